"""Logs to TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlcli.tracking.tracker import TrackedRun, Tracker, require


class TensorBoard(Tracker):
    """Uses TensorBoard's own writer: torch's would import torch needlessly."""

    @classmethod
    def check(cls) -> None:
        require("tensorboard")

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.resumed_at is not None:
            # Discards later steps of earlier event files.
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.resumed_at + 1, session_log=session))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()
