"""Attention with a sink in each head (GPT-OSS, arXiv 2508.10925; sinks: arXiv 2309.17453): a logit s that each token
sees beside its keys, and that has no value.

    out = Σ_j p_j v_j,   p_j = exp(q·k_j / √d) / (Σ_i exp(q·k_i / √d) + exp(s))

A kernel that knows no sinks computes o = Σ_j p'_j v_j and ℓ = log Σ_i exp(q·k_i / √d). Then out = o σ(ℓ − s). Its own
backward pass, given `out` and ℓ' = log(exp ℓ + exp s) in the place of o and ℓ, gives the gradients with sinks: it
computes p_j = exp(q·k_j / √d − ℓ') and, of the gradient g of `out`, p_j (g·v_j − g·out), in which the sink's value of 0
changes nothing. The gradient of s is −Σ exp(s − ℓ') (g·out), over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Three = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention without sinks. Heads are the second dimension of all tensors but the keys' and values' of a group."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, of the query's shape, and ℓ, of that shape without its last dimension."""
        ...

    def backward(self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor) -> Three:
        """The gradients of query, key and value, by an output and ℓ that are taken as they are given."""
        ...


def attend_with_sinks(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """`out` of the query's shape. sinks: `[heads]`."""
    out: Tensor = _Sunk.apply(query, key, value, sinks, kernel)
    return out


def plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """The same by torch's own operations, which keep all scores, of `[B, heads, L, D]`. hidden: 0 or −inf, added to the
    scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale + hidden
    sunk = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat([scores, sunk], -1).softmax(-1)[..., :-1] @ value


class _Sunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        sunk = _beside(sinks, lse)
        out = out * torch.sigmoid(lse - sunk)[..., None].to(out.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, torch.logaddexp(lse, sunk))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        inputs = ctx.kernel.backward(grad, (query, key, value), out, lse)
        share = torch.exp(_beside(sinks, lse) - lse) * (grad * out).sum(-1, dtype=lse.dtype)
        others = [dim for dim in range(share.ndim) if dim != 1]
        return *inputs, -share.sum(others).to(sinks.dtype), None


def _beside(sinks: Tensor, lse: Tensor) -> Tensor:
    """Sinks that can be added to ℓ, of which the second dimension is the heads."""
    return sinks.to(lse.dtype).view(-1, *[1] * (lse.ndim - 2))


@dataclass(frozen=True)
class CpuKernel:
    """torch's flash kernel for CPUs, of `[B, heads, L, D]`. mask: as `scaled_dot_product_attention` takes it; None:
    causal. scale: of the scores."""

    mask: Tensor | None
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return out, lse

    def backward(self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor) -> Three:
        found: Three = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, out, lse, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return found


@dataclass(frozen=True)
class VarlenKernel:
    """torch's flash kernel for sequences of several lengths on GPUs, of `[T, heads, D]`: what
    `torch.nn.attention.varlen.varlen_attn` calls. ends: boundaries, int32. longest: of the sequences. scale: of the
    scores. window: how many tokens before it each sees; -1: all."""

    ends: Tensor
    longest: int
    scale: float
    window: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *self._sequences, 0.0, self.window < 0, return_debug_mask=False, **self._options
        )
        return out, lse.t()  # the kernel's is [heads, T]

    def backward(self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor) -> Three:
        random = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which there is none of
        found: Three = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            *inputs,
            out,
            lse.t().contiguous(),
            *self._sequences,
            0.0,
            self.window < 0,
            random,
            grad.new_empty(0),
            **self._options,
        )
        return found

    @property
    def _sequences(self) -> tuple[Tensor, Tensor, int, int]:
        return self.ends, self.ends, self.longest, self.longest

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.window, "window_size_right": 0}
