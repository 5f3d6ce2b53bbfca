"""What a run's first steps say: how long they take against the plan, and whether asynchrony would make them faster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcli.config.schema import RunConfig
from rlcli_planner.asynchrony.advice import Advice, advice, advised, simulated
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.asynchrony.simulate import Speeds
from rlcli_planner.run_setting import Setting
from rlcli_planner.step_time import decode_seconds, step_seconds, times

MEASURED = ("step", "generate", "wait_for_rollout", "sync", "engine_idle")
HALVINGS = 24
FASTEST_S, SLOWEST_S = 1e-6, 10.0
"""Limits of the fitted seconds of an engine step."""


@dataclass(frozen=True)
class Pace:
    """step_s: median seconds of the measured steps. predicted_s: of a step with full-length responses, before the run;
    0: not predicted. gain, predicted_gain: of the run's asynchrony over synchronous steps on the same devices, measured
    and as predicted before the run; None if it is synchronous, or was not predicted. advice: from what was measured."""

    step_s: float
    predicted_s: float
    gain: float | None
    predicted_gain: float | None
    advice: Advice | None

    @property
    def told(self) -> str:
        """In one line."""
        found = f"a step takes {self.step_s:.3g} s"
        found += f" (at most {self.predicted_s:.3g} s predicted)" if self.predicted_s else ""
        if self.gain is not None:
            predicted = f" ({self.predicted_gain:.2f} × predicted)" if self.predicted_gain else ""
            found += f", {self.gain:.2f} × as fast as synchronous ones would be{predicted}"
        if self.advice is None:
            return found
        found += f"; responses {self.advice.lengths}"
        better = self.advice.better
        if self.gain is None or better is None:
            return found if self.gain is not None else f"{found}; {self.advice.told}"
        return f"{found}; {better.told} would be {better.gain:.2f} ×"

    def as_dict(self) -> dict[str, Any]:
        plain = {"step_s": self.step_s, "predicted_s": self.predicted_s or None, "gain": self.gain}
        told = self.advice.as_dict() if self.advice else {}
        return {
            **plain,
            "predicted_gain": self.predicted_gain,
            "best": told.get("best"),
            "lengths": told.get("lengths"),
        }


def pace_of(
    config: RunConfig, groups: Sequence[Sequence[int]], metrics: Sequence[Mapping[str, float]], plan: Setting | None
) -> Pace:
    """groups: drawn tokens of each response of complete groups. metrics: of the measured steps. plan: of the run, if
    there is one."""
    seconds = {name: median(line.get(f"time/{name}_s", 0.0) for line in metrics) for name in MEASURED}
    predicted = step_seconds(plan, times(plan)) if plan else 0.0
    before = advice(plan) if plan else None
    predicted_gain = before.configured.gain if before and before.configured else None
    most = max(map(len, groups), default=0)
    whole = np.array([group for group in groups if len(group) == most], np.int64)
    if not most or config.data.response:
        return Pace(seconds["step"], predicted, None, None, None)
    speeds, prompt_tokens = _fitted(config, whole, seconds, plan), plan.prompt_tokens if plan else 0.0

    def on(train: int, generate: int) -> Speeds:
        return replace(speeds, update=speeds.update * config.cluster.workers / train)

    found = advised(config, Lengths.of(whole), on, prompt_tokens)
    gain = found.synchronous.step_s / seconds["step"] if found and config.async_.staleness else None
    return Pace(seconds["step"], predicted, gain, predicted_gain, found)


def _fitted(
    config: RunConfig, lengths: NDArray[np.int64], seconds: Mapping[str, float], plan: Setting | None
) -> Speeds:
    """Speeds with which the simulated engines are busy as long as the measured ones: how an engine step depends on the
    responses and their tokens is the plan's, or else constant."""
    waited = seconds["generate"] + seconds["wait_for_rollout"]
    update = max(0.0, seconds["step"] - waited - seconds["sync"])
    prompt_tokens = plan.prompt_tokens if plan else 0.0
    known = plan if plan and not plan.untimed else None
    one = decode_seconds(known, 1, prompt_tokens + float(lengths.mean()) / 2) if known else 1.0

    def speeds(step_s: float) -> Speeds:
        def decode(running: int, tokens: float) -> float:
            return step_s * (decode_seconds(known, running, tokens) / one if known else 1.0)

        return Speeds(decode, 0.0, update, seconds["sync"])

    layout = config.cluster.workers, config.rollout.workers, config.async_.staleness
    target = seconds["step"] - seconds["engine_idle"] if config.async_.staleness else seconds["generate"]
    low, high = math.log(FASTEST_S), math.log(SLOWEST_S)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        own = speeds(math.exp(middle))
        there = simulated(config, Lengths.of(lengths), own, layout, prompt_tokens, math.inf)
        busy = there.step_s * (1 - there.engine_idle) if config.async_.staleness else there.step_s - update - own.sync
        low, high = (middle, high) if busy < target else (low, middle)
    return speeds(math.exp(high))
