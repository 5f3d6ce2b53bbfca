"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon; arXiv 2502.16982): for a hidden matrix W with gradient G, as
`torch.optim.Muon` computes it,

    B ← μ B + (1 - μ) G        U = (1 - μ) G + μ B        W ← (1 - γ λ) W - γ s O(U)

where O(U) is about U Vᵀ of U's singular value decomposition, by five steps of X ← a X + (b X Xᵀ + c (X Xᵀ)²) X from
X = U / ‖U‖, and s makes steps of matrices of all shapes [A, B] alike: 0.2 √max(A, B), the size of AdamW's steps
(`match_rms_adamw`), or √max(1, A / B) (`original`). All other parameters follow AdamW.

O needs whole matrices, of which FSDP2 has divided the rows: of as many matrices as there are ranks each rank gets one
whole, and sends back the rows of its result. Experts are divided by number, so that each is whole already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcli.model.decoder import blocks
from rlcli.model.parallel.buckets import Rows, rows_of
from rlcli.model.tensor_names import DOWN, FUSED, UP

if TYPE_CHECKING:
    from jaxtyping import Float

StepSize = Literal["match_rms_adamw", "original"]

COEFFICIENTS, STEPS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Constants of the Newton-Schulz iteration, as in Keller Jordan's post and `torch.optim.Muon`."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers of a block that choose or weigh experts: they follow AdamW."""
EXPERTS_AT_ONCE = 1 << 27
"""Numbers of the experts that are made orthogonal at once."""


@dataclass(frozen=True)
class Hidden:
    """A parameter that holds one hidden matrix, or one of each expert."""

    parameter: nn.Parameter
    """[outputs, inputs], or [experts, outputs, inputs]."""
    stacked: int = 1
    """Number of matrices stacked along its outputs: 2 for the gate and up projection of an expert."""
    inputs_first: bool = False
    """True if the parameter is [experts, inputs, outputs]."""


def hidden_matrices(lm: nn.Module) -> list[Hidden]:
    """The trained matrices of the layers' linear maps, as the model's files have them: without embeddings, head,
    routers, convolutions and biases."""
    config = getattr(lm, "config", None)
    fused = getattr(config, "model_type", "") in FUSED
    modules = ((name, module) for layer in blocks(lm) for name, module in layer.named_modules())
    matrices: dict[int, Hidden] = {}
    for name, module in modules:
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if isinstance(module, nn.Linear) and parameter_name == "weight" and name.rpartition(".")[2] not in ROUTERS:
                matrices[id(parameter)] = Hidden(parameter)
            elif parameter.ndim == 3 and parameter_name in (_last(UP), _last(DOWN)):
                stacked = 2 if parameter_name == _last(UP) and not fused else 1
                matrices[id(parameter)] = Hidden(parameter, stacked, inputs_first=fused)
    return list(matrices.values())


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def orthogonal(matrices: Float[Tensor, "N A B"]) -> Float[Tensor, "N A B"]:
    """Each matrix with singular values near 1, by `STEPS` of the iteration (Newton-Schulz), in their precision."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def step_factor(outputs: int, inputs: int, size: StepSize) -> float:
    """Factor s of the step: see the module's docstring."""
    if size == "match_rms_adamw":
        return 0.2 * sqrt(max(outputs, inputs))
    return sqrt(max(1.0, outputs / inputs))


