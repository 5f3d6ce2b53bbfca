"""Put a run together: cluster, workers, trainer; and take it apart again, whatever happens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcli import attempt
from rlcli.config.schema import RunConfig
from rlcli.errors import SetupError
from rlcli.rollout.engine import Sampling, shared_memory_prefix
from rlcli.trainer.ahead import GONE_S, in_background
from rlcli.trainer.checkpoint import Checkpoint
from rlcli.trainer.evaluate import EvalReport, evaluate
from rlcli.trainer.failing import leaving_at_once
from rlcli.trainer.preflight import Prepared
from rlcli.trainer.profiling import StepProfile, profiled_step
from rlcli.trainer.run_folder import RunFolder
from rlcli.trainer.starting import StartReport
from rlcli.trainer.stop import StopOnSignal, ignoring_signals
from rlcli.trainer.tracking import Trackers
from rlcli.trainer.trainer import RunResult, StopRequest, Trainer
from rlcli.trainer.view import View
from rlcli.workers import startup
from rlcli.workers.cluster import policy_pool
from rlcli.workers.early import EarlyStart
from rlcli.workers.group import WorkerGroup
from rlcli.workers.placing import Pool, reserve, start_group
from rlcli.workers.sentinel import OnLost, leave
from rlcli.workers.spec import WorkerSpec
from rlcli.workers.worker import Worker

POLICY, CRITIC, ENGINES = "rank", "critic", "engine"
"""What the logs of each pool's workers are called."""
KEYS = {POLICY: "cluster.workers", CRITIC: "critic.workers", ENGINES: "rollout.workers"}


@dataclass(frozen=True)
class Groups:
    """The workers of a run. policy: those that train, and generate unless `engines` do. critic: those of a value model
    that is placed apart; engines: those of engines that are. spec: what the policy's workers were built from."""

    policy: WorkerGroup
    critic: WorkerGroup | None
    engines: WorkerGroup | None
    spec: WorkerSpec


@contextmanager
def running_workers(
    prepared: Prepared,
    logs: Path,
    *,
    train: bool,
    on_phase: Callable[[str], None],
    on_lost: OnLost = leave,
    early: EarlyStart | None = None,
) -> Iterator[Groups]:
    """Ray, the actors, their process groups and their roles; all of it is gone when the block ends. early: what of it
    has begun."""
    config, early = prepared.config, early or EarlyStart()
    spec = worker_spec(prepared, logs, train=train, group_id=attempt.group_id())
    on_phase("start Ray")
    started: dict[str, WorkerGroup] = {}
    with early.session(config, on_lost):
        failed = True
        try:
            startup.done("ray")
            on_phase("start workers")
            for own, pool, held in _held(config, spec, prepared.device, early):
                how: dict[str, Any] = {"name": own.name, "stall_s": config.fault_tolerance.stall_s, **held}
                started[own.name] = group = start_group(Worker, pool, logs.resolve(), own, **how)
                group.join(*group.meeting_point())
                if train:
                    check_shared(logs, own.name, pool.workers)
            startup.done("workers")
            on_phase("load model")
            build(list(started.values()))
            startup.done("built")
            yield Groups(started[POLICY], started.get(CRITIC), started.get(ENGINES), spec)
            failed = False
        finally:
            with ignoring_signals():
                for group in started.values():
                    # After a failure the others may hang in a collective: there is nothing left to ask them.
                    group.kill() if failed else group.close()
                # Of workers that were killed on this machine; where they ran on others it stays until reboot.
                for left in Path("/dev/shm").glob(f"{shared_memory_prefix(spec.group_id)}*"):
                    shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def build(groups: Sequence[WorkerGroup]) -> None:
    """Have every group build its roles, all at the same time. Where one fails, none goes on."""
    first, *others = groups
    building = [in_background(group.build) for group in others]
    try:
        first.build()
        for one in building:
            one.result()
    except BaseException:
        for group in groups:
            group.kill()
        wait(building, GONE_S)  # their threads, before Ray is shut down under them
        raise


def worker_spec(prepared: Prepared, logs: Path, *, train: bool, group_id: str) -> WorkerSpec:
    """What the policy's workers are built from: with train=False engines alone."""
    return WorkerSpec(
        config=prepared.config,
        device=prepared.device,
        dtype=prepared.dtype,
        roles=prepared.roles if train else frozenset({"engine"}),
        adapter=prepared.adapter,
        logs=str(logs.resolve()),
        name=POLICY,
        max_length=prepared.max_length,
        kv_cache_bytes=prepared.kv_cache_bytes,
        scoring_processes=prepared.scoring_processes,
        verifiers=prepared.verifiers,
        group_id=group_id,
        stop_token_ids=tuple(prepared.stop_tokens),
        thinking=prepared.thinking,
        hub_token=os.environ.get("HF_TOKEN", ""),
    )


