"""Starts a run's cluster, workers and trainer, and always shuts them down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlcli.cluster.placement import PlacedActors, Pool, Reservation, reserve, start_group
from rlcli.cluster.process import startup_times
from rlcli.cluster.ray_monitor import OnLost, exit_on_loss
from rlcli.cluster.ray_session import cluster_address, policy_pool
from rlcli.cluster.same_code import check_same_code
from rlcli.cluster.supervisor.failure_record import exit_when_cluster_lost, noting_failure
from rlcli.cluster.supervisor.stop_signals import StopOnSignal, ignoring_signals
from rlcli.config.load import Resolved, dump_toml
from rlcli.config.schema import RunConfig
from rlcli.context import RunContext
from rlcli.errors import SetupError
from rlcli.launch.input_files import (
    Input,
    InputCheck,
    InputRecord,
    InputWatch,
    copies,
    hub_models,
    local_inputs,
    recorded_inputs,
)
from rlcli.launch.planner import planner
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.prewarm import EarlyStart
from rlcli.launch.resume import Resumption
from rlcli.launch.run_outcome import outcome_of
from rlcli.launch.startup_report import StartReport
from rlcli.rollout.engine import shared_memory_prefix
from rlcli.rollout.model_servers.server_actors import Serving, serving
from rlcli.rollout.scheduler.prefetch import KILL_TIMEOUT_S
from rlcli.runs.checkpoint import Checkpoint
from rlcli.runs.curve_marks import INPUTS_CHANGED, INPUTS_UNRECORDED, marks_of
from rlcli.runs.folder import RunFolder, events_of
from rlcli.runs.record_files import RunResult, rewind
from rlcli.runs.tracking import Trackers, open_trackers
from rlcli.runs.tracking.plots import reward_curve_png
from rlcli.runs.tracking.run_console import View
from rlcli.support import attempt
from rlcli.support.daemon_thread import in_background
from rlcli.support.served_models import ENGINE_KEY
from rlcli.training.listener import listener_types
from rlcli.training.loop.step_profile import StepProfile, profiled_step
from rlcli.training.loop.trainer import StopRequest, Trainer
from rlcli.training.loop.warnings import FILE_EDITED
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.worker import Worker
from rlcli.training.worker.worker_pools import CRITIC, ENGINES, POLICY, TEACHERS, WorkerPools
from rlcli.training.worker.worker_spec import WorkerSpec


@contextmanager
def running_workers(
    prepared: Prepared,
    logs: Path,
    *,
    on_phase: Callable[[str], None],
    on_lost: OnLost = exit_on_loss,
    early: EarlyStart | None = None,
) -> Iterator[WorkerPools]:
    """Start Ray, the actors, their process groups and their roles; all are shut down when the block ends. early: a
    cluster with workers that has been started before."""
    config, early = prepared.config, early or EarlyStart()
    policy_spec = worker_spec(prepared.context, logs, attempt.group_id())
    planned = _planned_groups(policy_spec)
    on_phase("start Ray")
    started: dict[str, Workers] = {}
    with early.session(config, on_lost), _serving(prepared, logs, planned) as servers:
        failed = True
        try:
            startup_times.done("ray")
            wait_s = config.cluster.wait_s
            on_phase("start workers" + (f" (up to {wait_s:.0f} s for machines to join)" if wait_s else ""))
            for group in _reserved(planned, servers, early, wait_s):
                started[group.spec.name] = workers = _start(group, logs, config.fault_tolerance.stall_s)
                _join(workers, group.spec)
                if prepared.context.trains:
                    check_shared(logs, group.spec.name, group.pool.workers)
            startup_times.done("workers")
            on_phase("load model")
            build(list(started.values()))
            startup_times.done("built")
            if servers.addresses:
                on_phase(f"wait for the server of {', '.join(servers.addresses)}")
                servers.wait()
            yield WorkerPools(
                policy=started[POLICY],
                critic=started.get(CRITIC),
                engines=started.get(ENGINES),
                spec=policy_spec,
                teachers=started.get(TEACHERS),
            )
            failed = False
        finally:
            with ignoring_signals():
                for worker_group in started.values():
                    # After a failure the others may hang in a collective, so they are killed.
                    worker_group.kill() if failed else worker_group.close()
                # From workers killed on this machine; on other machines it stays until reboot.
                for leftover in Path("/dev/shm").glob(f"{shared_memory_prefix(policy_spec.group_id)}*"):
                    attempt.remove_shared(leftover)


def _start(group: _Group, logs: Path, stall_s: float) -> Workers:
    """Start the actors of a group."""
    return start_group(
        Worker,
        group.pool,
        logs.resolve(),
        name=group.spec.name,
        stall_s=stall_s,
        placed=group.placed,
        reservation=group.reservation,
    )


def _join(workers: Workers, spec: WorkerSpec) -> None:
    """Give the workers their spec, and connect their process group."""
    workers.call(WorkerCalls.begin, spec)
    host, port = workers.call(WorkerCalls.rendezvous)
    workers.call(WorkerCalls.join, host, port)


def build(groups: Sequence[Workers]) -> None:
    """Build the roles of all groups in parallel. If one fails, all are killed."""
    first, *others = groups
    building = [in_background(partial(group.call, WorkerCalls.build)) for group in others]
    try:
        first.call(WorkerCalls.build)
        for pending in building:
            pending.result()
    except BaseException:
        for group in groups:
            group.kill()
        wait(building, KILL_TIMEOUT_S)  # their threads, before Ray is shut down under them
        raise


def worker_spec(context: RunContext, logs: Path, group_id: str) -> WorkerSpec:
    """The spec of the policy's workers; in an evaluation, of engines."""
    return WorkerSpec(
        context=context,
        roles=context.facts.roles,
        name=POLICY,
        logs=str(logs.resolve()),
        group_id=group_id,
        hub_token=os.environ.get("HF_TOKEN", ""),
        engine_key=os.environ.get(ENGINE_KEY, ""),
    )


