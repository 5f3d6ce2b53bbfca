"""Data of the page *Overview*: state, curves, evaluations, events, warnings, time and configuration of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlcli.runs.curve_marks import marks_of
from rlcli.runs.event_text import event_text
from rlcli.runs.listing import number
from rlcli.runs.run_data import RunData

MAX_POINTS = 1200
"""Points of a curve that are sent: more than a chart has pixels."""
MAX_EVENTS = 400
RECENT = 20
"""Steps over which the share of each phase is averaged."""
THROUGHPUTS = {"": "whole step", "rollout_": "rollout", "update_": "update"}
CURVES: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Reward", "", {"reward/mean": "mean", "reward/shaped": "shaped"}),
    (
        "Outcomes",
        "share",
        {f"outcome/{name}": name.replace("_", " ") for name in ("ok", "wrong", "no_answer", "timeout", "crash")},
    ),
    ("Response length", "tokens", {"response_tokens/mean": "mean", "response_tokens/max": "longest"}),
    ("Cut off at the limit", "share", {"response_tokens/truncated": "responses"}),
    ("Groups of equal rewards", "share", {"reward/equal_groups": "no signal"}),
    ("Entropy", "nats", {"update/entropy": "policy"}),
    ("Gradient norm", "", {"update/grad_norm": "before clipping", "critic/grad_norm": "critic"}),
    ("Loss", "", {"update/policy_loss": "policy", "critic/loss": "critic", "update/nll": "nll"}),
    ("KL to the reference", "nats", {"update/kl": "kl"}),
    ("KL to the teacher", "nats", {"update/teacher_kl": "estimated from the sampled tokens"}),
    ("Tokens that are the teacher's likeliest", "share", {"update/teacher_agreement": "drawn"}),
    ("Engine against trainer", "nats", {"mismatch/k3": "k3", "mismatch/kl": "kl"}),
    ("Clipped tokens", "share", {"update/clip_low": "low", "update/clip_high": "high"}),
    ("Turns", "", {"turns/mean": "mean", "tool_calls/mean": "tool calls"}),
    ("Learning rate", "", {"update/lr": "policy", "critic/lr": "critic"}),
    ("Throughput", "tokens/s", {f"throughput/{name}tokens_per_s": label for name, label in THROUGHPUTS.items()}),
)
"""Title, unit and metrics with their labels. Metrics that the run lacks are left out, and curves without metrics."""
PHASES = (
    *("generate", "wait_for_rollout", "plan", "load", "old_log_probs", "reference", "teacher", "critic"),
    *("advantages", "update", "sync", "bookkeeping"),
)
"""Phases that add up to a step's time; metrics `time/NAME_s`."""


def overview(run: RunData) -> dict[str, object]:
    """All data of the page but the curves of further metrics, which `series` returns."""
    config, steps = run.config(), run.metrics.steps
    events, state = run.events, run.state
    return {
        "name": run.name,
        "recipe": {name: str(config.get("recipe", {}).get(name, "")) for name in ("name", "summary", "paper")},
        "model": str(config.get("model", {}).get("path", "")),
        "data": _text(config.get("data", {}).get("path", "")),
        "verifier": _text(config.get("verifier", {}).get("name", "")),
        "state": state,
        "step": steps[-1] if steps else 0,
        "steps": int(number(config.get("train", {}).get("steps")) or 0),
        "first_reward": next((value for _, value in run.metrics.points("reward/mean")), None),
        "reward": run.metrics.last("reward/mean"),
        "seconds": _seconds(events, alive=state == "alive"),
        "tokens_per_s": run.metrics.last("throughput/tokens_per_s"),
        "step_s": run.metrics.last("time/step_s"),
        "marks": [{"x": mark.step + 0.5, "label": mark.text} for mark in marks_of(events)],
        "curves": [curve for title, unit, names in CURVES if (curve := _curve(run, title, unit, names))],
        "metrics": run.metrics.names(),
        "evaluations": evaluations(run),
        "events": [_event(event) for event in events[-MAX_EVENTS:]],
        "warnings": [_event(event) for event in events if event.get("event") in ("warning", "alarm")][-MAX_EVENTS:],
        "phases": phases(run),
        "config": configuration(run),
        "environment": run.environment(),
        "notes": run.notes,
    }


def series(run: RunData, names: Iterable[str]) -> dict[str, list[list[float]]]:
    """Metric → its steps and its values."""
    return {name: thinned(run.metrics.points(name)) for name in names}


