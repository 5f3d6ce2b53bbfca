"""The profile of one step: the driver's phases and every rank's methods, operators and kernels, in one file."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypedDict

from rlcli.support.files import filled_path
from rlcli.training.listener import Listener
from rlcli.training.worker.calls import WorkerCalls, Workers

WARM = 2
"""Steps before the profiled one: in the first, caches fill and kernels compile."""
OURS = 0
"""The trace's thread for rlcli's phases and methods, shown above those of the process."""

Span = tuple[str, int, int]
"""Name, begin, end; in ns since 1970."""


class StepProfile(Listener):
    """Writes `step-N.json.gz` to `folder`, in Chrome's trace format. groups: name → workers. step: its number.

        with StepProfile(folder / "profile", {"rank": workers}, 3, print) as profile:
            profile.phase("generate", 3)      # begins to record
            profile.phase("update", 3)
            profile.phase("generate", 4)      # writes the file

    A file that cannot be written causes a note and does not stop the run. If a run takes a step back and repeats it,
    the first attempt is profiled.
    """

    def __init__(self, folder: Path, groups: Mapping[str, Workers], step: int, note: Callable[[str], None]) -> None:
        self.folder, self.groups, self.profiled, self.note = folder, groups, step, note
        self._spans: list[Span] = []
        self._doing: tuple[str, int] | None = None
        self._finished = False

    def phase(self, name: str, step: int) -> None:
        """The driver begins this phase, which ends the previous one."""
        if self._finished:
            return
        if self._doing is not None:
            self._spans.append((*self._doing, time.time_ns()))
            self._doing = None
            if step != self.profiled:
                self._finish()
        elif step == self.profiled and not self._spans:
            for group in self.groups.values():
                group.call(WorkerCalls.start_profile)
        if step == self.profiled:
            self._doing = (name, time.time_ns())

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.phase("", self.profiled + 1)

    def _finish(self) -> None:
        self._finished = True
        try:
            path = self._write()
        except OSError as error:
            self.note(f"the profile of step {self.profiled} could not be written: {error}")
        else:
            self.note(f"the profile of step {self.profiled} is in {path}: open it at https://ui.perfetto.dev")

    def _write(self) -> Path:
        with suppress(OSError):  # a rank that cannot write there reports why; all have to stop
            self.folder.mkdir(exist_ok=True)
        parts: dict[str, Path] = {}
        failed: list[str] = []
        for name, group in self.groups.items():
            pattern = f"{self.folder}/.{name}-{{rank}}.json"
            failed += [error for error in group.call(WorkerCalls.stop_profile, pattern) if error]
            parts |= {f"{name} {rank}": Path(filled_path(pattern, "rank", rank)) for rank in range(len(group))}
        if failed:
            raise OSError(failed[0])
        path = self.folder / f"step-{self.profiled}.json.gz"
        write_trace(path, self._spans, parts)
        for part in parts.values():
            part.unlink()
        return path


def profiled_step(first: int, last: int) -> int:
    """The step to profile of `first` to `last`: the third, or the last if there are fewer."""
    return min(first + WARM, last)


def write_trace(path: Path, driver: Sequence[Span], ranks: Mapping[str, Path]) -> None:
    """One trace with the driver's spans and each worker's output of `profiling.stop`, one process each."""
    start = min(begin for _, begin, _ in driver)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        trace = _Trace(file, start)
        trace.process("driver", "phases", driver)
        for name, part in ranks.items():
            profile = json.loads(part.read_text(encoding="utf-8"))
            processes = {profile["pid"]: trace.process(name, "methods", profile["spans"])}
            for event in profile["events"]:
                if event["pid"] not in processes:  # A kernel's process number is that of its GPU.
                    processes[event["pid"]] = trace.process(f"{name}, GPU {event['pid']}", "", [])
                trace.event(processes[event["pid"]], event)
        file.write("{}]}\n")


class TraceEvent(TypedDict):
    """Fields that an event of a trace has to have; those of torch's profiler have more."""

    name: str
    """Function or kernel that ran."""
    cat: str
    """Category, such as `kernel`."""
    tid: int | str
    """Thread, or stream of a GPU."""
    ts: int
    """Begin, in ns since 1970."""
    dur: int
    """Duration in ns."""


class _Trace:
    """Writes events, each followed by a comma. since: start of the time axis, ns since 1970."""

    def __init__(self, file: IO[str], start: int) -> None:
        self._file, self._since = file, start
        self._processes = 0

    def process(self, name: str, ours: str, spans: Iterable[Span]) -> int:
        """Add a process with `spans` on a thread called `ours`; returns its number."""
        self._processes += 1
        number = self._processes
        self._line({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        self._line({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        if ours:
            self._line({"ph": "M", "name": "thread_name", "pid": number, "tid": OURS, "args": {"name": ours}})
        for label, begin, end in spans:
            self.event(number, {"name": label, "cat": "rlcli", "tid": OURS, "ts": begin, "dur": end - begin})
        return number

    def event(self, process: int, event: TraceEvent) -> None:
        times = {"ts": (event["ts"] - self._since) / 1000, "dur": event["dur"] / 1000}
        self._line({**event, "ph": "X", "pid": process, **times})

    def _line(self, event: Mapping[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")
