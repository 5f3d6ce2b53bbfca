"""Let one small run meet a full disk, twice, and a damaged checkpoint, and go on after each. Prints a JSON line for
each beginning: what it noted, how it ended, and the checkpoints that there are.

    python tests/integration/losing.py MODEL DATA WHOLE DISK RUN

WHOLE becomes the folder of an uninterrupted run. The other lies in DISK, an empty folder on a small disk of its own,
and is copied to RUN in the end.
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
    noted: what the run told."""

    def __init__(self, disk: Path, step: int = 0, phase: str = "", room: int = 0) -> None:
        super().__init__()
        self.noted: list[str] = []
        self._disk, self._at, self._room = disk, (step, phase), room

    def phase(self, name: str) -> None:
        super().phase(name)
        if (self._done, name) == self._at:
            while not [*self._disk.glob(f"run/checkpoints/*step-{self._done:06d}*/policy/.metadata")]:
                time.sleep(0.01)
            disk = os.statvfs(self._disk)
            with (self._disk / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - self._room)
        if self._room and self._done == self._at[0] + 1 and name == "plan":
            # The next step's records find the room that the failed checkpoint gave back.
            while [*self._disk.glob(f"run/checkpoints/.step-{self._done:06d}.partial/policy/__*")]:
                time.sleep(0.01)

    def note(self, text: str) -> None:
        super().note(text)
        self.noted.append(text)


def tell(groups: WorkerPools, out: Path, case: str, view: Filler) -> None:
    """Begin, or go on, and print what came of it."""
    (out.parent / "filler").unlink(missing_ok=True)
    error = ""
    try:
        if (out / "config.toml").exists():
            resumed = resumption(out, None, {}, [], view.noted.append)
            run(resumed.resolved, groups, out, view, resumed.checkpoint)
        else:
            run(resolved(case, *sys.argv[1:3], workers=1), groups, out, view)
    except (RlcliError, OSError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    newest = Checkpoints(out / "checkpoints", keep=1).newest(view.noted.append)
    row = {"noted": view.noted, "error": error, "left": left, "newest": newest and newest.step}
    print(json.dumps(row), file=sys.__stdout__, flush=True)  # while Ray runs, sys.stdout leads to stderr


def flip_a_byte(checkpoint: Path) -> None:
    """In place: the disk is full, and what a new file's truncation frees, another writer may take."""
    file = max(checkpoint.glob("policy/*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        byte = content.read(1)[0]
        content.seek(-1, os.SEEK_CUR)
        content.write(bytes([byte ^ 1]))


def main(model: str, data: str, whole: Path, disk: Path, copy: Path) -> None:
    first = prepare(resolved(CASE, model, data, workers=1).config)
    logs = whole.with_name("logs")
    logs.mkdir(parents=True)
    with running_workers(first, logs, on_phase=lambda name: None) as groups:
        tell(groups, whole, CASE, Filler(disk))
        out = disk / "run"
        tell(groups, out, CASE, Filler(disk, step=2, phase="plan", room=SOME_BYTES))
        tell(groups, out, CASE, Filler(disk, step=2, phase="update"))
        flip_a_byte((out / "checkpoints" / "latest").resolve())
        tell(groups, out, CASE, Filler(disk))
        shutil.copytree(out, copy, symlinks=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(Path, sys.argv[3:]))
