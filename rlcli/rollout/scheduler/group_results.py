"""Results of complete groups: counts of correct samples, and dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import ScoredGroup
from rlcli.rollout.scheduler.groups import Group, merge_groups
from rlcli.rollout.scheduler.sample_filter import correct_mask, exclusion_reasons, rewarded


def correct_and_scored(samples: SampleTable, config: RunConfig) -> tuple[int, int]:
    """Numbers of correct and of scored samples of one group. A sample whose verification failed, or that
    `train.truncated = mask` leaves out, is not scored."""
    scored = samples.exclusion_reasons(config.train.truncated) == 0
    return int((scored & correct_mask(samples, config)).sum()), int(scored.sum())


def scored_groups(groups: Sequence[Group], selected: Sequence[Group], config: RunConfig) -> list[ScoredGroup]:
    """The record of each complete group. selected: the subset that dynamic sampling keeps, as the same objects."""
    selected_ids = set(map(id, selected))
    records: list[ScoredGroup] = []
    for group in groups:
        correct, scored = correct_and_scored(group.samples, config)
        tokens = int(group.samples.response_tokens.sum())
        records.append(ScoredGroup(group.prompt_id, scored, correct, tokens, id(group) in selected_ids))
    return records


def kept_groups(groups: Sequence[Group], config: RunConfig) -> list[Group]:
    """Dynamic sampling (DAPO, arXiv 2503.14476): the complete groups that the rule `dynamic_sampling.keep` keeps, by
    the scores of the samples that count. A group with only one such sample is rejected."""
    rules, truncated = config.dynamic_sampling, config.train.truncated
    if rules.keep == "all" or not groups:
        return list(groups)
    import torch

    from rlcli.algorithms.selection import keep_groups

    batch = merge_groups(groups)
    reasons = exclusion_reasons(batch.samples, truncated, batch.baselines, compared=True)
    samples = rewarded(batch.samples, truncated).take(reasons == 0)
    scores, labels = torch.tensor(samples.score), torch.tensor(samples.prompt)
    kept_samples = keep_groups(scores, labels, keep=rules.keep, low=rules.low, high=rules.high)
    return [groups[position] for position in sorted(set(samples.prompt[kept_samples.numpy()].tolist()))]
