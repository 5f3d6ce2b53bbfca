"""The signal of an independent verifier, from the scores that `rlcli rescore RUN --verifier … --keep` wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlcli.runs.listing import number
from rlcli.types import UNVERIFIED
from rlcli_inspect.signals.sample_record import Mean
from rlcli_inspect.signals.signal import EXAMPLES, Example, Signal, example_of
from rlcli_inspect.signals.windows import MIN_ROWS, MIN_STEPS, RISE, SHARE, total

DIFFERENCE = 0.2
"""Two honest verifiers differ by what one of them cannot read: by less than 5%, and as much at the end as before."""
NAME, TITLE = "verifier", "An independent verifier disagrees"
EXPLANATION = (
    "The reward that the run trained on rises by more than the score of the verifier that judged the same samples "
    "again. The value is the difference, each as a share of its range. What only the first one pays for is a hack, or "
    "the second one cannot read it: the examples were rewarded by the first alone."
)


def second_verifier_signal(rows: Iterable[Mapping[str, Any]]) -> Signal:
    """The rise of the old score less the rise of the new one, each as a share of its range. rows: in any order."""
    old, new = _Scores(), _Scores()
    examples: dict[int, list[Example]] = {}
    for row in rows:
        step, first, second = (number(row.get(name)) for name in ("step", "old_score", "score"))
        failed = row.get("old_outcome") in UNVERIFIED or row.get("outcome") in UNVERIFIED
        if step is None or first is None or second is None or failed:
            continue
        old.add(int(step), first)
        new.add(int(step), second)
        if first > (old.low + old.high) / 2 and second <= (new.low + new.high) / 2:
            step_examples = examples.setdefault(int(step), [])
            if len(step_examples) < EXAMPLES and row.get("prompt_id") not in {
                example.prompt_id for example in step_examples
            }:
                step_examples.append(example_of(int(step), row, f"scored {first:g}, by the other verifier {second:g}"))
                if len(examples) > 2 * EXAMPLES:
                    del examples[min(examples)]
    rises = old.rise(), new.rise()
    if rises[0] is None or rises[1] is None:
        why = "No other verifier has judged the samples. To have one: rlcli rescore RUN --verifier … --keep"
        return Signal(NAME, TITLE, None, DIFFERENCE, "unknown", why)
    value = rises[0] - rises[1]
    series = [(step, old.share(step) - new.share(step)) for step in sorted(old.steps)]
    latest = [example for step in sorted(examples, reverse=True) for example in examples[step]][:EXAMPLES]
    warns = rises[0] >= RISE and value >= DIFFERENCE
    return Signal(NAME, TITLE, value, DIFFERENCE, "warning" if warns else "ok", EXPLANATION, series, latest)


class _Scores:
    """The scores of one verifier by step."""

    def __init__(self) -> None:
        self.steps: dict[int, Mean] = {}
        self.low, self.high = 0.0, 0.0

    def add(self, step: int, score: float) -> None:
        """Add the score of a sample."""
        self.steps.setdefault(step, Mean()).add(score)
        self.low, self.high = min(self.low, score), max(self.high, score)

    def share(self, step: int) -> float:
        """The mean score of a step as a share of the range."""
        return (self.steps[step].mean - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def rise(self) -> float | None:
        """Rise of the score from the first to the last steps, as a share of the range; None for too few steps."""
        steps = sorted(self.steps)
        size = max(MIN_STEPS, math.ceil(SHARE * len(steps)))
        first, last = (total([self.steps[step] for step in window]) for window in (steps[:size], steps[-size:]))
        if len(steps) < 2 * size or min(first.count, last.count) < MIN_ROWS:
            return None
        return (last.mean - first.mean) / (self.high - self.low) if self.high > self.low else 0.0
