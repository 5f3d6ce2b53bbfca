"""The log-prob check: whether engine and trainer compute the same log-probs at equal weights, apart from rounding.

That the engine *holds* the trainer's weights is checked byte by byte at each sync. This check is of the *computation*:
temperature, positions, masks, kernels. `rlcli.algorithms.correction.log_prob_check` has the statistics. Here is where
their tokens come from, and how their noise is known:

samples      The step's own samples: the engine's log-probs came with them, and the trainer's are those of its first
             forward pass, before the first optimizer step. Thousands of tokens, at no cost.
probe        Where a step has few such tokens (samples of an older policy, all groups equal, top-p, no sampling), about
             PROBE_TOKENS tokens of its samples, or of prompts if it trained on none: through the trainer before the
             sync, while its weights are on the device, and through the engine after it. In the first PROBED steps, and
             then every PROBE_EVERY steps.
noise        How far the trainer's own log-probs move on such tokens if its layers round once more: in the first
             CALIBRATED steps, and every CALIBRATE_EVERY steps, since it changes with the policy. Nothing of the engine
             takes part, so that a fault which is there from the first step is not calibrated away.

Sums are kept over the steps, earlier ones with less weight, so that small faults show within three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypedDict

from rlcli.algorithms.correction.log_prob_check import (
    LogProbComparison,
    Moments,
    Statistic,
    joined,
    noise_of,
    sample_table,
    statistics,
)
from rlcli.errors import RunFailed
from rlcli.training.worker.calls import WorkerCalls, Workers

if TYPE_CHECKING:
    import numpy as np

    from rlcli.algorithms.correction.log_prob_check import MomentsState
    from rlcli.training.worker.calls import Row

PROBE_TOKENS = 256
"""Tokens of the step's samples, prompts included, in a probe: at least one sample."""
NOISE_TOKENS = 512
"""Drawn tokens in which the noise is measured. (Samples of a prompt share it in the trainer's forward pass.)"""
LEAST_TOKENS = 256
"""A step whose samples give fewer tokens at equal weights is probed."""
PROBED, PROBE_EVERY = 3, 3
"""Number of first steps that are probed if needed, and then the interval in steps: a probe takes 0.9 s of a step of
9 s (32 samples of SmolLM2-135M on two CPU cores)."""
CALIBRATED, CALIBRATE_EVERY = 2, 10
"""Noise is measured in this many first steps, and then at this interval."""
DECAY = 0.8
"""Weight of the sums of all earlier steps at each step with tokens to compare: about the last five count."""
NOISE_DECAY = 0.7
"""The same of the noise, at each measurement."""
NAME = "log_prob_check"
"""Prefix of its metrics, and name of its warning."""


class LogProbCheckState(TypedDict):
    """The state of a `LogProbCheck`, as checkpoints hold it."""

    moments: MomentsState
    """Engine against trainer, over the last steps."""
    noise: MomentsState
    """Trainer against trainer with other rounding."""


