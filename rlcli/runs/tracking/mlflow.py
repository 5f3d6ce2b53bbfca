"""Logs to MLflow, at MLFLOW_TRACKING_URI, else in the run folder: mlflow/mlflow.db."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.config.recipes import flatten
from rlcli.runs.tracking.tracker import TrackedRun, TrackedSample, Tracker, require


class MLflow(Tracker):
    """Uses only the client: MLflow's active run is not needed here, and would monitor the process."""

    @classmethod
    def check(cls) -> None:
        require("mlflow")

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=_address(run))
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project, _artifacts(run))
        )
        self.id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        parameters = [Param(name, str(value)) for name, value in flatten(run.config).items()]
        for first in range(0, len(parameters), 100):  # the limit per call
            self._client.log_batch(self.id, params=parameters[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(allowed(name), value, now, step) for name, value in metrics.items()])

    def samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        texts = [f"{sample.title}\n\n{sample.conversation}\n" for sample in samples]
        self._client.log_text(self.id, f"\n{'─' * 80}\n\n".join(texts), f"{name}/step-{step:06d}.txt")

    def image(self, name: str, file: Path) -> None:
        self._client.log_artifact(self.id, str(file))

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


def _address(run: TrackedRun) -> str:
    if address := os.environ.get("MLFLOW_TRACKING_URI"):
        return address
    (run.folder / "mlflow").mkdir(exist_ok=True)
    return f"sqlite:///{run.folder / 'mlflow' / 'mlflow.db'}"


def _artifacts(run: TrackedRun) -> str | None:
    """Address of the run's files, instead of a folder in the working directory; None: the server's default."""
    return None if os.environ.get("MLFLOW_TRACKING_URI") else (run.folder / "mlflow" / "artifacts").as_uri()


def allowed(name: str) -> str:
    """A metric's name with the characters that MLflow allows.

    >>> allowed("eval/pass@1")
    'eval/pass_1'
    """
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
