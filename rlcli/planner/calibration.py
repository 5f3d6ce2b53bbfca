"""Measure the speed of this machine's CPUs briefly; for GPUs there is a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from rlcli.planner.device import Device
from rlcli.planner.shape import ModelShape

TOKENS = 256
REPEATS = 5
COPIED = 32 << 20
LOCAL_LINK = 2e9
"""Bytes per second between two processes of one machine through gloo: an assumption."""


def calibrated(device: Device, shape: ModelShape) -> Device:
    """A GPU unchanged; for this machine's CPUs the rates of a product with the model's widths and of a copy, on torch's
    default threads. Takes a quarter of a second; other work on the machine lowers the rates."""
    if not device.is_cpu:
        return device
    import torch

    rows, inner = torch.ones(TOKENS, shape.hidden), torch.ones(shape.hidden, shape.intermediate)
    product = _seconds(lambda: rows @ inner)
    block, target = torch.ones(COPIED // 4), torch.empty(COPIED // 4)
    copy = _seconds(lambda: target.copy_(block))
    flops = 2 * TOKENS * shape.hidden * shape.intermediate / product
    return replace(device, flops=flops, read_rate=2 * COPIED / copy, link_rate=LOCAL_LINK, host_rate=COPIED / copy)


def _seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
