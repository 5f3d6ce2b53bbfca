"""The profile of a worker in one step: its methods by name, and torch's operators and kernels within them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.cluster import watchdog
from rlcli.support.machine.gpus import gpu_available

if TYPE_CHECKING:
    from torch.profiler import profile

MOST_EVENTS = 20_000
"""Number of events kept of one recording: the longest."""
RECORD_S = 5.0
"""Seconds of a method that are recorded in detail: a long generation repeats itself."""
RECORDED_CALLS = 2
"""Calls of each method recorded in detail. (Optimizer steps are as many as there are minibatches.)"""

Event = dict[str, Any]
"""name, cat, pid, tid as torch gives them; ts and dur in ns, ts since 1970."""


class _Recording:
    """The recording of this process, from `start` to `stop`. spans: (name, begin, end) in ns since 1970."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int]] = []
        self._done: list[profile] = []
        self._depth = 0
        self._calls: Counter[str] = Counter()
        self._profiler: profile | None = None
        self._until = 0.0
        self._thread = 0
        self._failed: Exception | None = None
        self._start_profiler()  # The first one takes a while to find the available tracers.
        self._stop_profiler()
        self._done.clear()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._depth += 1
        if self._depth == 1:
            self._calls[name] += 1
            if self._calls[name] <= RECORDED_CALLS:
                self._start_profiler()
        began = time.time_ns()
        try:
            yield
        finally:
            self.spans.append((name, began, time.time_ns()))
            self._depth -= 1
            if self._depth == 0:
                self._stop_profiler()

    def tick(self) -> None:
        # The profiler must end in the thread that started it.
        if time.monotonic() > self._until and threading.get_ident() == self._thread:
            self._stop_profiler()

    def _start_profiler(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = [ProfilerActivity.CUDA] if gpu_available() else []
        with self._keeping_error():
            profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
            profiler.start()
            self._profiler = profiler
        self._until, self._thread = time.monotonic() + RECORD_S, threading.get_ident()

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with self._keeping_error():
                profiler.stop()
                self._done.append(profiler)

    @contextlib.contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep an error of torch's profiler, which raises many kinds, so that the profiled code runs on: `events`
        raises it."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error

    def events(self) -> list[Event]:
        """torch's events. (Exported only now, as this takes as long as the profiled code.) Raises `OSError` for any
        error of torch's profiler."""
        events: list[Event] = []
        with self._keeping_error(), tempfile.TemporaryDirectory() as folder:
            for number, profiler in enumerate(self._done):
                file = Path(folder) / f"{number}.json"
                profiler.export_chrome_trace(str(file))
                events += _longest_events(json.loads(file.read_text(encoding="utf-8", errors="replace")))
        if self._failed is not None:
            why = f"{type(self._failed).__name__}: {self._failed}"
            raise OSError(f"torch's profiler failed: {why}") from self._failed
        return events


_recording: _Recording | None = None


def start() -> None:
    """Record from now on."""
    global _recording
    _recording = _Recording()
    watchdog.listeners.append(_recording.tick)


def stop(path: Path) -> None:
    """Stop the recording, and write it to `path`, as `{"pid": …, "spans": […], "events": […]}`. Raises `OSError` if
    that fails, also in torch's profiler."""
    global _recording
    recording, _recording = _recording, None
    assert recording is not None, "no recording was started"
    watchdog.listeners.remove(recording.tick)
    profile = {"pid": os.getpid(), "spans": recording.spans, "events": recording.events()}
    path.write_text(json.dumps(profile), encoding="utf-8")


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Record the block under this name, with torch's details unless it is nested in another. Costs nothing without a
    recording."""
    with _recording.span(name) if _recording is not None else contextlib.nullcontext():
        yield


def _longest_events(trace: dict[str, Any]) -> list[Event]:
    """The longest events of a torch trace."""
    base = trace.get("baseTimeNanoseconds", 0)
    work = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
    work = sorted(work, key=lambda event: event["dur"], reverse=True)[:MOST_EVENTS]
    # As µs since 1970 a double is off by a quarter of one, and operators would no longer nest.
    return [
        {name: event.get(name, "") for name in ("name", "cat", "pid", "tid")}
        | {"ts": base + round(event["ts"] * 1000), "dur": round(event["dur"] * 1000)}
        for event in work
    ]
