"""Measured rates of this machine (`measure_rates`, about two seconds), and their cache."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlcli.runs.software_record import installed
from rlcli.support.files import cache_folder, read_object, replacing
from rlcli.support.machine import processor
from rlcli.support.machine.threads import waiting_environment

VERSION = 2
"""Version of the measurement: raised when it changes, so that cached figures are measured again."""
LIMIT_S = 90.0
"""Most seconds that the processes of a measurement may take, imports included."""
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""A heap that keeps freed memory, as that of a worker does (`rlcli.cluster.process.malloc`)."""
TRIES = 3
"""Measurements at most, while other programs use the processors. The best of each figure is taken."""
OTHERS = 0.1
"""Share of the processors' time from which on other programs count."""
AGAIN_S = 3600.0
"""Age from which figures that were measured on a busy machine are measured again."""


@dataclass(frozen=True)
class Rates:
    """Rates of one worker of this machine, with its threads, in one dtype.

    >>> rates = Rates((128, 512), (1e9, 4e9), (1e9, 4e9), (8, 512), ((1e9, 4e9), (1e9, 4e9)), 1e10, 1e8, *[1e-6] * 4)
    >>> round(rates.of_layer(256, training=True) / 1e9, 2)
    2.0
    """

    widths: tuple[int, ...]
    """Hidden sizes of the measured decoder layers, ascending."""
    training: tuple[float, ...]
    """Operations per second of a layer's forward and backward pass, for each width."""
    forward: tuple[float, ...]
    """Operations per second of its forward pass."""
    rows: tuple[int, ...]
    """Rows of the measured products, ascending: the requests of a decoding step."""
    products: tuple[tuple[float, ...], ...]
    """[width][rows] Operations per second of a linear layer."""
    read_rate: float
    """Bytes per second that a copy reads and writes."""
    update_rate: float
    """Parameters per second of AdamW in float32."""
    operation_s: float
    """Seconds of a small operation: its dispatch, and waking the threads."""
    draw_s: float
    """Seconds of one logit when tokens are sampled on a CPU: noise, log-probs and ranks."""
    softmax_s: float
    """Seconds of one logit in the head's loss, forward and backward."""
    python_s: float
    """Seconds of a fixed piece of Python (1,000 dictionary updates)."""
    quiet: bool = True
    """True if the measurement had the processors to itself."""
    measured: float = 0.0
    """When, in seconds since 1970."""

    def of_layer(self, width: int, *, training: bool) -> float:
        """Operations per second of a decoder layer of a hidden size."""
        return _between(self.widths, self.training if training else self.forward, width)

    def of_product(self, width: int, rows: float) -> float:
        """Operations per second of a linear layer for this number of rows."""
        return _between(self.widths, [_between(self.rows, rates, rows) for rates in self.products], width)


MEASURED = tuple(field.name for field in fields(Rates) if field.name not in ("widths", "rows"))
"""Fields that two measurements of the same machine may differ in."""


def _between(xs: Sequence[float], values: Sequence[float], x: float) -> float:
    """`values` at `xs`, interpolated linearly in logarithms, and constant outside."""
    if x <= xs[0]:
        return values[0]
    for (x_low, low), (x_high, high) in zip(
        zip(xs, values, strict=True), zip(xs[1:], values[1:], strict=True), strict=False
    ):
        if x <= x_high:
            share = math.log(x / x_low) / math.log(x_high / x_low)
            return math.exp(math.log(low) * (1 - share) + math.log(high) * share)
    return values[-1]


@lru_cache
def machine_rates(device: str, dtype: str, threads: int, processes: int) -> Rates | None:
    """The rates of this machine, from the cache or measured now; None if they cannot be measured. device: `cpu` or
    `cuda`. processes: that compute at once."""
    cached = load(device, dtype, threads, processes)
    return measured_now(device, dtype, threads, processes) if cached is None else cached


def measured_now(device: str, dtype: str, threads: int, processes: int) -> Rates | None:
    """Measure the rates of this machine, and cache them."""
    rates = measure(device, dtype, threads, processes)
    if rates is not None:
        save(rates, device, dtype, threads, processes)
    return rates


def _key(device: str, dtype: str, threads: int, processes: int) -> str:
    """Key of the cache: everything that the rates depend on."""
    parts = (VERSION, device, _processor(device), dtype, f"{threads} threads", f"{processes} processes")
    return " · ".join(map(str, (*parts, f"torch {installed('torch')}")))


