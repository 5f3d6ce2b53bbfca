"""Log-probabilities and entropy of tokens directly from hidden states, never holding [tokens, vocabulary].

No existing fused kernel fits: `torch.nn.functional.linear_cross_entropy` and Liger's fused linear cross entropy return
no entropy, which would cost a second projection.

The element-wise passes over a chunk are not compiled on GPUs: a compiled kernel fuses them with the sums over the
vocabulary and adds in another order, so that log-probs would depend on whether it was compiled. No GPU has shown yet
what it would save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcli.model.logit_chunks import BLOCK_LOGITS

FAR_BELOW = -1e9
"""The logit of what is never drawn. Finite, since 0 · ∞ in the entropy would be NaN."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool,
    never: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """For p = softmax(hidden · weightᵀ / temperature): log p[target], like `targets`, and H(p) = −Σ p log p, [N]; both
    differentiable.

    hidden [N, D], weight [V, D], targets int64 [N], or [N, C] for several tokens of each p. `chunk` tokens are
    projected at a time and projected again in the backward pass; softmax is in float32 (float64 for float64 input), on
    a CPU of a few tokens at a time. Without `entropy` the second result is None. never: int64 ids whose probability is
    0: what the engine does not draw.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, targets, temperature, chunk, entropy, never)
    return log_probs, entropies if entropy else None


class Likeliest(NamedTuple):
    """log_probs: float [N], of the targets. ids, top: int64 and float [N, K], the likeliest tokens, most likely first,
    and their log-probs. agrees: bool [N], whether no token is likelier than the target."""

    log_probs: Tensor
    ids: Tensor
    top: Tensor
    agrees: Tensor


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    k: int,
    below: int,
    never: Tensor | None = None,
) -> Likeliest:
    """The K = k tokens of the largest p among the ids less than `below`, beside what `token_log_probs` returns for
    targets [N], which it equals bitwise. k = 0: none. Never holds [N, V]."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    log_probs, agrees = hidden.new_zeros(len(hidden), dtype=exact), targets.new_zeros(len(hidden), dtype=torch.bool)
    ids, top = targets.new_zeros(len(hidden), k), hidden.new_zeros(len(hidden), k, dtype=exact)
    for part, logits in _logits(hidden, weight, temperature, chunk, exact, never):
        picked = logits.sub_(logits.amax(-1, keepdim=True)).gather(-1, targets[part, None])[:, 0]
        best, ids[part] = logits[:, :below].topk(k, dim=-1)
        log_total = logits.exp_().sum(-1).log()
        log_probs[part], top[part], agrees[part] = picked - log_total, best - log_total[:, None], picked == 0
        del logits  # before the next ones
    return Likeliest(log_probs, ids, top, agrees)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        never: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        log_norms, entropies = (hidden.new_zeros(len(hidden), dtype=exact) for _ in range(2))
        log_probs, columns = hidden.new_zeros(targets.shape, dtype=exact), _columns(targets)
        for part, logits in _logits(hidden, weight, temperature, chunk, exact, never):
            top = logits.amax(-1, keepdim=True)
            picked = logits.sub_(top).gather(-1, columns[part])
            # With z below the largest logit and Z = Σ eᶻ: H = log Z − Σ z eᶻ / Z, a sum of two terms ≥ 0.
            exponentials = logits.exp() if entropy else logits.exp_()
            total = exponentials.sum(-1)
            log_total = total.log()
            log_probs[part] = (picked - log_total[:, None]).view(log_probs[part].shape)
            log_norms[part] = top[:, 0] + log_total
            if entropy:
                entropies[part] = log_total - exponentials.mul_(logits).sum(-1) / total
            del logits, exponentials  # before the next ones
        ctx.save_for_backward(hidden, weight, columns, log_norms, entropies)
        ctx.temperature, ctx.chunk, ctx.never = temperature, chunk, never
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, log_norms, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Float32: chunks are summed here, and bfloat16 would lose the later ones.
        grad_weight = torch.zeros_like(weight, dtype=log_norms.dtype) if ctx.needs_input_grad[1] else None
        # ∂ log p[y] / ∂z = 1[y] − p and ∂H / ∂z = −p (log p + H), so both are −p (a + b log p), plus the rest at y.
        given = torch.zeros_like(log_norms) if grad_log_probs is None else grad_log_probs / ctx.temperature
        at_target = _columns(given).expand(columns.shape)
        in_all = at_target.sum(-1)
        by_log = None if grad_entropy is None else grad_entropy / ctx.temperature
        for chunk, logits in _projections(hidden, weight, ctx.temperature, ctx.chunk):
            for rows in _blocks(logits):
                part = slice(chunk.start + rows.start, chunk.start + rows.stop)
                log_p = _exact(logits[rows], log_norms.dtype, ctx.never).sub_(log_norms[part, None])
                if by_log is None:
                    grad_logits = log_p.exp_().mul_(-in_all[part, None])
                else:
                    grad_logits = log_p.exp()
                    share = in_all[part] + by_log[part] * entropies[part]
                    grad_logits.mul_(log_p.mul_(-by_log[part, None]).sub_(share[:, None]))
                grad_logits.scatter_add_(1, columns[part], at_target[part])
                if grad_logits.data_ptr() != logits[rows].data_ptr():
                    logits[rows] = grad_logits  # which are read no more
                del log_p, grad_logits  # before the next ones are made
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(logits.t(), hidden[chunk])
            elif grad_weight is not None:
                grad_weight += logits.t() @ hidden[chunk]
            del logits  # before the next chunk's are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _columns(values: Tensor) -> Tensor:
    """[N] as [N, 1]; [N, C] as it is."""
    return values if values.ndim == 2 else values[:, None]


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, chunk: int, dtype: torch.dtype, never: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Block by block: which tokens, and their logits ÷ temperature in `dtype`, [block, V], for the caller to change."""
    for part, logits in _projections(hidden, weight, temperature, chunk):
        for rows in _blocks(logits):
            # Without a name here, which would hold these until the next block's are there.
            yield slice(part.start + rows.start, part.start + rows.stop), _exact(logits[rows], dtype, never)
        del logits


def _projections(hidden: Tensor, weight: Tensor, temperature: float, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunk by chunk: which tokens, and their logits ÷ temperature, [chunk, V], for the caller to change."""
    for start in range(0, len(hidden), chunk):
        part = slice(start, min(start + chunk, len(hidden)))
        # The division is part of the product; with beta = 0 the added tensor is not read.
        yield part, torch.addmm(hidden.new_zeros(()), hidden[part], weight.t(), beta=0, alpha=1 / temperature)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of a chunk in the parts that the softmax is computed for at once: on a CPU what its caches hold."""
    rows, vocabulary = logits.shape
    size = rows if logits.is_cuda else max(1, BLOCK_LOGITS // vocabulary)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _exact(logits: Tensor, dtype: torch.dtype, never: Tensor | None) -> Tensor:
    """The logits in `dtype`: themselves if they have it already."""
    exact = logits.to(dtype)
    return exact if never is None else exact.index_fill_(1, never, FAR_BELOW)
