"""Logs to Trackio, in `trackio/` of the run folder, or as TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.runs.tracking.tracker import TrackedRun, TrackedSample, Tracker, require


class Trackio(Tracker):
    """Resumes by project and name."""

    @classmethod
    def check(cls) -> None:
        require("trackio")

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # read when it is imported
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.id or run.name,
            config=dict(run.config),
            resume="allow" if run.id else "never",
            embed=False,
        )
        self.id: str = self._run.name
        self._step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        import trackio

        facts = ("prompt_id", "sample", "score", "outcome", "answer", "response_tokens")
        traces = [
            trackio.Trace(
                [dict(message) for message in sample.messages], {fact: getattr(sample, fact) for fact in facts}
            )
            for sample in samples
        ]
        self._run.log({name: traces}, step=step)

    def image(self, name: str, file: Path) -> None:
        import trackio

        self._run.log({name: trackio.Image(str(file))}, step=self._step)

    def close(self, failed: bool) -> None:
        self._run.finish()
