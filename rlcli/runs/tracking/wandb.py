"""Logs to Weights & Biases. WANDB_MODE, WANDB_ENTITY and its other variables apply."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.runs.tracking.tracker import TrackedRun, TrackedSample, Tracker, require, require_key

COLUMNS = ("prompt_id", "sample", "score", "outcome", "answer", "response_tokens", "conversation")


class Wandb(Tracker):
    """A resumed run keeps the first values of a repeated step: wandb takes steps in ascending order only."""

    @classmethod
    def check(cls) -> None:
        require("wandb")
        if os.environ.get("WANDB_MODE", "online") == "online":
            import wandb

            require_key("wandb", bool(wandb.login(prompt=False, verify=False)))

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run.id or None,
            resume="allow" if run.id else None,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=60),
        )
        self.id: str = self._run.id
        self._step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        import wandb

        rows = [[step, *(getattr(sample, column) for column in COLUMNS)] for sample in samples]
        self._run.log({name: wandb.Table(columns=["step", *COLUMNS], data=rows)}, step=step)

    def image(self, name: str, file: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(file))}, step=self._step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
