"""The responses of an evaluation as columns, reduced to those that the statistics need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcli.data.columns import OUTCOMES, SampleTable
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.types import Outcome

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from jaxtyping import Bool, Float64, Int64, Shaped

COLUMNS = ("sample", "score", "outcome", "answer", "response_tokens", "finish_reason", "detail")
"""Columns of a table of samples, in the order of `Responses.of`."""
ARRAYS = ("prompt", "sample", "score", "outcome", "answer", "tokens", "truncated")
"""The fields of `Responses` with a value for each response."""


@dataclass(frozen=True, eq=False)
class Responses:
    """Responses with their verdicts, in any order."""

    prompt: Int64[np.ndarray, " S"]
    """Position of the prompt."""
    sample: Int64[np.ndarray, " S"]
    """Index among the samples of the prompt; GREEDY for the greedy one."""
    score: Float64[np.ndarray, " S"]
    """Reward of the verifier."""
    outcome: Shaped[np.ndarray, " S"]
    """Outcome of the verification, as text."""
    answer: Shaped[np.ndarray, " S"]
    """Extracted answer: a text, or None."""
    tokens: Float64[np.ndarray, " S"]
    """Length in tokens; NaN if not counted."""
    truncated: Bool[np.ndarray, " S"]
    """True if cut off at the limit."""
    crash: str = ""
    """Message of the first verifier crash."""

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        sample: Sequence[int],
        score: Sequence[float],
        outcome: Sequence[str],
        answer: Sequence[str | None],
        tokens: Sequence[int | None],
        finish_reason: Sequence[str],
        detail: Sequence[str],
    ) -> Responses:
        import numpy as np

        crash = next((text for text, value in zip(detail, outcome, strict=True) if value == Outcome.CRASH), "")
        return cls(
            np.asarray(prompt, np.int64),
            np.asarray(sample, np.int64),
            np.asarray(score, np.float64),
            np.asarray([str(value) for value in outcome], dtype="U16"),
            np.array(list(answer), dtype=object),
            np.asarray([np.nan if count is None else count for count in tokens], np.float64),
            np.asarray([reason == "length" for reason in finish_reason], bool),
            crash,
        )

    @classmethod
    def of_samples(cls, samples: SampleTable) -> Responses:
        """From the samples that workers report."""
        import numpy as np

        crashes = samples.detail[samples.is_(Outcome.CRASH)]
        return cls(
            samples.prompt,
            samples.sample,
            samples.score,
            np.asarray(OUTCOMES, dtype="U16")[samples.outcome],
            samples.answer,
            samples.response_tokens.astype(np.float64),
            samples.truncated,
            crashes[0] if len(crashes) else "",
        )

    @classmethod
    def of_table(cls, table: pa.Table, positions: Mapping[str, int]) -> Responses:
        """From a table of samples, only the prompts in `positions`: id → position."""
        ids = table.column("prompt_id").to_pylist()
        rows = [row for row, prompt in enumerate(ids) if prompt in positions]
        selected = table.select(COLUMNS).take(rows)
        return cls.of([positions[ids[row]] for row in rows], *(selected.column(name).to_pylist() for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def passed(self) -> Bool[np.ndarray, " S"]:
        """True for responses whose outcome is ok."""
        passed: Bool[np.ndarray, " S"] = self.outcome == str(Outcome.OK)
        return passed

    def answers(self) -> Int64[np.ndarray, " S"]:
        """Equal numbers for equal answers (ignoring surrounding spaces); -1: no answer."""
        import numpy as np

        codes: dict[str, int] = {}
        numbers = [-1 if text is None else codes.setdefault(text.strip(), len(codes)) for text in self.answer]
        return np.asarray(numbers, dtype=np.int64)

    def where(self, mask: Bool[np.ndarray, " S"]) -> Responses:
        """The responses where `mask` is true."""
        return Responses(**{name: getattr(self, name)[mask] for name in ARRAYS}, crash=self.crash)

    def between(self, start: int, end: int) -> Responses:
        """Responses of the prompts from `start` up to, not including, `end`; prompts are renumbered from 0."""
        selected = self.where((self.prompt >= start) & (self.prompt < end))
        return replace(selected, prompt=selected.prompt - start)

    def split_greedy(self) -> tuple[Responses, Responses]:
        """The greedy responses, and the sampled ones."""
        greedy = self.sample == GREEDY
        return self.where(greedy), self.where(~greedy)

    def per_prompt(self, values: Shaped[np.ndarray, " S"], prompts: int) -> Float64[np.ndarray, " prompts"]:
        """The mean of `values` over each prompt's responses; every prompt has one."""
        import numpy as np

        sums = np.bincount(self.prompt, weights=values, minlength=prompts)
        mean: Float64[np.ndarray, " prompts"] = sums / np.bincount(self.prompt, minlength=prompts)
        return mean


def joined(parts: Sequence[Responses], offsets: Sequence[int]) -> Responses:
    """The concatenated responses; the prompt numbers of each part start at its offset."""
    import numpy as np

    moved = [replace(part, prompt=part.prompt + offset) for part, offset in zip(parts, offsets, strict=True)]
    rows = {name: np.concatenate([getattr(part, name) for part in moved]) for name in ARRAYS}
    return Responses(**rows, crash=next((part.crash for part in parts if part.crash), ""))
