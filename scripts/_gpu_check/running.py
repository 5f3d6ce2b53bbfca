"""Runs parts as processes, and kills them with all of their descendants when their deadline passes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _gpu_check.check import PROGRESS

MARK = "RLCLI_GPU_CHECK"
"""Environment variable of a part and of all its descendants, also of those that were reparented."""

POLL_S = 0.5
ENDING_S = 10.0
"""Seconds between SIGTERM at a part's deadline and SIGKILL."""
TAIL_LINES = 40

Result = dict[str, Any]


@dataclass
class Running:
    """A part that runs."""

    name: str
    """Name of the part."""
    command: Sequence[str]
    """Command line."""
    folder: Path
    """Folder of its log, its settings and its figures so far."""
    deadline_s: float
    """Maximum duration."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables."""
    show: Callable[[str], None] = print
    """Receives lines for the user."""

    def __post_init__(self) -> None:
        self._mark, self._shown = uuid.uuid4().hex, 0
        self._began, self._since = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._timed_out, self._leftovers, self._killed_at = False, 0, 0.0
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**self.environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> bool:
        """Show new progress, and enforce the deadline: SIGTERM, then SIGKILL. Returns True once the part has ended."""
        self._show_progress()
        if self._process.poll() is not None:
            self.kill()
            return True
        if self.seconds > self.deadline_s and not self._timed_out:
            self._timed_out, self._killed_at = True, time.monotonic() + ENDING_S
            self.show(f"{self.name}: {self.deadline_s:.0f} s are over; it is terminated")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        if self._timed_out and time.monotonic() > self._killed_at:
            self.kill()
        return False

    def kill(self) -> None:
        """Kill the part's process group, and descendants that have left it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + ENDING_S
        while (remaining := marked(self._mark)) and time.monotonic() < until:
            self._leftovers = max(self._leftovers, len(remaining))
            for pid in remaining:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def result(self) -> Result:
        """The part's result so far, finished or not."""
        record = self._written()
        code = self._process.poll()
        failed = [f"{check['name']}: {check['detail']}" for check in record["checks"] if not check["ok"]]
        if code is None:
            status, error = "running", ""
        elif self._timed_out:
            status, error = "timeout", f"killed after {self.deadline_s:.0f} s; its measurements until then are kept"
        elif code or failed:
            status, error = "failed", "; ".join(failed) or f"exit code {code}"
        else:
            status, error = "ok", ""
        tail = [] if status in ("ok", "running") else self._tail()
        return {
            **{"status": status, "error": error, "began": self._since, "seconds": round(self.seconds, 1)},
            **{"deadline_s": self.deadline_s, "log": self.log.name, "tail": tail, "leftovers": self._leftovers},
            **record,
        }

    def _written(self) -> Result:
        with contextlib.suppress(OSError, ValueError):
            record: Result = json.loads((self.folder / f"{self.name}.figures.json").read_text())
            return record
        return {"figures": [], "checks": [], "data": {}}

    def _tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return []

    def _show_progress(self) -> None:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._shown)
            complete_lines, _, _ = log.read().rpartition(b"\n")
            self._shown += len(complete_lines) + bool(complete_lines)
            for line in complete_lines.decode(errors="replace").splitlines():
                if line.startswith(PROGRESS):
                    self.show(line.removeprefix(PROGRESS))


def marked(mark: str) -> list[int]:
    """Live processes that have `mark` in their environment."""
    entry_text, pids = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if entry_text in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def start(
    name: str,
    settings: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    command: Sequence[str] = (sys.executable, "-P", "-m", "_gpu_check.child"),
    show: Callable[[str], None] = print,
) -> Running:
    """Start a part in a new folder. settings: those that `child.py` reads, without the paths that are made here."""
    work = folder / f"{name}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    figures = folder / f"{name}.figures.json"
    figures.unlink(missing_ok=True)
    settings_file = folder / f"{name}.given.json"
    settings_file.write_text(json.dumps({**settings, "part": name, "work": str(work), "result": str(figures)}))
    return Running(name, [*command, str(settings_file)], folder, float(settings["deadline_s"]), environment, show)


def clean(running: Running) -> None:
    """Remove the files that only the running part needed."""
    shutil.rmtree(running.folder / f"{running.name}.work", ignore_errors=True)
    for suffix in ("figures.json", "given.json"):
        (running.folder / f"{running.name}.{suffix}").unlink(missing_ok=True)
