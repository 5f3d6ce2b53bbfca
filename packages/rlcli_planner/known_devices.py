"""The devices that --gpus accepts, with their memory and rates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rlcli.errors import ConfigError
from rlcli.registry import near
from rlcli.support.machine.free_memory import available_memory, process_limit
from rlcli_planner.calibration import Constants
from rlcli_planner.machine.machine_rates import Rates

GIB = 1 << 30
NODE = 8
"""Devices of a node: an assumption."""
NETWORK = {"a100": 25e9, "a100-80gb": 25e9, "b200": 50e9, "gh200": 50e9, "h100": 50e9, "h200": 50e9, "h20": 50e9}
SLOW_NETWORK = 3e9
"""Bytes per second of a device to other nodes: 400 Gb/s a device (A100: 200) in machines that are built for it, else
100 Gb/s for four devices. Assumptions."""
LOCAL_LINK = 2e9
"""Bytes per second between two processes of one machine through gloo: an assumption."""


@dataclass(frozen=True)
class Device:
    """One device of a run, which a worker has; on CPUs the machine, which the workers share."""

    name: str
    """As `--gpus` names it, `cpu`, or as nvidia-smi reports it."""
    memory: float
    """Bytes that are free for the run's processes."""
    flops: float = 0.0
    """Peak dense bfloat16 operations per second, from the data sheet; 0 if unknown, and for CPUs."""
    read_rate: float = 0.0
    """Bytes per second of its memory."""
    link_rate: float = 0.0
    """Bytes per second to each other device of its node."""
    node_rate: float = 0.0
    """Bytes per second to devices of other nodes."""
    host_rate: float = 0.0
    """Bytes per second to the host's memory."""
    constants: Constants = field(default_factory=Constants)
    """Constants of the predictions."""
    rates: Rates | None = None
    """As measured, if this is the machine that the command runs on."""
    process_limit: float = math.inf
    """Most bytes that the system gives one process (`ulimit -d`, `-v`)."""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def has_rates(self) -> bool:
        return self.flops > 0 or self.rates is not None

    @property
    def rates_from(self) -> str:
        """Source of its rates, in words; empty if there are none."""
        if self.rates is not None:
            return "measured on this machine" + (" while it was busy" if not self.rates.quiet else "")
        return f"from the data sheet of {self.name}, not measured" if self.flops else ""

    def rate_among(self, devices: int) -> tuple[float, str]:
        """Bytes per second between this many neighbouring devices, and the name of the link."""
        if devices <= NODE or not self.node_rate:
            return self.link_rate, "links inside a node"
        return self.node_rate, "links between nodes"


# name: GiB as nvidia-smi reports them, dense bfloat16 TFLOP/s, memory GB/s, NVLink (or PCIe) GB/s one way, host GB/s.
# From NVIDIA's data sheets; sparse figures halved.
TABLE = {
    "a10": (22.5, 125, 600, 25, 25),
    "a10g": (22.5, 70, 600, 25, 25),
    "a100": (80, 312, 2039, 300, 25),
    "a100-40gb": (39.6, 312, 1555, 300, 25),
    "a100-80gb": (80, 312, 2039, 300, 25),
    "a6000": (48, 155, 768, 25, 25),
    "b200": (179, 2250, 8000, 900, 50),
    "gh200": (95.6, 989, 4000, 450, 200),
    "h100": (79.6, 989, 3350, 450, 50),
    "h100-pcie": (79.6, 756, 2000, 50, 50),
    "h20": (95.6, 148, 4000, 450, 50),
    "h200": (140.4, 989, 4800, 450, 50),
    "l4": (22.5, 121, 300, 25, 25),
    "l40s": (45, 362, 864, 25, 25),
    "rtx3090": (24, 71, 936, 25, 25),
    "rtx4090": (24, 165, 1008, 25, 25),
    "rtx5090": (31.8, 209, 1792, 50, 50),
}

_GPUS = re.compile(
    r"(?:(?P<sized>\d+)x)?(?P<size>\d+(?:\.\d+)?)(?P<unit>gib|gb|g)|(?P<name>[a-z][a-z0-9-]*)(?::(?P<named>\d+))?"
)


def parse_gpus(text: str) -> tuple[Device, int]:
    """The device that `--gpus` names, and the count. Raises `ConfigError` for an unknown one.

    >>> [(device.name, count) for device, count in map(parse_gpus, ("h100:8", "8x80GB", "cpu"))]
    [('h100', 8), ('80GB', 8), ('cpu', 1)]
    """
    match = _GPUS.fullmatch(text.strip().lower())
    if not match:
        raise ConfigError(f"--gpus {text} is neither a GPU nor a size", "write, for example, h100:8, 8x80GB or cpu")
    size, unit, name, count = match["size"], match["unit"], match["name"], int(match["sized"] or match["named"] or 1)
    if count < 1:
        raise ConfigError(f"--gpus {text} gives no device", "give 1 or more")
    if size:  # A card of 80 GB has 79.6 GiB or more for its processes: vendors count in GiB.
        return Device(f"{size}{unit.upper()}", float(size) * GIB * (1.0 if unit == "gib" else 0.995)), count
    if name == "cpu":
        return cpu(), count
    if name not in TABLE:
        raise ConfigError(f"--gpus {text}: unknown GPU '{name}'", near(name, [*TABLE, "cpu"]))
    memory, flops, read, link, host = TABLE[name]
    network = NETWORK.get(name, SLOW_NETWORK)
    return Device(name, memory * GIB, flops * 1e12, read * 1e9, link * 1e9, network, host * 1e9), count


def of_machine(name: str, memory: float) -> Device:
    """The GPU that nvidia-smi calls `name`, with `memory` bytes; without rates if it is not in the table.

    >>> [of_machine(name, 1.0).name for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L40")]
    ['h100', 'a100-40gb', 'NVIDIA L40']
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    words += [first + second for first, second in pairwise(words)]  # RTX 4090
    known = [key for key in TABLE if set(key.split("-")) <= set(words)]
    if not known:
        return Device(name, memory)
    return replace(parse_gpus(max(known, key=len))[0], memory=memory)


def cpu() -> Device:
    """This machine's CPUs, with the memory that is free for new processes; without rates (`with_rates`)."""
    return Device("cpu", available_memory(), link_rate=LOCAL_LINK, process_limit=process_limit())


def with_rates(device: Device, rates: Rates | None) -> Device:
    """This machine's device with its measured rates."""
    if rates is None:
        return device
    host_rate = rates.read_rate / 2 if device.is_cpu else device.host_rate
    return replace(device, rates=rates, read_rate=rates.read_rate, host_rate=host_rate)
