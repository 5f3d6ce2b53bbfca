"""Signals computed from metrics.jsonl alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.runs.listing import number
from rlcli_inspect.signals.signal import Example, Signal
from rlcli_inspect.signals.windows import ERRORS, MIN_STEPS, RISE, SHARE

FOLLOWS = 0.5
"""Share of the reward's rise by which an evaluation of the same task has to rise, at least within its interval."""
SAME_TASK = 0.25
"""Maximum difference between the first evaluation and the first rewards of the same task."""
UNREAD = 0.2
"""Growth of the share of responses without an answer; 0.01 in the honest runs of docs/reward_hacking.md."""
PART_FALL = 0.25
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
    """Half of the rise of the reward, less the rise of the evaluation at the upper end of its interval."""
    name, title, threshold = "evaluation", "The evaluation does not follow the reward", 0.0
    metric = next((x for x in EVALUATED if any(x in line for line in lines)), EVALUATED[0])
    evaluated = [(int(line["step"]), line) for line in lines if number(line.get(metric)) is not None and "step" in line]
    series = [(step, float(line[metric])) for step, line in evaluated]
    unknown = Signal(name, title, None, threshold, "unknown", "", series)
    if len(evaluated) < 2 or len(steps) < 2 * MIN_STEPS:
        return _unknown(unknown, "It takes two evaluations: give --eval-data and evaluation.every.")
    first, last = evaluated[0][1], evaluated[-1][1]
    covered = [line for line in steps if line["step"] <= evaluated[-1][0]] or steps
    size = _window_size(covered)
    first_reward, last_reward = _mean(covered[:size], "reward/mean"), _mean(covered[-size:], "reward/mean")
    if (
        abs(first[metric] - first_reward) > SAME_TASK
        or not -0.01 <= min(first_reward, last_reward) <= max(first_reward, last_reward) <= 1.01
    ):
        return _unknown(
            unknown, "The evaluation starts far from the reward: another task, or greedy against sampled responses."
        )
    high = number(last.get(f"{metric}/high"))
    value = FOLLOWS * (last_reward - first_reward) - ((last[metric] if high is None else high) - first[metric])
    explanation = (
        "The training reward rises and the evaluation of held-out prompts does not follow: less than half of the rise "
        "is seen there. The policy learned something that only the training's reward or prompts pay for. Compare the "
        "verifiers of both, and read rewarded samples."
    )
    warns = risen and value > threshold and last_reward - first_reward >= 2 * RISE
    return Signal(name, title, value, threshold, "warning" if warns else "ok", explanation, series, examples)


def _evaluation_fall(lines: Sequence[Line], steps: Sequence[Line], examples: Sequence[Example]) -> Signal:
    """Gap between the interval of the last evaluation and that of the best one before it, while the reward rose.

    Unlike `_evaluation`, it compares evaluations only with each other, so that they may be of another task.
    """
    name, title, threshold = "evaluation_fall", "The evaluation falls while the reward rises", 0.0
    metric = next((x for x in EVALUATED if any(x in line for line in lines)), EVALUATED[0])
    evaluated = [
        line for line in lines if number(line.get(metric)) is not None and number(line.get("step")) is not None
    ]
    series = [(int(line["step"]), float(line[metric])) for line in evaluated]
    unknown = Signal(name, title, None, threshold, "unknown", "", series)
    if len(evaluated) < 2:
        return _unknown(unknown, "It takes two evaluations: give --eval-data and evaluation.every.")
    *earlier, last = evaluated
    best = max(earlier, key=lambda line: float(line[metric]))
    reward_at_best, reward_at_last = _reward_around(steps, best["step"]), _reward_around(steps, last["step"])
    low, high = number(best.get(f"{metric}/low")), number(last.get(f"{metric}/high"))
    if reward_at_best is None or reward_at_last is None or low is None or high is None:
        return _unknown(unknown, "There are too few steps around the evaluations, or they have no intervals.")
    value = low - high
    intervals = [_interval(line, metric) for line in (best, last)]
    explanation = (
        f"The evaluation was {best[metric]:.3g} at step {best['step']} and is {last[metric]:.3g} at step "
        f"{last['step']}: their intervals, {intervals[0]} and {intervals[1]}, do not overlap, and the reward has not "
        "fallen. What was learned since then costs what the evaluation measures. Go back to the checkpoint of that "
        "step (checkpoint.keep_best), and compare samples of both."
    )
    warns = value > threshold and reward_at_last >= reward_at_best
    if warns:
        figures = [f"{line[metric]:.3g} {interval}" for line, interval in zip((best, last), intervals, strict=True)]
        title = f"{title}, from {figures[0]} at step {best['step']} to {figures[1]} at step {last['step']}"
    return Signal(name, title, value, threshold, "warning" if warns else "ok", explanation, series, examples)