def thinned(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[list[float]]:
    """Steps and values of at most `limit` points: the smallest and the largest of each bin, so that peaks stay visible.

    >>> thinned([(step, float(step == 7)) for step in range(100)], 10)[1].count(1.0)
    1
    """
    if len(points) > limit:
        size = -(-2 * len(points) // limit)
        extremes = []
        for begin in range(0, len(points), size):
            part = points[begin : begin + size]
            extremes += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
        points = extremes
    return [[step for step, _ in points], [float(f"{value:.6g}") for _, value in points]]


def evaluations(run: RunData) -> list[dict[str, object]]:
    """Step, prompts and measures (name → mean, low, high) of each evaluation: pass@1, mean@1, then the others. mean@k
    is the same figure as mean@1."""
    rows = []
    for step, report in run.evaluations().items():
        measures = {}
        for kind in ("pass", "maj", "mean"):
            estimates = report.get(kind)
            for name, estimate in estimates.items() if isinstance(estimates, dict) else ():
                if isinstance(estimate, dict) and number(estimate.get("mean")) is not None:
                    measures[str(name)] = {end: number(estimate.get(end)) for end in ("mean", "low", "high")}
        if "mean@1" in measures:
            measures = {
                name: measure for name, measure in measures.items() if name == "mean@1" or not name.startswith("mean@")
            }
        first = {name: measures[name] for name in ("pass@1", "mean@1") if name in measures}
        rows.append({"step": step, "prompts": report.get("prompts"), "measures": first | measures})
    return rows


def phases(run: RunData) -> dict[str, object]:
    """Mean seconds of each phase over the last steps, and over the run in `series`."""
    columns = {name: run.metrics.column(f"time/{name}_s") for name in PHASES}
    used = {name: column for name, column in columns.items() if any(column)}
    return {
        "recent": RECENT,
        "seconds": {name: _mean(column[-RECENT:]) for name, column in used.items()},
        "series": series(run, [f"time/{name}_s" for name in used]),
    }


def configuration(run: RunData) -> list[dict[str, object]]:
    """Key, value and origin of each setting; of those that differ from the recipe, the recipe's value too."""
    from rlcli.config.changes import origins_in
    from rlcli.config.recipes import flatten

    config, text = run.config(), run.config_text()
    origins = origins_in(text)
    name = str(config.get("recipe", {}).get("name", ""))
    recipe = _recipe_values(name)
    rows = []
    for key, value in flatten({section: held for section, held in config.items() if section != "recipe"}).items():
        origin = origins.get(key, "default")
        row: dict[str, object] = {"key": key, "value": _text(value), "origin": origin}
        if not origin.startswith(("recipe ", "default")) and row["value"] != _text(recipe.get(key, "")):
            row |= {"changed": True, "recipe": _text(recipe[key]) if key in recipe else None}
        rows.append(row)
    return rows


def _recipe_values(name: str) -> Mapping[str, object]:
    """Values of the recipe and the defaults as installed; empty if the recipe does not exist any more."""
    from rlcli.config.load import resolve
    from rlcli.errors import RlcliError

    try:
        return resolve(name).values()
    except RlcliError:
        return {}


def _curve(run: RunData, title: str, unit: str, names: Mapping[str, str]) -> dict[str, object] | None:
    lines = [
        {"name": name, "label": label, "points": thinned(points)}
        for name, label in names.items()
        if (points := run.metrics.points(name))
    ]
    # Without curves that are always 0, and without duplicates.
    nonzero = [line for line in lines if line is lines[0] or any(line["points"][1])]
    shown = [
        line for at, line in enumerate(nonzero) if all(line["points"] != other["points"] for other in nonzero[:at])
    ]
    return {"title": title, "unit": unit, "series": shown} if shown else None


def _event(event: Mapping[str, Any]) -> dict[str, object]:
    return {
        "time": number(event.get("time")),
        "step": number(event.get("step")),
        "kind": str(event.get("event", "")),
        "name": str(event.get("name", "")),
        "text": event_text(event, without=("step", "name")),
    }


def _seconds(events: Sequence[Mapping[str, Any]], *, alive: bool) -> float | None:
    """Seconds from the first event to the last, or until now."""
    times = [at for event in events if (at := number(event.get("time"))) is not None]
    return (time.time() if alive else max(times)) - min(times) if times else None


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _text(value: object) -> str:
    from rlcli.config.load import to_toml

    return value if isinstance(value, str) else to_toml(value)