class LogProbCheck:
    """Compares engine and trainer after each weight sync.

    mode: `rollout.log_prob_check`. unit: relative rounding of the engine's arithmetic. prompts: rows (int32 tokens, and
    how many of them are the prompt) to probe with before there are samples. longest: tokens that the engine can score.
    warn: receives the step, and the text of a failed check, if that does not stop the run.
    """

    def __init__(
        self,
        mode: Literal["stop", "warn", "off"],
        unit: float,
        prompts: list[Row],
        longest: int,
        policy: Workers,
        engines: Workers,
        warn: Callable[[int, str], None],
    ) -> None:
        self.mode, self.unit, self.prompts, self.longest = mode, unit, prompts, longest
        self.policy, self.engines, self.warn = policy, engines, warn
        self.moments = Moments.of(joined([]))
        self.noise = Moments.of(joined([]))
        self._noise, self._probes = self.noise, False
        self._rows: list[Row] = []
        self._trainer: list[np.ndarray] = []

    def prepare(self, step: int, tokens: float, *, counts: bool = True) -> None:
        """Before a weight sync, while the trainers' weights are on their devices and the engines may sleep: compute
        the trainer's log-probs of a probe or a calibration. tokens: of the step's samples that are compared anyway.
        step, counts: as in `check`, which follows after the sync."""
        if self.mode == "off":
            return
        self._rows, self._trainer, self._noise = [], [], self.noise
        few = tokens < LEAST_TOKENS
        self._probes = not counts or (few and (step <= PROBED or step % PROBE_EVERY == 0))
        calibrates = not self.noise.samples or (counts and (step <= CALIBRATED or step % CALIBRATE_EVERY == 0))
        if self._probes or calibrates:
            recent = self._cut(self.policy.call(WorkerCalls.recent_rows, NOISE_TOKENS)) if counts else []
            rows = recent or self._cut(self.prompts)
            self._rows = _first(rows, PROBE_TOKENS)
            rows = rows if calibrates else self._rows
            self._trainer = self.policy.call(WorkerCalls.trainer_log_probs, rows) if rows else []
            if rows and calibrates:
                rounded = self.policy.call(WorkerCalls.trainer_log_probs, rows, self.unit, step)
                self._noise = self.noise.scaled(NOISE_DECAY) + Moments.of(_table(rounded, self._trainer))

    def check(self, step: int, samples: Sequence[LogProbComparison | None], *, counts: bool = True) -> dict[str, float]:
        """After a weight sync: the metrics. Raises RunFailed, or warns, if engine and trainer disagree. samples: what
        the workers compared of the step's samples. counts: the sync ends a step; otherwise (at the start, or after a
        return to a checkpoint) later checks do not know of it."""
        if self.mode == "off":
            return {}
        new = sum(filter(None, samples), LogProbComparison.of(joined([])))
        if self._probes and self._rows:
            new += LogProbComparison.of(self._probed(step))
        moments = self.moments.scaled(DECAY) + new.moments if new.moments.samples else self.moments
        if counts:
            self.moments, self.noise = moments, self._noise
        results = statistics(moments, new, self._noise)
        failed = [result for result in results if not result.holds]
        if failed:
            self._report(step, failed)
        tokens = max(moments.total("tokens"), 1.0)
        margins = [abs(result.value) / result.bound for result in results if result.bound]
        return {f"{NAME}/{result.name}": result.value for result in results} | {
            f"{NAME}/noise_of_trainer": noise_of(self._noise).value,
            f"{NAME}/mean_abs_diff": moments.total("a") / tokens,
            f"{NAME}/max_abs_diff": new.largest,
            f"{NAME}/k3": moments.total("k3") / tokens,
            f"{NAME}/tokens": new.tokens,
            f"{NAME}/margin": max(margins, default=0.0),
        }

    def state(self) -> LogProbCheckState:
        """For `restore`, in a checkpoint."""
        return {"moments": self.moments.state(), "noise": self.noise.state()}

    def restore(self, state: LogProbCheckState) -> None:
        self.moments, self.noise = Moments.restored(state["moments"]), Moments.restored(state["noise"])

    def _cut(self, rows: list[Row]) -> list[Row]:
        """The rows, cut to what the engine can score, without those that then have no token behind the prompt."""
        return [(tokens[: self.longest], prompt) for tokens, prompt in rows if min(len(tokens), self.longest) > prompt]

    def _probed(self, step: int) -> np.ndarray:
        """The table of the rows, each from one engine, which changes from step to step. All workers compute all rows,
        since some share an engine."""
        engines = self.engines.call(WorkerCalls.engine_log_probs, self._rows)
        by_engine = [engines[(row + step) % len(engines)][row] for row in range(len(self._rows))]
        return _table(self._trainer[: len(by_engine)], by_engine)

    def _report(self, step: int, failed: list[Statistic]) -> None:
        first, *others = failed
        also = f" (so are {', '.join(result.name for result in others)})" if others else ""
        text = (
            f"engine and trainer compute different log-probs at equal weights: {NAME}/{first.name} = "
            f"{first.value:.3g} is beyond its bound, {first.bound:.3g}{also}; usual cause: {first.meaning}"
        )
        if self.mode == "warn":
            self.warn(step, text)
            return
        raise RunFailed(
            text, "see Engine and trainer disagree in docs/debug.md; rollout.log_prob_check = warn continues anyway"
        )


def _first(rows: list[Row], tokens: int) -> list[Row]:
    """The first rows of about this many tokens in all, at least one."""
    ends = list(accumulate(len(row) for row, _ in rows))
    return [row for row, end in zip(rows, ends, strict=True) if end <= tokens] or rows[:1]


def _table(trainer: list[np.ndarray], engine: list[np.ndarray]) -> np.ndarray:
    """The table of rows of log-probs."""
    import numpy as np

    lengths = np.array([len(row) for row in trainer])
    return sample_table(np.concatenate(trainer), np.concatenate(engine), lengths, sampled=False)