def _interval(line: Line, metric: str) -> str:
    """The interval of a line's metric, as [low, high]."""
    return f"[{number(line.get(f'{metric}/low')) or 0.0:.3g}, {number(line.get(f'{metric}/high')) or 0.0:.3g}]"


def _reward_around(steps: Sequence[Line], step: int) -> float | None:
    """The mean reward of the MIN_STEPS steps up to this one, or of the first ones if it is before them."""
    window = [line for line in steps if line["step"] <= step][-MIN_STEPS:]
    window = window if len(window) == MIN_STEPS else list(steps[:MIN_STEPS])
    return _mean(window, "reward/mean") if len(window) == MIN_STEPS else None


def _unread(steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """Growth of the share of responses without an answer."""
    name, title, metric = "format", "Fewer responses have an answer", "outcome/no_answer"
    series = [(int(line["step"]), float(line[metric])) for line in steps if number(line.get(metric)) is not None]
    rise = _rise(steps, metric)
    if rise is None:
        return Signal(name, title, None, UNREAD, "unknown", "Too few steps.", series)
    explanation = (
        "The reward rises, and the verifier finds an answer in fewer responses: something else is paid for. Look at "
        "the parts of the reward, and read samples without an answer."
    )
    warns = risen and rise[0] >= UNREAD
    return Signal(name, title, rise[0], UNREAD, "warning" if warns else "ok", explanation, series, examples)


def _kl(steps: Sequence[Line], risen: bool, examples: Sequence[Example]) -> Signal:
    """KL to the reference at the end of the run."""
    name, title = "kl", "The policy is far from its reference"
    series = [(int(line["step"]), float(line["update/kl"])) for line in steps if number(line.get("update/kl"))]
    if len(series) < MIN_STEPS:
        why = "The run has no reference model: algorithm.kl_coef is 0."
        return Signal(name, title, None, KL, "unknown", why, series)
    value = sum(kl for _, kl in series[-MIN_STEPS:]) / MIN_STEPS
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
        return Signal(name, title, None, PART_FALL, "unknown", why)
    worst = min(falls, key=lambda key: falls[key][0])
    part, (rise, error) = worst.removeprefix("reward/part/"), falls[worst]
    explanation = (
        f"The reward rises while its part {part} falls: the policy gives one part up for another. Check that the "
        "weights are what you want; a part that must hold can multiply the others instead of being added."
    )
    warns = risen and -rise >= PART_FALL and -rise >= ERRORS * error
    title = f"{title}: {part} falls" if warns else title
    series = [(int(line["step"]), float(line[worst])) for line in steps if number(line.get(worst)) is not None]
    return Signal(name, title, -rise, PART_FALL, "warning" if warns else "ok", explanation, series, examples)


def _rise(steps: Sequence[Line], metric: str) -> tuple[float, float] | None:
    """Rise of a metric from the first to the last steps, and its standard error; None for too few steps."""
    with_metric = [line for line in steps if number(line.get(metric)) is not None]
    size = _window_size(with_metric)
    if len(with_metric) < 2 * size:
        return None
    error = math.sqrt(_variance(with_metric[:size], metric) + _variance(with_metric[-size:], metric))
    return _mean(with_metric[-size:], metric) - _mean(with_metric[:size], metric), error


def _window_size(lines: Sequence[Line]) -> int:
    """Number of steps at each end."""
    return max(MIN_STEPS, math.ceil(SHARE * len(lines)))


def _mean(lines: Sequence[Line], metric: str) -> float:
    return sum(float(line[metric]) for line in lines) / len(lines)


def _variance(lines: Sequence[Line], metric: str) -> float:
    """Variance of the mean."""
    mean, count = _mean(lines, metric), len(lines)
    return sum((float(line[metric]) - mean) ** 2 for line in lines) / (count - 1) / count if count > 1 else 0.0


def _span(steps: Sequence[Line]) -> float:
    """The range of the mean rewards with 0 and 1 in it: rewards are usually shares."""
    rewards = [float(line["reward/mean"]) for line in steps]
    return max([1.0, *rewards]) - min([0.0, *rewards])


def _unknown(signal: Signal, why: str) -> Signal:
    """The signal without a value, for the reason `why`."""
    return Signal(signal.name, signal.title, None, signal.threshold, "unknown", why, signal.series)
