"""Totals of the rounds since the last step took its groups, and a check that the data cursor moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlcli.data.columns import TruncatedRule
from rlcli.data.messages import RolloutBatch, ScoredGroup
from rlcli.data.rollout_stats import RolloutStats
from rlcli.errors import REPORT, RunFailed
from rlcli.rollout.scheduler.group_checkpoint import Fields
from rlcli.rollout.scheduler.sample_filter import rewarded
from rlcli.rollout.scheduler.verifier_failures import Failures
from rlcli.types import Prompt


@dataclass
class StepTotals:
    """Totals over all rounds since the last step took its groups."""

    draws: Counter[int] = field(default_factory=Counter)
    """Row of the dataset → number of times that the cursor yielded it."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    """Counters of the rounds."""
    failures: Failures = field(default_factory=Failures)
    """Verifications without a verdict."""
    scored_groups: list[ScoredGroup] = field(default_factory=list)
    """Each completed group."""
    phase: int = 0
    """Number of starts of generation for the step, which numbers the files of streaming rollouts."""

    def add(self, round: RolloutBatch, prompts: Mapping[int, Prompt], groups: int, truncated: TruncatedRule) -> None:
        """Add a round. prompts: by `Sample.prompt`. groups: number of groups that the engines received. truncated: as
        `train.truncated`."""
        scores = rewarded(round.samples, truncated).score[round.samples.exclusion_reasons(truncated) == 0]
        self.failures.add_samples(prompts, round.samples)
        for prompt, verdict in round.baselines.items():
            self.failures.add(prompts[prompt], verdict)
        self.stats += replace(
            round.stats,
            groups=groups,
            counting=len(scores),
            score=math.fsum(scores),
            responses=len(round.samples) + len(round.baselines),
        )

    def state(self) -> dict[str, object]:
        """Plain values for a checkpoint. Failures are left out: they only end the run."""
        return {
            "drawn": list(self.draws.items()),
            "judged": list(self.scored_groups),
            **self.stats.state(),
            "phase": self.phase,
        }

    @classmethod
    def restored(cls, state: Fields) -> StepTotals:
        """The inverse of `state`."""
        scored_groups = [ScoredGroup(*group) for group in state["judged"]]
        return cls(
            Counter(dict(state["drawn"])),
            RolloutStats.restored(state),
            scored_groups=scored_groups,
            phase=state["phase"],
        )


class DrawCheck:
    """Checks that the data cursor moves: compares each draw of prompts with the previous two. An epoch's first prompts
    may equal the last ones of the previous epoch, but not a third time."""

    def __init__(self, count: int) -> None:
        self.count = count
        """Prompts in the dataset, or in the smallest of several."""
        self._previous: list[list[int]] = [[], []]

    def check(self, indexes: list[int]) -> None:
        """Raise RunFailed if the same prompts are drawn a third time although the dataset has others."""
        if len(indexes) > 1 and self._previous == [indexes, indexes] and 2 * len(indexes) <= self.count:
            raise RunFailed(
                f"the last {len(indexes)} prompts are drawn a third time, of {self.count} in the dataset: the data "
                "cursor does not move",
                REPORT,
            )
        self._previous = [self._previous[1], indexes]
