"""Logs to SwanLab. SWANLAB_MODE (online, offline, local) and its other variables apply."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.runs.tracking.tracker import TrackedRun, TrackedSample, Tracker, require, require_key


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
        self._step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        import swanlab

        texts = [swanlab.Text(sample.conversation, caption=sample.title) for sample in samples]
        self._run.log({name: texts}, step=step)

    def image(self, name: str, file: Path) -> None:
        import swanlab

        self._run.log({name: swanlab.Image(str(file))}, step=self._step)

    def close(self, failed: bool) -> None:
        self._run.finish(*(("crashed", "the run failed") if failed else ()))
