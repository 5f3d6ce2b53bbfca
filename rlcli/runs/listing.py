"""Reads the state of runs from their folders, for `rlcli runs`. Imports nothing heavy and keeps no lock."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcli.errors import RlcliError
from rlcli.runs.folder import LOCK, check_records, events_of
from rlcli.runs.record_files import evaluations_of, metrics_of
from rlcli.runs.run_measure import LOSS, MEAN, REWARD, means_of, measure_of, score_of
from rlcli.support.reading import read_toml

State = Literal["alive", "finished", "stopped", "failed", "killed", "unreadable"]
ENDS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
"""Events that end a run, unless it is restarted."""
BEGINS = ("started", "resumed", "restarted")
MOST = 1e15
"""Upper bound of steps and times."""


@dataclass(frozen=True)
class Run:
    """Summary of one run."""

    name: str
    """Name of its folder."""
    path: str
    """Path of its folder."""
    recipe: str
    """Name of its recipe, empty if unknown."""
    state: State
    """`unreadable` if nothing could be read: `problem` has the reason."""
    step: int
    """Steps done so far."""
    steps: int
    """Steps of the whole run."""
    reward: float | None
    """Mean reward of the last step; None if the dataset has the responses, and `loss` shows the progress."""
    loss: float | None
    """Loss of the last step, if the dataset has the responses."""
    evaluated: int | None
    """Step of the last evaluation."""
    pass_at_1: float | None
    """pass@1 of the last evaluation."""
    mean_at_1: float | None
    """Mean score of the last evaluation."""
    checkpoint: int | None
    """Step of the newest checkpoint."""
    time: float | None
    """Time of the last event, in seconds since 1970; None if unknown."""
    problem: str = ""
    """The reason why nothing of the run could be read."""


def runs_in(root: Path) -> list[Run]:
    """The runs in the folders of `root`, the latest first. One that cannot be read is listed with the problem."""
    folders = [path.parent for path in root.glob(f"*/{LOCK}") if os.path.lexists(path.parent / "config.toml")]
    return sorted(map(_listed, folders), key=lambda run: run.time or 0.0, reverse=True)


def _listed(folder: Path) -> Run:
    try:
        check_records(folder)
        return run_at(folder)
    except RlcliError as error:
        return Run(
            name=folder.name,
            path=str(folder),
            recipe="",
            state="unreadable",
            step=0,
            steps=0,
            reward=None,
            loss=None,
            evaluated=None,
            pass_at_1=None,
            mean_at_1=None,
            checkpoint=None,
            time=_changed(folder / "config.toml"),
            problem=str(error),
        )


def run_at(folder: Path) -> Run:
    """The run in `folder`, which has a config.toml."""
    config = config_of(folder)
    metrics = [line for line in metrics_of(folder) if number(line.get("step"))]
    evaluations, events = evaluations_of(folder), events_of(folder)
    evaluated = max(evaluations, default=None)
    means = means_of(evaluations[evaluated]) if evaluated is not None else {}
    measure = measure_of(config)
    last = number(metrics[-1].get(measure.key)) if metrics else None
    return Run(
        name=folder.name,
        path=str(folder),
        recipe=str(config.get("recipe", {}).get("name", "")),
        state=state_of(folder),
        step=metrics[-1]["step"] if metrics else 0,
        steps=int(number(config.get("train", {}).get("steps")) or 0),
        reward=last if measure == REWARD else None,
        loss=last if measure == LOSS else None,
        evaluated=evaluated,
        pass_at_1=number(means.get("pass@1")),
        mean_at_1=number(score_of(means, MEAN)),
        checkpoint=max(checkpoints_of(folder), default=None),
        time=number(events[-1].get("time")) if events else _changed(folder / "config.toml"),
    )


def number(value: object) -> float | None:
    """`value` if it is a finite number, else None: a damaged or edited file may contain anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MOST else None


def config_of(folder: Path) -> dict[str, Any]:
    """The resolved configuration as stored, not validated: it may be from another version. Raises `UnfitFile`."""
    try:
        sections = read_toml(folder / "config.toml")
    except (OSError, ValueError):
        return {}
    return {name: section for name, section in sections.items() if isinstance(section, dict)}


def checkpoints_of(folder: Path) -> list[int]:
    """The steps of complete checkpoints, ascending, not verified. Copies with other names do not count."""
    names = (path.parent.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*/manifest.json"))
    return sorted(int(name) for name in names if name.isdecimal())


def state_of(folder: Path) -> State:
    """Alive if a process holds the lock; else how its last attempt ended; killed if it recorded no end."""
    if _held(folder):
        return "alive"
    for event in reversed(events_of(folder)):
        kind = event.get("event")
        if kind in ENDS:
            return ENDS[kind]
        if kind in BEGINS:
            break
    return "killed"


def _held(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
