"""A trained model's optimizer, and the one way in which any of them is updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.config.schema import RunConfig
from rlcli.errors import RunFailed
from rlcli.workers.batch import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

MicroLoss = Callable[[MicroBatch], "tuple[Tensor, Tensor, dict[str, Tensor]]"]
"""Of a micro-batch: the model's output, the loss (a sum over ranks and micro-batches gives the minibatch's), and sums
over its tokens, float64 scalars, to report."""


class Learner:
    """AdamW over what is trained of `model`, a sharded policy or value model."""

    def __init__(self, model: Any, config: RunConfig, lr: float) -> None:
        import torch.distributed as dist

        from rlcli.model.optim import build_optimizer

        train = config.train
        self.model = model
        self.max_grad_norm = train.max_grad_norm
        self.world = dist.get_world_size()
        self.optimizer = build_optimizer(
            model, lr=lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
        )

    def update(self, micros: Sequence[MicroBatch], loss: MicroLoss, lr: float) -> dict[str, float]:
        """One optimizer step over the micro-batches of a minibatch. Collective. Returns the sums, added up, and
        `grad_norm`, which is global and so divided by the number of ranks; nothing where there are no micro-batches."""
        import torch

        from rlcli.model.optim import clip_grad_norm

        if not micros:
            return {}  # No sample of this minibatch carries a gradient, on any rank: nothing to learn from.
        sums: dict[str, Tensor] = {}
        for micro in micros:
            output, term, own = loss(micro)
            # FSDP averages gradients over ranks; the loss is a sum over them. An empty pack still takes its part in the
            # collectives of the backward pass, with a gradient of zero.
            (output.sum() * 0.0 if micro.empty else term * self.world).backward()
            for name, value in own.items():
                sums[name] = sums[name] + value if name in sums else value
        norm = clip_grad_norm(self.model, self.max_grad_norm)
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
