"""Put a run together: cluster, workers, trainer; and take it apart again, whatever happens."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import SetupError
from rlcli.rollout.engine import Sampling, shared_memory_prefix
from rlcli.trainer.evaluate import EvalReport, evaluate
from rlcli.trainer.preflight import Prepared
from rlcli.trainer.run_folder import RunFolder
from rlcli.trainer.stop import StopOnSignal, ignoring_signals
from rlcli.trainer.tracking import Trackers
from rlcli.trainer.trainer import RunResult, Trainer
from rlcli.trainer.view import View
from rlcli.workers.cluster import Pool, ray_session, start_group
from rlcli.workers.group import WorkerGroup
from rlcli.workers.worker import Worker, WorkerSpec


@contextmanager
def running_workers(prepared: Prepared, logs: Path, *, train: bool, view: View) -> Iterator[WorkerGroup]:
    """Ray, the actors, their process group and their roles; all of it is gone when the block ends."""
    config = prepared.config
    spec = WorkerSpec(
        config=config,
        device=prepared.device,
        dtype=prepared.dtype,
        train=train,
        adapter=prepared.adapter,
        logs=str(logs.resolve()),
        max_length=prepared.max_length,
        kv_cache_bytes=prepared.kv_cache_bytes,
        scoring_processes=prepared.scoring_processes,
        verifiers=prepared.verifiers,
        group_id=uuid.uuid4().hex[:8],
    )
    view.phase("start Ray")
    with ray_session(config.cluster.address, config.cluster.workers):
        pool = Pool(config.cluster.workers, prepared.device, prepared.threads)
        workers = start_group(Worker, pool, logs.resolve(), spec)
        failed = True
        try:
            view.phase("start workers")
            workers.join(*workers.meeting_point())
            if train:
                check_shared(logs, len(workers))
            view.phase("load model")
            workers.build()
            yield workers
            failed = False
        finally:
            with ignoring_signals():
                # After a failure the others may hang in a collective: there is nothing left to ask them.
                workers.kill() if failed else workers.close()
                # Of workers that were killed on this machine; where they ran on others it stays until reboot.
                for left in Path("/dev/shm").glob(f"{shared_memory_prefix(spec.group_id)}*"):
                    shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def launch(prepared: Prepared, folder: RunFolder, trackers: Trackers, view: View) -> RunResult:
    """Train. The folder's lock and the trackers are the caller's to close."""
    with (
        StopOnSignal(lambda: view.note("finishing this step, then leaving; once more to leave at once")) as stop,
        running_workers(prepared, folder.logs, train=True, view=view) as workers,
    ):
        trainer = Trainer(
            prepared.config,
            prepared.dtype,
            prepared.prompts,
            prepared.held_out,
            workers,
            folder,
            trackers,
            view,
            stop,
        )
        return trainer.run()


def check_shared(logs: Path, workers: int) -> None:
    """Workers on other machines write logs, samples and checkpoints to the run folder too: is it the same one?"""
    for rank in range(workers):
        if not (logs / f"rank-{rank}.log").exists():
            raise SetupError(
                f"worker {rank} writes to {logs} on its own machine, and this one does not see it",
                "give --out on a file system that all machines of the cluster share",
            )


def launch_evaluation(prepared: Prepared, *, logs: Path, save_as: str, view: View) -> EvalReport:
    """Evaluate `prepared.config.model.path` on `prepared.prompts`, with engines alone."""
    config = prepared.config
    with (
        StopOnSignal(lambda: None),
        running_workers(prepared, logs, train=False, view=view) as workers,
    ):
        view.phase("evaluate")
        return evaluate(
            workers,
            prepared.prompts,
            samples=config.evaluation.samples,
            sampling=Sampling(config.evaluation.temperature, config.rollout.max_response_tokens),
            seed=config.train.seed,
            tensor_parallel=config.rollout.tensor_parallel,
            save_as=save_as,
            on_progress=view.progress,
        )
