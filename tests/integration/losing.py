"""Let one small run fail on a full disk, twice, and on a damaged checkpoint, and resume it after each. Prints a JSON
line per start: the run's notes, its error, and the checkpoints in its folder.

    python tests/integration/losing.py MODEL DATA WHOLE DISK RUN

WHOLE becomes the folder of an uninterrupted run. The other lies in DISK, an empty folder on a small disk of its own,
and is copied to RUN at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from resuming import resolved, run

from rlcli.errors import RlcliError
from rlcli.launch.launch import running_workers
from rlcli.launch.preflight import prepare
from rlcli.launch.resume import resumption
from rlcli.runs.checkpoint import Checkpoints
from rlcli.runs.tracking.run_console import View
from rlcli.training.worker.worker_pools import WorkerPools

CASE = "grpo,checkpoint.every=1"
SOME_BYTES = 1 << 20
"""Room for a step's samples, but for no checkpoint."""


class Filler(View):
    """Leaves `room` bytes of the disk when `step` steps are done, their checkpoint is written, and `phase` begins.
    noted: the notes of the run."""

    def __init__(self, disk: Path, step: int = 0, phase: str = "", room: int = 0) -> None:
        super().__init__()
        self.noted: list[str] = []
        self._disk, self._at, self._room = disk, (step, phase), room

    def phase(self, name: str, began_s: float = 0.0) -> None:
        super().phase(name, began_s)
        if (self._done, name) == self._at:
            while not [*self._disk.glob(f"run/checkpoints/*step-{self._done:06d}*/policy/.metadata")]:
                time.sleep(0.01)
            disk = os.statvfs(self._disk)
            with (self._disk / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - self._room)
        if self._room and self._done == self._at[0] + 1 and name == "plan":
            # The next step's records need the space that the failed checkpoint frees.
            while [*self._disk.glob(f"run/checkpoints/.step-{self._done:06d}.partial/policy/__*")]:
                time.sleep(0.01)

    def note(self, text: str) -> None:
        super().note(text)
        self.noted.append(text)


def run_or_resume(groups: WorkerPools, run_folder: Path, case: str, view: Filler) -> None:
    """Start or resume the run, and print its outcome."""
    (run_folder.parent / "filler").unlink(missing_ok=True)
    error = ""
    try:
        if (run_folder / "config.toml").exists():
            resumed = resumption(run_folder, None, {}, [], view.noted.append)
            run(resumed.resolved, groups, run_folder, view, resumed.checkpoint)
        else:
            run(resolved(case, *sys.argv[1:3], workers=1), groups, run_folder, view)
    except (RlcliError, OSError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    checkpoints = sorted(path.name for path in (run_folder / "checkpoints").iterdir())
    newest = Checkpoints(run_folder / "checkpoints", keep=1).newest(view.noted.append)
    row = {"noted": view.noted, "error": error, "left": checkpoints, "newest": newest and newest.step}
    print(json.dumps(row), file=sys.__stdout__, flush=True)  # while Ray runs, sys.stdout leads to stderr


def flip_a_byte(checkpoint: Path) -> None:
    """In place: the disk is full, and another writer may take the space that rewriting the file would free."""
    file = max(checkpoint.glob("policy/*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        byte = content.read(1)[0]
        content.seek(-1, os.SEEK_CUR)
        content.write(bytes([byte ^ 1]))


def main(model: str, data: str, uninterrupted: Path, disk: Path, copy: Path) -> None:
    first = prepare(resolved(CASE, model, data, workers=1).config)
    logs = uninterrupted.with_name("logs")
    logs.mkdir(parents=True)
    with running_workers(first, logs, on_phase=lambda name: None) as groups:
        run_or_resume(groups, uninterrupted, CASE, Filler(disk))
        run_folder = disk / "run"
        run_or_resume(groups, run_folder, CASE, Filler(disk, step=2, phase="plan", room=SOME_BYTES))
        run_or_resume(groups, run_folder, CASE, Filler(disk, step=2, phase="update"))
        flip_a_byte((run_folder / "checkpoints" / "latest").resolve())
        run_or_resume(groups, run_folder, CASE, Filler(disk))
        shutil.copytree(run_folder, copy, symlinks=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(Path, sys.argv[3:]))