@dataclass(frozen=True)
class _Group:
    """A group of workers to start."""

    spec: WorkerSpec
    """Specification of each worker."""
    pool: Pool
    """Number and resources of the workers."""
    placed: PlacedActors | None = None
    """Actors that were started early, if any."""
    reservation: Reservation | None = None
    """Reserved resources of a group without such actors."""


def _serving(prepared: Prepared, logs: Path, planned: Sequence[_Group]) -> AbstractContextManager[Serving]:
    """Servers of the models that verifiers query, on other devices than the workers."""
    loopback = not cluster_address(prepared.config.cluster.address)
    worker_pools = [group.pool for group in planned]
    return serving(prepared.served, prepared.facts.device, logs, other_pools=worker_pools, loopback=loopback)


def _planned_groups(spec: WorkerSpec) -> list[_Group]:
    """All groups of workers, that of the policy first. spec: of the policy's workers."""
    config = spec.config
    first = policy_pool(config, spec.facts.device)
    groups = [_Group(spec, first)]
    if workers := config.critic.workers:
        critic = replace(spec, roles=frozenset({"critic"}), name=CRITIC)
        groups.append(_Group(critic, replace(first, workers=workers, workers_key="critic.workers", engine_size=1)))
    if workers := config.teacher.workers:
        teachers = replace(spec, roles=frozenset({"teacher"}), name=TEACHERS)
        groups.append(_Group(teachers, replace(first, workers=workers, workers_key="teacher.workers", engine_size=1)))
    if workers := config.rollout.workers:
        engines = replace(
            first, workers=workers, workers_key="rollout.workers", engine_size=config.rollout.tensor_parallel
        )
        groups.append(_Group(engine_spec(spec), engines))
    return groups


