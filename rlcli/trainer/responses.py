"""The responses of an evaluation as columns: what statistics need of them, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcli.types import Outcome
from rlcli.workers.rollout_role import GREEDY
from rlcli.workers.samples import OUTCOMES, Samples

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("sample", "score", "outcome", "answer", "response_tokens", "finish_reason", "detail")
"""Of a table of samples, in the order of `Responses.of`."""


@dataclass(frozen=True, eq=False)
class Responses:
    """N responses with their verdicts, in any order.

    prompt, sample: int64 `[N]`, of which prompt (by position) and which of its samples; GREEDY: the greedy one. score:
    float64 `[N]`. outcome, answer: text `[N]`; an answer may be None. tokens: float64 `[N]`, NaN where nobody counted.
    truncated: bool `[N]`. crash: what the first crash of a verifier says.
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
    def of_samples(cls, samples: Samples) -> Responses:
        """Of what workers report."""
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
    def of_table(cls, table: Any, place: Mapping[str, int]) -> Responses:
        """Of a table of samples, those of the prompts that `place` knows: id → position."""
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
        """int64 `[N]`: the same number where the same text was answered, spaces around it aside; -1: no answer."""
        import numpy as np

        codes: dict[str, int] = {}
        found = [-1 if a is None else codes.setdefault(a.strip(), len(codes)) for a in self.answer]
        numbers: np.ndarray = np.asarray(found, dtype=np.int64)
        return numbers

    def where(self, mask: np.ndarray) -> Responses:
        return Responses(
            self.prompt[mask],
            self.sample[mask],
            self.score[mask],
            self.outcome[mask],
            self.answer[mask],
            self.tokens[mask],
            self.truncated[mask],
            self.crash,
        )

    def of_prompts(self, mask: np.ndarray) -> Responses:
        """Those of the prompts where `mask`, bool `[prompts]`, holds."""
        return self.where(mask[self.prompt])

    def between(self, start: int, end: int) -> Responses:
        """Those of the prompts from `start` to before `end`, counted from 0."""
        own = self.where((self.prompt >= start) & (self.prompt < end))
        return replace(own, prompt=own.prompt - start)

    def split_greedy(self) -> tuple[Responses, Responses]:
        """The greedy ones, and the samples."""
        greedy = self.sample == GREEDY
        return self.where(greedy), self.where(~greedy)

    def per_prompt(self, values: np.ndarray, prompts: int) -> np.ndarray:
        """The mean of `values` over each prompt's responses: float64 `[prompts]`; every prompt has one."""
        import numpy as np

        sums = np.bincount(self.prompt, weights=values, minlength=prompts)
        mean: np.ndarray = sums / np.bincount(self.prompt, minlength=prompts)
        return mean


def joined(parts: Sequence[Responses], offsets: Sequence[int]) -> Responses:
    """All responses in a row, the prompts of each part counted on from its offset."""
    import numpy as np

    def row(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    return Responses(
        prompt=np.concatenate([part.prompt + offset for part, offset in zip(parts, offsets, strict=True)]),
        sample=row("sample"),
        score=row("score"),
        outcome=row("outcome"),
        answer=row("answer"),
        tokens=row("tokens"),
        truncated=row("truncated"),
        crash=next((part.crash for part in parts if part.crash), ""),
    )
