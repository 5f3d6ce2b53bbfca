"""Advantages that need tokens, computed on the ranks that hold the batch; only sums cross ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.inputs import AdvantageInputs, LossInputs
from rlcli.algorithms.ranks import Ranks
from rlcli.data.train_rows import MinibatchCounts
from rlcli.training.worker.train_batch import Joined, TrainBatch

if TYPE_CHECKING:
    from jaxtyping import Float, Float64
    from torch import Tensor


def fill_advantages(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float) -> None:
    """Fill in `advantages`, unless they came with the batch because the rewards alone determine them, and, if there is
    a critic, `returns`. Collective.

    Needs of `batch` the columns `rewards` and `groups`, and the tokens' `values`, `process_rewards`, `old_log_probs`,
    `reference_log_probs` and `teacher_log_probs` if the algorithm uses them.
    """
    if algorithm.advantages_before_tokens:
        return
    if algorithm.is_token_level:
        _token_level(algorithm, batch, ranks, kl_coef)
    else:
        batch.spread("advantages", _kl_penalised_advantages(algorithm, batch, ranks, kl_coef))


def fill_kept(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks) -> None:
    """Fill in `kept`, minibatch by minibatch: the tokens that no correction rejects; and remove the others from the
    policy's denominators. Collective. Advantages are computed from all tokens nevertheless."""
    import torch

    for index in range(len(batch.minibatches)):
        joined = batch.joined(index)
        kept = algorithm.keep_tokens(
            LossInputs(
                old_log_probs=joined.tokens("old_log_probs"),
                rollout_log_probs=joined.tokens("rollout_log_probs"),
                sequence=joined.sequence,
                lengths=joined.lengths,
            )
        )
        joined.fill_kept(kept)
        rejected = torch.zeros(len(batch.columns.groups), dtype=torch.float64, device=batch.device)
        rejected.index_add_(0, joined.samples[joined.sequence], (~kept).double())
        batch.policy_counts[index] = _counts_after_rejection(batch, index, ranks.add(rejected))


def fill_selected(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks) -> None:
    """Fill in `selected`, minibatch by minibatch: the tokens that the loss treats differently. Collective."""
    import torch

    for index in range(len(batch.minibatches)):
        joined = batch.joined(index)
        kept = joined.tokens("kept").bool() if algorithm.rejects else slice(None)
        noise = _noise(batch, joined)
        old_log_probs, advantages = joined.tokens("old_log_probs")[kept], joined.tokens("advantages")[kept]
        selected = torch.zeros_like(noise, dtype=torch.bool)
        selected[kept] = algorithm.select_tokens(old_log_probs, advantages, noise[kept], ranks)
        joined.fill("selected", selected)


def _counts_after_rejection(batch: TrainBatch, index: int, rejected: Float64[Tensor, " S"]) -> MinibatchCounts:
    """The denominators of a minibatch without the `rejected` tokens of each sample: neither responses nor prompts whose
    tokens are all rejected count. Subtracts the rejected tokens from `group_tokens`, too."""
    import torch

    counts, groups, lengths = batch.minibatch_counts[index], batch.columns.groups, batch.columns.lengths
    empty = ((rejected > 0) & (rejected >= lengths)).double()
    table = torch.stack([rejected, empty, torch.ones_like(rejected)], dim=1)
    of_groups = table.new_zeros(int(groups.max()) + 1 if len(groups) else 0, 3).index_add_(0, groups, table)
    batch.columns.group_tokens = batch.columns.group_tokens - of_groups[groups, 0].float()
    emptied = (of_groups[:, 1] > 0) & (of_groups[:, 1] == of_groups[:, 2])
    sums = (rejected.sum(), empty.sum(), emptied.double().sum(), (rejected * batch.columns.right).sum())
    tokens, sequences, prompts, right_tokens = map(int, torch.stack(sums).tolist())
    return replace(
        counts,
        tokens=counts.tokens - tokens,
        sequences=counts.sequences - sequences,
        groups=counts.groups - prompts,
        right_tokens=counts.right_tokens - right_tokens,
    )