def _reserved(planned: Sequence[_Group], servers: Serving, early: EarlyStart, wait_s: float) -> Iterator[_Group]:
    """The groups with their placement: actors that `early` has started, or resources that are reserved for all groups
    before the first one starts. servers: of models for the workers' verifiers. wait_s: see `reserve`."""
    policy = planned[0]
    placed = early.take(policy.pool)
    existing = [policy.pool] if placed is not None else []
    missing = [group.pool for group in planned[len(existing) :]]
    reserved = reserve(missing, existing, wait_s) if missing else []
    if cluster_address(policy.spec.config.cluster.address):
        check_same_code(reserved)
    reservations = iter(reserved)
    for group in planned:
        actors = placed if group.spec.name == POLICY else None
        spec = replace(group.spec, served=servers.addresses, served_key=servers.key)
        yield replace(group, spec=spec, placed=actors, reservation=None if actors is not None else next(reservations))


def engine_spec(spec: WorkerSpec) -> WorkerSpec:
    """The spec of separate engine workers, for a policy built from `spec`."""
    return replace(spec, roles=frozenset({"engine"}), name=ENGINES)


def train_in_folder(
    resolved: Resolved,
    prepared: Prepared,
    target: Path,
    view: View,
    *,
    force: bool = False,
    resumed: Resumption | None = None,
    profile: bool = False,
    early: EarlyStart | None = None,
) -> dict[str, Any]:
    """Train in the run folder `target`, or resume the run there. Returns the result of `outcome_of`. profile: profile
    one step to a file in the folder."""
    startup_times.done("imported")
    listener_types()  # an import error is reported before anything starts
    checkpoint = resumed.checkpoint if resumed else None
    step = checkpoint.step if checkpoint else 0

    def on_phase(name: str) -> None:
        view.phase(name)
        folder.at(step, name)

    with (
        _folder(resolved, prepared, target, resumed, force=force) as folder,
        _trackers(resolved.config, folder, view, resumed) as trackers,
    ):
        with noting_failure(folder.path):
            folder.event("resumed" if checkpoint else "started", step=step, of=resolved.config.train.steps)
            lost = exit_when_cluster_lost(folder.path)
            with (
                StopOnSignal(lambda: view.note("finishing this step, then exiting; once more to exit at once")) as stop,
                running_workers(
                    prepared,
                    folder.logs,
                    on_phase=on_phase,
                    on_lost=lost,
                    early=early,
                ) as pools,
                # Before Ray is shut down: threads that still call it would end the process.
                noting_failure(folder.path),
            ):
                trainer = make_trainer(prepared, pools, folder, trackers, view, stop)
                trainer.listeners.add(StartReport(folder, list(pools.by_name.values()), pools.engines or pools.policy))
                trainer.listeners.add(InputWatch(_inputs_read(folder), partial(_warn_of_edit, folder, view)))
                with _profile(trainer, pools, checkpoint) if profile else nullcontext():
                    result = trainer.run(checkpoint)
                # While the workers are closed.
                curve = in_background(partial(_write_reward_curve, target, result, view))
        if curve.result():
            trackers.image("reward", folder.path / "reward.png")
    return outcome_of(target, result)


def make_trainer(
    prepared: Prepared, pools: WorkerPools, folder: RunFolder, trackers: Trackers, view: View, stop: StopRequest
) -> Trainer:
    """A trainer for running workers, with all published listeners."""
    return Trainer(
        prepared.context,
        prepared.prompts,
        prepared.held_out,
        pools,
        folder,
        trackers,
        view,
        stop,
        listeners=listener_types(),
        planner_input=partial(planner().setting, prepared),
    )


