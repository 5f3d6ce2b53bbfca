"""Workers on four simulated machines of 8 pretended GPUs: empty actors on real Ray, which say where they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlcli.cluster.placement import Pool, reserve, start_actors, start_group
from rlcli.cluster.ray_session import closed_to_others, ray_session
from rlcli.errors import SetupError

pytestmark = pytest.mark.long
ENGINES, CRITICS = "rollout.workers", "critic.workers"


def empty() -> type:
    """Made by a function, so that Ray carries its code to the actors."""
    from rlcli.cluster.dispatch import dispatch

    class Empty:
        def __init__(self, rank: int, world: int) -> None:
            self.rank = rank

        @dispatch()
        def where(self) -> tuple[int, str, list[str]]:
            import ray

            context = ray.get_runtime_context()
            return self.rank, context.get_node_id(), context.get_accelerator_ids()["GPU"]

        @dispatch()
        def environment(self) -> dict[str, str]:
            return dict(os.environ)

        def close(self) -> None: ...

    return Empty


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that someone else started: a head, and machines with 8, 8, 8 and 8 GPUs."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as folder, closed_to_others(Path(folder)):
        machines = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20},
        )
        try:
            for _ in range(4):
                machines.add_node(num_cpus=32, num_gpus=8, object_store_memory=80 << 20)
            machines.wait_for_nodes()
            yield machines
        finally:
            machines.shutdown()


def pool(workers: int, engine: int = 1, key: str = "cluster.workers") -> Pool:
    return Pool(workers, "cuda", 1, workers_key=key, engine_size=engine)


def nodes_of(reservation: Any) -> list[str]:
    """By rank, the machine."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(reservation.group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in reservation.bundles]


def engines_on_one_machine(nodes: list[str], engine: int) -> bool:
    return all(len(set(nodes[first : first + engine])) == 1 for first in range(0, len(nodes), engine))


def contiguous(nodes: list[str]) -> bool:
    return len(list(groupby(nodes))) == len(set(nodes))


@pytest.mark.parametrize(
    "pools",
    [
        [pool(24, 8)],
        [pool(32, 8)],
        [pool(24, 4)],
        [pool(32, 4)],
        [pool(12, 4)],
        [pool(8), pool(24, 8, ENGINES)],
        [pool(6), pool(2, key=CRITICS), pool(24, 4, ENGINES)],
        [pool(32, 16)],  # asked to span: each engine then lies on two whole machines
    ],
    ids=lambda pools: ", ".join(f"{pool.workers} TP {pool.engine_size}" for pool in pools),
)
def test_ranks_are_contiguous_by_machine_and_engines_do_not_cross(cluster: Any, pools: list[Pool]) -> None:
    from ray.util import remove_placement_group

    with ray_session(cluster.address, 1):
        reservations = reserve(pools)
        for requested, reservation in zip(pools, reservations, strict=True):
            nodes = nodes_of(reservation)
            assert len(nodes) == requested.workers
            assert contiguous(nodes)
            if requested.engine_size == 16:
                assert [len(set(nodes[first : first + 16])) for first in (0, 16)] == [2, 2]
            else:
                assert engines_on_one_machine(nodes, requested.engine_size)
        for reservation in reservations:
            remove_placement_group(reservation.group)


def test_actors_have_a_gpu_each_and_the_drivers_variables(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with ray_session(cluster.address, 1):
        engines = pool(4, 2)
        worker = empty()
        group = start_group(worker, engines, tmp_path, reservation=reserve([engines])[0])
        locations = group.call(worker.where)
        assert [rank for rank, _, _ in locations] == [0, 1, 2, 3]
        assert engines_on_one_machine([node for _, node, _ in locations], 2)
        assert len({(node, *gpu) for _, node, gpu in locations}) == 4
        for environment in group.call(worker.environment):
            assert environment["NCCL_SOCKET_IFNAME"] == "eth7"
            assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert "secret" not in environment.values()
        group.close()


def test_a_machine_that_joins_late_is_waited_for(cluster: Any) -> None:
    from ray.util import remove_placement_group

    with ray_session(cluster.address, 1), ThreadPoolExecutor(1) as waiting:
        pending = waiting.submit(reserve, [pool(40, 8)], wait_s=60.0)
        with pytest.raises(TimeoutError):
            pending.result(timeout=1.0)
        joined = cluster.add_node(num_cpus=32, num_gpus=8, object_store_memory=80 << 20)
        try:
            assert len(set(nodes_of(pending.result(timeout=60.0)[0]))) == 5
            remove_placement_group(pending.result()[0].group)
        finally:
            cluster.remove_node(joined)


def test_what_the_machines_cannot_hold_is_refused_before_anything_waits(cluster: Any) -> None:
    with ray_session(cluster.address, 1):
        with pytest.raises(SetupError, match=r"needs 40 GPUs, the cluster has 32 on 5 machines"):
            start_actors(empty(), pool(40, 8))
        with pytest.raises(SetupError, match=r"each of the 10 engines lies on one machine.* room for 8: .* 4 × 8"):
            reserve([pool(30, 3)])


def test_machines_may_differ(cluster: Any) -> None:
    cluster.add_node(num_cpus=32, num_gpus=4, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    with ray_session(cluster.address, 1):
        critics, engines = reserve([pool(4, key=CRITICS), pool(32, 8, ENGINES)])
        assert engines_on_one_machine(nodes_of(engines), 8)
        assert len(set(nodes_of(critics))) == 1
