"""Advantages that need tokens, made where the batch lies; only sums cross ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.ranks import Ranks
from rlcli.workers.batch import Joined, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


def all_ranks() -> Ranks:
    """The ranks of this process group."""
    import torch
    import torch.distributed as dist

    def add(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather(tensor: Tensor) -> Tensor:
        parts: list[Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, tensor.cpu())
        return torch.cat([part for part in parts if part is not None]).to(tensor.device)

    return Ranks(add, gather)


def fill_advantages(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float) -> None:
    """Fill in `advantages`, unless the rewards alone made them, so that the batch came with them, and, where there is a
    critic, `returns`. Collective.

    Needs of `batch` the columns `rewards` and `groups`, and the tokens' `values`, `process_rewards`, `old_log_probs`
    and `reference_log_probs` where the algorithm asks for them.
    """
    if algorithm.advantages_before_tokens:
        return
    if algorithm.is_token_level:
        _token_level(algorithm, batch, ranks, kl_coef)
    else:
        batch.spread("advantages", _penalised_rewards(algorithm, batch, ranks, kl_coef))


def fill_selected(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks) -> None:
    """Fill in `selected`, minibatch by minibatch: the tokens that the loss treats apart. Collective."""
    for index in range(len(batch.minibatches)):
        joined = batch.joined(index)
        inputs = {
            "old_log_probs": joined.tokens("old_log_probs"),
            "advantages": joined.tokens("advantages"),
            "noise": _noise(batch, joined),
            "ranks": ranks,
        }
        joined.fill("selected", algorithm.select_tokens(inputs))


def _token_level(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float) -> None:
    joined = batch.joined()
    rewards = batch.columns["rewards"][joined.samples]
    token_rewards = _kl_penalty(algorithm, joined, kl_coef)
    present = joined.lengths > 0
    token_rewards[joined.lengths.cumsum(0)[present] - 1] += rewards[present]  # the verdict is on the last token
    groups = batch.columns["groups"]
    inputs = {
        "token_rewards": token_rewards,
        "sequence": joined.sequence,
        "lengths": joined.lengths,
        "rewards": rewards,
        "groups": groups[joined.samples],
        "group_count": int(groups.max()) + 1 if len(groups) else 0,  # a selection may leave no sample
        "ranks": ranks,
    }
    if algorithm.needs_critic:
        inputs["values"] = joined.tokens("values")
    if algorithm.needs_process_rewards:
        inputs["process_rewards"] = joined.tokens("process_rewards")
    made = algorithm.token_advantages(inputs)
    joined.fill("advantages", made.advantages.float())
    if made.returns is not None:
        joined.fill("returns", made.returns.float())


def _penalised_rewards(algorithm: Algorithm, batch: TrainBatch, ranks: Ranks, kl_coef: float) -> Tensor:
    """Advantages `[N]` of rewards from which each response's KL was taken: every rank needs those of all samples."""
    joined = batch.joined()
    penalties = batch.columns["rewards"].new_zeros(len(batch.columns["rewards"]))
    penalties.index_add_(0, joined.samples[joined.sequence], _kl_penalty(algorithm, joined, kl_coef))
    rewards = batch.columns["rewards"] + ranks.add(penalties)
    return algorithm.response_advantages({**batch.columns, "rewards": rewards})


def _kl_penalty(algorithm: Algorithm, joined: Joined, kl_coef: float) -> Tensor:
    """−β KL of each token, float64 `[T]`, where the KL belongs to the reward; else zeros."""
    import torch

    if not algorithm.kl_in_reward:
        return torch.zeros(len(joined.sequence), dtype=torch.float64, device=joined.sequence.device)
    estimate = algorithm.divergence(joined.tokens("old_log_probs"), joined.tokens("reference_log_probs"))
    return -kl_coef * estimate.double()


def _noise(batch: TrainBatch, joined: Joined) -> Tensor:
    """Uniform numbers that belong to the samples, float64 `[T]`: no layout changes them."""
    import numpy as np
    import torch

    drawn = [
        np.random.default_rng([batch.seed, sample]).random(length)
        for sample, length in zip(joined.samples.tolist(), joined.lengths.tolist(), strict=True)
    ]
    return torch.tensor(np.concatenate([np.zeros(0), *drawn]), device=joined.sequence.device)
