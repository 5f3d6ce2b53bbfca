"""How many samples of a group are right: for the draw of prompts and for each prompt's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.columns import Samples
from rlcli.rollout.scheduler.groups import Group
from rlcli.rollout.scheduler.sample_filter import right_of


def judged(samples: Samples, config: RunConfig) -> tuple[int, int]:
    """How many samples of one group are right, and how many were judged: a sample whose verification failed, or that
    `train.truncated = mask` leaves out, was not."""
    counting = samples.excluded(config.train.truncated) == 0
    return int((counting & right_of(samples, config)).sum()), int(counting.sum())


def judged_groups(groups: Sequence[Group], kept: Sequence[Group], config: RunConfig) -> list[Sequence[Any]]:
    """`Collected.judged` of complete groups. kept: those of them that are worth training on, the same objects."""
    stay = set(map(id, kept))
    found: list[Sequence[Any]] = []
    for group in groups:
        right, counted = judged(group.samples, config)
        found.append([group.prompt_id, counted, right, int(group.samples.drawn_tokens.sum()), id(group) in stay])
    return found
