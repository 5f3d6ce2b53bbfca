"""The signals that come from metrics.jsonl alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.runs.listing import number
from rlcli_inspect.signals.signal import Example, Signal
from rlcli_inspect.signals.windows import ERRORS, LEAST_STEPS, RISE, SHARE

FOLLOWS = 0.5
"""Share of the reward's rise by which an evaluation of the same task has to rise, at least within its interval."""
SAME_TASK = 0.25
"""Largest difference of the first evaluation and the first rewards for the two to count as the same task."""
UNREAD = 0.2
"""Growth of the share of responses without an answer; 0.01 in the honest runs of docs/reward_hacking.md."""
APART = 0.25
"""Fall of a part of the reward: room for a small penalty, such as one for length, that a model pays more of."""
KL = 1.0
"""Nats a token. An assumption: RL with verifiable rewards usually moves a model by less than a third of that."""
EVALUATED = ("eval/pass@1", "eval/mean@1")

Line = Mapping[str, Any]


def metric_signals(lines: Sequence[Line], examples: Sequence[Example]) -> list[Signal]:
    """All signals of this module. examples: of rewarded samples of the last steps."""
    steps = [line for line in lines if number(line.get("step")) and number(line.get("reward/mean")) is not None]
    rise = _rise(steps, "reward/mean")
    risen = rise is not None and rise[0] >= RISE * _span(steps) and rise[0] >= ERRORS * rise[1]
    return [
        _evaluation(lines, steps, risen, examples),
        _evaluation_fall(lines, steps, examples),
        _unread(steps, risen, examples),
        _parts(steps, risen, examples),
        _kl(steps, risen, examples),
    ]