def _folder(
    resolved: Resolved, prepared: Prepared, target: Path, resumed: Resumption | None, *, force: bool
) -> RunFolder:
    """The run folder, locked by this process, with the current configuration."""
    facts = {"sandbox": prepared.sandbox} if prepared.sandbox else {}
    facts |= {"day": prepared.facts.day.isoformat()} if prepared.facts.day else {}
    if resumed:
        folder = RunFolder.resume(target)
    else:
        folder = RunFolder.create(target, force=force, facts=facts, shared=resolved.config.run.shared)
    if resumed and not resumed.checkpoint:  # else the record is truncated after the workers load the checkpoint
        rewind(folder.path, -1)
    if resumed is None or resumed.changed:
        folder.write_config(dump_toml(resolved))
    inputs = resumed.inputs if resumed else None
    _record_inputs(folder, inputs or _inputs_of(resolved.config), resumed.step if resumed else 0)
    return folder


def _inputs_of(config: RunConfig) -> InputCheck:
    """The inputs of a new run."""
    return InputCheck((*local_inputs(config), *hub_models(config)))


def _record_inputs(folder: RunFolder, inputs: InputCheck, step: int) -> None:
    """Write the inputs of the run to its folder, and events that mark its curves after `step` if inputs have changed or
    were not recorded before."""
    folder.write_inputs(InputRecord(inputs.files, inputs.prompts).as_dict(), copies(inputs.files))
    if inputs.changes:
        files = [
            {"key": change.key, "path": change.path, "was": change.was, "is": change.now} for change in inputs.changes
        ]
        folder.event(INPUTS_CHANGED, step=step, text="; ".join(map(str, inputs.changes)), files=files)
    if not inputs.recorded and step:
        text = "what it read by path so far was not recorded; from here on it is"
        folder.event(INPUTS_UNRECORDED, step=step, text=text)


def _inputs_read(folder: RunFolder) -> tuple[Input, ...]:
    record = recorded_inputs(folder.path)
    return record.files if record else ()


def _warn_of_edit(folder: RunFolder, view: View, step: int, text: str) -> None:
    view.warning(f"warning {FILE_EDITED}: {text}", step)
    folder.event("warning", step=step, name=FILE_EDITED, text=text)


def _trackers(
    config: RunConfig, folder: RunFolder, view: View, resumed: Resumption | None
) -> AbstractContextManager[Trackers]:
    resumed_at = None
    if resumed is not None:
        resumed_at = resumed.step if resumed.checkpoint else -1
    tracking, plain = config.tracking, config.model_dump(mode="json")
    return open_trackers(tracking.trackers, folder, tracking.project, plain, view.note, resumed_at)


def _write_reward_curve(target: Path, result: RunResult, view: View) -> bool:
    """Write reward.png to the run folder. Returns False if it could not be written."""
    pass_at_1 = {step: report["pass"]["pass@1"] for step, report in result.evaluations.items()}
    steps = [step for step, value in enumerate(result.course, 1) if math.isfinite(value)]
    if not steps:
        return False
    values = [result.course[step - 1] for step in steps]
    intervals = {step: (e["mean"], e["low"], e["high"]) for step, e in pass_at_1.items()}
    marks = marks_of(events_of(target))
    try:
        reward_curve_png(target / "reward.png", steps, values, intervals, result.measure, marks)
    except OSError as error:  # only a plot of recorded data
        view.note(f"{target / 'reward.png'} cannot be written: {error.strerror}")
        return False
    return True


def _profile(trainer: Trainer, pools: WorkerPools, checkpoint: Checkpoint | None) -> StepProfile:
    step = profiled_step(checkpoint.step + 1 if checkpoint else 1, trainer.config.train.steps)
    profile = StepProfile(trainer.folder.path / "profile", pools.by_name, step, trainer.view.note)
    trainer.listeners.add(profile)
    return profile


def check_shared(logs: Path, name: str, workers: int) -> None:
    """Check that workers on other machines, which write logs, samples and checkpoints, see the same run folder."""
    for rank in range(workers):
        if not (logs / f"{name}-{rank}.log").exists():
            raise SetupError(
                f"worker {rank} writes to {logs} on its machine, and it is not visible here",
                "give --out on a file system that all machines of the cluster share",
            )
