"""Reads a run's records of steps, and truncates them to the step to resume from. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import RunFailed
from rlcli.runs.folder import METRICS, PROMPTS, TIMELINE, finite
from rlcli.runs.run_measure import REWARD, Measure
from rlcli.support.files import read_objects, replacing, sync_file, sync_folder, write_synced
from rlcli.support.reading import LINES_BYTES, UnfitFile, read_json


@dataclass(frozen=True)
class RunResult:
    """The result of a run, from its first step on."""

    steps: int
    """Steps that were done."""
    measure: Measure
    """The figure that shows progress: the mean reward or the loss."""
    course: list[float]
    """The measure at each step."""
    evaluations: dict[int, dict[str, Any]]
    """Step → report, as in its file."""
    checkpoint: str
    """Path of the newest checkpoint."""
    stopped: bool = False
    """True if the run was asked to end early."""


MOST_BYTES = 4 << 30
"""Largest timeline and record of prompts: a line of theirs is much longer than one of metrics."""
OF_STEP = re.compile(r"step-(\d+)(\.json$|\.rank-|$)")
OF_TRAINING = ("advantages.parquet", "tokens-*.parquet", ".advantages.*.tmp", ".tokens-*.tmp")
"""Files in the folder of a step's samples that are written when the step is trained on."""
OF_SAMPLING = ("rank-*.parquet", ".rank-*.tmp")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first, without truncated ones; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _read_lines(run / METRICS)
    return []


def timeline_of(run: Path) -> list[dict[str, Any]]:
    """The lines of timeline.jsonl, oldest first, without truncated ones; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _read_lines(run / TIMELINE, MOST_BYTES)
    return []


def judged_of(run: Path) -> list[dict[str, Any]]:
    """The lines of prompts.jsonl, oldest first, without truncated ones; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _read_lines(run / PROMPTS, MOST_BYTES)
    return []


def course_of(run: Path, measure: Measure = REWARD) -> list[float]:
    """The measure at each step, oldest first; NaN for a step that has none, since no sample counted."""
    return [measure.of(line) for line in metrics_of(run) if line["step"]]


def evaluations_of(run: Path) -> dict[int, dict[str, Any]]:
    """Step → report of each periodic evaluation, from evaluations/step-000050.json; invalid files are left out."""
    reports = {}
    for step, path in sorted(_of_steps(run / "evaluations")):
        if path.suffix == ".json":
            with contextlib.suppress(OSError, ValueError):
                reports[step] = read_json(path)
    return {step: report for step, report in reports.items() if isinstance(report, dict)}


def rewind(run: Path, step: int, *, sampled: int = -1) -> None:
    """Truncate the record to the end of `step`: metrics, timeline and prompts atomically, samples and evaluations of
    later steps, and evaluations that the metrics do not mention. -1 removes everything. Logs and events stay: they
    record what happened. sampled: a later step whose samples exist already and stay; the files written when it was
    trained on are removed. Raises RunFailed if that cannot be done."""
    with _changing(run):
        for name in (METRICS, *(name for name in (TIMELINE, PROMPTS) if (run / name).exists())):
            _write_lines(run / name, [line for line in _read_lines(run / name, 0) if line["step"] <= step])
        evaluated = evaluated_steps(run)
        for subfolder in ("samples", "evaluations"):
            for path_step, path in _of_steps(run / subfolder):
                # After an interrupted evaluation, another number of workers would not overwrite all files.
                last = max(step, sampled) if subfolder == "samples" else step
                if path_step > last or (subfolder == "evaluations" and path_step not in evaluated):
                    _remove(path)
                elif path_step > step:
                    _remove(path, OF_TRAINING)
            for path in (run / subfolder).glob(".step-*.tmp"):  # unfinished writes of a killed run
                path.unlink()


def evaluated_steps(run: Path) -> set[int]:
    """Steps with an evaluation in metrics.jsonl; an interrupted evaluation may have left only a report."""
    return {line["step"] for line in metrics_of(run) if any(name.startswith("eval/") for name in line)}


def amend(run: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add metrics to the line of `step` in metrics.jsonl, atomically. Raises RunFailed if that cannot be done."""
    with _changing(run):
        lines = [line | finite(metrics) if line["step"] == step else line for line in _read_lines(run / METRICS, 0)]
        _write_lines(run / METRICS, lines)


def sync(run: Path, after: int) -> None:
    """Sync to disk what the controller recorded of the steps after `after`: a machine that goes down must not keep the
    checkpoint and lose the record. Samples need no sync: workers return them only after writing them to disk, as do the
    background writers of the rest of a step's folder. So this takes the same time for any number of workers and steps.
    """
    reports = [path for step, path in _of_steps(run / "evaluations") if step > after and path.suffix == ".json"]
    for path in (run / METRICS, run / TIMELINE, run / PROMPTS, *reports):
        if path.exists() or path.name not in (TIMELINE, PROMPTS):
            sync_file(path)
    for folder in (run, run / "samples", run / "evaluations"):
        sync_folder(folder)


@contextlib.contextmanager
def _changing(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"the record of {run} cannot be changed: {error.filename or run}: {error.strerror or error}",
            "free some space or fix the disk",
        ) from error


def _read_lines(path: Path, max_bytes: int = LINES_BYTES) -> list[dict[str, Any]]:
    """The lines of a file with a line a step. max_bytes: 0 is any number. Raises `UnfitFile`, and OSError if the file
    exists and cannot be read: it must not count as empty."""
    with contextlib.suppress(FileNotFoundError):
        return [line for line in read_objects(path, max_bytes) if isinstance(line.get("step"), int)]
    return []


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with replacing(path) as temporary:
        write_synced(temporary, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def _remove(path: Path, patterns: Sequence[str] = (*OF_SAMPLING, *OF_TRAINING)) -> None:
    """Remove a file of a step, or its folder except for files that are not ours. patterns: of those in the folder."""
    if not path.is_dir():
        return path.unlink() if OF_SAMPLING[0] in patterns else None
    for pattern in patterns:
        for file in path.glob(pattern):
            file.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def _of_steps(subfolder: Path) -> list[tuple[int, Path]]:
    """The entries of `subfolder` that belong to a step, with the step: `step-000012.json`, the folder `step-000012`,
    and, for runs of an older rlcli, `step-000012.rank-0.round-2.parquet`. Other files are ignored. Raises `UnfitFile`
    for a link: its target is not the run's."""
    step_paths = []
    with contextlib.suppress(OSError), os.scandir(subfolder) as entries:
        for entry in entries:
            if name := OF_STEP.match(entry.name):
                if entry.is_symlink():
                    raise UnfitFile(entry.path, "is a link", "put the file or folder itself there")
                step_paths.append((int(name[1]), subfolder / entry.name))
    return step_paths
