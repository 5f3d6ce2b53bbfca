"""What was generated since the last step took its samples: totals, and a check that the data cursor moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rlcli.data.columns import TruncatedRule
from rlcli.data.messages import Collected
from rlcli.errors import REPORT, RunFailed
from rlcli.rollout.scheduler.sample_filter import rewarded
from rlcli.rollout.scheduler.verifier_failures import Failures
from rlcli.types import Prompt


@dataclass
class Rounds:
    """Totals over the rounds for one step. drawn: how often each prompt. groups, generated: how many groups and
    samples. counting, score: how many of them count, and the sum of their scores. phase: number of the files that
    samples are saved in. judged: as in `Collected`."""

    drawn: Counter[int] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    count: int = 0
    groups: int = 0
    generated: int = 0
    counting: int = 0
    score: float = 0.0
    asked: int = 0
    tokens: int = 0
    dropped: int = 0
    too_old: int = 0
    aborted: int = 0
    carried: int = 0
    redrawn: int = 0
    drafted: int = 0
    accepted: int = 0
    version: int = 0
    generate_s: float = 0.0
    verify_s: float = 0.0
    idle_s: float = 0.0
    phase: int = 0
    judged: list[Sequence[Any]] = field(default_factory=list)

    def add(self, round: Collected, prompts: Mapping[int, Prompt], begun: int, truncated: TruncatedRule) -> None:
        """prompts: by `Sample.prompt`. begun: how many groups the round began. truncated: as `train.truncated`."""
        counting = rewarded(round.samples, truncated).score[round.samples.excluded(truncated) == 0]
        self.count += 1
        self.groups += begun
        self.generated += len(round.samples)
        self.counting += len(counting)
        self.score += math.fsum(counting)
        self.failures.add_samples(prompts, round.samples)
        for prompt, verdict in round.baselines.items():
            self.failures.add(prompts[prompt], verdict)
        self.asked += len(round.samples) + len(round.baselines)
        self.tokens += round.generated_tokens
        self.redrawn += round.redrawn
        self.drafted += round.drafted
        self.accepted += round.accepted
        self.aborted, self.version = round.aborted, round.version
        self.generate_s += round.generate_s
        self.verify_s += round.verify_s
        self.idle_s += round.idle_s

    @property
    def mean_score(self) -> float:
        return self.score / max(self.counting, 1)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, without the failures, which only end the run."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        return {"drawn": list(self.drawn.items()), "judged": list(self.judged), **numbers}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Rounds:
        return cls(**{**state, "drawn": Counter(dict(state["drawn"]))})


NUMBERS = tuple(column.name for column in fields(Rounds) if column.name not in ("drawn", "failures", "judged"))


class DrawCheck:
    """Checks that the data cursor moves: compares each draw of prompts with the previous two. count: of the prompts in
    the dataset, the smallest of several. An epoch's first prompts may equal the last ones of the epoch before, but not
    a third time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: list[list[int]] = [[], []]

    def check(self, indexes: list[int]) -> None:
        """Raise RunFailed if the same prompts are drawn a third time although the dataset has others."""
        if len(indexes) > 1 and self._before == [indexes, indexes] and 2 * len(indexes) <= self.count:
            raise RunFailed(
                f"the last {len(indexes)} prompts are drawn a third time, of {self.count} in the dataset: the data "
                "cursor does not move",
                REPORT,
            )
        self._before = [self._before[1], indexes]
