"""The watchdog's notes and stacks, written by real processes, and what is read out of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.cluster import watchdog
from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.watchdog import Frame, ProgressRecord, StallDetector, read_progress
from rlcli.cluster.worker_errors import (
    actor_died,
    is_gpu_failure,
    is_out_of_memory,
    is_peer_failure,
    out_of_memory_error,
)

STALL_S = 0.5


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    watchdog.start(tmp_path / "rank-0.stack", STALL_S)
    try:
        yield tmp_path / "rank-0.stack"
    finally:
        watchdog.stop()
    assert not (tmp_path / "rank-0.stack").exists()


def record_of(file: Path) -> ProgressRecord:
    note = read_progress(file)
    assert note is not None
    return note


class Slow:
    @dispatch()
    def update(self, seconds: float) -> None:
        self.sleep(seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @dispatch(collect="stream")
    def rollout(self, pause: float, count: int = 3) -> Iterator[int]:
        for number in range(count):
            time.sleep(pause)
            yield number

    @dispatch()
    def outer(self) -> None:
        self.update(0.0)
        time.sleep(2 * STALL_S)


def test_a_method_that_makes_no_progress_leaves_its_stack_until_it_goes_on(file: Path) -> None:
    assert (record_of(file).method, record_of(file).threads) == ("", [])
    Slow().update(2 * STALL_S)
    note = record_of(file)
    assert not note.threads, "it went on after all"
    records = [(number, record_of(file)) for number in Slow().rollout(2 * STALL_S)]
    assert [number for number, _ in records] == [0, 1, 2]
    first = records[0][1]
    assert first.method == "rollout"
    assert [frame.function for frame in first.threads[0][:2]] == ["rollout", "stream"]
    assert first.location.startswith("rollout (")
    assert first.location.endswith(")")
    assert "dispatch.py" not in first.location
    assert [note.count for _, note in records] == sorted({note.count for _, note in records}), "each item is progress"


def test_a_method_that_goes_on_leaves_none(file: Path) -> None:
    for _ in Slow().rollout(STALL_S / 8, count=12):
        assert not record_of(file).threads
    with watchdog.watched("update"):
        for _ in range(12):
            time.sleep(STALL_S / 8)
            watchdog.progress()
        assert not record_of(file).threads


BUSY = """
import json, sys
from pathlib import Path
from rlcli.cluster import watchdog

def deep(depth):
    return json.dumps({"depth": [depth]}) if depth == 0 else deep(depth - 1)

path = Path(sys.argv[1])
watchdog.start(path, 0.01)
for _ in range(300):
    with watchdog.watched("update"):
        while path.stat().st_size == watchdog.HEADER_BYTES:
            deep(60)
watchdog.stop()
"""
LOCKED = """
import ctypes, sys
from pathlib import Path
from rlcli.cluster import watchdog
from rlcli.cluster.dispatch import dispatch

class Worker:
    @dispatch()
    def update(self):
        ctypes.PyDLL(None).sleep(600)

watchdog.start(Path(sys.argv[1]), 0.1)
Worker().update()
"""


def test_a_slow_method_that_computes_survives_its_stack(tmp_path: Path) -> None:
    """Reading the frames of a running thread without Python's lock ends the process with SIGSEGV."""
    words = [sys.executable, "-c", BUSY, str(tmp_path / "rank-0.stack")]
    completed = subprocess.run(words, capture_output=True, text=True, timeout=540)
    assert completed.returncode == 0, completed.stderr


def test_a_hang_that_keeps_pythons_lock_leaves_its_stack(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOCKED, str(tmp_path / "rank-0.stack")])
    try:
        path = tmp_path / "rank-0.stack"
        while not ((note := read_progress(path)) and note.threads and note.location.startswith("update (")):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def test_what_comes_before_the_first_step_gets_more_time() -> None:
    assert watchdog.stall_limit_s("build", 20.0) == watchdog.MIN_STARTUP_STALL_S
    assert watchdog.stall_limit_s("build", 1800.0) == watchdog.stall_limit_s("update", 1800.0) == 1800.0
    assert watchdog.stall_limit_s("update", 20.0) == 20.0


def test_a_method_within_another_is_part_of_it(file: Path) -> None:
    class Look(Slow):
        def sleep(self, seconds: float) -> None:
            assert record_of(file).method == "outer"

    Look().outer()
    with watchdog.watched("outer"):
        Look().outer()
        assert record_of(file).method == "outer"
    assert record_of(file).method == ""


def test_a_process_that_is_not_watched_runs_as_if_there_were_no_watchdog() -> None:
    assert watchdog._watch is None
    Slow().update(0.0)
    assert list(Slow().rollout(0.0)) == [0, 1, 2]
    watchdog.progress()


