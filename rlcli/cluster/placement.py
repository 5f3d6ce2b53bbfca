"""Placement of a cluster's workers, and their actors: ranks contiguous by machine, an engine on one machine."""

from __future__ import annotations

import ipaddress
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.cluster.process import malloc
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.errors import SetupError
from rlcli.support.attempt import is_restart
from rlcli.support.importing import SAFE_PATH, SET_HERE
from rlcli.support.machine.threads import waiting_environment
from rlcli.support.redact import SECRET_NAME

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

PLACEMENT_TIMEOUT_S = 120.0
RETRY_EVERY_S = 2.0

WORKER_ENV = {
    # vLLM runs inside the worker, so that weights reach it within the process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its warnings (weights that «failed to load», a template that cannot be warmed up) are false alarms here.
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "PYTHONUNBUFFERED": "1",
}

DETERMINISTIC_ENV = {
    # vLLM's kernels then give a response the same bits whatever else is in the batch; vLLM configures NCCL likewise.
    "VLLM_BATCH_INVARIANT": "1",
    # Without a separate workspace for each stream cuBLAS may select another order of sums.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""On GPUs, with train.deterministic."""

FORWARDED_VARIABLES = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "WANDB_MODE")
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "VLLM_")
"""Variables of the driver that workers inherit, since the machines of a running cluster were started without them: for
collectives (FI_: libfabric, as for AWS EFA), torch and vLLM."""
PER_MACHINE_VARIABLES = {"VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH"}
"""Variables that are never forwarded: they are valid on one machine."""

T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True)
class Pool:
    """The workers of a group and the resources that they need."""

    workers: int
    """Number of workers."""
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """CPU threads of each worker, on CPUs."""
    deterministic: bool = False
    """Use kernels that give the same bits each time on GPUs."""
    workers_key: str = "cluster.workers"
    """Config key of the number of workers, for messages."""
    engine_size: int = 1
    """Consecutive workers that share an engine (tensor parallel), and a machine if one is large enough."""
    one_actor_per_engine: bool = False
    """One actor holds all devices of an engine, which must be on one machine."""

    @property
    def engine_size_key(self) -> str:
        """Config key of `engine_size`, for messages."""
        return "tensor_parallel" if self.one_actor_per_engine else "rollout.tensor_parallel"

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker."""
        return {"CPU": 1.0, "GPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}


@dataclass(frozen=True)
class Reservation:
    """Resources reserved for a pool."""

    group: PlacementGroup
    bundles: Sequence[int]
    """Index of each rank's bundle in the placement group."""


@dataclass(frozen=True)
class PlacedActors:
    """Actors, by rank, and the placement group that holds their resources."""

    actors: list[ActorHandle]
    placement_group: PlacementGroup


def start_group(
    worker: type[W],
    pool: Pool,
    logs: Path,
    *args: Any,
    name: str = "rank",
    stall_s: float | None = None,
    placed: PlacedActors | None = None,
    reservation: Reservation | None = None,
) -> WorkerGroup[W]:
    """Start `pool.workers` actors of class `worker`, each constructed with (rank, world size, *args). name: prefix of
    their logs. stall_s: seconds without progress after which a worker has failed (see `WorkerGroup`). placed: actors of
    this pool that exist already. reservation: the result of `reserve` for the pool, if it was called."""
    for stale_note in logs.glob(f"{name}-*.stack"):
        stale_note.unlink(missing_ok=True)
    placed = placed or start_actors(worker, pool, *args, reservation=reservation)
    same_bits = pool.device == "cpu" or pool.deterministic
    return WorkerGroup(placed.actors, logs, placed.placement_group, name, stall_s, same_bits)


