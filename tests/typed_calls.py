"""Calls on workers that mypy must accept, with their result types, and calls that it must refuse.

Nothing here runs: the stage of types reads it. There an `ignore` of an error that does not occur is an error itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

from rlcli.cluster.dispatch import implements
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.data.messages import Coefficients, Progress, PromptTask, RolloutBatch
from rlcli.data.train_rows import TrainRows
from rlcli.rollout.model_servers.server_actors import ServerActor
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.worker.work_queue import RoundTasks
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.rank_step_recorder import StepReport
from rlcli.training.worker.worker import Worker


def accepted(
    workers: Workers,
    servers: WorkerGroup[ServerActor],
    coefficients: Coefficients,
    tasks: list[list[PromptTask]],
    arguments: RolloutArguments,
    queue: RoundTasks | None,
    work: TrainRows,
) -> None:
    assert_type(workers.call(WorkerCalls.step_report), list[StepReport])
    assert_type(workers.call(WorkerCalls.data_rank), list[int])
    assert_type(workers.call(WorkerCalls.rendezvous), tuple[str, int])
    assert_type(workers.call(WorkerCalls.describe_engine), str)
    assert_type(workers.call(WorkerCalls.update, 0, coefficients), dict[str, float])
    assert_type(workers.call(WorkerCalls.update, minibatch=0, coefficients=coefficients), dict[str, float])
    assert_type(workers.call(WorkerCalls.rollout, tasks, arguments, queue), Iterator[Progress | RolloutBatch])
    assert_type(workers.call(WorkerCalls.load, [[[(0, 1)]], [[(2,)]]], work), list[None])
    assert_type(servers.call(ServerActor.address), list[str])


def the_methods_of_one_worker(
    worker: Worker, group: WorkerGroup[Worker], coefficients: Coefficients, work: TrainRows
) -> None:
    assert_type(worker.update(0, coefficients), dict[str, float])
    assert_type(worker.data_rank(), int)
    worker.load([[(0, 1)]], work)
    declared: WorkerCalls = worker
    the_same: Workers = group
    del declared, the_same


def refused(
    workers: Workers, worker: Worker, coefficients: Coefficients, arguments: RolloutArguments, work: TrainRows
) -> None:
    workers.call(WorkerCalls.updates, 0, coefficients)  # type: ignore[attr-defined]
    workers.call(WorkerCalls.update, "0", coefficients)  # type: ignore[arg-type]
    workers.call(WorkerCalls.update, 0)  # type: ignore[call-arg]
    workers.call(WorkerCalls.update, 0, coefficients, 1)  # type: ignore[call-arg]
    workers.call(WorkerCalls.update, 0, coefs=coefficients)  # type: ignore[call-arg]
    workers.call(WorkerCalls.load, [(0, 1)], work)  # type: ignore[list-item]
    workers.call(WorkerCalls.rollout, [], [arguments])  # type: ignore[arg-type]
    workers.call(ServerActor.address)  # type: ignore[arg-type]
    workers.call(Worker.close)  # type: ignore[arg-type]
    workers.update(0, coefficients)  # type: ignore[attr-defined]
    worker.update("0", coefficients)  # type: ignore[arg-type]
    of_each: list[dict[str, float]] = workers.call(WorkerCalls.update, 0, coefficients)  # type: ignore[arg-type]
    of_one: StepReport = workers.call(WorkerCalls.step_report)  # type: ignore[assignment]
    del of_each, of_one


class Wrong:
    """Each of these implements a declared call in another form."""

    @implements(WorkerCalls.update)  # type: ignore[arg-type]
    def update(self, minibatch: int) -> dict[str, float]:
        return {}

    @implements(WorkerCalls.rendezvous)  # type: ignore[arg-type]
    def rendezvous(self) -> str:
        return ""
