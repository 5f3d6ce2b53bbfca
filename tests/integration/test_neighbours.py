"""Another user of the machine, beside a run: what it can read, write, replace and reach; and every port of the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import SMALL, descendants, start

NOBODY = 65534
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
CHOICE = ", ".join(repr(json.dumps({"reason": "so", "score": score})) for score in (0, 1))
JUDGE = f"exact + judge(serve='MODEL', structured=false, extra={{structured_outputs = {{choice = [{CHOICE}]}}}})"
SERVED = ["--set", "rollout.engine=server", "--set", "cluster.workers=1", "--verifier", JUDGE]
"""An engine as a server, and a judge that the run serves."""
PLAIN: list[str] = []
SLOW = """
import time


def reward(completions, **columns):
    time.sleep(1)
    return [0.0 for _ in completions]
"""
"""A reward that takes a second for each call, so that the run leaves the processors to others."""


class Live:
    """A run in a folder that other users can reach. group: id in the names of its files in shared places."""

    def __init__(self, folder: Path, words: list[str | Path]) -> None:
        self.folder, self.out = folder, folder / "run"
        self.process = start("train", "grpo", *words, "--out", self.out, "--steps", "10000")
        until = time.monotonic() + 400
        while not (self.out / "metrics.jsonl").exists() or len(self.lines()) < 2:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until, "no step within 400 s"
            time.sleep(0.2)
        groups = (process.environ().get("RLCLI_GROUP") for process in descendants(self.process.pid))
        self.group = next(group for group in groups if group)

    def lines(self) -> list[str]:
        return (self.out / "metrics.jsonl").read_text().splitlines()

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *descendants(self.process.pid)]

    def shared(self) -> list[Path]:
        """Its files in /tmp and /dev/shm."""
        return [path for root in ("/tmp", "/dev/shm") for path in Path(root).glob(f"rlcli-*{self.group}*")]

    def listeners(self) -> dict[tuple[str, int], str]:
        """(address, port) → which of its processes listens there."""
        kinds = {}
        for process in self.processes():
            try:
                listens = [
                    connection
                    for connection in process.net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN
                ]
                kind = kind_of(process)
                kinds |= {
                    (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port): kind for connection in listens
                }
            except psutil.NoSuchProcess:
                continue
        return kinds


def kind_of(process: psutil.Process) -> str:
    """The name of a process in the documentation."""
    line = " ".join(process.cmdline())
    kinds = {
        "gcs_server": r"/gcs_server ",
        "raylet": r"/raylet/raylet ",
        "Ray's agents": r"/agent/main\.py|/dashboard/agent\.py|DashboardAgent|RuntimeEnvAgent",
        "worker": r"^ray::(Worker|IDLE)|/default_worker\.py",
        "served model": r"^ray::ServerActor",
        "server of a served model": r"vllm\.entrypoints.*RequireKey",
        "server of an engine": r"vllm\.entrypoints.*--uds",
        "engine of a server": r"VLLM::",
        "driver": r"-m rlcli\.cli\.main",
    }
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, line)), line)


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """Where other users can go, unlike pytest's folders."""
    folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def live(
    open_folder: Path, tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Live]:
    slow = tmp_path_factory.mktemp("reward") / "slow.py"
    slow.write_text(SLOW)
    options = [word.replace("MODEL", str(tiny)) for word in request.param or ("--verifier", f"{slow}:reward")]
    run = Live(open_folder, ["--model", tiny, "--data", sums, "--workers", "2", *SMALL, *options])
    yield run
    run.process.terminate()
    run.process.communicate(timeout=120)
    shutil.rmtree(run.out, ignore_errors=True)


def tried(user: int, run: Live, paths: list[Path], tokens: list[str]) -> dict[str, Any]:
    """The accesses that succeed for a user."""
    sockets = [path for path in paths if path.is_socket()]
    attempt = {
        "user": user,
        "paths": [str(path) for path in paths if path not in sockets],
        "sockets": list(map(str, sockets)),
        "ports": sorted(port for _, port in run.listeners()),
        "tokens": tokens,
    }
    completed = subprocess.run(
        [sys.executable, "-P", Path(__file__).with_name("neighbour.py")],
        input=json.dumps(attempt),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    successes: dict[str, Any] = json.loads(completed.stdout)
    return successes


@pytest.mark.parametrize("live", [PLAIN], ids=["vllm"], indirect=True)
def test_another_user_reaches_nothing_and_the_ports_are_documented(live: Live) -> None:
    assert listening(live) >= {"gcs_server", "raylet", "worker", "driver"}
    if os.geteuid():
        pytest.skip("only root can try as another user")
    (control := live.folder / "control").write_text("for everybody")
    control.chmod(0o666)
    roots = [live.out, *live.shared()]
    paths = [control, *roots, *(entry for root in roots for entry in root.rglob("*"))]
    token = next(path.read_text() for path in paths if path.name == "token")

    theirs = tried(NOBODY, live, paths, ["", "0" * 64])
    ours = tried(0, live, paths, [token])

    assert theirs["read"] == theirs["write"] == [str(control)]
    assert theirs["replace"] == theirs["connect"] == theirs["fetch"] == []
    assert {name for name, status in theirs["answers"].items() if status == "OK"} == set()
    # The attempts are such that the run's own user succeeds.
    assert len(ours["read"]) > 20
    assert len(ours["connect"]) >= 2, "the raylet's and the object store's, at least"
    answered = {name.split()[0]: name.split()[1] for name, status in ours["answers"].items() if status == "OK"}
    assert len({*answered.values()}) == 3, "the head, the raylet, and workers answer who knows the token"
    for port, method in answered.items():
        for wrong in ("", "0" * 64):
            assert theirs["answers"][f"{port} {method} {wrong}"] == "UNAUTHENTICATED"

    for process in live.processes():
        assert token not in " ".join(process.cmdline())
    for path in (path for path in paths if path.is_file() and path.name != "token" and path.stat().st_size < 1 << 20):
        assert token.encode() not in path.read_bytes(), path
    for root in roots:
        assert not stat.S_IMODE(root.stat().st_mode) & 0o077, root


@pytest.mark.exhaustive  # the servers' sockets have tests of their own
@pytest.mark.parametrize("live", [SERVED], ids=["servers"], indirect=True)
def test_every_port_of_served_models_is_on_loopback_and_documented(live: Live) -> None:
    assert listening(live) >= {"gcs_server", "raylet", "worker", "driver", "served model", "server of a served model"}


def listening(run: Live) -> set[str]:
    """Which of the processes of a run listen: on loopback alone, and each in the table of ports."""
    listeners = run.listeners()
    assert {address for address, _ in listeners} <= {"127.0.0.1", "::1"}, listeners
    assert {*listeners.values()} <= documented(), listeners
    return {*listeners.values()}


def documented() -> set[str]:
    """Processes in the table of ports."""
    section = re.search(r"^## Ports\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    return set(re.findall(r"^\| \*\*(.+?)\*\* \|", section[1], re.MULTILINE))