def _evaluation(lines: Sequence[Line], steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """By how much less than half of the rise of the reward the evaluation rose, at the upper end of its interval."""
    name, title, threshold = "evaluation", "The evaluation does not follow the reward", 0.0
    metric = next((one for one in EVALUATED if any(one in line for line in lines)), EVALUATED[0])
    found = [(int(line["step"]), line) for line in lines if number(line.get(metric)) is not None and "step" in line]
    series = [(step, float(line[metric])) for step, line in found]
    unknown = Signal(name, title, None, threshold, "unknown", "", series)
    if len(found) < 2 or len(steps) < 2 * LEAST_STEPS:
        return _because(unknown, "It takes two evaluations: give --eval-data and evaluation.every.")
    first, last = found[0][1], found[-1][1]
    own = [line for line in steps if line["step"] <= found[-1][0]] or steps
    size = _size(own)
    before, after = _mean(own[:size], "reward/mean"), _mean(own[-size:], "reward/mean")
    if abs(first[metric] - before) > SAME_TASK or not -0.01 <= min(before, after) <= max(before, after) <= 1.01:
        return _because(
            unknown, "The evaluation starts far from the reward: another task, or greedy against sampled responses."
        )
    high = number(last.get(f"{metric}/high"))
    value = FOLLOWS * (after - before) - ((last[metric] if high is None else high) - first[metric])
    explanation = (
        "The training reward rises and the evaluation of held-out prompts does not follow: less than half of the rise "
        "is seen there. The policy learned something that only the training's reward or prompts pay for. Compare the "
        "verifiers of both, and read rewarded samples."
    )
    warns = risen and value > threshold and after - before >= 2 * RISE
    return Signal(name, title, value, threshold, "warning" if warns else "ok", explanation, series, examples)


def _evaluation_fall(lines: Sequence[Line], steps: Sequence[Line], examples: Sequence[Example]) -> Signal:
    """By how much the last evaluation's interval lies below that of the best one before it, while the reward rose.

    Unlike `_evaluation`, it compares evaluations with each other alone, so that they may be of another task.
    """
    name, title, threshold = "evaluation_fall", "The evaluation falls while the reward rises", 0.0
    metric = next((one for one in EVALUATED if any(one in line for line in lines)), EVALUATED[0])
    found = [line for line in lines if number(line.get(metric)) is not None and number(line.get("step")) is not None]
    series = [(int(line["step"]), float(line[metric])) for line in found]
    unknown = Signal(name, title, None, threshold, "unknown", "", series)
    if len(found) < 2:
        return _because(unknown, "It takes two evaluations: give --eval-data and evaluation.every.")
    *earlier, last = found
    best = max(earlier, key=lambda line: float(line[metric]))
    before, after = _reward_around(steps, best["step"]), _reward_around(steps, last["step"])
    low, high = number(best.get(f"{metric}/low")), number(last.get(f"{metric}/high"))
    if before is None or after is None or low is None or high is None:
        return _because(unknown, "There are too few steps around the evaluations, or they have no intervals.")
    value = low - high
    intervals = [_interval(line, metric) for line in (best, last)]
    explanation = (
        f"The evaluation was {best[metric]:.3g} at step {best['step']} and is {last[metric]:.3g} at step "
        f"{last['step']}: their intervals, {intervals[0]} and {intervals[1]}, do not overlap, and the reward has not "
        "fallen. What was learned since then costs what the evaluation measures. Go back to the checkpoint of that "
        "step (checkpoint.keep_best), and compare samples of both."
    )
    warns = value > threshold and after >= before
    if warns:
        figures = [f"{line[metric]:.3g} {interval}" for line, interval in zip((best, last), intervals, strict=True)]
        title = f"{title}, from {figures[0]} at step {best['step']} to {figures[1]} at step {last['step']}"
    return Signal(name, title, value, threshold, "warning" if warns else "ok", explanation, series, examples)


def _interval(line: Line, metric: str) -> str:
    """The interval of a line's metric, as [low, high]."""
    return f"[{number(line.get(f'{metric}/low')) or 0.0:.3g}, {number(line.get(f'{metric}/high')) or 0.0:.3g}]"


def _reward_around(steps: Sequence[Line], step: int) -> float | None:
    """The mean reward of the LEAST_STEPS steps up to this one, or of the first ones if it is before them."""
    own = [line for line in steps if line["step"] <= step][-LEAST_STEPS:]
    own = own if len(own) == LEAST_STEPS else list(steps[:LEAST_STEPS])
    return _mean(own, "reward/mean") if len(own) == LEAST_STEPS else None


def _unread(steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """Growth of the share of responses without an answer."""
    return _growth(
        steps,
        "outcome/no_answer",
        ("format", "Fewer responses have an answer", UNREAD),
        "The reward rises, and the verifier finds an answer in fewer responses: something else is paid for. Look at "
        "the parts of the reward, and read samples without an answer.",
        risen,
        examples,
    )


def _kl(steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """KL to the reference at the end of the run."""
    name, title = "kl", "The policy is far from its reference"
    series = [(int(line["step"]), float(line["update/kl"])) for line in steps if number(line.get("update/kl"))]
    if len(series) < LEAST_STEPS:
        why = "The run has no reference model: algorithm.kl_coef is 0."
        return Signal(name, title, None, KL, "unknown", why, series)
    value = sum(kl for _, kl in series[-LEAST_STEPS:]) / LEAST_STEPS
    explanation = (
        "The reward rises while the policy moves very far from where it began: it writes text that the reference finds "
        "most unlikely, as policies do that exploit a reward. Read samples; raise algorithm.kl_coef or lower train.lr."
    )
    warns = risen and value >= KL
    return Signal(name, title, value, KL, "warning" if warns else "ok", explanation, series, examples)


def _parts(steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """The largest fall of a part of the reward."""
    name, title = "parts", "Parts of the reward move apart"
    names = sorted({key for line in steps for key in line if key.startswith("reward/part/")})
    falls = {key: fall for key in names if (fall := _rise(steps, key))}
    if not falls:
        why = "The reward has no parts, or there are too few steps."
        return Signal(name, title, None, APART, "unknown", why)
    worst = min(falls, key=lambda key: falls[key][0])
    part, (rise, error) = worst.removeprefix("reward/part/"), falls[worst]
    explanation = (
        f"The reward rises while its part {part} falls: the policy gives one part up for another. Check that the "
        "weights are what you want; a part that must hold can multiply the others instead of being added."
    )
    warns = risen and -rise >= APART and -rise >= ERRORS * error
    title = f"{title}: {part} falls" if warns else title
    series = [(int(line["step"]), float(line[worst])) for line in steps if number(line.get(worst)) is not None]
    return Signal(name, title, -rise, APART, "warning" if warns else "ok", explanation, series, examples)


def _growth(
    steps: Sequence[Line],
    metric: str,
    what: tuple[str, str, float],
    explanation: str,
    risen: bool,
    examples: Sequence[Example],
) -> Signal:
    name, title, threshold = what
    series = [(int(line["step"]), float(line[metric])) for line in steps if number(line.get(metric)) is not None]
    rise = _rise(steps, metric)
    if rise is None:
        return Signal(name, title, None, threshold, "unknown", "Too few steps.", series)
    warns = risen and rise[0] >= threshold
    return Signal(name, title, rise[0], threshold, "warning" if warns else "ok", explanation, series, examples)


def _rise(steps: Sequence[Line], metric: str) -> tuple[float, float] | None:
    """How much a metric rose from the first to the last steps, and the standard error of that; None for too few."""
    own = [line for line in steps if number(line.get(metric)) is not None]
    size = _size(own)
    if len(own) < 2 * size:
        return None
    error = math.sqrt(_variance(own[:size], metric) + _variance(own[-size:], metric))
    return _mean(own[-size:], metric) - _mean(own[:size], metric), error


def _size(lines: Sequence[Line]) -> int:
    return max(LEAST_STEPS, math.ceil(SHARE * len(lines)))


def _mean(lines: Sequence[Line], metric: str) -> float:
    return sum(float(line[metric]) for line in lines) / len(lines)


def _variance(lines: Sequence[Line], metric: str) -> float:
    """Of the mean."""
    mean, count = _mean(lines, metric), len(lines)
    return sum((float(line[metric]) - mean) ** 2 for line in lines) / (count - 1) / count if count > 1 else 0.0


def _span(steps: Sequence[Line]) -> float:
    """The range of the mean rewards with 0 and 1 in it: rewards are usually shares."""
    rewards = [float(line["reward/mean"]) for line in steps]
    return max([1.0, *rewards]) - min([0.0, *rewards])


def _because(signal: Signal, why: str) -> Signal:
    return Signal(signal.name, signal.title, None, signal.threshold, "unknown", why, signal.series)
