"""Logs to TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.runs.tracking.tracker import TrackedRun, TrackedSample, Tracker, require


class TensorBoard(Tracker):
    """Uses TensorBoard's own writer: torch's would import torch needlessly."""

    @classmethod
    def check(cls) -> None:
        require("tensorboard")

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._step = 0
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if run.resumed_at is not None:
            # Discards later steps of earlier event files.
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.resumed_at + 1, session_log=session))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._step = step
        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        texts = [f"**{literal(sample.title)}**\n\n{block(sample.conversation)}".encode() for sample in samples]
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
        tensor = TensorProto(dtype=DT_STRING, string_val=texts, tensor_shape=shape)
        metadata = create_summary_metadata(display_name=name, description="")
        self._add(step, [Summary.Value(tag=name, tensor=tensor, metadata=metadata)])

    def image(self, name: str, file: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = file.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # of its first chunk
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._add(self._step, [Summary.Value(tag=name, image=image)])

    def _add(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def block(text: str) -> str:
    """Text that TensorBoard, which shows Markdown, shows as it is.

    >>> block("# 1\\n*")
    '    # 1\\n    *'
    """
    return "\n".join(f"    {line}" for line in text.splitlines())


def literal(text: str) -> str:
    """The same for a text within a line.

    >>> literal("a*b")
    'a\\\\*b'
    """
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", text)
