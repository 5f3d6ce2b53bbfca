"""Parts as processes: started, watched, killed with all that they started when their deadline passes."""

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
"""In the environment of a part and of every process below it, whoever its parent has become."""

POLL_S = 0.5
ENDING_S = 10.0
"""Seconds that a part has to end by itself after its deadline, before it is killed."""
TAIL_LINES = 40

Result = dict[str, Any]


@dataclass
class Running:
    """A part that runs. deadline_s: seconds that it may take; below: the part's own folder, with its log, what it was
    given and its figures so far."""

    name: str
    command: Sequence[str]
    below: Path
    deadline_s: float
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    show: Callable[[str], None] = print

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
        return self.below / f"{self.name}.log"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> bool:
        """Show what is new; whether the part has ended. Past its deadline it is asked to end, and then killed."""
        self._show_progress()
        if self._process.poll() is not None:
            self.kill()
            return True
        if self.seconds > self.deadline_s and not self._timed_out:
            self._timed_out, self._killed_at = True, time.monotonic() + ENDING_S
            self.show(f"{self.name}: {self.deadline_s:.0f} s are over; it is ended")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        if self._timed_out and time.monotonic() > self._killed_at:
            self.kill()
        return False

    def kill(self) -> None:
        """Kill what is left of the part: its process group, and what has left that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + ENDING_S
        while (left := marked(self._mark)) and time.monotonic() < until:
            self._leftovers = max(self._leftovers, len(left))
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def result(self) -> Result:
        """What there is of it, finished or not."""
        found = self._written()
        code = self._process.poll()
        failed = [f"{check['name']}: {check['detail']}" for check in found["checks"] if not check["ok"]]
        if code is None:
            status, error = "running", ""
        elif self._timed_out:
            status, error = "timeout", f"killed after {self.deadline_s:.0f} s; what it had measured by then is kept"
        elif code or failed:
            status, error = "failed", "; ".join(failed) or f"exit code {code}"
        else:
            status, error = "ok", ""
        tail = [] if status in ("ok", "running") else self._tail()
        return {
            **{"status": status, "error": error, "began": self._since, "seconds": round(self.seconds, 1)},
            **{"deadline_s": self.deadline_s, "log": self.log.name, "tail": tail, "leftovers": self._leftovers},
            **found,
        }

    def _written(self) -> Result:
        with contextlib.suppress(OSError, ValueError):
            found: Result = json.loads((self.below / f"{self.name}.figures.json").read_text())
            return found
        return {"figures": [], "checks": [], "data": {}}

    def _tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return []

    def _show_progress(self) -> None:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._shown)
            whole, _, _ = log.read().rpartition(b"\n")
            self._shown += len(whole) + bool(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line.startswith(PROGRESS):
                    self.show(line.removeprefix(PROGRESS))


def marked(mark: str) -> list[int]:
    """Live processes that have `mark` in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def start(
    name: str,
    given: Mapping[str, Any],
    below: Path,
    environment: Mapping[str, str],
    command: Sequence[str] = (sys.executable, "-P", "-m", "_gpu_check.child"),
    show: Callable[[str], None] = print,
) -> Running:
    """Start a part in a new folder for its files. given: what `child.py` reads, less the paths that are made here."""
    work = below / f"{name}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    figures = below / f"{name}.figures.json"
    figures.unlink(missing_ok=True)
    written = below / f"{name}.given.json"
    written.write_text(json.dumps({**given, "part": name, "work": str(work), "result": str(figures)}))
    return Running(name, [*command, str(written)], below, float(given["deadline_s"]), environment, show)


def clean(running: Running) -> None:
    """Remove what only the running part needed."""
    shutil.rmtree(running.below / f"{running.name}.work", ignore_errors=True)
    for suffix in ("figures.json", "given.json"):
        (running.below / f"{running.name}.{suffix}").unlink(missing_ok=True)
