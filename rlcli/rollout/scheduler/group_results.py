"""Complete groups: how many of their samples are right, and which groups are worth training on."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import JudgedGroup
from rlcli.rollout.scheduler.groups import Group, batch_of
from rlcli.rollout.scheduler.sample_filter import left_out, rewarded, right_of


def judged(samples: SampleTable, config: RunConfig) -> tuple[int, int]:
    """How many samples of one group are right, and how many were judged: a sample whose verification failed, or that
    `train.truncated = mask` leaves out, was not."""
    counting = samples.excluded(config.train.truncated) == 0
    return int((counting & right_of(samples, config)).sum()), int(counting.sum())


def judged_groups(groups: Sequence[Group], kept: Sequence[Group], config: RunConfig) -> list[JudgedGroup]:
    """The record of each complete group. kept: those of them that are worth training on, the same objects."""
    kept_ids = set(map(id, kept))
    records: list[JudgedGroup] = []
    for group in groups:
        right, counting = judged(group.samples, config)
        tokens = int(group.samples.drawn_tokens.sum())
        records.append(JudgedGroup(group.prompt_id, counting, right, tokens, id(group) in kept_ids))
    return records


def kept_groups(groups: Sequence[Group], config: RunConfig) -> list[Group]:
    """Dynamic sampling (DAPO, arXiv 2503.14476): the complete groups worth training on by the rule
    `dynamic_sampling.keep`, judged by the samples that count. A group with only one of them is not."""
    rules, truncated = config.dynamic_sampling, config.train.truncated
    if rules.keep == "all" or not groups:
        return list(groups)
    import torch

    from rlcli.algorithms.selection import keep_groups

    batch = batch_of(groups)
    reasons = left_out(batch.samples, truncated, batch.baselines, compared=True)
    samples = rewarded(batch.samples, truncated).take(reasons == 0)
    scores, labels = torch.tensor(samples.score), torch.tensor(samples.prompt)
    kept = keep_groups(scores, labels, keep=rules.keep, low=rules.low, high=rules.high)
    return [groups[position] for position in sorted(set(samples.prompt[kept.numpy()].tolist()))]
