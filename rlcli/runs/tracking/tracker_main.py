"""The process of one tracker: python -m rlcli.runs.tracking.tracker_main MODULE:CLASS.

It reads requests as JSON lines from standard input and answers each with one line: {} or {"id": …}, or {"error": …}.
Output of the tracker's library goes to standard error, which is a file in the run's logs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TextIO

from rlcli.runs.tracking.tracker import TrackedRun, Tracker
from rlcli.support.redact import redact_output

CLOSE_S = 90
"""Maximum seconds that this process lives after a close request, or after the run is gone: somewhat longer than the run
waits for it, so that the run reports a timeout."""


def main(target: str) -> None:
    requests, replies = _private_pipes()
    redact_output()
    # Ctrl-C and SIGTERM are for the run; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = _Server(target)
    for line in requests:
        reply = server.answer(json.loads(line))
        try:
            print(json.dumps(reply), file=replies, flush=True)
        except BrokenPipeError:
            break
    if not server.closed:  # the run was killed
        server.answer({"close": {"failed": True}})


class _Server:
    """Holds the tracker and answers the requests to it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._tracker: Tracker | None = None
        self._folder = Path()
        self.closed = False

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        ((kind, arguments),) = request.items()
        handlers: dict[str, Callable[..., dict[str, str]]] = {
            "start": self._start,
            "log": self._log,
            "samples": self._samples,
            "image": self._image,
            "close": self._close,
        }
        try:
            return handlers[kind](**arguments)
        except Exception as error:
            traceback.print_exc()
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())}

    def _start(
        self, folder: str, project: str, config: dict[str, Any], id: str, resumed_at: int | None
    ) -> dict[str, str]:
        tracker_class: type[Tracker] = EntryPoint("tracker", self._target, "rlcli.trackers").load()
        self._folder = Path(folder)
        self._tracker = tracker_class(TrackedRun(self._folder, project, config, id, resumed_at))
        return {"id": self._tracker.id}

    def _log(self, step: int, metrics: dict[str, float]) -> dict[str, str]:
        assert self._tracker is not None
        self._tracker.log(step, metrics)
        return {}

    def _samples(self, step: int, evaluated: bool) -> dict[str, str]:
        if receive := self._optional("samples"):
            from rlcli.runs.tracking.tracked_samples import tracked_samples

            for name in ("samples", "evaluations") if evaluated else ("samples",):
                if samples := tracked_samples(self._folder / name, step):
                    receive(step, "eval/samples" if name == "evaluations" else name, samples)
        return {}

    def _image(self, name: str, file: str) -> dict[str, str]:
        if receive := self._optional("image"):
            receive(name, Path(file))
        return {}

    def _optional(self, name: str) -> Callable[..., None] | None:
        """An optional method of the tracker; None if it does not implement it."""
        method: Callable[..., None] | None = getattr(self._tracker, name, None)
        return None if method is None or getattr(method, "__func__", method) is getattr(Tracker, name) else method

    def _close(self, failed: bool) -> dict[str, str]:
        self.closed = True
        signal.alarm(CLOSE_S)  # kills this process even if the library hangs, also in its exit handlers
        if self._tracker is not None:
            self._tracker.close(failed)
        return {}


def _private_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output, moved to descriptors that no library uses."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    main(sys.argv[1])
