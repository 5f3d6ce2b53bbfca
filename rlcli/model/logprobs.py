"""Log-probabilities and entropy of tokens straight from hidden states, never holding [tokens, vocabulary]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 2**26
"""Logits held at one time (256 MiB in float32; the backward pass holds about three such buffers)."""


def chunk_tokens(vocabulary: int) -> int:
    """How many tokens are projected at once, so that no more than `LOGITS_AT_ONCE` logits exist."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Of p = softmax(hidden · weightᵀ / temperature): log p[target] and H(p) = −Σ p log p, both [N] and differentiable.

    hidden [N, D], weight [V, D], targets [N] int64. `chunk` tokens are projected at a time and projected again in the
    backward pass; softmax is in float32 (float64 for float64 input). Without `entropy` the second result is None.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, targets, temperature, chunk, entropy)
    return log_probs, entropies if entropy else None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, log_norms, entropies = (hidden.new_zeros(len(hidden), dtype=exact) for _ in range(3))
        for part in _parts(len(hidden), chunk):
            logits = (hidden[part] @ weight.t()).to(exact).div_(temperature)
            log_norm = logits.logsumexp(-1)
            log_norms[part] = log_norm
            log_p = logits.sub_(log_norm[:, None])
            log_probs[part] = log_p.gather(-1, targets[part, None])[:, 0]
            if entropy:
                entropies[part] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, targets, log_norms, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norms, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Float32: chunks add up here, and bfloat16 would lose the later ones.
        grad_weight = torch.zeros_like(weight, dtype=log_norms.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), ctx.chunk):
            log_p = (hidden[part] @ weight.t()).to(log_norms.dtype).div_(ctx.temperature).sub_(log_norms[part, None])
            grad_logits = torch.zeros_like(log_p)
            if grad_log_probs is not None:  # ∂ log p[y] / ∂z = 1[y] − p
                grad = grad_log_probs[part, None]
                grad_logits.addcmul_(log_p.exp(), grad, value=-1.0).scatter_add_(1, targets[part, None], grad)
            if grad_entropy is not None:  # ∂H / ∂z = −p (log p + H)
                grad = grad_entropy[part, None]
                grad_logits.addcmul_(log_p.exp(), log_p.add_(entropies[part, None]).mul_(grad), value=-1.0)
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _parts(total: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, total, chunk)]