def test_a_full_disk_stops_no_worker(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    initial, refused = record_of(file), list[object]()

    def full(*args: object) -> int:
        refused.append(args)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.pwrite", full)
        assert list(Slow().rollout(0.0)) == [0, 1, 2]
    assert refused
    assert record_of(file) == initial
    Slow().update(0.0)
    assert record_of(file).count > initial.count, "it is written again once there is room"


WAITING = """
import sys, time
import torch, torch.distributed as dist
from pathlib import Path
from rlcli.cluster import watchdog as watch
from rlcli.cluster.dispatch import dispatch

class Worker:
    @dispatch()
    def update(self, rank):
        if rank:
            self.forget()
        dist.all_reduce(torch.ones(1))
    def forget(self):
        time.sleep(600)

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
watch.start(Path(folder) / f"rank-{rank}.stack", 0.5)
Worker().update(rank)
"""


@pytest.mark.long
def test_who_waits_in_a_collective_is_told_from_who_holds_it_up(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", WAITING, str(rank), str(tmp_path)]) for rank in (0, 1)]
    paths = [tmp_path / f"rank-{rank}.stack" for rank in (0, 1)]
    try:
        patience = StallDetector(paths, 0.5, no_file_s=60.0)
        stalled: dict[int, ProgressRecord | None] = {}
        limit = time.monotonic() + 60
        while not stalled and time.monotonic() < limit:
            time.sleep(0.1)
            stalled = patience.stalled([0, 1])
        assert list(stalled) == [1]
        assert record_of(paths[0]).waits_for_peers
        assert not record_of(paths[1]).waits_for_peers
        assert record_of(paths[1]).location.startswith("forget (")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def write(path: Path, count: int, frames: str = "") -> None:
    note = f'{{"count": {count}, "method": "update", "pid": 1, "host": "here"}}'.ljust(watchdog.HEADER_BYTES - 1) + "\n"
    dump = f"Timeout (0:00:02)!\nThread 0x1 (most recent call first):\n{frames}" if frames else ""
    path.write_text(note + dump)


COLLECTIVE = (
    '  File "/x/torch/distributed/distributed_c10d.py", line 2 in all_reduce\n  File "/x/learner.py", line 3 in f\n'
)
OWN = '  File "/x/learner.py", line 3 in f\n'


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StallDetector, list[Path]]:
    """StallDetector of 10 s with three ranks; `time.monotonic` advances by a second with each call."""
    clock = iter(range(10_000))
    monkeypatch.setattr("rlcli.cluster.watchdog.time.monotonic", lambda: float(next(clock)))
    paths = [tmp_path / f"rank-{rank}.stack" for rank in range(3)]
    return StallDetector(paths, 10.0, no_file_s=30.0), paths


def first_stall(patience: StallDetector, waiting: list[int], limit: int = 100) -> tuple[int, list[int]]:
    for look in range(limit):
        stalled = patience.stalled(waiting)
        if stalled:
            return look, list(stalled)
    return limit, []


def test_a_rank_that_hangs_in_its_own_code_is_at_fault_not_the_waiting(
    looked_at: tuple[StallDetector, list[Path]],
) -> None:
    patience, paths = looked_at
    for path, frames in zip(paths, (COLLECTIVE, OWN, COLLECTIVE), strict=True):
        write(path, 1, frames)
    look, ranks = first_stall(patience, [0, 1, 2])
    assert ranks == [1]
    assert 10 <= look <= 13


def test_nobody_is_late_while_one_that_the_others_wait_for_goes_on(looked_at: tuple[StallDetector, list[Path]]) -> None:
    patience, paths = looked_at
    for path in paths:
        write(path, 1, COLLECTIVE)
    for look in range(60):
        write(paths[1], look)
        assert not patience.stalled([0, 1, 2])
    write(paths[1], 60, COLLECTIVE)
    assert first_stall(patience, [0, 1, 2])[1] == [0, 1, 2]


def test_a_rank_that_left_no_stack_or_no_sign_of_life_is_at_fault(looked_at: tuple[StallDetector, list[Path]]) -> None:
    patience, paths = looked_at
    write(paths[0], 1, COLLECTIVE)
    write(paths[1], 1)
    look, ranks = first_stall(patience, [0, 1, 2])
    assert (ranks, look <= 13) == ([1], True)
    look, ranks = first_stall(patience, [0, 2])
    assert ranks == [2]
    assert look >= 15, "one that was never seen may still be starting"


def test_what_is_heard_is_progress_and_without_a_bound_there_is_none(
    looked_at: tuple[StallDetector, list[Path]],
) -> None:
    patience, paths = looked_at
    for path in paths:
        write(path, 1, OWN)
    for _ in range(40):
        assert not patience.stalled([0, 1, 2])
        for rank in range(3):
            patience.progressed(rank)
    assert first_stall(StallDetector(paths, None, 30.0), [0, 1, 2]) == (100, [])


def test_a_caller_that_was_suspended_finds_nobody_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5000.0, 5001.0])
    monkeypatch.setattr("rlcli.cluster.watchdog.time.monotonic", lambda: next(times))
    write(tmp_path / "rank-0.stack", 1)
    patience = StallDetector([tmp_path / "rank-0.stack"], 10.0, 30.0)
    assert [patience.stalled([0]) for _ in range(3)] == [{}] * 3


