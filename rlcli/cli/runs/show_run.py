"""`rlcli runs show`: one run in the terminal: its curve, its time, its changes to the recipe, its last samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.options import Json, RunName
from rlcli.cli.runs.samples import print_samples

if TYPE_CHECKING:
    from rlcli.runs.curve_marks import Mark

LAST_EVENTS = 12
CURVE_WIDTH, CURVE_HEIGHT = 72, 8
SAMPLE_CHARACTERS = 300
LEAST_SHARE = 0.005
"""Phases with a smaller share of the time are not in the table."""
RATES = {"generate": "throughput/rollout_tokens_per_s", "update": "throughput/update_tokens_per_s"}
"""Phase → the metric of its tokens per second."""


def show(
    run: RunName,
    samples: Annotated[int, typer.Option(min=0, help="Show this many of the last samples, shortened.")] = 2,
    json: Json = False,
) -> None:
    """Show one run: its curve, time by phase, changes to the recipe, checkpoints, evaluations, events and last samples.

    Examples:

      rlcli runs show grpo-1

      rlcli runs show runs/grpo-1 --samples 0 --json
    """
    from rlcli.launch.resume import find_record
    from rlcli.runs.curve_marks import marks_of
    from rlcli.runs.folder import events_of
    from rlcli.runs.listing import checkpoints_of, config_of, run_at
    from rlcli.runs.record_files import course_of, evaluations_of, metrics_of
    from rlcli.runs.run_data import RunData
    from rlcli.runs.run_measure import measure_of

    folder = find_record(run)
    for note in RunData(folder).damage():
        console.note(f"warning: {note}")
    settings = _changed_settings(folder)
    summary, evaluations = run_at(folder), evaluations_of(folder)
    events, checkpoints = events_of(folder), checkpoints_of(folder)
    marks, events = marks_of(events), events[-LAST_EVENTS:]
    measure = measure_of(config_of(folder))
    course, phases = course_of(folder, measure), _phases(metrics_of(folder))
    last = _last_samples(folder, samples)
    if json:
        records = {"settings": settings, "checkpoints": checkpoints, "evaluations": evaluations, "events": events}
        records |= {"measure": measure.name, "course": course, "phases": phases, "samples": last}
        console.emit_json(asdict(summary) | records)
        return
    value = summary.loss if summary.reward is None else summary.reward
    rows = [
        ("recipe", summary.recipe),
        ("state", summary.state),
        ("step", f"{summary.step} of {summary.steps}"),
        (measure.name, "" if value is None else f"{value:.3f}"),
        ("checkpoints", ", ".join(map(str, checkpoints)) or "none"),
    ]
    console.show(console.table([summary.name, ""], rows))
    _show_curve(course, measure.in_words, marks)
    if phases:
        console.show(console.table(["time of a step", "seconds", "share", "tokens/s"], _phase_rows(phases)))
    if settings:
        setting_rows = [(key, setting["value"], setting["origin"]) for key, setting in settings.items()]
        console.show(console.table(["setting", "value", "from"], setting_rows))
    if evaluations:
        headlines = [(step, report.get("headline", "")) for step, report in sorted(evaluations.items())]
        console.show(console.table(["step", "evaluation"], headlines))
    if events:
        console.show(console.table(["when", "event", ""], [_event_row(event) for event in events]))
    print_samples(last, SAMPLE_CHARACTERS)


def _show_curve(course: Sequence[float], in_words: str, marks: Sequence[Mark]) -> None:
    from rlcli.runs.tracking.plots import reward_curve_text
    from rlcli.support.redact import printable

    width = min(console.stdout().width - 1, CURVE_WIDTH)
    if len(course) > 1 and (curve := reward_curve_text(course, width, CURVE_HEIGHT, marks=marks)):
        console.plain(f"{in_words}\n" + "\n".join(map(printable, curve.split("\n"))) + "\n")


def _phases(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Seconds, and tokens per second if it is known, of each phase: means over the last steps."""
    from rlcli.runs.listing import number
    from rlcli.runs.tracking.text.step_figures import RECENT_STEPS, phase_seconds

    recent = [line for line in lines if number(line.get("step"))][-RECENT_STEPS:]
    phases: dict[str, dict[str, float | None]] = {}
    for name, seconds in phase_seconds(recent).items():
        rates = [rate for line in recent if (rate := number(line.get(RATES.get(name, ""))))]
        phases[name] = {"seconds": seconds, "tokens_per_s": sum(rates) / len(rates) if rates else None}
    return phases


def _phase_rows(phases: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, str, str, str]]:
    total = sum(phase["seconds"] or 0.0 for phase in phases.values())
    rows = []
    for name, phase in phases.items():
        seconds, rate = phase["seconds"] or 0.0, phase["tokens_per_s"]
        if seconds >= LEAST_SHARE * total:
            rows.append((name, f"{seconds:.2f}", f"{seconds / total:.0%}", "" if rate is None else f"{rate:,.0f}"))
    return rows


def _last_samples(folder: Path, count: int) -> list[dict[str, Any]]:
    """One sample for each of the first `count` prompts of the last step with samples."""
    from rlcli.evaluation.rescoring import steps_of
    from rlcli.evaluation.sample_browser import Filter, wanted_samples

    if not count:
        return []
    samples_folder, by_prompt = folder / "samples", dict[str, dict[str, Any]]()
    for row in wanted_samples(samples_folder, steps_of(samples_folder)[-1:], Filter(), console.note):
        by_prompt.setdefault(row["prompt_id"], row)
        if len(by_prompt) == count:
            break
    return list(by_prompt.values())


def _changed_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings that come neither from the recipe nor from a default: key → value and origin."""
    from rlcli.config.changes import origins_in
    from rlcli.config.recipes import flatten
    from rlcli.runs.listing import config_of
    from rlcli.support.reading import read_text

    try:
        origins = origins_in(read_text(folder / "config.toml"))
    except (OSError, UnicodeDecodeError):
        return {}
    values = flatten(config_of(folder))
    changed = {key: origin for key, origin in origins.items() if key in values and not origin.startswith("recipe ")}
    return {key: {"value": values[key], "origin": origin} for key, origin in changed.items()}


def _event_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    from rlcli.runs.event_text import event_text
    from rlcli.runs.listing import number
    from rlcli.support.redact import printable

    return time_text(number(event.get("time"))), str(event.get("event")), printable(event_text(event))


def time_text(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime(form)