def _token_level(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float) -> None:
    joined = batch.joined()
    rewards = batch.columns.rewards[joined.samples]
    token_rewards = _kl_penalty(algorithm, joined, kl_coef) + _reward_per_token(batch, joined)
    groups = batch.columns.groups
    needs = algorithm.advantage.needs
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
        sequence=joined.sequence,
        lengths=joined.lengths,
        rewards=rewards,
        groups=groups[joined.samples],
        group_count=int(groups.max()) + 1 if len(groups) else 0,  # the selection may be empty
        ranks=ranks,
        values=joined.tokens("values") if "values" in needs else None,
        process_rewards=joined.tokens("process_rewards") if "process_rewards" in needs else None,
        old_log_probs=joined.tokens("old_log_probs") if "old_log_probs" in needs else None,
        teacher_log_probs=joined.tokens("teacher_log_probs") if "teacher_log_probs" in needs else None,
    )
    outputs = algorithm.token_advantages(inputs)
    joined.fill("advantages", outputs.advantages.float())
    if outputs.returns is not None:
        joined.fill("returns", outputs.returns.float())


def _reward_per_token(batch: TrainBatch, joined: Joined) -> Float64[Tensor, " R"]:
    """The rewards at the tokens that earn them: a sample's on its last token, or, if its turns are rewarded,
    each turn's on the turn's last token. A turn without tokens counts to the token before it, else to the first one."""
    import torch

    if batch.columns.has("turn_rewards"):
        by_turn = batch.columns.turn_rewards[joined.samples]
        counts = torch.zeros_like(by_turn, dtype=torch.int64)
        counts.index_put_((joined.sequence, joined.tokens("turn").long()), torch.ones_like(joined.sequence), True)
    else:
        by_turn = batch.columns.rewards[joined.samples, None]
        counts = joined.lengths[:, None]
    present = joined.lengths > 0
    starts = joined.lengths.cumsum(0) - joined.lengths
    ends = starts[:, None] + (counts.cumsum(1) - 1).clamp(min=0)
    earned = torch.zeros(len(joined.sequence), dtype=torch.float64, device=joined.sequence.device)
    return earned.index_add_(0, ends[present].flatten(), by_turn[present].double().flatten())


def _kl_penalised_advantages(
    algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float
) -> Float[Tensor, " S"]:
    """Advantages of rewards minus each response's KL, for all samples of the step on every rank."""
    joined = batch.joined()
    penalties = batch.columns.rewards.new_zeros(len(batch.columns.rewards))
    penalties.index_add_(0, joined.samples[joined.sequence], _kl_penalty(algorithm, joined, kl_coef))
    rewards = batch.columns.rewards + ranks.add(penalties)
    columns = batch.columns
    return algorithm.response_advantages(
        AdvantageInputs(
            rewards=rewards,
            groups=columns.groups,
            lengths=columns.lengths,
            baselines=columns.get("baselines"),
            parts=columns.parts,
        )
    )


def _kl_penalty(algorithm: Algorithm, joined: Joined, kl_coef: float) -> Float64[Tensor, " R"]:
    """−β KL of each token, if the KL is part of the reward; else zeros."""
    import torch

    if not algorithm.kl_in_reward:
        return torch.zeros(len(joined.sequence), dtype=torch.float64, device=joined.sequence.device)
    estimate = algorithm.divergence(joined.tokens("old_log_probs"), joined.tokens("reference_log_probs"))
    return -kl_coef * estimate.double()


def _noise(batch: TrainBatch, joined: Joined) -> Float64[Tensor, " R"]:
    """Uniform random numbers seeded by the samples: independent of the layout."""
    import numpy as np
    import torch

    from rlcli.model.device_copies import download

    samples, lengths = download([joined.samples, joined.lengths])
    noise = [
        np.random.default_rng([batch.seed, sample]).random(length)
        for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.tensor(np.concatenate([np.zeros(0), *noise]), device=joined.sequence.device)
