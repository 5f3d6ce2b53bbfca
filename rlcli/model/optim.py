"""Optimizer, learning rate and gradient clipping of a model, sharded or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlcli.model.muon import Muon, StepSize, hidden_matrices
from rlcli.model.parallel.buckets import rows_of

T = TypeVar("T", bound=torch.Tensor)

Schedule = Literal["constant", "linear", "cosine"]


def build_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, muon: MuonSettings | None = None
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over parameters that require a gradient; norms and biases (1-D) do not decay.
    muon: hidden matrices follow Muon instead (`rlcli.model.muon`).

    Fused: otherwise torch would step sharded parameters one by one, in a dozen operations each.
    """
    hidden = hidden_matrices(cast(Any, model).lm) if muon is not None else []
    matrices = {id(matrix.parameter) for matrix in hidden}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in matrices]
    decaying = [p for p in trained if p.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": group, "weight_decay": weight_decay} for group in by_mesh(decaying)]
    groups.append({"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if muon is None:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    return Muon(
        hidden, groups, lr=lr, weight_decay=weight_decay, betas=betas, momentum=muon.momentum, size=muon.step_size
    )


@dataclass(frozen=True)
class MuonSettings:
    """Settings of `rlcli.model.muon.Muon`."""

    momentum: float
    """μ."""
    step_size: StepSize
    """Rule by which steps of matrices of different shapes compare."""


class GradientScale:
    """By how much gradients that enter a float16 network are scaled up, so that small ones are not lost: halved where
    they overflow, doubled after `LASTS` updates in which none did (arXiv 1710.03740, section 3.2)."""

    FIRST, LASTS = 2.0**16, 200

    def __init__(self) -> None:
        self.state = torch.tensor([self.FIRST, 0.0], dtype=torch.float64)

    @property
    def value(self) -> float:
        return float(self.state[0])

    def lower(self) -> bool:
        """False if it is 1 already: then it is not the scale that makes gradients overflow."""
        if self.value <= 1.0:
            return False
        self.state = torch.tensor([self.value / 2, 0.0], dtype=torch.float64)
        return True

    def lasted(self) -> None:
        """An update had finite gradients."""
        value, count = self.state.tolist()
        self.state = torch.tensor(
            [value * 2, 0.0] if count + 1 == self.LASTS else [value, count + 1], dtype=torch.float64
        )


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


def gradient_scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x`; its gradient is multiplied by `scale`."""
    scaled: torch.Tensor = _Scaled.apply(x, scale)
    return scaled


def clip_grad_norm(model: nn.Module, max_norm: float, scale: float = 1.0) -> float:
    """Scale the gradients so that their global norm, over all ranks, is at most `max_norm`; returns the norm before.
    scale: by which all of them were scaled up.

    Collective. A norm that is not finite is returned unchanged, and leaves the gradients unusable: do not step.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    total = torch.stack([_squares(group) for group in by_mesh(gradients)]).sum().sqrt() / scale
    torch._foreach_mul_(list(map(_local, gradients)), (max_norm / (total + 1e-6)).clamp(max=1.0) / scale)
    return float(total)


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of tensors that are divided over the same mesh. In one collective, so that it has the same
    bits on all ranks; torch's own norm of tensors that are divided twice takes two."""
    squares = torch.nn.utils.get_total_norm(list(map(_local, tensors)), foreach=True).square()
    if (rows := rows_of(tensors[0])) is not None:
        dist.all_reduce(squares, group=rows.group)
    return squares


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """The tensors that are divided over the same mesh together."""
    found: dict[object, list[T]] = {}
    for one in tensors:
        found.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return list(found.values())


def lr_at(step: int, *, peak: float, steps: int, warmup_steps: int, schedule: Schedule, min_fraction: float) -> float:
    """The learning rate of `step` (0 the first) in a run of `steps`.

    It rises in equal parts to `peak` over the first `warmup_steps` (the first step already gets one part), then stays,
    or falls towards `min_fraction · peak`, which it would reach at step `steps`, one after the last.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + cos(pi * done)) / 2}[schedule]
    return peak * (min_fraction + (1.0 - min_fraction) * left)
