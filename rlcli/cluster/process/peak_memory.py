"""Peak memory of each phase of a step: of this worker's device or, on CPUs, of its process.

A worker's method in `PHASES` is a phase. It begins by resetting the high-water marks and ends by reading them, which
takes a tenth of a millisecond; the controller collects the numbers once a step. docs/metrics.md defines what is
counted.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

BUILD = "build"
PHASES = {
    "build": BUILD,
    "load_state": BUILD,
    "rollout": "generate",
    "release_rollout_memory": "release",
    "load": "load",
    "compute_old_log_probs": "old_log_probs",
    "compute_reference_log_probs": "reference",
    "infer_teachers": "teacher",
    "infer_critic": "critic",
    "compute_advantages": "advantages",
    "update": "update",
    "update_critic": "update",
    "sync_weights": "sync",
    "next_weight_bucket": "sync",
    "load_weight_bucket": "sync",
    "broadcast_weights": "sync",
    "receive_broadcast": "sync",
    "activate_weights": "sync",
    "save_state": "checkpoint",
}
"""A worker's method → its phase."""

GIB = 1 << 30
SAMPLED_EVERY_S = 0.02
SHARED = Path("/dev/shm")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FIELD = re.compile(r"^(VmHWM|VmRSS|RssShmem):\s+(\d+) kB", re.M)

Peaks = dict[str, float]
"""Name (without `memory/`) → GiB."""


class Process:
    """This process's resident memory, in bytes. Unless `shared`, without the pages that it shares with others through
    /dev/shm. begin: resets the peak; peak: the maximum since then."""

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._resets = _can_reset()
        self._most = 0
        if not self._resets:
            threading.Thread(target=self._sample, daemon=True, name="memory").start()

    def begin(self) -> None:
        if self._resets:
            _CLEAR.write_text("5")
        self._most = 0

    def peak(self) -> int:
        status = _status()
        highest = status["VmHWM"] if self._resets else max(self._most, status["VmRSS"])
        return highest - self._excluded(status)

    def now(self) -> int:
        status = _status()
        return status["VmRSS"] - self._excluded(status)

    def _excluded(self, status: dict[str, int]) -> int:
        return 0 if self._shared else status["RssShmem"]

    def _sample(self) -> None:
        """Poll the memory, if the kernel does not let a process reset its high-water mark."""
        while True:
            threading.Event().wait(SAMPLED_EVERY_S)
            self._most = max(self._most, _status()["VmRSS"])


class Device:
    """Like `Process`, for its GPU: all memory in use outside torch's allocator (vLLM's pool as far as it is mapped, the
    CUDA context, NCCL's buffers, other processes), and the peak of torch's own tensors.

    torch keeps counting tensors of vLLM's pool while it sleeps; they are subtracted as the memory that torch reserves
    minus the memory in use on the device. unused: the most that torch's cache has held beyond what was allocated.
    """

    def __init__(self) -> None:
        self._at_begin = 0
        self.unused = 0

    def begin(self) -> None:
        from torch import accelerator

        accelerator.reset_peak_memory_stats()
        self._at_begin = self.now()

    def peak(self) -> int:
        from torch import accelerator

        allocated = int(accelerator.max_memory_allocated())
        self.unused = max(self.unused, accelerator.max_memory_reserved() - allocated)
        return max(self._at_begin, self._outside() + allocated)

    def now(self) -> int:
        from torch import accelerator

        return self._outside() + int(accelerator.memory_allocated())

    def _outside(self) -> int:
        from torch import accelerator

        free, total = accelerator.get_memory_info()
        return int(total - free - accelerator.memory_reserved())


class Meter:
    """The peaks of this process's phases since they were last collected.

    gauge: what is measured; host: on GPUs also the process's own memory, one number for all phases.
    """

    def __init__(self, gauge: Process | Device, host: Process | None = None) -> None:
        self._gauge, self._host = gauge, host
        self._phase = ""
        self._peaks: dict[str, int] = {}
        self._base = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as the phase `name`, including nested phases."""
        if self._phase:
            yield
            return
        self._phase = name
        self._gauge.begin()
        try:
            yield
        finally:
            self._note(name, self._gauge.peak())
            self._phase = ""

    def mark(self) -> None:
        """Within a phase: record its peak so far, and start a new measurement. On GPUs memory outside torch's allocator
        must be mapped after a mark, or it would be added to an earlier peak of torch's."""
        if self._phase:
            self._note(self._phase, self._gauge.peak())
            self._gauge.begin()

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Count the memory of the block's imports to the base; the first time, also all memory already in use."""
        start = self._gauge.now() if self._base else 0
        yield
        self._base += self._gauge.now() - start

    def collect(self) -> Peaks:
        """All peaks since the last call, and constant values: the base, the peak of building, current shared memory."""
        assert not self._phase, f"within {self._phase}"
        if self._host is not None:
            self._note("host", self._host.peak())
            self._host.begin()
        if isinstance(self._gauge, Device):
            self._note("fragmented", self._gauge.unused)
            self._gauge.unused = 0
        bytes_by_name = self._peaks | {"base": self._base, "shm": _shared()}
        self._peaks = {name: value for name, value in self._peaks.items() if name == BUILD}
        return {f"{name}_gb": value / GIB for name, value in bytes_by_name.items()}

    def _note(self, name: str, value: int) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, 0))


_meter: Meter | None = None


def start(device: str) -> None:
    """Measure this process's phases from now on. device: `cpu` or `cuda`."""
    global _meter
    _meter = Meter(Device(), Process(shared=True)) if device == "cuda" else Meter(Process())


@contextlib.contextmanager
def measured(method: str) -> Iterator[None]:
    """Measure the block as a worker's method. No effect for methods that are not phases, and before `start`."""
    phase = PHASES.get(method)
    with _meter.phase(phase) if _meter is not None and phase is not None else contextlib.nullcontext():
        yield


def mark() -> None:
    """See `Meter.mark`."""
    if _meter is not None:
        _meter.mark()


@contextlib.contextmanager
def base() -> Iterator[None]:
    """See `Meter.base`."""
    with _meter.base() if _meter is not None else contextlib.nullcontext():
        yield


def collect() -> Peaks:
    """See `Meter.collect`."""
    return _meter.collect() if _meter is not None else {}


def largest(ranks: Iterable[Peaks]) -> dict[str, float]:
    """The metrics of a step: for each name, the maximum over the ranks that have it.

    >>> largest([{"update_gb": 1.0, "base_gb": 0.5}, {"update_gb": 2.0}])
    {'memory/base_gb': 0.5, 'memory/update_gb': 2.0}
    """
    maxima: dict[str, float] = {}
    for peaks in ranks:
        for name, value in peaks.items():
            maxima[f"memory/{name}"] = max(value, maxima.get(f"memory/{name}", 0.0))
    return dict(sorted(maxima.items()))


def _status() -> dict[str, int]:
    """Field → bytes. 0 for fields that this kernel does not report: gVisor has no RssShmem and no VmHWM."""
    fields = {name: int(value) << 10 for name, value in _FIELD.findall(_STATUS.read_text())}
    return dict.fromkeys(("VmHWM", "VmRSS", "RssShmem"), 0) | fields


def _can_reset() -> bool:
    """True if this process may reset its high-water mark: some sandboxes have no such file."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _status()["VmHWM"] > 0


def _shared() -> int:
    try:
        return shutil.disk_usage(SHARED).used
    except OSError:
        return 0
