"""The device of this machine's workers, and its measured rates."""

from __future__ import annotations

import subprocess
from typing import Literal

from rlcli.cluster.ray_session import cluster_address, policy_pool, resolve_device
from rlcli.config.schema import RunConfig
from rlcli.errors import SetupError
from rlcli.launch.device_checks import compute_dtype
from rlcli.support.machine.gpus import has_nvml, seen_by_torch
from rlcli_planner.known_devices import Device, cpu, of_machine
from rlcli_planner.machine import machine_rates
from rlcli_planner.machine.machine_rates import Rates


def rates_of(config: RunConfig, kind: str, measure: Literal["unless known", "again", "never"]) -> Rates | None:
    """Rates of this machine for a run's workers, cached or measured now; None if the workers are on other machines, or
    if nothing is known. kind: `cpu` or `cuda`."""
    if cluster_address(config.cluster.address):
        return None
    device, dtype, threads, processes = _measured_as(config, kind)
    if measure == "never":
        return machine_rates.load(device, dtype, threads, processes)
    if measure == "again":
        return machine_rates.measured_now(device, dtype, threads, processes)
    return machine_rates.machine_rates(device, dtype, threads, processes)


def rates_are_known(config: RunConfig, kind: str) -> bool:
    """True if `rates_of` needs no measurement."""
    return bool(cluster_address(config.cluster.address)) or machine_rates.load(*_measured_as(config, kind)) is not None


def _measured_as(config: RunConfig, kind: str) -> tuple[str, str, int, int]:
    """Device, dtype, threads of a process, and processes that compute at once."""
    dtype = compute_dtype(config, kind)
    if kind != "cpu":
        return kind, dtype, 1, 1
    return kind, dtype, policy_pool(config, kind).threads, config.cluster.workers


def own_device(config: RunConfig) -> Device:
    """The device of this machine's workers, without rates. Raises `SetupError` if it is not known."""
    if resolve_device(config.cluster.device, config.cluster.address) == "cpu":
        return cpu()
    if cluster_address(config.cluster.address):
        raise SetupError(
            "the run's GPUs are in a cluster, whose GPU memory is not queried",
            "run rlcli plan … --gpus h100:8, and set the sizes that it prints",
        )
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, _, mebibytes = output.partition("\n")[0].rpartition(",")
        return of_machine(name.strip(), float(mebibytes) * (1 << 20))
    except (OSError, subprocess.SubprocessError, ValueError) as error:  # «[N/A]» if the memory is the host's
        if seen := () if has_nvml() else seen_by_torch():
            return of_machine(*seen[0])
        raise SetupError(
            f"nvidia-smi does not report the memory of this machine's GPU: {error}",
            "run rlcli plan … --gpus h100:8, or with its size (8x80GB), and set the sizes that it prints",
        ) from error
