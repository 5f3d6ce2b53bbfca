"""Compare a run's first steps with the plan, and find whether asynchrony would make them faster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from rlcli.config.schema import RunConfig
from rlcli_planner.asynchrony.advice import Advice, advice, advised, simulated
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.asynchrony.simulate import Speeds
from rlcli_planner.plan_input import RunPlanInput
from rlcli_planner.step_time import decode_seconds, step_seconds, times

if TYPE_CHECKING:
    from jaxtyping import Int

MEASURED = ("step", "generate", "wait_for_rollout", "sync", "engine_idle")
HALVINGS = 24
FASTEST_S, SLOWEST_S = 1e-6, 10.0
"""Limits of the fitted seconds of an engine step."""


@dataclass(frozen=True)
class Pace:
    """Measured speed of a run's first steps, compared with the plan."""

    step_s: float
    """Median seconds of the measured steps."""
    predicted_s: float
    """Predicted seconds of a step with full-length responses; 0: not predicted."""
    gain: float | None
    """Measured speedup over synchronous steps on the same devices; None if the run is synchronous."""
    predicted_gain: float | None
    """The same as predicted before the run; None if it was not predicted."""
    advice: Advice | None
    """Advice from the measured speeds; None if nothing is generated."""

    @property
    def summary(self) -> str:
        """The comparison in one line."""
        text = f"a step takes {self.step_s:.3g} s"
        text += f" (at most {self.predicted_s:.3g} s predicted)" if self.predicted_s else ""
        if self.gain is not None:
            predicted = f" ({self.predicted_gain:.2f} × predicted)" if self.predicted_gain else ""
            text += f", {self.gain:.2f} × as fast as synchronous ones would be{predicted}"
        if self.advice is None:
            return text
        text += f"; responses {self.advice.lengths}"
        better = self.advice.better
        if self.gain is None or better is None:
            return text if self.gain is not None else f"{text}; {self.advice.summary}"
        return f"{text}; {better.label} would be {better.gain:.2f} ×"

    def as_dict(self) -> dict[str, object]:
        plain = {"step_s": self.step_s, "predicted_s": self.predicted_s or None, "gain": self.gain}
        record = self.advice.as_dict() if self.advice else {}
        return {
            **plain,
            "predicted_gain": self.predicted_gain,
            "best": record.get("best"),
            "lengths": record.get("lengths"),
        }


def pace_of(
    config: RunConfig,
    groups: Sequence[Sequence[int]],
    metrics: Sequence[Mapping[str, float]],
    plan: RunPlanInput | None,
) -> Pace:
    """The pace of a run. groups: response tokens of each sample, by group. metrics: of the measured steps. plan: of the
    run, if there is one."""
    seconds = {name: median(line.get(f"time/{name}_s", 0.0) for line in metrics) for name in MEASURED}
    predicted = step_seconds(plan, times(plan)) if plan else 0.0
    planned = advice(plan) if plan else None
    predicted_gain = planned.configured.gain if planned and planned.configured else None
    group_size = max(map(len, groups), default=0)
    complete = np.array([group for group in groups if len(group) == group_size], np.int64)
    if not group_size or config.data.response:
        return Pace(seconds["step"], predicted, None, None, None)
    speeds, prompt_tokens = _fitted(config, complete, seconds, plan), plan.prompt_tokens if plan else 0.0

    def on(train: int, generate: int) -> Speeds:
        return replace(speeds, update=speeds.update * config.cluster.workers / train)

    measured = advised(config, Lengths.of(complete), on, prompt_tokens)
    gain = measured.synchronous.step_s / seconds["step"] if measured and config.async_.staleness else None
    return Pace(seconds["step"], predicted, gain, predicted_gain, measured)


def _fitted(
    config: RunConfig, lengths: Int[np.ndarray, "G S"], seconds: Mapping[str, float], plan: RunPlanInput | None
) -> Speeds:
    """Speeds with which the simulated engines are busy as long as the measured ones. How the time of a decoding step
    depends on responses and tokens comes from the plan; without one it is constant."""
    waited = seconds["generate"] + seconds["wait_for_rollout"]
    update = max(0.0, seconds["step"] - waited - seconds["sync"])
    prompt_tokens = plan.prompt_tokens if plan else 0.0
    known = plan if plan and not plan.untimed else None
    unit = decode_seconds(known, 1, prompt_tokens + float(lengths.mean()) / 2) if known else 1.0

    def speeds(step_s: float) -> Speeds:
        def decode(running: int, tokens: float) -> float:
            return step_s * (decode_seconds(known, running, tokens) / unit if known else 1.0)

        return Speeds(decode, 0.0, update, seconds["sync"])

    layout = config.cluster.workers, config.rollout.workers, config.async_.staleness
    target = seconds["step"] - seconds["engine_idle"] if config.async_.staleness else seconds["generate"]
    low, high = math.log(FASTEST_S), math.log(SLOWEST_S)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        candidate = speeds(math.exp(middle))
        result = simulated(config, Lengths.of(lengths), candidate, layout, prompt_tokens, math.inf)
        busy = (
            result.step_s * (1 - result.engine_idle)
            if config.async_.staleness
            else result.step_s - update - candidate.sync
        )
        low, high = (middle, high) if busy < target else (low, middle)
    return speeds(math.exp(high))