def start_actors(worker: type, pool: Pool, *args: Any, reservation: Reservation | None = None) -> PlacedActors:
    """Start actors of class `worker`, each constructed with (rank, world size, *args)."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    reservation = reservation or reserve([pool])[0]
    actor = ray.remote(worker)
    environment = worker_environment(pool, os.environ)
    devices = pool.engine_size if pool.one_actor_per_engine else 1
    actors = [
        actor.options(
            num_cpus=pool.bundle["CPU"] * devices,
            num_gpus=pool.bundle.get("GPU", 0) * devices,
            max_restarts=0,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reservation.group, placement_group_bundle_index=bundle
            ),
        ).remote(rank, pool.workers // devices, *args)
        for rank, bundle in enumerate(reservation.bundles[::devices])
    ]
    return PlacedActors(actors, reservation.group)


def worker_environment(pool: Pool, driver: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker's process besides its machine's; `driver`: those of the driver. Variables that
    a worker requires override the others.

    >>> pool = Pool(1, "cuda", 1)
    >>> driver = {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "x", "TOKENIZERS_PARALLELISM": "true"}
    >>> environment = worker_environment(pool, driver)
    >>> environment["NCCL_DEBUG"], "VLLM_API_KEY" in environment, environment["TOKENIZERS_PARALLELISM"]
    ('INFO', False, 'false')
    """
    environment = {
        name: value
        for name, value in driver.items()
        if (name in FORWARDED_VARIABLES or name.startswith(FORWARDED_PREFIXES))
        and name not in PER_MACHINE_VARIABLES
        and not SECRET_NAME.search(name)  # Ray logs the environment variables that it is given
    }
    environment |= WORKER_ENV
    environment[SAFE_PATH] = driver.get(SAFE_PATH) or SET_HERE  # a cluster's Ray was not started by this process
    if pool.device == "cpu":
        # Inductor would compile for half a minute without a gain on models that fit a CPU.
        environment |= {"OMP_NUM_THREADS": str(pool.threads), "TORCH_COMPILE_DISABLE": "1"}
        environment |= waiting_environment(driver) | malloc.environment()
    elif pool.deterministic:
        environment |= DETERMINISTIC_ENV
    return environment


def reserve(pools: Sequence[Pool], placed_pools: Sequence[Pool] = (), wait_s: float = 0.0) -> list[Reservation]:
    """Reserve the resources of all pools, so that a lack of resources is known before anything starts. Raises
    `SetupError` if the machines cannot hold them, or are busy for PLACEMENT_TIMEOUT_S. placed_pools: pools that already
    have their resources. wait_s: how long to wait for machines to join, if there are too few.

    Ray's bundles cannot span machines, but Ray does not number them by machine. So an engine of several workers is one
    bundle, unless no machine is large enough: then it spans machines, as configured. Ranks are assigned by machine, in
    the order of the machines' addresses.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    machines = retried(lambda: _cluster_resources([*placed_pools, *pools]), wait_s)
    reservations: dict[int, Reservation] = {}
    # Engines of many workers first: single workers fit into the remaining space.
    for index, pool in sorted(enumerate(pools), key=lambda item: -item[1].engine_size):
        unit = _workers_per_bundle(pool, machines)
        bundles = [{kind: each * unit for kind, each in pool.bundle.items()}] * (pool.workers // unit)
        assert pool.workers % unit == 0, "rollout.tensor_parallel divides the workers"
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):  # `ready` would start a process for a task
            for reserved_group in (group, *(reservation.group for reservation in reservations.values())):
                remove_placement_group(reserved_group)
            raise SetupError(
                f"the cluster is busy: no room for {pool.workers} × {pool.bundle} in {PLACEMENT_TIMEOUT_S:.0f} s",
                f"wait for other jobs to end or lower {pool.workers_key}",
            )
        reservations[index] = Reservation(group, [bundle for bundle in _bundles_by_machine(group) for _ in range(unit)])
    return [reservations[index] for index in range(len(pools))]


def _bundles_by_machine(group: PlacementGroup) -> list[int]:
    """The bundles of a placement group, grouped by machine, machines ordered by address."""
    import ray
    from ray.util.placement_group import placement_group_table

    address = {node["NodeID"]: _address_sort_key(node["NodeManagerAddress"]) for node in ray.nodes()}
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda bundle: (address.get(node_of[bundle], ""), node_of[bundle], bundle))


def _address_sort_key(address: str) -> str:
    """A text that sorts in the order of addresses.

    >>> _address_sort_key("10.0.0.9") < _address_sort_key("10.0.0.10") < _address_sort_key("10.0.1.1")
    True
    """
    try:
        return ipaddress.ip_address(address).packed.hex()
    except ValueError:
        return address


def retried(work: Callable[[], T], wait_s: float = 0.0) -> T:
    """The result of `work`, retried for `wait_s` seconds while it raises SetupError. In a restarted run, for at least
    PLACEMENT_TIMEOUT_S: the failed machine may come back."""
    until = time.monotonic() + max(wait_s, PLACEMENT_TIMEOUT_S if is_restart() else 0.0)
    while True:
        try:
            return work()
        except SetupError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_EVERY_S)


def _cluster_resources(pools: Sequence[Pool]) -> list[dict[str, float]]:
    """The machines' resources. Raises `SetupError` if they do not suffice."""
    import ray

    machines = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    check_capacity(pools, machines)
    return machines


