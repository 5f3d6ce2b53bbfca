"""Peak memory of each phase: of this process for real, of a GPU by what torch and the device would say."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import peak_memory
from rlcli.cluster.process.peak_memory import GIB, PHASES, Device, Meter, Process, largest
from rlcli.training.worker.worker import Worker

MIB = 1 << 20
SLACK = 24 * MIB
"""Tolerance for memory that the interpreter allocates or frees meanwhile."""


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_meter", None)
    peak_memory.start("cpu")


def held(size: int, shared: bool = False) -> mmap.mmap:
    """`size` bytes, each page of them touched; they go back to the kernel with what is returned."""
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, size, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.memset(address, 1, size)
    return pages


def take(size: int) -> None:
    """Have `size` bytes for a moment."""
    held(size)


class Some:
    """A worker with two phases, which allocate and free the requested amounts."""

    @dispatch()
    def update(self, size: int) -> None:
        take(size)

    @dispatch(collect="stream")
    def rollout(self, size: int) -> Iterator[int]:
        take(size)
        yield 1

    @dispatch()
    def texts(self, size: int) -> None:
        take(size)


@pytest.mark.long
def test_a_phases_peak_counts_memory_freed_before_its_end(measuring: None) -> None:
    some = Some()
    list(some.rollout(64 * MIB))
    some.update(512 * MIB)
    some.update(128 * MIB)  # the largest of a phase's calls counts
    some.texts(600 * MIB)  # no phase
    peaks = {name: value * GIB for name, value in peak_memory.collect().items()}
    assert peaks["update_gb"] - peaks["generate_gb"] == pytest.approx((512 - 64) * MIB, abs=SLACK)
    assert peaks.keys() == {"generate_gb", "update_gb", "base_gb", "shm_gb"}


def test_what_was_told_is_not_told_again_but_for_what_stays(measuring: None) -> None:
    some = Some()
    with peak_memory.measured("build"):
        take(256 * MIB)
    with peak_memory.base():
        pass
    some.update(512 * MIB)
    first = peak_memory.collect()
    some.update(64 * MIB)
    second = peak_memory.collect()
    assert first["update_gb"] - second["update_gb"] == pytest.approx(448 / 1024, abs=SLACK / GIB)
    assert first["build_gb"] == second["build_gb"] > first["base_gb"] == second["base_gb"] > 0


def test_pages_that_are_shared_are_not_the_phases(measuring: None) -> None:
    some = Some()
    some.update(MIB)
    without = peak_memory.collect()["update_gb"]
    pages = held(256 * MIB, shared=True)
    some.update(MIB)
    assert peak_memory.collect()["update_gb"] - without < SLACK / GIB
    del pages


def test_the_base_grows_by_what_is_imported_later(measuring: None) -> None:
    with peak_memory.base():
        pass
    first = peak_memory.collect()["base_gb"]
    weights = held(128 * MIB)  # not within the block
    with peak_memory.base():
        library = held(64 * MIB)
    assert peak_memory.collect()["base_gb"] - first == pytest.approx(64 / 1024, abs=SLACK / GIB)
    del weights, library


def test_without_a_mark_that_can_be_set_back_memory_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(peak_memory, "_can_reset", lambda: False)
    gauge = Process()
    gauge.begin()
    baseline = gauge.peak()
    pages = held(256 * MIB)
    time.sleep(10 * peak_memory.SAMPLED_EVERY_S)
    del pages
    assert gauge.peak() - baseline == pytest.approx(256 * MIB, abs=SLACK)
    gauge.begin()
    assert gauge.peak() - baseline < SLACK


def test_a_kernel_that_tells_less_of_a_process_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, clear = tmp_path / "status", tmp_path / "clear_refs"
    status.write_text("Name:\tpython\nVmSize:\t2048 kB\nVmRSS:\t1024 kB\nVmData:\t512 kB\n")
    monkeypatch.setattr(peak_memory, "_STATUS", status)
    monkeypatch.setattr(peak_memory, "_CLEAR", clear)
    meter = Meter(Process())
    with meter.base(), meter.phase("update"):
        pass
    assert meter.collect()["update_gb"] == pytest.approx(1 / 1024)


def test_nothing_is_measured_before_the_start_and_within_a_phase_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_meter", None)
    with peak_memory.measured("update"), peak_memory.base():
        peak_memory.mark()
    assert peak_memory.collect() == {}
    meter = Meter(Process())
    with meter.phase("sync"), meter.phase("update"):
        meter.mark()
    assert meter.collect().keys() == {"sync_gb", "base_gb", "shm_gb"}


def test_each_phase_is_a_method_of_the_worker_that_is_dispatched() -> None:
    assert [name for name in PHASES if not hasattr(getattr(Worker, name, None), "dispatch")] == []


def test_the_largest_over_the_ranks_counts() -> None:
    ranks = [{"update_gb": 1.0, "generate_gb": 3.0}, {"update_gb": 2.0}]
    assert largest(ranks) == {"memory/generate_gb": 3.0, "memory/update_gb": 2.0}


class Gpu:
    """Stand-in for torch.accelerator, with an allocator whose tensors in `pool` stay counted while it is unmapped."""

    total = 1000

    def __init__(self) -> None:
        self.context, self.pool, self.asleep = 10, 0, False
        self.tensors = self.cached = self.peak = self.peak_reserved = 0

    def allocate(self, size: int) -> None:
        self.tensors += size
        self.cached = max(0, self.cached - size)
        self._count()

    def free(self, size: int) -> None:
        self.tensors -= size
        self.cached += size

    def _count(self) -> None:
        self.peak = max(self.peak, self.memory_allocated())
        self.peak_reserved = max(self.peak_reserved, self.memory_reserved())

    def memory_allocated(self) -> int:
        return self.tensors + self.pool

    def memory_reserved(self) -> int:
        return self.memory_allocated() + self.cached

    def max_memory_allocated(self) -> int:
        return self.peak

    def max_memory_reserved(self) -> int:
        return self.peak_reserved

    def reset_peak_memory_stats(self) -> None:
        self.peak, self.peak_reserved = self.memory_allocated(), self.memory_reserved()

    def get_memory_info(self) -> tuple[int, int]:
        used = self.context + self.tensors + self.cached + (0 if self.asleep else self.pool)
        return self.total - used, self.total


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    import torch

    accelerator = Gpu()
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return accelerator


def test_a_sleeping_pool_is_not_counted_though_torch_counts_it(gpu: Gpu) -> None:
    gpu.pool, gpu.asleep = 500, True
    gpu.allocate(100)
    meter = Meter(Device(), SimpleNamespace(begin=lambda: None, peak=lambda: 7))  # type: ignore[arg-type]
    with meter.phase("update"):
        gpu.allocate(200)
        gpu.free(200)
    readings = readings_of(meter)
    assert readings["update"] == 10 + 100 + 200
    assert readings["fragmented"] == 0
    assert readings["host"] == 7


def test_what_is_mapped_between_two_marks_is_not_added_to_a_peak_before(gpu: Gpu) -> None:
    gpu.pool, gpu.asleep = 500, True
    gpu.allocate(100)
    meter = Meter(Device())
    with meter.phase("sync"):
        gpu.allocate(200)  # a bucket, which is gone before the pool is mapped
        gpu.free(200)
        gpu.cached = 0  # as empty_cache leaves it
        meter.mark()
        gpu.asleep = False
    assert readings_of(meter)["sync"] == 10 + 100 + 500
    with meter.phase("release"):
        gpu.asleep = True
    assert readings_of(meter)["release"] == 10 + 100 + 500, "as it began"


def test_what_the_cache_holds_unused_is_told_apart(gpu: Gpu) -> None:
    meter = Meter(Device())
    with meter.phase("update"):
        gpu.allocate(100)
        gpu.free(100)
        gpu.cached += 50  # pieces that nothing fits into
        gpu.allocate(20)
    readings = readings_of(meter)
    assert readings["update"] == 10 + 100
    assert readings["fragmented"] == 50


def readings_of(meter: Meter) -> dict[str, int]:
    return {name.removesuffix("_gb"): round(value * GIB) for name, value in meter.collect().items()}
