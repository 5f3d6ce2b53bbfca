"""Checks on a rank that training follows the plan: the rows, the loss, the gradient, the optimizer step.

Each costs far less than 2% of a step. Checks of a single rank's data raise here; those that need all ranks return sums
whose names begin with `check_`, which the controller compares with its plan (`rlcli.training.loop.checks.invariants`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from rlcli.data.signature import signature, tokens_digest
from rlcli.data.train_rows import SampleColumns
from rlcli.data.trajectories import Trajectory
from rlcli.errors import REPORT, RunFailed

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

A = TypeVar("A")

SLICE_SIZE = 1024
"""Weights of one tensor that are compared before and after an optimizer step."""
MIN_WATCHED = 16
"""Least number of weights that are expected to move; with fewer the check is not conclusive."""
MIN_GRADIENT = 1e-7
"""Smaller gradients move a weight by far less than the learning rate: AdamW's ε is 1e-8."""
MIN_STEP_SHARE = 0.01
"""Share of the learning rate: a step of this size must be visible in a watched weight."""
REDUCTION_TOLERANCE = 1e-3
"""Error of a reduced gradient ÷ the size of the workers' terms: both sums are in float32, of the same gradients."""
MAX_LISTED = 3
"""Maximum number of weights in a message."""


def signature_weights(signatures: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """A weight in [0, 1) for each sample, from its signature: numpy or torch int64 `[N]` → float64 `[N]`. Advantages of
    a group add up to 0; the weighted ones do not."""
    return (signatures % 65536) / 65536.0


def sum_over_turns(values: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """Sum a numpy or torch column `[N, K]` over turns; `[N]` is returned as it is."""
    return values if values.ndim == 1 else values.sum(1)


class PackedTokens(NamedTuple, Generic[A]):
    """What a micro-batch of S sequences and R response tokens is trained on: tensors on its device, or arrays."""

    samples: A
    """[S] Index of each sequence's sample in the step."""
    lengths: A
    """[S] Response tokens of each sequence."""
    sequence: A
    """[R] Sequence of each response token."""
    targets: A
    """[R] Its id."""
    rollout_log_probs: A
    """[R] The engine's log-prob of it."""


class RowCheck:
    """Compares the rows of a batch with their signatures, as they are packed for the loss."""

    def __init__(self, columns: SampleColumns[np.ndarray], *, one_prompt: bool = True) -> None:
        """columns: of all the step's samples. Without `signatures` nothing is checked. one_prompt: the samples of a
        group begin with the same prompt."""
        self.columns, self._one_prompt = columns, one_prompt
        self._prompts: dict[int, int] = {}

    def check(self, micros: Sequence[tuple[Sequence[Trajectory], PackedTokens[Tensor]]]) -> None:
        """micros: of each micro-batch the trajectory of each of its sequences, from its shard, and what it is trained
        on. All tensors are copied to the host at once. Raises RunFailed."""
        from rlcli.model.device_copies import download

        if not self.columns.has("signatures"):
            return
        arrays = iter([tensor.numpy() for tensor in download([tensor for _, packed in micros for tensor in packed])])
        for rows, packed in micros:
            self._check_micro(rows, PackedTokens(*(next(arrays) for _ in packed)))

    def _check_micro(self, rows: Sequence[Trajectory], packed: PackedTokens[np.ndarray]) -> None:
        import numpy as np

        signatures = self.columns.signatures
        if not np.array_equal(np.bincount(packed.sequence, minlength=len(packed.lengths)), packed.lengths):
            raise RunFailed("the packed batch assigns response tokens to other samples than planned", REPORT)
        ends = np.cumsum(packed.lengths)[:-1]
        responses, engine_log_probs = np.split(packed.targets, ends), np.split(packed.rollout_log_probs, ends)
        of_sample = zip(rows, packed.samples.tolist(), responses, engine_log_probs, strict=True)
        for row, sample, response, log_probs in of_sample:
            if self._one_prompt:
                self._check_group(sample, row.tokens[: row.prompt_tokens])
            forwarded = row.tokens.copy()
            forwarded[row.response_mask] = response
            digest = tokens_digest(replace(row, tokens=forwarded, log_probs=log_probs))
            actual = signature(digest, float(self.columns.scores[sample]))
            if signatures[sample] and actual != signatures[sample]:
                raise RunFailed(
                    f"sample {sample} of the step is trained on with other tokens, log-probs or reward than it was "
                    "generated and verified with",
                    REPORT,
                )

    def _check_group(self, sample: int, prompt: np.ndarray) -> None:
        """Check that samples of one group have one prompt."""
        group, digest = int(self.columns.groups[sample]), zlib.crc32(prompt.tobytes())
        if self._prompts.setdefault(group, digest) != digest:
            raise RunFailed(f"group {group} of the step holds samples of different prompts", REPORT)


def watch_grad_dot_advantage(
    log_probs: Float[Tensor, " R"], advantages: Float[Tensor, " R"], total: Float[Tensor, ""], world: int
) -> None:
    """Have the backward pass, which runs on world × the loss, subtract from `total` the loss gradient along the
    advantages: −Σ A · ∂loss/∂log π over this rank's response tokens.

    log_probs: the input of the policy loss, for its gradient only. advantages: the controller's, not those in the
    batch, so that a different sign or scale between the two shows.
    """

    def subtract(gradient: Tensor) -> None:
        total.sub_((gradient.double() * advantages).sum() / world)

    if log_probs.requires_grad:
        log_probs.register_hook(subtract)


class ReductionCheck:
    """Sums the gradient of one small parameter over ranks a second time, and compares it with the reduced gradient."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.world = world
        self._gradients: list[Tensor] = []
        self._hooked: set[int] = set()
        if world == 1:
            return
        # No bias, unless there is nothing else: attention ignores that of keys, so its gradient is only rounding.
        trained = [(name.endswith("bias"), p.numel(), name) for name, p in model.named_parameters() if p.requires_grad]
        _, _, self.name = min(trained)
        path, _, self._attribute = self.name.rpartition(".")
        self._owner = model.get_submodule(path)
        _sharded_above(model, path).register_forward_pre_hook(self._hook)

    def _hook(self, *_: object) -> None:
        """FSDP2 has just gathered the parameter: its hook gets this rank's own gradient."""
        import torch

        gathered = getattr(self._owner, self._attribute)
        if torch.is_grad_enabled() and gathered.requires_grad and id(gathered) not in self._hooked:
            self._hooked.add(id(gathered))
            gathered.register_hook(lambda gradient: self._gradients.append(gradient.detach().float()))

    def check(self) -> None:
        """Call after the backward passes of an update. Collective. Raises RunFailed on every rank."""
        import torch
        import torch.distributed as dist

        local_gradients, self._gradients = self._gradients, []
        if self.world == 1:
            return
        parameter = getattr(self._owner, self._attribute)
        none = torch.zeros(parameter.shape, device=parameter.device)
        local_sum = sum(local_gradients, none) / self.world  # FSDP2 averages over ranks
        total = torch.cat([local_sum.flatten(), local_sum.norm()[None]])  # the last: size of the summands
        dist.all_reduce(total)
        reduced = none if parameter.grad is None else parameter.grad.full_tensor().float()
        off, size = (reduced.flatten() - total[:-1]).norm(), total[-1]
        if bool(torch.isfinite(size)) and bool(off > REDUCTION_TOLERANCE * size):
            raise RunFailed(
                f"gradients are not summed over the {self.world} workers: that of {self.name} is "
                f"{float(reduced.norm()):.3g}, but the workers' own sum to {float(total[:-1].norm()):.3g}",
                REPORT,
            )


class CopyCheck:
    """Checks that all copies of a replicated model (HSDP) have the same trained weights, to the last bit: nothing else
    makes them agree again once they differ. Reads each weight once, in about half the time of AdamW's step on a CPU."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._group = mesh.get_group(0) if mesh.ndim > 1 else None

    def check(self) -> None:
        """Call after an optimizer step. Collective. Raises RunFailed on the ranks of all copies."""
        import torch
        import torch.distributed as dist

        if self._group is None:
            return
        bits = torch.stack([_local(p.detach()).view(torch.int32).sum() for _, p in self._named])
        bounds = torch.stack([bits, -bits])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group)
        differ = (bounds[0] != -bounds[1]).tolist()  # the largest is not the smallest
        names = [name for (name, _), differs in zip(self._named, differ, strict=True) if differs]
        if names:
            raise RunFailed(
                f"{len(names)} of {len(differ)} weights differ between the {self._group.size()} copies of the model "
                f"(parallel.replicate) after an update: {', '.join(names[:MAX_LISTED])}",
                REPORT,
            )


class StepCheck:
    """Checks that an optimizer step changes weights that have a gradient."""

    def __init__(self, model: nn.Module) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
        # An embedding row belongs to a token that may never occur.
        inner = [p for name, p in trained if not name.endswith(("lm_head.weight", "embed_tokens.weight"))]
        self._parameter = (inner or [p for _, p in trained])[-1]
        self._before: Tensor | None = None
        self._watched: Tensor | None = None

    def before(self, lr: float) -> None:
        """Copy the first weights of this rank's part of the last matrix. lr: of the step; 0 is never planned."""
        import torch

        self._before = _local(self._parameter.detach()).reshape(-1)[:SLICE_SIZE].clone()
        gradient = self._parameter.grad
        self._watched = None
        if gradient is not None:
            large = _local(gradient).reshape(-1)[:SLICE_SIZE].abs() >= MIN_GRADIENT
            # Half a unit in the last place of a weight w is between w · eps / 4 and w · eps / 2.
            largest_weight = MIN_STEP_SHARE * lr * 2 / torch.finfo(self._before.dtype).eps if lr else torch.inf
            self._watched = large & (self._before.abs() <= largest_weight)

    def after(self) -> dict[str, Tensor]:
        """`check_watched`: how many of them should change; `check_moved`: how many of those have changed."""
        import torch

        assert self._before is not None, "before() comes first"
        if self._watched is None:
            return {}
        now = _local(self._parameter.detach()).reshape(-1)[:SLICE_SIZE]
        moved = (now != self._before) & self._watched
        return {
            "check_watched": self._watched.sum(dtype=torch.float64),
            "check_moved": moved.sum(dtype=torch.float64),
        }


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_above(model: nn.Module, path: str) -> nn.Module:
    """The innermost module above `path` that FSDP2 gathers as a whole, or `model` if there is none."""
    from torch.distributed.fsdp import FSDPModule

    parts = path.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    sharded = (module for module in map(model.get_submodule, names) if isinstance(module, FSDPModule))
    return next(sharded, model)
