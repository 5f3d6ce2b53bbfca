"""`rlcli runs watch`: the live view of a run that another process trains."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.options import RunName
from rlcli.support.reading import bounded_lines, json_object, opened

if TYPE_CHECKING:
    from rlcli.runs.tracking.run_console import View

POLL_S = 0.5
GONE_S = 5.0
"""Seconds after which a run without a lock holder and without a recorded end counts as killed."""
RESTART_S = 300.0
"""The same after a restart by the supervisor, which pauses first; loading the model takes a while."""
NOTED = ("failed", "restarted", "resumed", "rolled_back", "stopped", "bad_update", "step_skipped")
"""Events that are shown with all their fields; a warning and an evaluation have their own text."""


def watch(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print the metrics of each step as a line of JSON.")] = False,
) -> None:
    """Watch a run that trains in another terminal, until it ends. Ctrl-C leaves the run alone.

    Without a terminal, one line a step. The exit code is 0 if the run has finished or was stopped, else 1.

    Examples:

      rlcli runs watch grpo-1

      rlcli runs watch runs/grpo-1 --json | jq '."reward/mean"'
    """
    from rlcli.launch.resume import find_record
    from rlcli.runs.tracking.run_console import View
    from rlcli.support.attempt import INTERRUPTED

    folder = find_record(run)
    try:
        with View() as view:
            follower = Follower(folder, view, _print_line if json else lambda metrics: None)
            state = follower.follow()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if state in ("finished", "stopped") else 1)


def _print_line(metrics: Mapping[str, Any]) -> None:
    console.json_line(metrics)


class Tail:
    """Reads the lines appended to a file of JSON objects. An incomplete line is read later, a damaged one is left
    out."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, -1, 0

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """True if the file was replaced since the last call, and its new lines: all of them if it was."""
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                replaced = status.st_ino != self._inode or status.st_size < self._offset
                self._inode, self._offset = status.st_ino, 0 if replaced else self._offset
                file.seek(self._offset)
                lines = [line for line in bounded_lines(file, self._path) if line.endswith(b"\n")]
        except OSError:
            return False, []
        self._offset += sum(map(len, lines))
        return replaced, [line for line in map(json_object, lines) if line is not None]


class Follower:
    """Shows the records of the run in `folder` in `view`. on_line: receives the metrics of each new step."""

    def __init__(self, folder: Path, view: View, on_line: Callable[[Mapping[str, Any]], None]) -> None:
        from rlcli.runs.folder import EVENTS, METRICS

        self.folder, self.view, self.on_line = folder, view, on_line
        self._metrics, self._events = Tail(folder / METRICS), Tail(folder / EVENTS)
        self._step = 0
        self._progress: dict[str, Any] = {}
        self._last_event: dict[str, Any] = {}

    def follow(self) -> str:
        """Follow the run to its end; returns its last state."""
        from rlcli.runs.listing import run_at, state_of

        self.begin()
        alive_at = time.monotonic()
        while True:
            state = state_of(self.folder)  # before the records, so that those written before the end are shown
            self.look()
            if state == "alive":
                alive_at = time.monotonic()
            elif state in ("finished", "stopped") or time.monotonic() - alive_at > self._patience():
                break
            time.sleep(POLL_S)
        summary = run_at(self.folder)
        self.view.note(f"{summary.name}: {state} at step {summary.step} of {summary.steps}")
        return state

    def begin(self) -> None:
        """Show the run's records so far, without its events."""
        _, events = self._events.new()
        self._last_event = events[-1] if events else {}
        _, lines = self._metrics.new()
        self._start(_steps(lines))

    def look(self) -> None:
        """Show new records."""
        for event in self._events.new()[1]:
            self._last_event = event
            self._note(event)
        replaced, lines = self._metrics.new()
        lines = _steps(lines)
        last = lines[-1]["step"] if lines else 0
        if replaced and last < self._step:  # the run went back to a checkpoint
            self._start(lines)
        for line in lines:
            if line["step"] > self._step:
                self._step = line["step"]
                self.view.step(_numbers(line))
                self.on_line(line)
        self._show_progress()

    def _start(self, lines: list[dict[str, Any]]) -> None:
        from rlcli.runs.curve_marks import marks_of
        from rlcli.runs.folder import METRICS, events_of
        from rlcli.runs.listing import config_of, number
        from rlcli.runs.run_measure import measure_of

        config = config_of(self.folder)
        steps = int(number(config.get("train", {}).get("steps")) or 0)
        self._step = lines[-1]["step"] if lines else 0
        ended_s = max(0.0, time.time() - (self.folder / METRICS).stat().st_mtime) if lines else 0.0
        history = [_numbers(line) for line in lines]
        marks = marks_of(events_of(self.folder))
        self.view.start(steps, self.folder.name, self._step, measure_of(config), history, ended_s, marks)

    def _show_progress(self) -> None:
        from rlcli.runs.folder import progress_of
        from rlcli.runs.listing import number

        progress = progress_of(self.folder)
        if progress and (progress.get("phase"), progress.get("time")) != (
            self._progress.get("phase"),
            self._progress.get("time"),
        ):
            self._progress = progress
            began = number(progress.get("time"))
            self.view.phase(str(progress.get("phase")), max(0.0, time.time() - began) if began else 0.0)

    def _note(self, event: Mapping[str, Any]) -> None:
        from rlcli.runs.curve_marks import INPUTS_CHANGED
        from rlcli.runs.listing import number

        kind = event.get("event")
        if kind == "warning":
            text = f"warning {event.get('name')}: {event.get('text')}"
            self.view.warning(text, int(number(event.get("step")) or 0))
        elif kind == INPUTS_CHANGED:
            self.view.warning(str(event.get("text")), int(number(event.get("step")) or 0))
        elif kind == "evaluated":
            self.view.note(f"evaluation at step {event.get('step')}: {event.get('headline')}")
        elif kind in NOTED:
            facts = [f"{name} {value}" for name, value in event.items() if name not in ("time", "event")]
            self.view.note(f"{kind}: {', '.join(facts)}")

    def _patience(self) -> float:
        return RESTART_S if self._last_event.get("event") == "restarted" else GONE_S


def _steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of steps; that of step 0 is the evaluation before them."""
    from rlcli.runs.listing import number

    return [line for line in lines if number(line.get("step"))]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric values of a line: a value that was not finite is null in JSON."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
