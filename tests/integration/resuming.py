"""Train each case on one group of workers: whole and stopped by a signal; the first case and those that generate ahead
also killed. Stopped and killed runs resume from their checkpoints with newly built roles. Prints a JSON line per case:
its name and its duration in seconds.

    python tests/integration/resuming.py MODEL DATA OUT WORKERS CASE…

A case is a recipe with optional settings: `dapo,dynamic_sampling.oversample=2`. A case that is a folder is a stopped
run with another number of workers, which is resumed. The first case leaves such a run in the folder `moved`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catalog import sets_for

from rlcli.cluster.supervisor.stop_signals import StopOnSignal
from rlcli.config.load import Resolved, dump_toml, resolve
from rlcli.launch.launch import engine_spec, make_trainer, running_workers, worker_spec
from rlcli.launch.preflight import prepare
from rlcli.launch.resume import resumption
from rlcli.runs.checkpoint import Checkpoint
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking import open_trackers
from rlcli.runs.tracking.run_console import View
from rlcli.training.worker.calls import WorkerCalls
from rlcli.training.worker.worker_pools import WorkerPools

STEPS, STOP = 4, 2
MIXED = "data.mix=tokens"
"""A case with this setting is trained on two datasets."""
AHEAD = "async.staleness="
EVALUATED = ["evaluation.every=2", "evaluation.max_prompts=4"]


class Killed(Exception):
    """Stands for the death of the driver."""


class Watcher(View):
    """Ends the run as `ending` says: `stopped` by a signal in step 2, or `killed` after step 3."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending

    def phase(self, name: str, began_s: float = 0.0) -> None:
        super().phase(name, began_s)
        if self.ending == "stopped" and self._done == STOP - 1 and name == "update":
            os.kill(os.getpid(), signal.SIGINT)

    def step(self, metrics: Mapping[str, float]) -> None:
        super().step(metrics)
        if self.ending == "killed" and self._done == STOP + 1:
            raise Killed


def resolved(case: str, model: str, data: str, workers: int) -> Resolved:
    weighed = [{"path": f"{data}/train.parquet", "weight": 2.0}, {"path": f"{data}/test.parquet", "weight": 1.0}]
    path: Any = weighed if MIXED in case else data
    flags = {"model.path": model, "data.path": path, "train.steps": STEPS, "cluster.workers": workers}
    return resolve(case.partition(",")[0], flags, [*settings(case), f"evaluation.data={data}"])


def settings(case: str) -> list[str]:
    """`--set` arguments of a case."""
    recipe, *extra = case.split(",")
    return [*sets_for(recipe), *EVALUATED, f"checkpoint.every={STOP}", *extra]


def run(
    config: Resolved, groups: WorkerPools, run_folder: Path, view: View, checkpoint: Checkpoint | None = None
) -> None:
    ready = prepare(config.config)
    spec = worker_spec(ready.context, run_folder / "logs", groups.spec.group_id)
    groups.policy.call(WorkerCalls.build, spec)
    if groups.engines is not None:
        groups.engines.call(WorkerCalls.build, engine_spec(spec))
    with (
        RunFolder.resume(run_folder) if checkpoint else RunFolder.create(run_folder) as folder,
        view,
        StopOnSignal(lambda: None) as stop,
    ):
        folder.write_config(dump_toml(config))
        trackers = open_trackers((), folder, "", {}, view.note)
        try:
            trainer = make_trainer(ready, dataclasses.replace(groups, spec=spec), folder, trackers, view, stop)
            trainer.run(checkpoint)
        except Killed:
            # Afterwards the last checkpoint is known, and no write of it overlaps the next run.
            trainer.checkpointer.finish()
        finally:
            trackers.close()


def resume_run(groups: WorkerPools, folder: Path, workers: int) -> None:
    resumed = resumption(folder, None, {"cluster.workers": workers}, [], lambda note: None)
    assert resumed.step == STOP
    run(resumed.resolved, groups, folder, View(), resumed.checkpoint)


def main(model: str, data: str, output_folder: Path, workers: int, cases: list[str]) -> None:
    first = prepare(resolved(cases[0], model, data, workers).config)
    (output_folder / "logs").mkdir(parents=True)
    with running_workers(first, output_folder / "logs", on_phase=lambda name: None) as groups:
        for number, case in enumerate(cases):
            started = time.perf_counter()
            if Path(case).is_dir():
                resume_run(groups, Path(case), workers)
                continue
            config = resolved(case, model, data, workers)
            killed = number == 0 or AHEAD in case  # scripts/torture kills the others
            for ending in ("whole", "stopped", "killed") if killed else ("whole", "stopped"):
                folder = output_folder / str(number) / ending
                run(config, groups, folder, Watcher(ending))
                if ending == "stopped" and number == 0:
                    shutil.copytree(folder, folder.with_name("moved"), symlinks=True)
                if ending != "whole":
                    resume_run(groups, folder, workers)
            row = {"case": case, "seconds": time.perf_counter() - started}
            print(json.dumps(row), file=sys.__stdout__, flush=True)  # while Ray runs, sys.stdout leads to stderr


if __name__ == "__main__":
    model, data, output_folder, workers, *cases = sys.argv[1:]
    main(model, data, Path(output_folder), int(workers), cases)
