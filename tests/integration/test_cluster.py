"""Groups of actors on real Ray, without models: how calls are dispatched, how failures are told, what stays behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlcli.cluster.placement import Pool, reserve, start_group
from rlcli.cluster.process import malloc
from rlcli.cluster.ray_session import closed_to_others, ray_session
from rlcli.cluster.same_code import check_same_code
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.errors import DataError, RunFailed, SetupError

TWO = Pool(workers=2, device="cpu", threads=1)


def toy() -> Any:
    """A worker class. Made by a function, so that Ray carries its code to the actors."""
    from rlcli.cluster.dispatch import dispatch

    class Toy:
        def __init__(self, rank: int, world: int, broken: int = -1) -> None:
            if rank == broken:
                raise PermissionError(13, "cannot write the log")
            self.rank, self.world = rank, world

        @dispatch()
        def pid(self) -> int:
            return os.getpid()

        data_rank = dispatch()(lambda _: 0)
        """All work on the same rows, as ranks of context or tensor parallelism do."""

        @dispatch(send="data", collect="sum")
        def count(self, rows: list[int]) -> dict[str, float]:
            return {"rows": float(len(rows)), f"rank {self.rank}": 1.0}

        @dispatch(send="data", shared=["shared"])
        def both(self, shard: str, shared: list[str]) -> list[str]:
            return [shard, *shared]

        @dispatch(send="scatter", collect="stream")
        def spell(self, word: str) -> Iterator[tuple[int, str]]:
            yield from ((self.rank, letter) for letter in word)

        @dispatch()
        def meet(self, ending: str) -> None:
            """Rank 0 fails; rank 1 waits for it for ever, or notices a broken connection."""
            if self.rank == 1 and ending == "dies":
                time.sleep(0.5)
                raise RuntimeError("Connection closed by peer")
            if self.rank == 1:
                time.sleep(600)
            if ending == "dies":
                os._exit(1)
            raise DataError("no row 7", "make one") if ending == "user's error" else ValueError("seven is odd")

        def close(self) -> None: ...

    return Toy


COMPARES = """
import sys
from rlcli.cluster.placement import Pool, reserve
from rlcli.cluster.ray_session import ray_session
from rlcli.cluster.same_code import check_same_code
with ray_session(sys.argv[1], 2):
    check_same_code(reserve([Pool(workers=2, device="cpu", threads=1)]))