def cache_file() -> Path:
    """File of the cache."""
    return cache_folder() / "rates.json"


def load(device: str, dtype: str, threads: int, processes: int) -> Rates | None:
    """The cached rates; None if there are none, or if they are outdated."""
    try:
        rates = _rates(read_object(cache_file())[_key(device, dtype, threads, processes)])
    except (RuntimeError, KeyError, TypeError, ValueError):  # no home, no such file, or not one of these
        return None
    return rates if rates.quiet or time.time() - rates.measured < AGAIN_S else None


def save(rates: Rates, device: str, dtype: str, threads: int, processes: int) -> None:
    """Write rates to the cache. Without a home or a writable folder they are not cached."""
    try:
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        record = read_object(file) | {_key(device, dtype, threads, processes): asdict(rates)}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except (OSError, RuntimeError):
        return


def _rates(record: dict[str, Any]) -> Rates:
    """Rates from a JSON object. Raises TypeError or ValueError if they are not valid."""
    rates = Rates(**{name: _frozen(value) for name, value in record.items()})
    lists = (rates.training, rates.forward, rates.products)
    numbers = (*rates.training, *rates.forward, *(rate for row in rates.products for rate in row), rates.read_rate)
    if any(len(values) != len(rates.widths) for values in lists) or not all(rate > 0 for rate in numbers):
        raise ValueError("rates of other widths, or none")
    return rates


def _frozen(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def measure(device: str, dtype: str, threads: int, processes: int) -> Rates | None:
    """Measure in `processes` processes at once, and return the mean. On a busy machine, the best of `TRIES`: a call in
    which a thread is preempted can take a thousand times as long."""
    best: Rates | None = None
    for _ in range(TRIES):
        rates = _measure_once(device, dtype, threads, processes)
        if rates is None:
            break
        best = rates if best is None else fastest(best, rates)
        if rates.quiet:
            break
    return best


def _measure_once(device: str, dtype: str, threads: int, processes: int) -> Rates | None:
    if not installed("psutil"):  # nor torch: both come with what trains
        return None
    command = [sys.executable, "-P", "-m", "rlcli_planner.machine.measure_rates", device, dtype]
    limit = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment = os.environ | KEEPING | waiting_environment(os.environ) | limit
    children: list[subprocess.Popen[str]] = []
    began, busy_before, ours_before = time.monotonic(), _busy_s(), _ours_s()
    try:
        for _ in range(processes):
            child = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            children.append(child)
        rates = [_rates(json.loads(child.communicate(timeout=LIMIT_S)[0])) for child in children]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return None
    finally:
        for child in children:
            child.kill()
            child.wait()
    others_s = (_busy_s() - busy_before) - (_ours_s() - ours_before)
    cores_s = len(os.sched_getaffinity(0)) * (time.monotonic() - began)
    return replace(mean(rates), quiet=device == "cuda" or others_s < OTHERS * cores_s)


def _busy_s() -> float:
    """Seconds that all programs have used the processors that this process may use."""
    import psutil

    cores = psutil.cpu_times(percpu=True)
    used = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)]
    return float(sum(sum(core) - core.idle - core.iowait - core.guest - core.guest_nice for core in used))


def _ours_s() -> float:
    """Seconds that this process and its ended children have used processors."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def fastest(first: Rates, second: Rates) -> Rates:
    """The better of each rate of two measurements of the same machine."""

    def better(name: str, a: Any, b: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(better(name, x, y) for x, y in zip(a, b, strict=True))
        return min(a, b) if name.endswith("_s") else max(a, b)

    return replace(first, **{name: better(name, getattr(first, name), getattr(second, name)) for name in MEASURED})


def mean(measurements: Sequence[Rates]) -> Rates:
    """The mean of the rates of several processes."""

    def mean_of(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(mean_of(column) for column in zip(*values, strict=True))
        return all(values) if isinstance(values[0], bool) else sum(values) / len(values)

    means = {name: mean_of([getattr(rates, name) for rates in measurements]) for name in MEASURED}
    return replace(measurements[0], **means)


def _processor(device: str) -> str:
    """The GPU's name, or the processor's with the cores that this process may use."""
    return gpu_name() if device != "cpu" else f"{processor.name() or 'unknown'} × {len(os.sched_getaffinity(0))}"


@lru_cache
def gpu_name() -> str:
    """The first GPU's name, as nvidia-smi gives it; empty without one."""
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.partition("\n")[0].strip()
