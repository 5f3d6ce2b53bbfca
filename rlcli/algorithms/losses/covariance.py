"""Losses that treat separately the few tokens on which entropy is lost, and the selection of those tokens.

A token that is both likely and better than expected (a high cov = (A − mean A)(log π − mean log π)) lowers the entropy
of the policy. The Entropy Mechanism, arXiv 2505.22617, restrains a share of 2e-4 of the tokens.

The selection is made once before a minibatch's update, over all its tokens on all ranks, from π_old: so any split into
micro-batches and ranks gives the same update. With one update a step π_old is π. (Implementations that select within
each micro-batch select other tokens when the batch is split differently.)

A selector takes old_log_probs and advantages (float [R], this rank's tokens of the minibatch), noise (float [R],
uniform in (0, 1), drawn so that a token has the same value in every split) and ranks, in this order, and returns bool
[R]. All ranks call it.
"""

from __future__ import annotations

from collections.abc import Callable

from rlcli.algorithms.function_registry import FunctionRegistry
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, loss_functions, ratio, unclipped
from rlcli.algorithms.losses.clipped import USED, ppo
from rlcli.algorithms.ranks import ALONE, Ranks

SelectorFunction = Callable[..., Tensor]
"""Takes old_log_probs, advantages, noise and ranks, and options."""

selectors: FunctionRegistry[Tensor] = FunctionRegistry(
    "token selection", ("old_log_probs", "advantages", "noise", "ranks")
)


@loss_functions.register("clip_cov", needs=(*USED, "selected"))
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    dual_clip: float | None = None,
) -> TokenLoss:
    """`ppo`, but 0 and without gradient on the `selected` tokens (bool [R], of the selector of this name).

    Clip-Cov, arXiv 2505.22617, with the clips of its authors' runs: no lower clip (1), ρ at most 2. `clipped_low` and
    `clipped_high` are PPO's; selected tokens are in neither.

    >>> selected = torch.tensor([True, False, False])
    >>> log_probs = torch.tensor([1.5, 1.5, 3.0]).log()
    >>> inputs = LossInputs(
    ...     log_probs=log_probs, old_log_probs=torch.zeros(3), advantages=torch.ones(3), selected=selected
    ... )
    >>> clip_cov(inputs).loss
    tensor([ 0.0000, -1.5000, -2.0000])
    """
    selected, term = inputs.selected, ppo(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss = torch.where(selected, 0.0, term.loss)
    return TokenLoss(loss, term.clipped_low & ~selected, term.clipped_high & ~selected)


@loss_functions.register("kl_cov", needs=(*USED, "selected"))
def kl_cov(
    inputs: LossInputs,
    *,
    cov_coef: float = 1.0,
) -> TokenLoss:
    """−Aρ, and + cov_coef·|log π − log π_old| on the `selected` tokens (bool [R], of the selector of this name).

    KL-Cov, arXiv 2505.22617: nothing is clipped. The penalty's gradient is 0 where π = π_old: with one update a step it
    has no effect, so use several.

    −1.5 and −1.5 + ln 1.5:

    >>> log_probs, selected = torch.tensor([1.5, 1.5]).log(), torch.tensor([False, True])
    >>> inputs = LossInputs(
    ...     log_probs=log_probs, old_log_probs=torch.zeros(2), advantages=torch.ones(2), selected=selected
    ... )
    >>> kl_cov(inputs).loss
    tensor([-1.5000, -1.0945])
    """
    log_probs, old_log_probs = inputs.log_probs, inputs.old_log_probs
    penalty = cov_coef * (log_probs - old_log_probs).abs()
    return unclipped(-inputs.advantages * ratio(log_probs, old_log_probs) + torch.where(inputs.selected, penalty, 0.0))


@selectors.register("clip_cov")
def select_clip_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    noise: Tensor,
    ranks: Ranks = ALONE,
    *,
    cov_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """max(1, ⌊cov_share·N⌋) of the N tokens, at random among those whose cov is in (cov_low, cov_high).

    Fewer if fewer are in range. Random means those with the least noise. Clip-Cov, arXiv 2505.22617; the count is that
    of its authors' code.

    Means 0 and −2, so cov is 2, −1, −1 and 2; a share this small is one token, and the last has the smaller noise:

    >>> old_log_probs, advantages = torch.tensor([-4.0, -3.0, -1.0, 0.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    >>> select_clip_cov(old_log_probs, advantages, torch.tensor([0.7, 0.1, 0.2, 0.5]))
    tensor([False, False, False,  True])
    """
    cov, tokens = _covariances(old_log_probs, advantages, ranks)
    candidates = (cov > cov_low) & (cov < cov_high)
    return _least(candidates, torch.zeros_like(cov), noise, _count(cov_share, tokens), ranks)


@selectors.register("kl_cov")
def select_kl_cov(
    old_log_probs: Tensor, advantages: Tensor, noise: Tensor, ranks: Ranks = ALONE, *, cov_share: float = 2e-4
) -> Tensor:
    """The max(1, ⌊cov_share·N⌋) of the N tokens with the largest cov; noise decides between equal ones.

    KL-Cov, arXiv 2505.22617; the count is that of its authors' code.

    Means 0 and −2, so cov is 2, −1, −1 and 2; a half of the tokens is two:

    >>> old_log_probs, advantages = torch.tensor([-4.0, -3.0, -1.0, 0.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    >>> select_kl_cov(old_log_probs, advantages, torch.rand(4), cov_share=0.5)
    tensor([ True, False, False,  True])
    """
    cov, tokens = _covariances(old_log_probs, advantages, ranks)
    return _least(torch.ones_like(cov, dtype=torch.bool), -cov, noise, _count(cov_share, tokens), ranks)


def _covariances(old_log_probs: Tensor, advantages: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """(A − mean A)(log π − mean log π), float64 [R], with means over all ranks; and the number of tokens in them."""
    pair = torch.stack([advantages.double(), old_log_probs.double()])
    sums = torch.cat([pair.sum(dim=1), pair.new_tensor([pair.shape[1]])])
    *totals, tokens = ranks.add(sums).unbind()
    means = torch.stack(totals) / tokens.clamp(min=1.0)
    return (pair - means[:, None]).prod(dim=0), int(tokens)


def _count(share: float, tokens: int) -> int:
    return max(1, int(share * tokens))


def _least(candidates: Tensor, keys: Tensor, noise: Tensor, count: int, ranks: Ranks) -> Tensor:
    """The `count` candidates, of all ranks, with the least (key, noise): bool [R]; all of them if there are fewer.

    No rank can hold more than `count` of them, so no rank needs to send more than its own `count` least.
    """
    noise = noise.double()
    local = _order(keys[candidates], noise[candidates])[:count]
    all_keys, all_noise = ranks.gather(keys[candidates][local]), ranks.gather(noise[candidates][local])
    last = _order(all_keys, all_noise)[:count][-1:]  # empty when no rank has a candidate, and then nothing is selected
    if last.numel() == 0:
        return candidates
    key, level = all_keys[last], all_noise[last]
    return candidates & ((keys < key) | ((keys == key) & (noise <= level)))


def _order(keys: Tensor, noise: Tensor) -> Tensor:
    """Indexes that sort by key and, among equal ones, by noise."""
    by_noise = noise.argsort(stable=True)
    return by_noise[keys[by_noise].argsort(stable=True)]
