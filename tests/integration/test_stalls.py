"""Ranks that hang, run out of memory or are killed, on real Ray, with the one that waits for them in a collective."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcli.cluster.placement import Pool, start_group
from rlcli.cluster.ray_session import ray_session
from rlcli.errors import RunFailed

pytestmark = pytest.mark.long

STALL_S = 5.0
"""Long enough for a rank of a busy machine to show that it computes."""


def stuck() -> Any:  # noqa: C901  (a class is no branching)
    """A worker class. Made by a function, so that Ray carries its code to the actors."""
    from rlcli.cluster import watchdog
    from rlcli.cluster.dispatch import dispatch

    class Stuck:
        def __init__(self, rank: int, world: int, folder: str) -> None:
            import torch.distributed  # noqa: F401  (it takes longer than the patience of these tests)

            self.rank, self.world = rank, world
            watchdog.start(Path(folder) / f"rank-{rank}.stack", STALL_S)

        @dispatch()
        def pid(self) -> int:
            return os.getpid()

        @dispatch()
        def join(self, folder: str) -> None:
            import torch.distributed as dist

            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.world)

        @dispatch(collect="stream")
        def work(self, seconds: float) -> Iterator[int]:
            """Long, and going on all the time, but for rank 1, that does without saying so to the caller."""
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.1)
                watchdog.progress()
                if self.rank == 0:
                    yield 1

        @dispatch()
        def hang(self) -> None:
            """Rank 0 waits for the others, who hang in Python, in C with Python's lock held, and by a signal."""
            if self.rank == 0:
                import torch
                import torch.distributed as dist

                dist.all_reduce(torch.ones(1))
            elif self.rank == 1:
                self.sleep_in_python()
            elif self.rank == 2:
                self.loop_in_c()
            else:
                os.kill(os.getpid(), signal.SIGSTOP)

        def sleep_in_python(self) -> None:
            while True:
                time.sleep(0.1)

        def loop_in_c(self) -> None:
            ctypes.PyDLL(None).sleep(600)  # PyDLL does not let go of the lock

        def close(self) -> None: ...

    return Stuck


def failing() -> Any:
    """A worker class whose rank 1 runs out of memory, or rank 0 is killed."""
    from rlcli.cluster.dispatch import dispatch

    class Failing:
        def __init__(self, rank: int, world: int) -> None:
            self.rank = rank

        @dispatch()
        def update(self, kind: str) -> None:
            import torch

            if self.rank == 1 and kind == "CUDA":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
            if self.rank == 1 and kind == "CPU":
                torch.empty(1 << 60)
            if self.rank == 1 and kind == "Python":
                raise MemoryError
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL if self.rank == 0 else signal.SIGSTOP)

        @dispatch(collect="stream")
        def rollout(self) -> Iterator[int]:
            yield 1
            if self.rank == 1:
                raise MemoryError

        def close(self) -> None: ...

    return Failing


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_session("", 4):
        yield


def test_each_hanging_rank_is_named_and_waiting_ranks_are_not(ray_here: None, tmp_path: Path) -> None:
    worker = stuck()
    group = start_group(worker, Pool(4, "cpu", 1), tmp_path, str(tmp_path), stall_s=STALL_S)
    processes = [psutil.Process(pid) for pid in group.call(worker.pid)]
    try:
        group.call(worker.join, str(tmp_path))
        assert (
            sum(group.call(worker.work, 2.5 * STALL_S)) > 10
        )  # going on all the time, though one of them says nothing
        with pytest.raises(RunFailed) as raised:
            group.call(worker.hang)
    finally:
        group.kill()
    error = raised.value
    assert error.retry
    messages = [part.strip() for part in error.message.split(";")]
    assert "worker 1 makes no progress in hang for 5 s: sleep_in_python (" in messages[0]
    assert " < hang (" in messages[0]
    assert "worker 2 makes no progress in hang for 5 s: loop_in_c (" in messages[1]
    assert messages[2].startswith("worker 3 makes no progress in hang for 5 s: it does not answer (stopped,")
    assert messages[-1] == "worker 0 waits for it"
    assert "all_reduce" in (tmp_path / "rank-0.stack").read_text()
    assert str(tmp_path / "rank-3.log") in error.hint
    assert not psutil.wait_procs(processes, timeout=20)[1], "a process that was stopped outlives its group"


def test_out_of_memory_has_a_hint_and_a_killed_rank_may_be_retried(ray_here: None, tmp_path: Path) -> None:
    worker = failing()
    group = start_group(worker, Pool(2, "cpu", 1), tmp_path)
    try:
        for kind, message in (("CUDA", "Tried to allocate 2.00 GiB"), ("CPU", "allocate memory"), ("Python", "Memory")):
            with pytest.raises(RunFailed, match=rf"worker 1 ran out of memory in update: .*{message}") as raised:
                group.call(worker.update, kind)
            assert not raised.value.retry
            assert "train.tokens_per_microbatch" in raised.value.hint
        with pytest.raises(RunFailed, match="worker 1 ran out of memory in rollout: MemoryError") as raised:
            list(group.call(worker.rollout))
        assert "rollout.gpu_memory_utilization" in raised.value.hint
        (tmp_path / "rank-0.log").write_text("step 3\n")
        with pytest.raises(RunFailed, match=r"worker 0 died in update; its log .*rank-0.log ends: step 3") as raised:
            group.call(worker.update, "killed")
        assert raised.value.retry
        assert "memory" in raised.value.hint
    finally:
        group.kill()
