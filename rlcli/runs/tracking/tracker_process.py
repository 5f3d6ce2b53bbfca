"""The run's side of a tracker process: a queue, and a thread that waits instead of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

BEHIND = 256
"""Steps that may wait for a tracker; more are dropped, with a note."""


class TrackerProcess:
    """A tracker in a separate process. Only `join` ever waits.

    name: the tracker's. target: `module:class`. run: the fields of its TrackedRun, as JSON values. log: the file for
    its library's output; appended to. on_start: receives the run's id in the tracker, from a thread.
    """

    def __init__(
        self, name: str, target: str, run: Mapping[str, Any], log: Path, on_start: Callable[[str], None]
    ) -> None:
        self.name = name
        self._log = log
        self._on_start = on_start
        self._requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._notes: deque[str] = deque()
        self._process: subprocess.Popen[str] | None = None
        self._off = False
        self._reported_error = self._behind = False
        self._logged = self._stored = 0
        self._requests.put({"start": run})
        self._thread = threading.Thread(target=self._serve, args=(target,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._off:
            return
        self._logged += 1
        waiting = self._requests.qsize()
        if waiting >= BEHIND:
            if not self._behind:
                self._notes.append(f"{self.name} is {waiting} steps behind; from step {step} on it lacks some")
            self._behind = True
        else:
            self._requests.put({"log": {"step": step, "metrics": dict(metrics)}})

    def samples(self, step: int, evaluated: bool) -> None:
        """Make it read and send some samples of a step from the run folder. evaluated: those of its evaluation too."""
        self._request({"samples": {"step": step, "evaluated": evaluated}})

    def image(self, name: str, file: Path) -> None:
        self._request({"image": {"name": name, "file": str(file)}})

    def _request(self, request: dict[str, Any]) -> None:
        """Queue an optional request: dropped if the tracker is far behind."""
        if not self._off and self._requests.qsize() < BEHIND:
            self._requests.put(request)

    def finish(self, failed: bool) -> None:
        """Ask it to send the rest."""
        self._requests.put({"close": {"failed": failed}})

    def join(self, until: float) -> None:
        """Wait until it has finished, or else kill it at the time `until` (of time.monotonic)."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._off = True
            self._notes.append(f"{self.name} did not finish in time and was killed; it may lack {self._lacking} steps")
            self._kill()
            self._thread.join(5)
        elif self._lacking and not self._off:
            self._notes.append(f"{self.name} lacks {self._lacking} steps; metrics.jsonl has them all")

    @property
    def _lacking(self) -> int:
        return self._logged - self._stored

    def notes(self) -> list[str]:
        """The notes since the last call."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def _serve(self, target: str) -> None:
        try:
            self._open(target)
            while not self._off:
                request = self._requests.get()
                self._note_reply(request, self._ask(request))
                if "close" in request:
                    break
        except Exception as error:
            self._turn_off(f"for the rest of the run: {type(error).__name__}: {error}")
        finally:
            self._kill()

    def _open(self, target: str) -> None:
        # -P: files in the working directory must not shadow a library.
        command = [sys.executable, "-P", "-m", "rlcli.runs.tracking.tracker_main", target]
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )

    def _ask(self, request: dict[str, Any]) -> dict[str, str] | None:
        """Its reply, or None if it died."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=_plain) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        line = process.stdout.readline()
        reply: dict[str, str] | None = json.loads(line) if line.endswith("\n") else None
        if reply is not None and "close" in request:
            process.stdin.close()
            process.wait()  # its library may send more while it exits
        return reply

    def _note_reply(self, request: dict[str, Any], reply: dict[str, str] | None) -> None:
        if reply is None:
            self._turn_off(f"for the rest of the run: {self._death()}; see {self._log}")
        elif "error" in reply and "start" in request:
            self._turn_off(f"for this run: {reply['error']}")
        elif "error" in reply:
            if not self._reported_error:
                self._notes.append(f"{self.name} failed at {_described(request)}: {reply['error']}")
            self._reported_error = True
        elif "log" in request:
            self._stored += 1
        elif "start" in request:
            self._on_start(reply["id"])

    def _turn_off(self, why: str) -> None:
        if not self._off:
            self._off = True
            self._notes.append(f"{self.name} is off {why}")

    def _death(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {cause}"

    def _kill(self) -> None:
        """Kill the process and all processes in its session."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _described(request: Mapping[str, Any]) -> str:
    """The subject of a request, for a note.

    >>> _described({"log": {"step": 3}}), _described({"samples": {"step": 3}}), _described({"close": {"failed": False}})
    ('step 3', 'the samples of step 3', 'the end')
    """
    ((kind, arguments),) = request.items()
    of_step = {"log": "step", "samples": "the samples of step"}
    if kind in of_step:
        return f"{of_step[kind]} {arguments['step']}"
    return "the image" if kind == "image" else "the end"


def _plain(value: Any) -> object:
    """NumPy scalars and tensors of one element as Python numbers."""
    return value.item()
