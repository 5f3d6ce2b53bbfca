"""Texts for the figures of steps: in a line, as a row of blocks, and how a step's time is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.runs.run_measure import REWARD, Measure
from rlcli.types import UNVERIFIED

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 20
"""Steps whose mean shows how the time of a step is spent."""
FIGURES = {
    "throughput/rollout_tokens_per_s": "generate {:,.0f} tok/s",
    "throughput/update_tokens_per_s": "update {:,.0f} tok/s",
    "update/grad_norm": "grad {:.2g}",
    "update/kl": "kl {:.2g}",
    "log_prob_check/mean_abs_diff": "log-prob diff {:.2g}",
}
"""Metric → its text in a step's line."""
WITHIN = frozenset({"step", "verify_wait", "idle", "trainer_idle", "engine_idle", "transfer", "check"})
"""Times that are not phases: the whole step, and what lies within or beside phases."""


def figures(metrics: Mapping[str, float], measure: Measure = REWARD) -> list[str]:
    """The main metrics of a step, the run's measure first; missing ones are left out."""
    texts = [f"{measure.name} {measure.of(metrics):.3f}"]
    if "response_tokens/mean" in metrics:
        cut = metrics.get("response_tokens/truncated", 0.0)
        texts.append(f"length {metrics['response_tokens/mean']:.0f}" + (f" ({cut:.0%} cut)" if cut else ""))
    texts += [text.format(metrics[key]) for key, text in FIGURES.items() if isinstance(metrics.get(key), int | float)]
    failed = {name: metrics.get(f"outcome/{name}", 0.0) for name in UNVERIFIED}
    return texts + [f"verifier {name} {share:.1%}" for name, share in failed.items() if share]


def phase_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of each phase of these steps, the longest first. A phase that a step lacks took none.

    >>> phase_seconds([{"time/generate_s": 2.0, "time/trainer_idle_s": 2.0, "time/step_s": 5.0, "time/update_s": 3.0}])
    {'update': 3.0, 'generate': 2.0}
    """
    sums: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            name = key.removeprefix("time/").removesuffix("_s")
            if key.startswith("time/") and name not in WITHIN and isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value
    return {name: sums[name] / len(lines) for name in sorted(sums, key=lambda name: -sums[name]) if sums[name] > 0}


def phase_shares(lines: Sequence[Mapping[str, Any]], limit: int = 5, minimum: float = 0.01) -> str:
    """The phases that take most of the time, each with its share, in one line.

    >>> phase_shares([{"time/generate_s": 1.0, "time/update_s": 3.0, "time/plan_s": 0.001}])
    'update 75% · generate 25%'
    """
    seconds = phase_seconds(lines)
    total = sum(seconds.values())
    shares = [(name, spent / total) for name, spent in seconds.items()][:limit]
    return " · ".join(f"{name} {share:.0%}" for name, share in shares if share >= minimum)


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from minimum to maximum; non-finite values are blank.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((v - low) * scale + 0.5)] if abs(v) < float("inf") else " " for v in values)


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
