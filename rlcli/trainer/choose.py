"""From verified samples to those that are trained on: what does not count is left out, rewards are shaped, samples
selected, advantages made of rewards.

All of it needs scores and lengths alone, so it happens on the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.packer import Plan, plan_batches
from rlcli.errors import RunFailed
from rlcli.trainer.collect import Collected
from rlcli.trainer.usable import compares_group, left_out, rewarded
from rlcli.types import Outcome
from rlcli.workers.dispatch import Shared
from rlcli.workers.samples import Samples
from rlcli.workers.work import MiniWork, RankWork, StepWork

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Chosen:
    """The N samples that a step trains on, maybe some of them twice. groups: dense labels. columns: what is known of
    each, `[N, …]` by name: `rewards` (shaped), `scores` (the verdicts'), `signatures`, `groups`, `lengths`, `right`,
    `group_tokens`, and where they apply `advantages`, `baselines`, `parts` and `pairs`. active: which have a gradient;
    None: all. reward: mean of all samples of the step that count, shaped, the unselected included; NaN where none does.
    left_out: of every sample of the step why it does not count, int8, as `usable.left_out` has it."""

    samples: Samples
    groups: list[int]
    columns: dict[str, Any]
    shards: list[Any]
    active: list[bool] | None
    reward: float
    left_out: Any


def choose(batch: Collected, algorithm: Algorithm, config: RunConfig, seed: int) -> Chosen:
    """The samples to train on and what is known of them. seed: of whatever is drawn."""
    import torch

    rule = config.train.truncated
    reasons = left_out(batch.samples, rule, batch.baselines, compared=compares_group(algorithm))
    samples = rewarded(batch.samples, rule)
    samples = samples.take(reasons == 0) if reasons.any() else samples
    groups = torch.tensor(samples.prompt)
    rewards = shaped_rewards(samples, groups, config)
    known = {
        "rewards": rewards,
        "groups": groups,
        "lengths": torch.tensor(samples.response_tokens),
        "right": torch.tensor(right_of(samples, config)),
        "scores": torch.tensor(batch.samples.score[reasons == 0]),  # as they were signed
        "signatures": torch.tensor(samples.signature),
    }
    known["parts"], weights = _parts(samples, rewards, batch.part_weights)
    if algorithm.needs_baselines:
        known["baselines"] = torch.tensor(
            [batch.baselines[p].score for p in samples.prompt.tolist()], dtype=torch.float64
        )
    if algorithm.advantages_before_tokens:
        known["advantages"] = algorithm.response_advantages({**known, "weights": weights})
    indexes = algorithm.select_samples(rewards, groups, torch.Generator().manual_seed(seed))
    chosen = {name: values[indexes] for name, values in known.items()}
    _, dense = torch.unique(chosen["groups"], return_inverse=True)
    chosen["groups"] = dense
    chosen["group_tokens"] = torch.zeros(len(dense)).index_add_(0, dense, chosen["lengths"].float())[dense]
    if algorithm.selects_pairs:
        chosen["pairs"] = torch.arange(len(indexes)) // 2
    skips = algorithm.skips_zero_advantages
    return Chosen(
        samples=samples.take(indexes.numpy()),
        groups=dense.tolist(),
        columns={name: values.numpy() for name, values in chosen.items()},
        shards=batch.shards,
        active=(chosen["advantages"] != 0).tolist() if skips else None,
        reward=float(rewards.mean()),
        left_out=reasons,
    )


def right_of(samples: Samples, config: RunConfig) -> Any:
    """Which are right, bool `[N]`: not those whose reward was set to 0 because they were cut off."""
    right = samples.is_(Outcome.OK)
    return right & ~samples.truncated if config.train.truncated == "zero_reward" else right


def shaped_rewards(samples: Samples, groups: Tensor, config: RunConfig) -> Tensor:
    """The verifier's scores, and what `shaping` adds to them: float64 `[N]`."""
    import numpy as np
    import torch

    from rlcli.algorithms.shaping import length_reward, overlong, soft_format

    shaping = config.shaping
    rewards, lengths = torch.tensor(samples.score), torch.tensor(samples.response_tokens)
    if shaping.overlong_buffer:
        rewards += overlong(
            lengths,
            max_length=config.rollout.max_response_tokens,
            buffer=shaping.overlong_buffer,
            penalty=shaping.overlong_penalty,
        )
    if shaping.length_weight:
        right = torch.tensor(right_of(samples, config))
        rewards += length_reward(right, lengths, groups, weight=shaping.length_weight)
    if shaping.format_weight:
        formats = samples.parts.get("format")
        if len(samples) and (formats is None or np.isnan(formats).all()):
            raise RunFailed(
                f"shaping.format_weight = {shaping.format_weight:g}, but no verdict has a part named format",
                "give a verifier that judges the format, or 0",
            )
        judged = np.zeros(len(samples)) if formats is None else np.nan_to_num(formats, nan=0.0)
        rewards += soft_format(torch.tensor(judged), weight=shaping.format_weight)
    return rewards


def plan_step(chosen: Chosen, config: RunConfig, ranks: int) -> Plan:
    """Which of `ranks` trains what, in which micro-batch."""
    return plan_batches(
        chosen.samples.prompt_tokens.tolist(),
        chosen.samples.response_tokens.tolist(),
        chosen.groups,
        minibatches=config.train.minibatches,
        ranks=ranks,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        max_response_tokens=config.rollout.max_response_tokens,
        active=chosen.active,
        pairs=chosen.columns["pairs"].tolist() if "pairs" in chosen.columns else None,
        prompts=chosen.groups,
    )


def step_work(plan: Plan, chosen: Chosen, seed: int) -> Shared:
    """The StepWork that all ranks share. seed: of whatever is drawn at random."""
    right_tokens = chosen.columns["lengths"] * chosen.columns["right"]
    minibatches = [
        MiniWork(
            tokens=mini.tokens,
            sequences=mini.sequences,
            groups=mini.groups,
            max_length=mini.max_length,
            right_tokens=int(right_tokens[list(mini.samples)].sum()),
        )
        for mini in plan.minibatches
    ]
    return Shared(StepWork(minibatches, chosen.columns, seed, chosen.shards))


def rank_work(plan: Plan, chosen: Chosen, ranks: int) -> list[RankWork]:
    """One RankWork for each rank. Only indexes: the tokens stay where they are."""
    import numpy as np

    shard, row = chosen.samples.shard, chosen.samples.row

    def of(rank: int) -> RankWork:
        bins = [mini.ranks[rank] for mini in plan.minibatches]
        samples = np.fromiter((sample for mini in bins for bin in mini for sample in bin), np.int64)
        counts = [[len(bin) for bin in mini] for mini in bins]
        return RankWork(samples, shard[samples], row[samples], counts)

    return [of(rank) for rank in range(ranks)]


def _parts(samples: Samples, rewards: Tensor, part_weights: Mapping[str, float]) -> tuple[Tensor, list[float]]:
    """The named parts of the rewards, float64 `[N, K]` by name, 0 where a sample lacks one, and last what they leave
    out, if anything: what shaping adds, and the whole reward of a sample without parts. With them the weight of each, 1
    where none is given."""
    import torch

    known = {name: torch.tensor(values) for name, values in sorted(samples.parts.items()) if (values == values).any()}
    if not known:
        return rewards[:, None], [1.0]
    parts = torch.stack(list(known.values()), dim=1)
    weights = [part_weights.get(name, 1.0) for name in known]
    told = torch.where(parts.isnan().all(dim=1), 0.0, torch.tensor(samples.score))
    parts, rest = parts.nan_to_num(nan=0.0), rewards - told
    return (torch.cat([parts, rest[:, None]], dim=1), [*weights, 1.0]) if rest.any() else (parts, weights)
