"""Attention with a sink in each head (GPT-OSS, arXiv 2508.10925; sinks: arXiv 2309.17453): a learned logit s that takes
part in the softmax over a token's keys, but has no value.

    output = Σ_j p_j v_j,   p_j = exp(q·k_j / √d) / (Σ_i exp(q·k_i / √d) + exp(s))

A kernel without sinks computes o = Σ_j p'_j v_j and ℓ = log Σ_i exp(q·k_i / √d). Then output = o σ(ℓ − s). The kernel's
backward pass, called with `output` and ℓ' = log(exp ℓ + exp s) instead of o and ℓ, returns the gradients with sinks: it
computes p_j = exp(q·k_j / √d − ℓ') and, for the gradient g of `output`, p_j (g·v_j − g·output), in which the sink's
value of 0 changes nothing. The gradient of s is −Σ exp(s − ℓ') (g·output), over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from jaxtyping import Float, Int

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, or their gradients."""


class Kernel(Protocol):
    """Attention without sinks. The second dimension of queries, outputs and ℓ is the heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, of the query's shape, and ℓ, of that shape without its last dimension."""
        ...

    def backward(self, grad: Tensor, inputs: QueryKeyValue, output: Tensor, lse: Tensor) -> QueryKeyValue:
        """The gradients of query, key and value for this output `output` and this ℓ `lse`, which are not recomputed."""
        ...


def attend_with_sinks(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sinks: Float[Tensor, " heads"]
) -> Tensor:
    """Attention with sinks by `kernel`, of the query's shape; differentiable."""
    output: Tensor = _SinkAttention.apply(query, key, value, sinks, kernel)
    return output


def attend_with_sinks_unfused(
    query: Float[Tensor, "B heads L D"],
    key: Float[Tensor, "B kv_heads K D"],
    value: Float[Tensor, "B kv_heads K D"],
    sinks: Float[Tensor, " heads"],
    mask: Tensor,
    scale: float,
) -> Float[Tensor, "B heads L D"]:
    """The same by plain torch operations, which hold all scores in memory. mask: 0 or −inf, added to the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale + mask
    sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1] @ value


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        output, lse = kernel.forward(query, key, value)
        sink_logits = _broadcastable(sinks, lse)
        output = output * torch.sigmoid(lse - sink_logits)[..., None].to(output.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, output, torch.logaddexp(lse, sink_logits))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        inputs = ctx.kernel.backward(grad, (query, key, value), output, lse)
        sink_grad = torch.exp(_broadcastable(sinks, lse) - lse) * (grad * output).sum(-1, dtype=lse.dtype)
        other_dims = [dim for dim in range(sink_grad.ndim) if dim != 1]
        return *inputs, -sink_grad.sum(other_dims).to(sinks.dtype), None


def _broadcastable(sinks: Float[Tensor, " heads"], lse: Tensor) -> Tensor:
    """`sinks` in the dtype of ℓ, viewed so that they broadcast over it: its second dimension is the heads."""
    return sinks.to(lse.dtype).view(-1, *[1] * (lse.ndim - 2))


@dataclass(frozen=True)
class CpuKernel:
    """torch's flash kernel for CPUs, for tensors `[B, heads, L, D]`."""

    mask: Tensor | None
    """As `scaled_dot_product_attention` takes it; None: causal."""
    scale: float
    """Factor of the scores."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return output, lse

    def backward(self, grad: Tensor, inputs: QueryKeyValue, output: Tensor, lse: Tensor) -> QueryKeyValue:
        query, key, value = inputs
        grads: QueryKeyValue = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale
        )
        return grads


@dataclass(frozen=True)
class VarlenKernel:
    """torch's flash kernel for sequences of several lengths on GPUs, for tensors `[T, heads, D]`: the one that
    `torch.nn.attention.varlen.varlen_attn` calls."""

    boundaries: Int[Tensor, " S_plus_1"]
    """int32: 0, then the end of each sequence."""
    longest: int
    """Length of the longest sequence."""
    scale: float
    """Factor of the scores."""
    window: int
    """Number of preceding tokens that each token attends to; -1: all."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            self.boundaries,
            self.boundaries,
            self.longest,
            self.longest,
            0.0,
            self.window < 0,
            return_debug_mask=False,
            scale=self.scale,
            window_size_left=self.window,
            window_size_right=0,
        )
        return output, lse.t()  # the kernel returns [heads, T]

    def backward(self, grad: Tensor, inputs: QueryKeyValue, output: Tensor, lse: Tensor) -> QueryKeyValue:
        query, key, value = inputs
        rng_state = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # for dropout, which is off
        grads: QueryKeyValue = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            lse.t().contiguous(),
            self.boundaries,
            self.boundaries,
            self.longest,
            self.longest,
            0.0,
            self.window < 0,
            rng_state,
            grad.new_empty(0),
            scale=self.scale,
            window_size_left=self.window,
            window_size_right=0,
        )
        return grads
