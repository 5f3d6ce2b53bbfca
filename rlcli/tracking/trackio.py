"""Logs to Trackio, in `trackio/` of the run folder, or as TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlcli.tracking.tracker import TrackedRun, Tracker, require


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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()
