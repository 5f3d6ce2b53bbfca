"""The policy on this worker: its shard of the weights, its optimizer, its rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcli.config.schema import RunConfig
from rlcli.errors import RunFailed
from rlcli.workers.work import MicroWork, MiniWork, RankWork

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.packed import PackedBatch


@dataclass
class MicroBatch:
    """One micro-batch where it is trained. All tensors are over its R response tokens, packed.

    advantages, rollout_log_probs, old_log_probs, reference_log_probs: float32 `[R]`. lengths: int64 `[S]`, response
    tokens of each sequence. empty: this rank has nothing here and runs along for the sake of the collectives.
    """

    packed: PackedBatch
    advantages: Tensor
    rollout_log_probs: Tensor
    lengths: Tensor
    empty: bool
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None


class PolicyRole:
    """Holds the TrainBatch of a step (`load`) and updates the policy on it, minibatch by minibatch (`update`)."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device, mesh: Any) -> None:
        import torch.distributed as dist

        from rlcli.algorithms.algorithm import Algorithm
        from rlcli.model.loading import load_policy
        from rlcli.model.lora import LoraSpec
        from rlcli.model.optim import build_optimizer

        self.config = config
        self.device = device
        self.world = dist.get_world_size()
        self.algorithm = Algorithm.build(**config.algorithm.model_dump())
        lora = LoraSpec(config.lora.rank, config.lora.alpha, config.lora.targets) if config.lora.rank else None
        load = {"path": config.model.path, "dtype": dtype, "device": device, "mesh": mesh}
        self.policy = load_policy(
            **load, lora=lora, gradient_checkpointing=config.model.gradient_checkpointing, trainable=True
        )
        train = config.train
        self.optimizer = build_optimizer(
            self.policy, lr=train.lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
        )
        # With LoRA the reference is the policy without its adapter; otherwise it is a second, frozen copy.
        needs_copy = self.algorithm.needs_reference and lora is None
        self.reference = (
            load_policy(**load, lora=None, gradient_checkpointing=False, trainable=False) if needs_copy else None
        )
        self._batch: list[list[MicroBatch]] = []
        self._work: list[MiniWork] = []

    def load(self, work: RankWork) -> None:
        """Fetch the shards that hold this rank's rows, and no others, and pack the rows."""
        import ray

        needed = {int(shard) for mini in work.minibatches for micro in mini.micro for shard in micro.shards}
        shards = {shard: ray.get(work.shards[shard]) for shard in needed}
        self._work = work.minibatches
        self._batch = [[self._pack(micro, shards) for micro in mini.micro] for mini in work.minibatches]

    def compute_old_log_probs(self) -> None:
        for micro in self._all():
            micro.old_log_probs = self._log_probs(self.policy, micro)

    def compute_reference_log_probs(self) -> None:
        if self.reference is not None:
            for micro in self._all():
                micro.reference_log_probs = self._log_probs(self.reference, micro)
            return
        with self.policy.adapter_disabled():
            for micro in self._all():
                micro.reference_log_probs = self._log_probs(self.policy, micro)

    def update(self, index: int, lr: float) -> dict[str, float]:
        """One optimizer step. Returns sums over this rank's response tokens (see `Objective.sums`), plus `entropy` and
        `mismatch_kl` (engine against trainer), and `grad_norm`, which is global and so divided by the number of
        ranks."""
        import torch

        from rlcli.model.optim import clip_grad_norm

        if not self._batch[index]:
            return {}  # No sample of this minibatch carries a gradient, on any rank: nothing to learn from.
        sums: dict[str, Tensor] = {}
        for micro in self._batch[index]:
            for name, value in self._accumulate(micro, self._work[index]).items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=self.device)) + value
        norm = clip_grad_norm(self.policy, self.config.train.max_grad_norm)
        if not math.isfinite(norm):
            raise RunFailed(
                f"the gradient norm is {norm}", "lower train.lr or train.max_grad_norm; the last checkpoint is sound"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        numbers = torch.stack(list(sums.values())).tolist() if sums else []
        return dict(zip(sums, numbers, strict=True)) | {"grad_norm": norm / self.world}

    def drop_batch(self) -> None:
        self._batch, self._work = [], []

    def probe_log_probs(self, tokens: Any) -> Any:
        """float32 `[len(tokens) - 1]` at temperature 1, as the engine's `prompt_log_probs` gives them."""
        import torch

        from rlcli.model.packed import pack

        with torch.no_grad():
            outputs = self.policy(pack([(tokens, 1)], self.device), temperature=1.0, want_entropy=False)
        return outputs.log_probs.float().cpu().numpy()

    def _accumulate(self, micro: MicroBatch, work: MiniWork) -> dict[str, Tensor]:
        from rlcli.algorithms.aggregation import Denominators

        outputs = self.policy(micro.packed, temperature=self.config.rollout.temperature, want_entropy=True)
        objective = self.algorithm.objective(
            outputs.log_probs,
            micro.old_log_probs,
            micro.reference_log_probs,
            micro.advantages,
            micro.packed.sequence,
            micro.lengths,
            Denominators(tokens=work.tokens, sequences=work.sequences, max_length=work.max_length),
        )
        # FSDP averages gradients over ranks; the objective is a sum over them. An empty pack still takes its part in
        # the collectives of the backward pass, with a gradient of zero.
        loss = outputs.log_probs.sum() * 0.0 if micro.empty else objective.loss * self.world
        loss.backward()
        if micro.empty:
            return {}
        log_probs = outputs.log_probs.detach()
        return objective.sums | {
            "entropy": outputs.entropy.detach().sum().double(),
            "mismatch_kl": (micro.rollout_log_probs - log_probs).sum().double(),
        }

    def _log_probs(self, model: Any, micro: MicroBatch) -> Tensor:
        import torch

        with torch.no_grad():
            outputs = model(micro.packed, temperature=self.config.rollout.temperature, want_entropy=False)
        return outputs.log_probs

    def _all(self) -> Iterator[MicroBatch]:
        for minibatch in self._batch:
            yield from minibatch

    def _pack(self, micro: MicroWork, shards: dict[int, Any]) -> MicroBatch:
        import numpy as np
        import torch

        from rlcli.model.packed import dummy, pack

        rows = [shards[int(shard)].row(row) for shard, row in zip(micro.shards, micro.rows, strict=True)]
        lengths = np.asarray([len(log_probs) for _, _, log_probs in rows], dtype=np.int64)
        log_probs = np.concatenate([row[2] for row in rows]) if rows else np.zeros(0, np.float32)

        def on_device(values: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

        return MicroBatch(
            packed=pack([(tokens, prompt) for tokens, prompt, _ in rows], self.device) if rows else dummy(self.device),
            advantages=on_device(np.repeat(micro.advantages.astype(np.float32), lengths)),
            rollout_log_probs=on_device(log_probs),
            lengths=on_device(lengths),
            empty=not rows,
        )