def check_capacity(pools: Sequence[Pool], machines: Sequence[Mapping[str, float]]) -> None:
    """Raise `SetupError` if machines with these resources, all of them free, cannot hold the pools."""
    keys, workers = " + ".join(pool.workers_key for pool in pools), sum(pool.workers for pool in pools)
    numbers = " + ".join(str(pool.workers) for pool in pools)
    for kind, each in pools[0].bundle.items():
        available = sum(machine.get(kind, 0) for machine in machines)
        if available < each * workers:
            counts = _describe_counts([int(machine.get(kind, 0)) for machine in machines])
            on = f" on {len(machines)} machines ({counts})" if len(machines) > 1 else ""
            raise SetupError(
                f"{keys} = {numbers} needs {each * workers:.0f} {kind}s, the cluster has {available:.0f}{on}",
                f"lower {pools[0].workers_key}" + (", or use --set cluster.device=cpu" if kind == "GPU" else ""),
            )
    slots = _worker_slots(pools[0], machines)
    for pool in pools:
        unit = pool.engine_size if pool.one_actor_per_engine else _workers_per_bundle(pool, machines)
        wanted, fit = pool.workers // unit, sum(free_slots // unit for free_slots in slots)
        if unit > 1 and wanted > fit:
            raise SetupError(
                f"{pool.workers_key} = {pool.workers} with {pool.engine_size_key} = {pool.engine_size}: each "
                f"of the {wanted} engines lies on one machine, and there is room for {fit}: the machines hold "
                f"{_describe_counts(slots)} workers",
                _capacity_hint(pool, slots, fit * unit),
            )
    if workers > sum(slots):
        raise SetupError(
            f"{keys} = {numbers}, but the cluster's machines hold {_describe_counts(slots)} workers, each with a CPU "
            "and a GPU",
            f"lower {pools[0].workers_key}, or let each machine have a CPU for each of its GPUs",
        )


def _capacity_hint(pool: Pool, slots: Sequence[int], fitting_workers: int) -> str:
    """Hint for a lack of room: fewer workers, or an engine size that fits the machines."""
    smaller = [
        engine
        for engine in range(pool.engine_size - 1, 0, -1)
        if pool.workers % engine == 0 and sum(free_slots // engine for free_slots in slots) >= pool.workers // engine
    ]
    fewer = [f"{pool.workers_key} = {fitting_workers}"] if fitting_workers else []
    return "set " + " or ".join([*fewer, *(f"{pool.engine_size_key} = {engine}" for engine in smaller[:1])])


def _workers_per_bundle(pool: Pool, machines: Sequence[Mapping[str, float]]) -> int:
    """Number of workers that must share a machine: those of an engine, if any machine is large enough, else one."""
    return pool.engine_size if pool.engine_size <= max(_worker_slots(pool, machines), default=0) else 1


def _worker_slots(pool: Pool, machines: Sequence[Mapping[str, float]]) -> list[int]:
    """Number of workers that each machine could hold, without machines that could hold none."""
    slots = [min(int(machine.get(kind, 0) // each) for kind, each in pool.bundle.items()) for machine in machines]
    return [count for count in slots if count]


def _describe_counts(numbers: Sequence[int]) -> str:
    """Equal numbers summarised, largest first.

    >>> _describe_counts([8, 4, 8, 8])
    '3 × 8, 4'
    """
    counts = sorted(Counter(numbers).items(), reverse=True)
    return ", ".join(f"{times} × {number}" if times > 1 else str(number) for number, times in counts)