class Muon(torch.optim.Optimizer):
    """Muon for `hidden`, and AdamW for the parameter groups `others`: one optimizer with the states of both.

    Collective: all ranks step together.
    """

    def __init__(
        self,
        hidden: list[Hidden],
        others: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        momentum: float,
        size: StepSize,
    ) -> None:
        groups = [{"params": [matrix.parameter for matrix in hidden], "weight_decay": weight_decay}]
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=True) if others else None
        super().__init__(groups if hidden else others, {"lr": lr})
        self.momentum, self.size, self.hidden = momentum, size, hidden
        if self.adamw is not None:
            # The same dictionaries: whoever sets a learning rate or fills a state reaches both.
            self.param_groups = [*(self.param_groups if hidden else ()), *self.adamw.param_groups]
            self.adamw.state = self.state
        self._exchanges = list(_exchanges(hidden))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before"
        for rows, matrices in self._exchanges:
            if rows is None:
                self._step_whole(matrices[0])
            else:
                self._step_divided(rows, matrices)
        if self.adamw is not None:
            self.adamw.step()

    def _step_whole(self, hidden: Hidden) -> None:
        """Step matrices that this rank has whole: one, or one of each expert."""
        direction = self._direction(hidden)
        if direction is None or not direction.numel():
            return
        matrices = direction if direction.ndim == 3 else direction[None]
        matrices = matrices.unflatten(1, (hidden.stacked, -1)).flatten(0, 1)
        at_once = max(1, EXPERTS_AT_ONCE // matrices[0].numel())
        steps = torch.cat([orthogonal(chunk) for chunk in matrices.split(at_once)])
        self._move(hidden, steps.view(direction.shape), (steps.shape[-2], steps.shape[-1]))

    def _step_divided(self, rows: Rows, matrices: list[Hidden]) -> None:
        """Step at most as many matrices of one shape as ranks divide their rows: rank i gets matrix i whole."""
        directions = [self._direction(hidden) for hidden in matrices]
        if all(direction is None for direction in directions):
            return  # on all ranks: none has a gradient
        parameter, ranks = matrices[0].parameter, len(rows.counts)
        count, width = len(matrices), parameter.shape[1]
        local = _local(parameter)
        sent = local.new_zeros((count, rows.most, width), dtype=_precision(local))
        for slot, direction in zip(sent, directions, strict=True):
            if direction is not None:
                slot[: len(direction)].copy_(direction)
        owns = rows.rank < count
        parts = sent.new_empty((ranks if owns else 0, rows.most, width))
        send_counts = [1] * count + [0] * (ranks - count)
        receive_counts = [1 if owns else 0] * ranks
        dist.all_to_all_single(parts, sent, receive_counts, send_counts, group=rows.group)
        if owns:
            matrix = orthogonal(rows.joined(parts)[None])[0]
            parts = parts.zero_()
            for part, begin, length in zip(parts, rows.begins, rows.counts, strict=True):
                part[:length].copy_(matrix[begin : begin + length])
        dist.all_to_all_single(sent, parts.contiguous(), send_counts, receive_counts, group=rows.group)
        for hidden, direction, step in zip(matrices, directions, sent, strict=True):
            if direction is not None:
                self._move(hidden, step[: len(direction)], tuple(parameter.shape))

    def _direction(self, hidden: Hidden) -> Tensor | None:
        """U of this rank's part, after its momentum has taken in the gradient; None if there is no gradient."""
        parameter = hidden.parameter
        if parameter.grad is None:
            return None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.detach())
        gradient, momentum = _local(parameter.grad), _local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum).to(_precision(momentum))

    def _move(self, hidden: Hidden, step: Tensor, shape: tuple[int, ...]) -> None:
        """Apply weight decay and `step`. shape: of one matrix as it is stored."""
        outputs, inputs = reversed(shape) if hidden.inputs_first else shape
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        weight = _local(hidden.parameter.detach())
        weight.mul_(1 - lr * decay)
        weight.add_(step.to(weight.dtype), alpha=-lr * step_factor(outputs, inputs, self.size))


def _exchanges(hidden: Iterable[Hidden]) -> Iterator[tuple[Rows | None, list[Hidden]]]:
    """Batches that step together: a parameter of which each rank has whole matrices; or up to as many matrices as there
    are ranks, of one shape and with their rows divided in the same way."""
    divided: dict[object, tuple[Rows, list[Hidden]]] = {}
    for matrix in hidden:
        rows = rows_of(matrix.parameter) if matrix.parameter.ndim == 2 else None
        if rows is None:
            yield None, [matrix]
            continue
        first_rows, batch = divided.setdefault((rows.ranks, matrix.parameter.shape, matrix.parameter.dtype), (rows, []))
        batch.append(matrix)
        if len(batch) == len(first_rows.counts):
            yield first_rows, list(batch)
            batch.clear()
    yield from ((rows, batch) for rows, batch in divided.values() if batch)


def _precision(tensor: Tensor) -> torch.dtype:
    """Dtype in which matrices are exchanged and multiplied: on GPUs bfloat16, as in `torch.optim.Muon`; on CPUs, where
    that is no faster, their own."""
    return torch.bfloat16 if tensor.device.type == "cuda" else tensor.dtype


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