def _held(
    config: RunConfig, spec: WorkerSpec, device: str, early: EarlyStart
) -> Iterator[tuple[WorkerSpec, Pool, dict[str, Any]]]:
    """Each pool, what its workers are built from, and what `start_group` is told of the places that it has: of all
    pools before the first of them starts."""
    first = policy_pool(config, device)
    apart = {CRITIC: 1, ENGINES: config.rollout.tensor_parallel}
    pools = [
        (own, replace(first, workers=size, key=KEYS[own.name], engine=apart.get(own.name, first.engine)))
        for size, own in _pools(config, spec)
    ]
    placed = early.take(first)
    there = [first] if placed is not None else []
    left = [pool for _, pool in pools[len(there) :]]
    places = iter(reserve(left, beside=there) if left else [])
    for own, pool in pools:
        taken = own.name == POLICY and placed is not None
        yield own, pool, {"placed": placed} if taken else {"places": next(places)}


def _pools(config: RunConfig, spec: WorkerSpec) -> list[tuple[int, WorkerSpec]]:
    """How many workers each pool has, and what they are built from."""
    pools = [(config.cluster.workers, spec)]
    if config.critic.workers:
        pools.append((config.critic.workers, replace(spec, roles=frozenset({"critic"}), name=CRITIC)))
    if config.rollout.workers:
        pools.append((config.rollout.workers, engine_spec(spec)))
    return pools


def engine_spec(spec: WorkerSpec) -> WorkerSpec:
    """What engines' own workers are built from, beside a policy's of `spec`."""
    return replace(spec, roles=frozenset({"engine"}), name=ENGINES, weights_follow=True)


def launch(
    prepared: Prepared,
    folder: RunFolder,
    trackers: Trackers,
    view: View,
    checkpoint: Checkpoint | None = None,
    *,
    profile: bool = False,
    early: EarlyStart | None = None,
) -> RunResult:
    """Train, from a checkpoint of the run if one is given. The folder's lock and the trackers are the caller's to
    close. profile: one step, to a file in the folder."""
    step = checkpoint.step if checkpoint else 0

    def on_phase(name: str) -> None:
        view.phase(name)
        folder.at(step, name)

    folder.event("resumed" if checkpoint else "started", step=step, of=prepared.config.train.steps)
    with (
        StopOnSignal(lambda: view.note("finishing this step, then leaving; once more to leave at once")) as stop,
        running_workers(
            *(prepared, folder.logs),
            train=True,
            on_phase=on_phase,
            on_lost=leaving_at_once(folder.path),
            early=early,
        ) as groups,
    ):
        return train(prepared, groups, folder, trackers, view, stop, checkpoint, profile=profile)


def train(
    prepared: Prepared,
    groups: Groups,
    folder: RunFolder,
    trackers: Trackers,
    view: View,
    stop: StopRequest,
    checkpoint: Checkpoint | None = None,
    *,
    profile: bool = False,
) -> RunResult:
    """Train on workers that run already."""
    trainer = Trainer(
        prepared.config,
        prepared.dtype,
        prepared.prompts,
        prepared.held_out,
        groups.policy,
        groups.critic,
        groups.engines,
        folder,
        trackers,
        view,
        stop,
    )
    trainer.listeners.append(StartReport(folder, list(_pools_of(groups).values())).phase)
    with closing(trainer.ahead), _profile(trainer, groups, checkpoint) if profile else nullcontext():
        return trainer.run(checkpoint)


def _profile(trainer: Trainer, groups: Groups, checkpoint: Checkpoint | None) -> StepProfile:
    step = profiled_step(checkpoint.step + 1 if checkpoint else 1, trainer.config.train.steps)
    profile = StepProfile(trainer.folder.path / "profile", _pools_of(groups), step, trainer.view.note)
    trainer.listeners.append(profile.phase)
    return profile


def _pools_of(groups: Groups) -> dict[str, WorkerGroup]:
    pools = {POLICY: groups.policy, CRITIC: groups.critic, ENGINES: groups.engines}
    return {name: group for name, group in pools.items() if group is not None}


def check_shared(logs: Path, name: str, workers: int) -> None:
    """Workers on other machines write logs, samples and checkpoints to the run folder too: is it the same one?"""
    for rank in range(workers):
        if not (logs / f"{name}-{rank}.log").exists():
            raise SetupError(
                f"worker {rank} writes to {logs} on its own machine, and this one does not see it",
                "give --out on a file system that all machines of the cluster share",
            )


def launch_evaluation(prepared: Prepared, *, logs: Path, save_as: str, view: View) -> EvalReport:
    """Evaluate `prepared.config.model.path` on `prepared.prompts`, with engines alone."""
    config = prepared.config
    with (
        StopOnSignal(lambda: None),
        running_workers(prepared, logs, train=False, on_phase=view.phase) as groups,
    ):
        view.phase("evaluate")
        return evaluate(
            groups.policy,
            prepared.prompts,
            samples=config.evaluation.samples,
            sampling=Sampling(config.evaluation.temperature, config.rollout.max_response_tokens),
            seed=config.train.seed,
            tensor_parallel=config.rollout.tensor_parallel,
            slots=config.rollout.max_concurrent,
            save_as=save_as,
            on_progress=view.progress,
        )
