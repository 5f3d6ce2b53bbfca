"""The responses of an evaluation as columns, reduced to what the statistics need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcli.data.columns import OUTCOMES, SampleTable
from rlcli.rollout.rollout_call import GREEDY
from rlcli.types import Outcome

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("sample", "score", "outcome", "answer", "response_tokens", "finish_reason", "detail")
"""Columns of a table of samples, in the order of `Responses.of`."""
ARRAYS = ("prompt", "sample", "score", "outcome", "answer", "tokens", "truncated")
"""The fields of `Responses` with a value for each response."""


@dataclass(frozen=True, eq=False)
class Responses:
    """N responses with their verdicts, in any order.

    prompt, sample: int64 `[N]`, the prompt (by position) and the index of the sample; GREEDY: the greedy one. score:
    float64 `[N]`. outcome, answer: text `[N]`; an answer may be None. tokens: float64 `[N]`, NaN if not counted.
    truncated: bool `[N]`. crash: message of the first verifier crash.
    """

    prompt: np.ndarray
    sample: np.ndarray
    score: np.ndarray
    outcome: np.ndarray
    answer: np.ndarray
    tokens: np.ndarray
    truncated: np.ndarray
    crash: str = ""

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

        crash = next((said for said, how in zip(detail, outcome, strict=True) if how == Outcome.CRASH), "")
        return cls(
            np.asarray(prompt, np.int64),
            np.asarray(sample, np.int64),
            np.asarray(score, np.float64),
            np.asarray([str(how) for how in outcome], dtype="U16"),
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
            samples.drawn_tokens.astype(np.float64),
            samples.truncated,
            crashes[0] if len(crashes) else "",
        )

    @classmethod
    def of_table(cls, table: Any, place: Mapping[str, int]) -> Responses:
        """From a table of samples, only the prompts in `place`: id → position."""
        ids = table.column("prompt_id").to_pylist()
        rows = [row for row, prompt in enumerate(ids) if prompt in place]
        few = table.select(COLUMNS).take(rows)
        return cls.of([place[ids[row]] for row in rows], *(few.column(name).to_pylist() for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def passed(self) -> np.ndarray:
        """bool `[N]`"""
        right: np.ndarray = self.outcome == str(Outcome.OK)
        return right

    def answers(self) -> np.ndarray:
        """int64 `[N]`: equal numbers for equal answers (ignoring surrounding spaces); -1: no answer."""
        import numpy as np

        codes: dict[str, int] = {}
        found = [-1 if a is None else codes.setdefault(a.strip(), len(codes)) for a in self.answer]
        numbers: np.ndarray = np.asarray(found, dtype=np.int64)
        return numbers

    def where(self, mask: np.ndarray) -> Responses:
        """The responses where `mask`, bool `[N]`, is true."""
        return Responses(**{name: getattr(self, name)[mask] for name in ARRAYS}, crash=self.crash)

    def between(self, start: int, end: int) -> Responses:
        """Responses of the prompts from `start` up to, not including, `end`; prompts are renumbered from 0."""
        own = self.where((self.prompt >= start) & (self.prompt < end))
        return replace(own, prompt=own.prompt - start)

    def split_greedy(self) -> tuple[Responses, Responses]:
        """The greedy responses, and the sampled ones."""
        greedy = self.sample == GREEDY
        return self.where(greedy), self.where(~greedy)

    def per_prompt(self, values: np.ndarray, prompts: int) -> np.ndarray:
        """The mean of `values` over each prompt's responses: float64 `[prompts]`; every prompt has one."""
        import numpy as np

        sums = np.bincount(self.prompt, weights=values, minlength=prompts)
        mean: np.ndarray = sums / np.bincount(self.prompt, minlength=prompts)
        return mean


def joined(parts: Sequence[Responses], offsets: Sequence[int]) -> Responses:
    """All responses in a row; the prompt numbers of each part start at its offset."""
    import numpy as np

    moved = [replace(part, prompt=part.prompt + offset) for part, offset in zip(parts, offsets, strict=True)]
    rows = {name: np.concatenate([getattr(part, name) for part in moved]) for name in ARRAYS}
    return Responses(**rows, crash=next((part.crash for part in parts if part.crash), ""))
