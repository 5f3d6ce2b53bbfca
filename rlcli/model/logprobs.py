"""Log-probabilities and entropy of tokens directly from hidden states, without materialising [tokens, vocabulary].

No existing fused kernel fits: `torch.nn.functional.linear_cross_entropy` and Liger's fused linear cross entropy return
no entropy, which would cost a second projection.

The element-wise passes over a chunk are not compiled on GPUs: a compiled kernel fuses them with the sums over the
vocabulary and adds in another order, so that log-probs would depend on compilation. The gain has not been measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcli.model.logit_chunks import BLOCK_LOGITS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

FAR_BELOW = -1e9
"""The logit of masked ids. Finite, since 0 · ∞ in the entropy would be NaN."""


def token_log_probs(
    hidden: Float[Tensor, "R H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, "R ..."],
    temperature: float,
    chunk: int,
    entropy: bool,
    never: Int[Tensor, " masked"] | None = None,
) -> tuple[Float[Tensor, "R ..."], Float[Tensor, " R"] | None]:
    """For p = softmax(hidden · weightᵀ / temperature): log p[target], in the shape of `targets`, and the entropy
    H(p) = −Σ p log p; both differentiable.

    targets: int64 [R], or [R, C] for several tokens of each p. `chunk` tokens are projected at a time and projected
    again in the backward pass; softmax is in float32 (float64 for float64 input), on a CPU of a few tokens at a time.
    Without `entropy` the second result is None. never: ids whose probability is 0, since the engine does not sample
    them.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, targets, temperature, chunk, entropy, never)
    return log_probs, entropies if entropy else None


class Likeliest(NamedTuple):
    """The K likeliest tokens in the place of each target."""

    log_probs: Float[Tensor, " R"]
    """Log-probs of the targets."""
    ids: Int[Tensor, "R K"]
    """int64: the likeliest tokens, most likely first."""
    top: Float[Tensor, "R K"]
    """Log-probs of `ids`."""
    agrees: Bool[Tensor, " R"]
    """True if no token is likelier than the target."""


@torch.no_grad()
def likeliest_tokens(
    hidden: Float[Tensor, "R H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " R"],
    temperature: float,
    chunk: int,
    k: int,
    below: int,
    never: Int[Tensor, " masked"] | None = None,
) -> Likeliest:
    """The k tokens with the largest p among the ids less than `below`, and the log-probs of the targets, bitwise equal
    to those of `token_log_probs`. k = 0: none. Does not materialise [R, V]."""
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
        scaled_grad = torch.zeros_like(log_norms) if grad_log_probs is None else grad_log_probs / ctx.temperature
        at_target = _columns(scaled_grad).expand(columns.shape)
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
                    logits[rows] = grad_logits  # the logits are not read again
                del log_p, grad_logits  # before the next ones are allocated
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(logits.t(), hidden[chunk])
            elif grad_weight is not None:
                grad_weight += logits.t() @ hidden[chunk]
            del logits  # before the next chunk's are allocated
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _columns(values: Tensor) -> Tensor:
    """[R] as [R, 1]; [R, C] unchanged."""
    return values if values.ndim == 2 else values[:, None]


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, chunk: int, dtype: torch.dtype, never: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """For each block its tokens, and their logits ÷ temperature in `dtype`, [block, V], which the caller may
    overwrite."""
    for part, logits in _projections(hidden, weight, temperature, chunk):
        for rows in _blocks(logits):
            # Not assigned to a name, which would keep these logits alive until the next block's exist.
            yield slice(part.start + rows.start, part.start + rows.stop), _exact(logits[rows], dtype, never)
        del logits


def _projections(hidden: Tensor, weight: Tensor, temperature: float, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """For each chunk its tokens, and their logits ÷ temperature, [chunk, V], which the caller may overwrite."""
    for start in range(0, len(hidden), chunk):
        part = slice(start, min(start + chunk, len(hidden)))
        # The division is part of the product; with beta = 0 the added tensor is not read.
        yield part, torch.addmm(hidden.new_zeros(()), hidden[part], weight.t(), beta=0, alpha=1 / temperature)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of a chunk in the blocks for which the softmax is computed: on a CPU of a size that fits its caches."""
    rows, vocabulary = logits.shape
    size = rows if logits.is_cuda else max(1, BLOCK_LOGITS // vocabulary)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _exact(logits: Tensor, dtype: torch.dtype, never: Tensor | None) -> Tensor:
    """The logits in `dtype`, with those of the ids `never` masked; may share memory with `logits`."""
    exact = logits.to(dtype)
    return exact if never is None else exact.index_fill_(1, never, FAR_BELOW)
