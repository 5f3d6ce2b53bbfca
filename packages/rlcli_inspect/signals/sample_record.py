"""Statistics of the steps of a run that were read, and a few examples, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlcli_inspect.signals.phrases import Phrases
from rlcli_inspect.signals.response_text import (
    answers_in,
    has_truth,
    is_foreign,
    is_refusal,
    repetition,
    truth_of,
    truth_text,
)
from rlcli_inspect.signals.sample_rows import Row
from rlcli_inspect.signals.signal import EXAMPLES, Example, example_of
from rlcli_inspect.signals.strata import Marks, Slope, centred, strata_of

REPEATS = 0.3
"""Repetition (`text.repetition`) above which a response is shown as an example."""
NOTES = {
    "truth": "rewarded; the ground truth is not in it",
    "one_response": "rewarded for prompts with different ground truths",
    "several_answers": "rewarded; it offers several answers",
    "repetition": "rewarded; it repeats itself",
    "language": "rewarded; its script or language is not the prompt's",
    "refusal": "rewarded; it refuses",
    "length": "one of the longest responses of its step",
    "phrase": "has the phrase",
}
SHARES = ("truth", "one_response", "several_answers", "repetition", "language", "refusal")
"""Properties of a sample, each with a value from 0 to 1, whose mean over rewarded samples is tracked."""


@dataclass
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | bool | None) -> None:
        """Add a value; None is left out."""
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Step:
    """Statistics of one step's samples."""

    step: int
    """Number of the step."""
    reward: Mean = field(default_factory=Mean)
    """Rewards."""
    squares: float = 0.0
    """Sum of the squared rewards."""
    length: Mean = field(default_factory=Mean)
    """Response tokens."""
    rewarded: dict[str, Mean] = field(default_factory=lambda: {name: Mean() for name in SHARES})
    """Property of `SHARES` → its mean over rewarded samples."""
    overall: dict[str, Mean] = field(default_factory=lambda: {name: Mean() for name in SHARES})
    """The same over all samples."""
    phrases: dict[str, float] = field(default_factory=dict)
    """Common phrase → share of the samples with it."""


class Record:
    """Statistics of the steps that were added, ascending, and examples of the last ones."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.length = Slope()
        self.phrases = Phrases()
        self.examples: dict[str, list[Example]] = {}
        self.recent: deque[tuple[int, Row]] = deque(maxlen=256)
        self.low, self.high = 0.0, 0.0

    @property
    def span(self) -> float:
        """The range of the rewards so far, with 0 in it."""
        return self.high - self.low

    def add(self, number: int, rows: Sequence[Row]) -> None:
        """Add the samples of a step, as `sample_rows.read_step` returns them."""
        scores = [float(row["score"]) for row in rows]
        self.low, self.high = min([self.low, *scores]), max([self.high, *scores])
        middle = (self.low + self.high) / 2
        step = Step(number)
        marks = [marks_of(row) for row in rows]
        _mark_shared(rows, marks, [score > middle for score in scores])
        for row, score, row_marks in zip(rows, scores, marks, strict=True):
            step.reward.add(score)
            step.squares += score * score
            step.length.add(row.get("response_tokens"))
            for name in SHARES:
                step.overall[name].add(row_marks.get(name))
                if score > middle:
                    step.rewarded[name].add(row_marks.get(name))
        strata = strata_of(rows, marks)
        lengths = [float(row.get("response_tokens") or 0) for row in rows]
        self.length.add(centred(lengths, strata), centred(scores, strata), strata)
        step.phrases = self.phrases.add(rows, scores, strata)
        self.steps.append(step)
        self.recent.extend((number, row) for row in rows)
        self._keep_examples(number, rows, marks, [score > middle for score in scores])

    def _keep_examples(
        self, number: int, rows: Sequence[Row], marks: Sequence[Marks], rewarded: Sequence[bool]
    ) -> None:
        """Record the examples of the last step, of different prompts where possible."""
        for name in SHARES:
            least = REPEATS if name == "repetition" else 0.5
            marked = [
                row
                for row, row_marks, good in zip(rows, marks, rewarded, strict=True)
                if good and (row_marks.get(name) or 0) >= least
            ]
            if marked:
                self.examples[name] = examples_of(number, marked, NOTES[name])
        longest = sorted(rows, key=lambda row: -(row.get("response_tokens") or 0))
        self.examples["length"] = examples_of(number, longest, NOTES["length"])

    def with_phrase(self, phrase: str) -> list[Example]:
        """Examples with a phrase, from the last rows."""
        from rlcli_inspect.signals.response_text import phrases_in

        for number in sorted({number for number, _ in self.recent}, reverse=True):
            rows = [
                row for step, row in self.recent if step == number and phrase in phrases_in(str(row["response"] or ""))
            ]
            if rows:
                return examples_of(number, rows, f"{NOTES['phrase']} «{phrase}»")
        return []


def marks_of(row: Row) -> Marks:
    """The properties of one sample: those of SHARES, None if they are unknown, and `right`: whether its only answer is
    the ground truth."""
    response, prompt = str(row.get("response") or ""), str(row.get("prompt") or "")
    truth = truth_of(row.get("ground_truth"))
    answers = answers_in(response, truth) if truth else []
    offered = max(1, len(answers_in(f"#### {truth_text(row['ground_truth'])}", truth))) if truth else 1
    return {
        "truth": None if truth is None else not has_truth(response, truth),
        "right": bool(truth) and answers == [truth],
        "several_answers": None if truth is None else len(answers) > offered,
        "repetition": repetition(response),
        "language": is_foreign(response, prompt),
        "refusal": is_refusal(response),
    }


def examples_of(number: int, rows: Sequence[Row], note: str) -> list[Example]:
    """The first rows, of different prompts where possible."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(str(row["prompt_id"]), row)
    selected = [*first.values(), *(row for row in rows if row not in first.values())][:EXAMPLES]
    return [example_of(number, row, note) for row in selected]


def _mark_shared(rows: Sequence[Row], marks: Sequence[Marks], rewarded: Sequence[bool]) -> None:
    """Mark responses that are rewarded for several ground truths in this step. Conversations are skipped: their last
    turn need not contain the answer."""
    truths: dict[str, set[str]] = {}
    texts = [" ".join(str(row.get("response") or "").split()).casefold() for row in rows]
    for row, text, good in zip(rows, texts, rewarded, strict=True):
        if good and row.get("ground_truth") and (row.get("turns") or 1) == 1:
            truth = truth_of(row["ground_truth"]) or str(row["ground_truth"])
            truths.setdefault(text, set()).add(truth)
    for row, text, row_marks, good in zip(rows, texts, marks, rewarded, strict=True):
        if row.get("ground_truth") and (row.get("turns") or 1) == 1:
            row_marks["one_response"] = good and len(truths.get(text, ())) > 1