"""


@contextmanager
def owned(**environment: str) -> Iterator[str]:
    """The address of a Ray cluster that someone else runs. This process has its token meanwhile."""
    code = (
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, logging_level='ERROR', "
        "object_store_memory=100 << 20)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
        "ray.shutdown()"
    )
    with tempfile.TemporaryDirectory() as folder, closed_to_others(Path(folder)):
        owner = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert owner.stdout is not None
        try:
            yield next(line.strip() for line in owner.stdout if re.fullmatch(r"[\d.]+:\d+\s*", line))
        finally:
            owner.communicate("", timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with owned() as address:
        yield address


@pytest.fixture
def group(cluster: str, tmp_path: Path) -> Iterator[WorkerGroup[Any]]:
    with ray_session(cluster, 2):
        workers = start_group(toy(), TWO, tmp_path)
        try:
            yield workers
        finally:
            workers.kill()


@pytest.mark.parametrize(
    "variables", [{}, {"LD_PRELOAD": "", "MALLOC_TRIM_THRESHOLD_": "4096"}], ids=["jemalloc", "glibc"]
)
def test_a_cpu_worker_starts_with_our_heap_unless_the_user_set_another(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """A heap reads its variables when a process starts, and never again."""
    import psutil

    for name in ("LD_PRELOAD", *malloc.JEMALLOC, *malloc.GLIBC):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ray_session(cluster, 2):
        workers = start_group(toy(), TWO, tmp_path)
        pids = workers.call(toy().pid)
        mapped = ["libjemalloc" in Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        environments = [psutil.Process(pid).environ() for pid in pids]
        workers.close()
    assert mapped == [not variables] * 2
    expected = malloc.GLIBC | {"MALLOC_TRIM_THRESHOLD_": "4096"} if variables else malloc.JEMALLOC
    assert [{name: environment.get(name) for name in expected} for environment in environments] == [expected] * 2


def test_the_machines_of_a_cluster_have_to_have_this_rlcli(cluster: str, tmp_path: Path) -> None:
    with ray_session(cluster, 2):
        check_same_code(reserve([TWO]))
    spec = importlib.util.find_spec("rlcli")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "rlcli", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "rlcli" / "algorithms" / "kl.py").open("a") as changed:
        changed.write("# another version\n")
    with owned(PYTHONPATH=str(tmp_path)) as address:
        # Ray's workers also look where its driver does, which here is not in the folder of this project.
        done = subprocess.run(
            [sys.executable, "-c", COMPARES, address], cwd=tmp_path.parent, capture_output=True, text=True, check=False
        )
    assert re.search(r"has another rlcli: 1 of \d+ files differ, such as rlcli/algorithms/kl.py", done.stderr), (
        done.stderr
    )
    assert "install the same rlcli on all machines" in done.stderr


def test_calls_are_dispatched_and_a_cluster_gets_its_places_back(cluster: str, tmp_path: Path) -> None:
    import psutil
    import ray
    from ray.util import placement_group_table

    with ray_session(cluster, 2):
        worker = toy()
        workers = start_group(worker, TWO, tmp_path)
        processes = [psutil.Process(pid) for pid in workers.call(worker.pid)]
        assert workers.data_ranks == 1
        assert workers.call(worker.count, [[1, 2]]) == {"rows": 2.0, "rank 0": 1.0}
        assert workers.call(worker.both, ["a"], ["c"]) == [["a", "c"], ["a", "c"]]
        spelt = list(workers.call(worker.spell, ["ab", "xyz"]))
        assert [letter for rank, letter in spelt if rank == 1] == ["x", "y", "z"]
        assert len(spelt) == 5
        workers.close()
        assert {entry["state"] for entry in placement_group_table().values()} == {"REMOVED"}
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU", 0) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not psutil.wait_procs(processes, timeout=60)[1]
    assert not ray.is_initialized()


def failure(group: WorkerGroup[Any], ending: str) -> Any:
    with pytest.raises((RunFailed, DataError)) as raised:
        group.call(toy().meet, ending)
    return raised.value


def test_the_first_failure_is_raised_while_others_wait_for_ever(group: WorkerGroup[Any], tmp_path: Path) -> None:
    error = failure(group, "raises")
    assert "worker 0 failed in meet: ValueError: seven is odd" in str(error)
    assert str(tmp_path / "rank-0.log") in error.hint


def test_a_users_error_comes_as_it_was_raised(group: WorkerGroup[Any]) -> None:
    error = failure(group, "user's error")
    assert type(error) is DataError
    assert (error.message, error.hint) == ("no row 7", "make one")


def test_a_death_is_told_rather_than_the_broken_connections_it_left(group: WorkerGroup[Any], tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("loading\n\nSegmentation fault\n")
    error = failure(group, "dies")
    assert "worker 0 died in meet" in str(error)
    assert "loading | Segmentation fault" in str(error)


def test_a_worker_that_does_not_start_says_why(cluster: str, tmp_path: Path) -> None:
    with ray_session(cluster, 2):
        workers = start_group(toy(), TWO, tmp_path, 1)
        with pytest.raises(RunFailed, match=r"worker 1 died in pid: PermissionError: .*cannot write the log"):
            workers.call(toy().pid)
        workers.kill()


def test_more_workers_than_the_cluster_holds_are_refused(cluster: str, tmp_path: Path) -> None:
    with ray_session(cluster, 3), pytest.raises(SetupError, match=r"cluster.workers = 3 needs 3 CPUs"):
        start_group(toy(), Pool(workers=3, device="cpu", threads=1), tmp_path)


DAEMONS = """
import json
import psutil
from rlcli.cluster.ray_session import local_cluster
with local_cluster(1, lambda lost, why: None):
    print(json.dumps([process.cmdline() for process in psutil.Process().children(recursive=True)]))
"""


def test_a_local_cluster_starts_no_daemon_that_one_machine_does_not_need() -> None:
    completed = subprocess.run([sys.executable, "-c", DAEMONS], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    lines = [" ".join(words) for words in json.loads(completed.stdout)]
    assert [line for line in lines if re.search(r"gcs_server|raylet/raylet", line)], "the needed ones"
    assert [line for line in lines if re.search(r"dashboard/dashboard\.py|monitor\.py", line)] == []
    # The command line of the raylet holds those of its agents.
    assert all("--minimal" in line for line in lines if "dashboard/agent.py" in line), "no HTTP server"


def test_no_cluster_at_the_address_is_said_in_one_line() -> None:
    with pytest.raises(SetupError, match=r"no Ray cluster answers at 127.0.0.1:1"), ray_session("127.0.0.1:1", 1):
        pass
