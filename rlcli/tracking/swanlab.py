"""Logs to SwanLab. SWANLAB_MODE (online, offline, local) and its other variables apply."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlcli.tracking.tracker import TrackedRun, Tracker, require, require_key


class SwanLab(Tracker):
    """Resuming needs the server: in offline and local mode a resumed run gets a second folder with the same id."""

    @classmethod
    def check(cls) -> None:
        require("swanlab")
        if os.environ.get("SWANLAB_MODE", "online") == "online":
            import swanlab

            require_key("swanlab", bool(swanlab.Settings().api_key))

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(run.folder / "swanlab"),
            config=dict(run.config),
            **({"id": run.id, "resume": "allow"} if run.id else {}),
        )
        self.id: str = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(*(("crashed", "the run failed") if failed else ()))
