"""A trained model's optimizer and its update, used by all roles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.cluster.watchdog import progress
from rlcli.config.schema import RunConfig
from rlcli.workers.roles.batch import MicroBatch
from rlcli.workers.roles.integrity import ReductionCheck, StepCheck

if TYPE_CHECKING:
    from torch import Tensor

MicroLoss = Callable[[MicroBatch], "tuple[Tensor, Tensor, dict[str, Tensor]]"]
"""Of a micro-batch: the model's output, the loss (summed over ranks and micro-batches: the minibatch's), and sums over
its tokens, float64 scalars, to report."""


class Learner:
    """AdamW over the trained parameters of `model`, a sharded policy or value model."""

    def __init__(self, model: Any, config: RunConfig, lr: float) -> None:
        import torch.distributed as dist

        from rlcli.model.optim import build_optimizer

        train = config.train
        self.model = model
        self.max_grad_norm = train.max_grad_norm
        self.bad_grad_norm = config.fault_tolerance.bad_grad_norm or math.inf
        self.world = dist.get_world_size()
        self.optimizer = build_optimizer(
            model, lr=lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
        )
        self.reduction, self.stepped = ReductionCheck(model, self.world), StepCheck(model)

    def update(self, micros: Sequence[MicroBatch], loss: MicroLoss, lr: float) -> dict[str, float]:
        """One optimizer step over the micro-batches of a minibatch. Collective. Returns the sums, added up, and
        `grad_norm`, which is global and so divided by the number of ranks; empty if there are no micro-batches.

        If the gradient is bad (not finite, or its norm above `bad_grad_norm`) no rank steps, since all see the same
        norm, and only `bad` and `grad_norm` are returned; each rank returns its part of 1 as `bad`. A loss or an
        output that is not finite makes the gradient bad."""
        import torch

        from rlcli.model.optim import clip_grad_norm

        if not micros:
            return {}  # No sample of this minibatch has a gradient, on any rank.
        sums: dict[str, Tensor] = {}
        for micro in micros:
            progress()
            output, term, own = loss(micro)
            # FSDP averages gradients over ranks; the loss is a sum over them. An empty pack still takes part in the
            # collectives of the backward pass, with a gradient of zero.
            (output.sum() * 0.0 if micro.empty else _poisoned(term, output) * self.world).backward()
            for name, value in own.items():
                sums[name] = sums[name] + value if name in sums else value
        self.reduction.check()
        norm = clip_grad_norm(self.model, self.max_grad_norm)
        bad = not math.isfinite(norm) or norm > self.bad_grad_norm
        if not bad:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.stepped.before(lr)
            self.optimizer.step()
            sums |= self.stepped.after()
        self.optimizer.zero_grad(set_to_none=True)
        if bad:
            return {"bad": 1.0 / self.world, "grad_norm": norm / self.world}
        numbers = torch.stack(list(sums.values())).tolist() if sums else []
        return dict(zip(sums, numbers, strict=True)) | {"grad_norm": norm / self.world}


def _poisoned(term: Tensor, output: Tensor) -> Tensor:
    """The loss unchanged or, if it or the output is not finite, one whose gradient is NaN: every rank sees that in the
    norm without further communication. (A clipped ratio or a mask can hide a NaN from the gradient.)"""
    import torch

    sound = torch.isfinite(term.detach()) & torch.isfinite(output.detach()).all()
    # Through `output`, which the loss always depends on: 0 · NaN is NaN, and adding 0 changes no bit of a finite loss.
    return term + (output * torch.where(sound, 0.0, math.nan)).sum()
