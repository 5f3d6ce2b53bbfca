"""The samples of a rollout as columns: the workers send them, and the controller plans with them.

As columns, 16,000 samples are arrays of 128 KB each. As objects they would be pickled, sorted and summed one by one,
which would take the controller longer than the rest of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, overload

from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.types import UNVERIFIED, Outcome, Sample, Verdict

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float64, Int8, Int64, Shaped

OUTCOMES = tuple(Outcome)
"""The outcomes that `SampleTable.outcome` indexes."""

TruncatedRule = Literal["keep", "mask", "zero_reward"]
"""`train.truncated`."""

RENAMED = {"drawn_tokens": "response_tokens", "finish_reason": "stop_reason"}
"""Fields of samples in older checkpoints → their names since."""
RAGGED: dict[str, tuple[float, str]] = {
    "turn_rewards": (float("nan"), "float64"),
    "turn_states": (0, "int64"),
    "version_tokens": (0, "int64"),
}
"""Columns `[S, K]`, of which a sample fills as many entries as it has turns or versions → fill value of the rest, and
dtype."""
NUMBERS = tuple(
    column.name
    for column in fields(Sample)
    if column.name not in ("stop_reason", "verdict") and column.name not in RAGGED
)
"""The integer fields of a sample: columns of the same name."""


def exclusion_reason(outcome: str, truncated: bool, rule: TruncatedRule) -> str:
    """Reason for which a single response is excluded from the loss and from its group's statistics; empty if it is not.

    >>> exclusion_reason("crash", False, "keep"), exclusion_reason("wrong", True, "mask")
    ('crash', 'truncated')
    >>> exclusion_reason("wrong", True, "keep")
    ''
    """
    if outcome in UNVERIFIED:
        return str(outcome)
    return "truncated" if truncated and rule == "mask" else ""


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[Sample]):
    """S samples. Indexing returns a `Sample`; code that needs all of them reads the columns.

    >>> few = SampleTable.of(Sample(7, i, 0, i, 5, 6, "stop", Verdict(float(i), Outcome.OK), 1) for i in range(3))
    >>> len(few), few.score.tolist(), few[2].verdict.score, few[1:].row.tolist()
    (3, [0.0, 1.0, 2.0], 2.0, [1, 2])
    """

    prompt: Int64[np.ndarray, " S"]
    """Number of its group: in the round; in a step's batch from 0 without gaps."""
    sample: Int64[np.ndarray, " S"]
    """Index within the group."""
    shard: Int64[np.ndarray, " S"]
    """Index of the shard with its trajectory, among the shards of the batch."""
    row: Int64[np.ndarray, " S"]
    """Row of that shard."""
    prompt_tokens: Int64[np.ndarray, " S"]
    """Tokens before the first response token."""
    response_tokens: Int64[np.ndarray, " S"]
    """Response tokens, the end-of-text token included."""
    version: Int64[np.ndarray, " S"]
    """Policy version (number of weight syncs) that generated the first response token."""
    seed: Int64[np.ndarray, " S"]
    """Seed of its sampling."""
    signature: Int64[np.ndarray, " S"]
    """Signature of its tokens, log-probs and score (`rlcli.data.signature`); 0: not signed."""
    context_tokens: Int64[np.ndarray, " S"]
    """Tokens after the prompt that are no response tokens."""
    turns: Int64[np.ndarray, " S"]
    """Turns of the policy."""
    newer_by: Int64[np.ndarray, " S"]
    """Weight syncs between its first and its last response token."""
    ended: Int64[np.ndarray, " S"]
    """Why a conversation ended, as an index into `ENDED`."""
    tool_calls: Int64[np.ndarray, " S"]
    """Tool calls of the policy."""
    failed_calls: Int64[np.ndarray, " S"]
    """Tool calls that could not be parsed or that failed."""
    branches: Int64[np.ndarray, " S"]
    """Token sequences that it consists of."""
    saved_step: Int64[np.ndarray, " S"]
    """Step in whose files its row is saved; 0: unknown."""
    saved_group: Int64[np.ndarray, " S"]
    """Number of its group in these files."""
    turn_rewards: Float64[np.ndarray, "S K"]
    """Rewards of its turns by the environment, K at least the most turns of a sample; NaN behind the last turn, and
    everywhere without an environment."""
    turn_states: Int64[np.ndarray, "S K"]
    """Hash of what the environment had written before each turn; 0 where `turn_rewards` is NaN."""
    version_tokens: Int64[np.ndarray, "S K"]
    """Response tokens that each policy version generated, from `version` on, K at least the most versions of a sample;
    0 behind the last, and everywhere if a single version generated all."""
    truncated: Bool[np.ndarray, " S"]
    """True if it was cut off at the token limit."""
    score: Float64[np.ndarray, " S"]
    """Score of the verdict."""
    latency_s: Float64[np.ndarray, " S"]
    """Seconds of its verification."""
    outcome: Int8[np.ndarray, " S"]
    """Outcome of its verification, as an index into `OUTCOMES`."""
    answer: Shaped[np.ndarray, " S"]
    """The answer that the verifier read: objects, str or None."""
    detail: Shaped[np.ndarray, " S"]
    """Details of the verdict: objects, str."""
    parts: dict[str, Float64[np.ndarray, " S"]] = field(default_factory=dict)
    """Name of a part of the reward → its values; NaN where a verdict does not have the part."""

    def __getstate__(self) -> dict[str, np.ndarray | dict[str, np.ndarray]]:
        """State without empty ragged columns: each would cost every rank as much as many samples."""
        return {name: value for name, value in vars(self).items() if name not in RAGGED or value.shape[1]}

    def __setstate__(self, state: dict[str, np.ndarray | dict[str, np.ndarray]]) -> None:
        import numpy as np

        samples = len(state["prompt"])
        empty: dict[str, np.ndarray] = {name: np.zeros((samples, 0), dtype) for name, (_, dtype) in RAGGED.items()}
        vars(self).update(empty | state)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> SampleTable:
        """The columns of these samples; a `SampleTable` is returned as it is."""
        import numpy as np

        if isinstance(samples, SampleTable):
            return samples
        rows = list(samples)
        verdicts = [s.verdict for s in rows]
        names = dict.fromkeys(name for verdict in verdicts for name in verdict.parts)
        outcome_index = {outcome: number for number, outcome in enumerate(OUTCOMES)}
        return cls(
            **{name: np.array([getattr(s, name) for s in rows], np.int64) for name in NUMBERS},
            **{name: ragged(name, [getattr(s, name) for s in rows]) for name in RAGGED},
            truncated=np.array([s.stop_reason == "length" for s in rows], bool),
            score=np.array([v.score for v in verdicts], np.float64),
            latency_s=np.array([v.latency_s for v in verdicts], np.float64),
            outcome=np.array([outcome_index[v.outcome] for v in verdicts], np.int8),
            answer=np.array([v.answer for v in verdicts], object),
            detail=np.array([v.detail for v in verdicts], object),
            parts={n: np.array([v.parts.get(n, np.nan) for v in verdicts], np.float64) for n in names},
        )

    @classmethod
    def joined(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """Concatenate tables. Ragged columns are padded, missing reward parts are NaN."""
        import numpy as np

        if not tables:
            return cls.of([])
        names = dict.fromkeys(name for table in tables for name in table.parts)
        width = {name: max(getattr(table, name).shape[1] for table in tables) for name in RAGGED}
        columns = {
            name: np.concatenate([table._column(name, width.get(name, 0)) for table in tables]) for name in _COLUMNS
        }

        def part(name: str) -> Float64[np.ndarray, " S"]:
            return np.concatenate([table.parts.get(name, np.full(len(table), np.nan)) for table in tables])

        return cls(**columns, parts={name: part(name) for name in names})

    def _column(self, name: str, width: int) -> np.ndarray:
        """A column, padded to `width` entries per sample if it is ragged."""
        import numpy as np

        column: np.ndarray = getattr(self, name)
        if name not in RAGGED:
            return column
        padded: np.ndarray = np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=RAGGED[name][0])
        return padded

    def take(self, rows: Int64[np.ndarray, " n"] | Bool[np.ndarray, " S"] | Sequence[int] | slice) -> SampleTable:
        """Select rows by indexes, a mask or a slice."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return SampleTable(**columns, parts={name: column[rows] for name, column in self.parts.items()})

    def sorted(self) -> SampleTable:
        """Sort by prompt, then sample."""
        import numpy as np

        return self.take(np.lexsort((self.sample, self.prompt)))

    @property
    def tokens(self) -> Int64[np.ndarray, " S"]:
        """All tokens of each trajectory."""
        total: np.ndarray = self.prompt_tokens + self.response_tokens + self.context_tokens
        return total

    def is_(self, *outcomes: Outcome) -> Bool[np.ndarray, " S"]:
        """Mask of the samples whose verification had one of these outcomes."""
        import numpy as np

        matches: np.ndarray = np.isin(self.outcome, [OUTCOMES.index(outcome) for outcome in outcomes])
        return matches

    def exclusion_reasons(self, rule: TruncatedRule) -> Int8[np.ndarray, " S"]:
        """`exclusion_reason` of each sample, as a number. 0: it is not excluded; 1: its verification timed out; 2: it
        crashed; 3: the response was truncated; 4: the sample's environment failed; 5: its judge's reply
        could not be parsed."""
        import numpy as np

        masked = self.truncated & (rule == "mask")
        failed = [self.is_(outcome) for outcome in UNVERIFIED]
        reasons: np.ndarray = np.select([*failed, masked], [1, 2, 4, 5, 3], 0).astype(np.int8)
        return reasons

    @property
    def overran(self) -> Bool[np.ndarray, " S"]:
        """Mask of the samples whose verification used up its CPU time twice, which makes the response wrong."""
        import numpy as np

        flags: np.ndarray = np.fromiter((str(detail).startswith(OVERRAN) for detail in self.detail), bool, len(self))
        return flags

    def verdict(self, row: int) -> Verdict:
        """The verdict of the sample at index `row`."""
        values = {name: float(column[row]) for name, column in self.parts.items()}
        return Verdict(
            score=float(self.score[row]),
            outcome=OUTCOMES[self.outcome[row]],
            answer=self.answer[row],
            parts={name: value for name, value in values.items() if value == value},  # NaN: no such part
            detail=self.detail[row],
            latency_s=float(self.latency_s[row]),
        )

    def rewarded_turns(self, row: int) -> int:
        """Number of turns that an environment rewarded."""
        rewards = self.turn_rewards[row]
        return int((rewards == rewards).sum())

    def _versions(self, row: int) -> int:
        """Number of entries of `version_tokens` that are in use."""
        newer = int(self.newer_by[row])
        return newer + 1 if newer and self.version_tokens.shape[1] and self.version_tokens[row, 0] else 0

    def __len__(self) -> int:
        return len(self.prompt)

    @overload
    def __getitem__(self, row: int) -> Sample: ...
    @overload
    def __getitem__(self, row: slice) -> SampleTable: ...
    def __getitem__(self, row: int | slice) -> Sample | SampleTable:
        if isinstance(row, slice):
            return self.take(row)
        return Sample(
            **{name: int(getattr(self, name)[row]) for name in NUMBERS},
            turn_rewards=tuple(self.turn_rewards[row, : self.rewarded_turns(row)].tolist()),
            turn_states=tuple(self.turn_states[row, : self.rewarded_turns(row)].tolist()),
            version_tokens=tuple(self.version_tokens[row, : self._versions(row)].tolist()),
            stop_reason="length" if self.truncated[row] else "stop",
            verdict=self.verdict(row),
        )

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))


def ragged(name: str, rows: Sequence[Sequence[float]]) -> np.ndarray:
    """The column `name` of RAGGED, `[S, K]`, from one sequence of values per sample.

    >>> ragged("turn_rewards", [(1.0, 0.5), (), (2.0,)]).tolist()
    [[1.0, 0.5], [nan, nan], [2.0, nan]]
    """
    import numpy as np

    fill, dtype = RAGGED[name]
    column: np.ndarray = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype)
    for row, values in enumerate(rows):
        column[row, : len(values)] = values
    return column


_COLUMNS = tuple(column.name for column in fields(SampleTable) if column.name != "parts")
