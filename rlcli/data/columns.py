"""The samples of a rollout as columns: the workers send them, and the controller plans with them.

Sixteen thousand samples are some arrays of 128 KB each. As objects they would be pickled, sorted and summed one by one,
which would take the controller longer than the rest of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, overload

from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.types import UNVERIFIED, Outcome, Sample, Verdict

if TYPE_CHECKING:
    import numpy as np

OUTCOMES = tuple(Outcome)
"""The outcomes that `SampleTable.outcome` indexes."""

TruncatedRule = Literal["keep", "mask", "zero_reward"]
"""`train.truncated`."""

RENAMED = {"response_tokens": "drawn_tokens", "finish_reason": "stop_reason"}
"""Fields of samples in older checkpoints → their names since."""
RAGGED: dict[str, tuple[Any, str]] = {
    "turn_rewards": (float("nan"), "float64"),
    "turn_states": (0, "int64"),
    "version_tokens": (0, "int64"),
}
"""Columns `[N, K]`, of which a sample fills so much of its row as it has turns, or versions → what fills the rest, and
their type."""
NUMBERS = tuple(
    column.name
    for column in fields(Sample)
    if column.name not in ("stop_reason", "verdict") and column.name not in RAGGED
)
"""The whole numbers of a sample: columns of the same name."""


def exclusion(outcome: str, truncated: bool, rule: TruncatedRule) -> str:
    """Why a single response is excluded from the loss and from its group's statistics; empty if it is not.

    >>> exclusion("crash", False, "keep"), exclusion("wrong", True, "mask"), exclusion("wrong", True, "keep")
    ('crash', 'truncated', '')
    """
    if outcome in UNVERIFIED:
        return str(outcome)
    return "truncated" if truncated and rule == "mask" else ""


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[Sample]):
    """N samples. Indexing returns a `Sample`; code that needs all of them reads the columns.

    >>> few = SampleTable.of(Sample(7, i, 0, i, 5, 6, "stop", Verdict(float(i), Outcome.OK), 1) for i in range(3))
    >>> len(few), few.score.tolist(), few[2].verdict.score, few[1:].row.tolist()
    (3, [0.0, 1.0, 2.0], 2.0, [1, 2])
    """

    prompt: np.ndarray
    """int64 `[N]`: number of its group: in the round; in a step's batch from 0 without gaps."""
    sample: np.ndarray
    """int64 `[N]`: index within the group."""
    shard: np.ndarray
    """int64 `[N]`: index of the shard with its trajectory, among those of the batch."""
    row: np.ndarray
    """int64 `[N]`: row of that shard."""
    prompt_tokens: np.ndarray
    """int64 `[N]`: tokens before the first response token."""
    drawn_tokens: np.ndarray
    """int64 `[N]`: response tokens, the end-of-text token included."""
    version: np.ndarray
    """int64 `[N]`: policy version (number of weight syncs) that generated the first response token."""
    seed: np.ndarray
    """int64 `[N]`: seed of generating it."""
    signature: np.ndarray
    """int64 `[N]`: of its tokens, log-probs and score (`rlcli.data.signature`); 0: not signed."""
    context_tokens: np.ndarray
    """int64 `[N]`: tokens after the prompt that are no response tokens."""
    turns: np.ndarray
    """int64 `[N]`: turns of the policy."""
    newer_by: np.ndarray
    """int64 `[N]`: weight syncs between its first and its last response token."""
    ended: np.ndarray
    """int64 `[N]`: why a conversation ended, as an index into `ENDED`."""
    tool_calls: np.ndarray
    """int64 `[N]`: tool calls of the policy."""
    failed_calls: np.ndarray
    """int64 `[N]`: those of them that could not be read or that failed."""
    branches: np.ndarray
    """int64 `[N]`: token sequences that it consists of."""
    saved_step: np.ndarray
    """int64 `[N]`: step in whose files its row is saved; 0: unknown."""
    saved_group: np.ndarray
    """int64 `[N]`: number of its group in these files."""
    turn_rewards: np.ndarray
    """float64 `[N, K]`, K at least the most turns of a sample: rewards of its turns by the environment; NaN behind the
    last turn, and where there was no environment."""
    turn_states: np.ndarray
    """int64 `[N, K]`: hash of what the environment had written before each turn; 0 where `turn_rewards` is NaN."""
    version_tokens: np.ndarray
    """int64 `[N, V]`, V at least the most versions of a sample: response tokens that each version generated, from
    `version` on; 0 behind the last, and everywhere if a single version generated all."""
    truncated: np.ndarray
    """bool `[N]`: whether it was cut off at the token limit."""
    score: np.ndarray
    """float64 `[N]`: score of the verdict."""
    latency_s: np.ndarray
    """float64 `[N]`: seconds of its verification."""
    outcome: np.ndarray
    """int8 `[N]`: outcome of its verification, as an index into `OUTCOMES`."""
    answer: Any
    """object `[N]`: str or None, the answer that the verifier read."""
    detail: Any
    """object `[N]`: str, details of the verdict."""
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    """Name of a part of the reward → float64 `[N]`; NaN where a verdict does not have the part."""

    def __getstate__(self) -> dict[str, Any]:
        """Without ragged columns that are empty: each costs every rank as much as many samples."""
        return {name: value for name, value in vars(self).items() if name not in RAGGED or value.shape[1]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import numpy as np

        none: dict[str, Any] = {n: np.zeros((len(state["prompt"]), 0), dtype) for n, (_, dtype) in RAGGED.items()}
        vars(self).update(none | state)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> SampleTable:
        import numpy as np

        if isinstance(samples, SampleTable):
            return samples
        found = list(samples)
        verdicts = [s.verdict for s in found]
        names = dict.fromkeys(name for verdict in verdicts for name in verdict.parts)
        place = {outcome: number for number, outcome in enumerate(OUTCOMES)}
        return cls(
            **{name: np.array([getattr(s, name) for s in found], np.int64) for name in NUMBERS},
            **{name: ragged(name, [getattr(s, name) for s in found]) for name in RAGGED},
            truncated=np.array([s.stop_reason == "length" for s in found], bool),
            score=np.array([v.score for v in verdicts], np.float64),
            latency_s=np.array([v.latency_s for v in verdicts], np.float64),
            outcome=np.array([place[v.outcome] for v in verdicts], np.int8),
            answer=np.array([v.answer for v in verdicts], object),
            detail=np.array([v.detail for v in verdicts], object),
            parts={n: np.array([v.parts.get(n, np.nan) for v in verdicts], np.float64) for n in names},
        )

    @classmethod
    def joined(cls, some: Sequence[SampleTable]) -> SampleTable:
        """Concatenate them."""
        import numpy as np

        if not some:
            return cls.of([])
        names = dict.fromkeys(name for samples in some for name in samples.parts)
        width = {name: max(getattr(samples, name).shape[1] for samples in some) for name in RAGGED}
        columns = {
            name: np.concatenate([samples._column(name, width.get(name, 0)) for samples in some]) for name in _COLUMNS
        }

        def part(name: str) -> Any:
            return np.concatenate([samples.parts.get(name, np.full(len(samples), np.nan)) for samples in some])

        return cls(**columns, parts={name: part(name) for name in names})

    def _column(self, name: str, width: int) -> np.ndarray:
        """A column, which is so wide if it is a ragged one."""
        import numpy as np

        column: np.ndarray = getattr(self, name)
        if name not in RAGGED:
            return column
        padded: np.ndarray = np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=RAGGED[name][0])
        return padded

    def take(self, which: Any) -> SampleTable:
        """The samples at these places: indexes, a mask or a slice."""
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        return SampleTable(**columns, parts={name: column[which] for name, column in self.parts.items()})

    def sorted(self) -> SampleTable:
        """Sort by prompt, then sample."""
        import numpy as np

        return self.take(np.lexsort((self.sample, self.prompt)))

    @property
    def tokens(self) -> np.ndarray:
        """All tokens of each trajectory: int64 `[N]`."""
        total: np.ndarray = self.prompt_tokens + self.drawn_tokens + self.context_tokens
        return total

    def is_(self, *outcomes: Outcome) -> np.ndarray:
        """Whether the verification had this outcome: bool `[N]`."""
        import numpy as np

        found: np.ndarray = np.isin(self.outcome, [OUTCOMES.index(outcome) for outcome in outcomes])
        return found

    def excluded(self, rule: TruncatedRule) -> np.ndarray:
        """Why each is excluded by itself (see `exclusion`): int8 `[N]`; 0: it is not, 1: its verification timed out, 2:
        it crashed, 3: the response was truncated, 4: the sample's environment failed, 5: its judge's reply could not be
        read."""
        import numpy as np

        cut = self.truncated & (rule == "mask")
        failed = [self.is_(outcome) for outcome in UNVERIFIED]
        found: np.ndarray = np.select([*failed, cut], [1, 2, 4, 5, 3], 0).astype(np.int8)
        return found

    @property
    def overran(self) -> np.ndarray:
        """Whether the verification used up its CPU time twice, which makes the response wrong: bool `[N]`."""
        import numpy as np

        found: np.ndarray = np.fromiter((str(detail).startswith(OVERRAN) for detail in self.detail), bool, len(self))
        return found

    def verdict(self, place: int) -> Verdict:
        """A sample's verdict."""
        values = {name: float(column[place]) for name, column in self.parts.items()}
        return Verdict(
            score=float(self.score[place]),
            outcome=OUTCOMES[self.outcome[place]],
            answer=self.answer[place],
            parts={name: value for name, value in values.items() if value == value},  # NaN: no such part
            detail=self.detail[place],
            latency_s=float(self.latency_s[place]),
        )

    def rewarded_turns(self, place: int) -> int:
        """How many turns an environment rewarded."""
        row = self.turn_rewards[place]
        return int((row == row).sum())

    def _versions(self, place: int) -> int:
        """How many versions have a number of tokens."""
        newer = int(self.newer_by[place])
        return newer + 1 if newer and self.version_tokens.shape[1] and self.version_tokens[place, 0] else 0

    def __len__(self) -> int:
        return len(self.prompt)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> SampleTable: ...
    def __getitem__(self, place: int | slice) -> Sample | SampleTable:
        if isinstance(place, slice):
            return self.take(place)
        return Sample(
            **{name: int(getattr(self, name)[place]) for name in NUMBERS},
            turn_rewards=tuple(self.turn_rewards[place, : self.rewarded_turns(place)].tolist()),
            turn_states=tuple(self.turn_states[place, : self.rewarded_turns(place)].tolist()),
            version_tokens=tuple(self.version_tokens[place, : self._versions(place)].tolist()),
            stop_reason="length" if self.truncated[place] else "stop",
            verdict=self.verdict(place),
        )

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))


def ragged(name: str, rows: Sequence[Sequence[Any]]) -> np.ndarray:
    """The column `name` of RAGGED, `[N, K]`, of a row for each sample.

    >>> ragged("turn_rewards", [(1.0, 0.5), (), (2.0,)]).tolist()
    [[1.0, 0.5], [nan, nan], [2.0, nan]]
    """
    import numpy as np

    fill, dtype = RAGGED[name]
    column: np.ndarray = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype)
    for place, row in enumerate(rows):
        column[place, : len(row)] = row
    return column


_COLUMNS = tuple(column.name for column in fields(SampleTable) if column.name != "parts")
