"""Placement on the machines of a cluster, and the environment of a worker's process. Without Ray."""

from __future__ import annotations

import pytest

from rlcli.cluster.placement import Pool, check_capacity, worker_environment
from rlcli.cluster.ray_session import worker_threads
from rlcli.errors import SetupError


def gpus(*counts: int, cpus: int = 64) -> list[dict[str, float]]:
    """Machines with so many GPUs, after a head that has none."""
    return [{"CPU": 4.0}, *({"CPU": float(cpus), "GPU": float(count)} for count in counts)]


def pool(workers: int, engine: int = 1, key: str = "cluster.workers") -> Pool:
    return Pool(workers, "cuda", 1, workers_key=key, engine_size=engine)


@pytest.mark.parametrize(
    ("machines", "pools"),
    [
        (gpus(8, 8, 8, 8), [pool(24, 8)]),
        (gpus(8, 8, 8, 8), [pool(32, 4)]),
        (gpus(8, 8, 4), [pool(20, 4)]),
        (gpus(8, 8, 4), [pool(16, 8), pool(4, key="critic.workers")]),
        (gpus(8, 8, 8), [pool(8), pool(16, 8, "rollout.workers")]),
        (gpus(8, 8), [pool(16, 16)]),  # larger than any machine: asked to span them
        ([{"CPU": 4.0}, {"CPU": 4.0}], [Pool(8, "cpu", 1, engine_size=2)]),
    ],
)
def test_what_fits_is_let_through(machines: list[dict[str, float]], pools: list[Pool]) -> None:
    check_capacity(pools, machines)


@pytest.mark.parametrize(
    ("machines", "pools", "message"),
    [
        (
            gpus(8, 8, 4),
            [pool(24, 8)],
            "cluster.workers = 24 needs 24 GPUs, the cluster has 20 on 4 machines (2 × 8, 4, 0); lower "
            "cluster.workers, or use --set cluster.device=cpu",
        ),
        (
            gpus(6, 6, 6, 6),
            [pool(24, 4)],
            "cluster.workers = 24 with rollout.tensor_parallel = 4: each of the 6 engines lies on one "
            "machine, and there is room for 4: the machines hold 4 × 6 workers; set cluster.workers = 16 or "
            "rollout.tensor_parallel = 3",
        ),
        (
            gpus(8, 8, 4),
            [pool(2, key="cluster.workers"), pool(18, 6, "rollout.workers")],
            "rollout.workers = 18 with rollout.tensor_parallel = 6: each of the 3 engines lies on one "
            "machine, and there is room for 2: the machines hold 2 × 8, 4 workers; set rollout.workers = 12 or "
            "rollout.tensor_parallel = 2",
        ),
        (
            gpus(8),
            [pool(8), pool(4, key="critic.workers")],
            "cluster.workers + critic.workers = 8 + 4 needs 12 GPUs, the cluster has 8 on 2 machines (8, 0); lower "
            "cluster.workers, or use --set cluster.device=cpu",
        ),
        (
            gpus(8, 8, cpus=6),
            [pool(16)],
            "cluster.workers = 16, but the cluster's machines hold 2 × 6 workers, each with a CPU and a GPU; lower "
            "cluster.workers, or let each machine have a CPU for each of its GPUs",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    machines: list[dict[str, float]], pools: list[Pool], message: str
) -> None:
    with pytest.raises(SetupError) as refused:
        check_capacity(pools, machines)
    assert str(refused.value) == message


def test_a_worker_gets_the_drivers_variables_but_no_secret() -> None:
    passed = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "FI_PROVIDER": "efa",
        "HF_HOME": "/cache",
    }
    kept_back = {
        "VLLM_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "VLLM_S3_SECRET_ACCESS_KEY": "secret",
        "VLLM_HOST_IP": "10.0.0.1",
        "MASTER_ADDR": "10.0.0.1",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    overridden = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment = worker_environment(pool(1), passed | kept_back | overridden)
    assert passed.items() <= environment.items()
    assert not kept_back.keys() & environment.keys()
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "secret" not in environment.values()
    assert worker_environment(Pool(1, "cpu", 3), {"TORCH_COMPILE_DISABLE": "0"})["TORCH_COMPILE_DISABLE"] == "1"


def test_a_server_of_a_model_is_on_one_machine() -> None:
    def served(workers: int, size: int) -> Pool:
        return Pool(
            workers, "cuda", 1, workers_key="workers of the served model m", engine_size=size, one_actor_per_engine=True
        )

    check_capacity([pool(8), served(8, 4)], gpus(8, 8))
    with pytest.raises(SetupError) as caught:
        check_capacity([served(16, 16)], gpus(8, 8))
    assert "workers of the served model m = 16 with tensor_parallel = 16: each of the 1 engines" in str(caught.value)
    assert "tensor_parallel = 8" in caught.value.hint


@pytest.mark.parametrize(
    ("limit", "workers", "threads"),
    [("", 1, 4), ("", 3, 1), ("", 9, 1), ("2", 1, 2), ("8", 2, 2), ("1,4", 1, 1), ("0", 1, 4), ("many", 1, 4)],
)
def test_a_worker_has_its_share_of_the_cores_and_no_more_than_asked(
    limit: str, workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert worker_threads(workers) == threads


def test_threads_that_wait_soon_sleep_unless_the_user_says_how_they_wait() -> None:
    cpu = Pool(1, "cpu", 2)
    assert worker_environment(cpu, {})["GOMP_SPINCOUNT"] == "10000"
    assert "GOMP_SPINCOUNT" not in worker_environment(cpu, {"OMP_WAIT_POLICY": "active"})
    assert "GOMP_SPINCOUNT" not in worker_environment(cpu, {"GOMP_SPINCOUNT": "5"}), "which the process inherits"
    assert "GOMP_SPINCOUNT" not in worker_environment(Pool(1, "cuda", 1), {})