def test_a_backward_pass_whose_own_thread_waits_in_a_collective_waits_too() -> None:
    backward = [Frame("/x/torch/autograd/graph.py", 1, "_engine_run_backward"), Frame("/x/learner.py", 2, "update")]
    thread = [Frame("/x/torch/distributed/fsdp/_param_group.py", 3, "post_backward")]
    assert ProgressRecord(1, 1, "here", "update", [backward, thread]).waits_for_peers
    assert not ProgressRecord(1, 1, "here", "update", [backward, [Frame("/x/own.py", 3, "hook")]]).waits_for_peers
    # Within a module that FSDP has wrapped, the model's own code comes first.
    assert not ProgressRecord(1, 1, "here", "update", [[Frame("/x/model.py", 1, "forward"), *thread]]).waits_for_peers


def test_a_file_that_is_half_there_is_no_note(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert read_progress(tmp_path / "empty") is None


def test_want_of_memory_is_told_with_what_to_change_where_it_was_felt() -> None:
    for error in (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate"),
        ValueError(
            "Free memory on device cuda:0 (9.1/79.2 GiB) on startup is less than desired GPU memory utilization"
        ),
        ValueError("No available memory for the cache blocks."),
        ValueError("2.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)."),
    ):
        assert is_out_of_memory(error)
        assert not out_of_memory_error(1, "update", error).retry
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert "worker 1 ran out of memory in update: MemoryError" in str(out_of_memory_error(1, "update", MemoryError()))
    assert "model.gradient_checkpointing" in out_of_memory_error(0, "compute_old_log_probs", MemoryError()).hint
    assert "rollout.max_concurrent" in out_of_memory_error(0, "rollout", MemoryError()).hint
    assert "rollout.gpu_memory_utilization" in out_of_memory_error(0, "sync_weights", MemoryError()).hint
    assert "train.offload" in out_of_memory_error(0, "rollout", MemoryError()).hint
    assert "offload" in out_of_memory_error(0, "update", MemoryError()).hint
    assert "rlcli plan" in out_of_memory_error(0, "update", MemoryError()).hint


def test_a_gpu_that_failed_is_worth_another_try_and_a_wrong_index_is_not() -> None:
    accelerator_error = type("AcceleratorError", (RuntimeError,), {})
    assert is_gpu_failure(accelerator_error("CUDA error: uncorrectable ECC error encountered"))
    assert not is_gpu_failure(accelerator_error("CUDA error: an illegal memory access was encountered"))
    assert not is_gpu_failure(accelerator_error("CUDA error: device-side assert triggered"))
    assert not is_gpu_failure(RuntimeError("the word ECC alone"))


def test_broken_connections_are_somebody_elses_death() -> None:
    for text in ("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:3", "Broken pipe"):
        assert is_peer_failure(RuntimeError(text))
    assert not is_peer_failure(ValueError("seven is odd"))


NODE = """The actor died unexpectedly before finishing this task.
	class_name: Worker
	ip: 10.0.0.7
The actor died because its node has died. Node Id: 0123456789abcdef
	the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
LOW = """The actor died unexpectedly before finishing this task.
	ip: 10.0.0.7
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7) was 15.3GB / 16GB
Refer to the documentation on how to address the out of memory issue: set the environment variable …"""


@pytest.mark.parametrize(
    ("text", "oom_kills", "expected", "helps"),
    [
        (NODE, 0, "worker 1 died in update: its machine 10.0.0.7 is gone", False),
        (LOW, 0, "worker 1 was killed in update: its machine 10.0.0.7 ran out of memory", True),
        ("Connection error code 2. End of file.", 1, "the kernel has killed a process on this machine", True),
        ("Connection error code 2. End of file.", 0, "worker 1 died in update; its log rank-1.log ends: step 3", True),
    ],
)
def test_a_death_from_outside_may_be_tried_again_and_names_its_cause(
    text: str, oom_kills: int, expected: str, helps: bool
) -> None:
    error = actor_died(1, "update", RuntimeError(text), Path("rank-1.log"), "step 3", oom_kills)
    assert (error.retry, error.who) == (True, "worker 1")
    assert expected in error.message
    assert "its log rank-1.log ends: step 3" in error.message
    assert ("train.tokens_per_microbatch" in error.hint) == helps


def test_of_what_ray_says_of_its_memory_monitor_the_figures_are_told() -> None:
    error = actor_died(1, "rollout", RuntimeError(LOW), Path("rank-1.log"), "", 0)
    assert error.message.endswith("Memory on the node (IP: 10.0.0.7) was 15.3GB / 16GB")
    assert "rollout.max_concurrent" in error.hint
