"""The monitors end a driver that would wait forever once its Ray cluster is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from rlcli.cluster import ray_monitor
from rlcli.cluster.ray_monitor import DaemonMonitor, HeadMonitor
from rlcli.runs.folder import events_of

# The stand-in for the end of the process raises in the monitor's thread.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from rlcli.cluster.supervisor.failure_record import exit_when_cluster_lost
from rlcli.cluster.ray_monitor import DaemonMonitor

daemon = subprocess.Popen(["sleep", "600"])
DaemonMonitor({daemon.pid: "gcs_server"}, exit_when_cluster_lost(Path(sys.argv[1])))
print(daemon.pid, flush=True)
time.sleep(600)
"""


class Lost(list[tuple[str, str]]):
    """Takes the place of what ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.called = threading.Event()

    def __call__(self, who: str, message: str) -> NoReturn:
        self.append((who, message))
        self.called.set()
        raise SystemExit


@pytest.mark.parametrize(("supervised", "code"), [("1", 75), ("", 1)])
def test_a_driver_that_hangs_leaves_when_a_daemon_dies_and_notes_why(
    supervised: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / ".place").write_text(json.dumps({"step": 3, "phase": "update", "time": time.time()}))
    environment = {name: value for name, value in os.environ.items() if name != "RLCLI_SUPERVISED"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        env=environment | ({"RLCLI_SUPERVISED": supervised} if supervised else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    os.kill(int(driver.stdout.readline()), 9)
    _, stderr = driver.communicate(timeout=10)
    assert driver.returncode == code
    (event,) = events_of(tmp_path)
    assert {name: event[name] for name in ("event", "who", "step", "phase", "message", "retry")} == {
        "event": "failed",
        "who": "the Ray head",
        "step": 3,
        "phase": "update",
        "message": "the Ray head (gcs_server) died",
        "retry": True,
    }
    assert ("error: the Ray head (gcs_server) died; resume with: rlcli train --resume" in stderr) == (not supervised)


def test_daemons_that_end_after_the_watch_are_nobodys_business() -> None:
    daemon, lost = subprocess.Popen(["sleep", "600"]), Lost()
    watch = DaemonMonitor({daemon.pid: "raylet"}, lost)
    watch.close()
    daemon.kill()
    daemon.wait()
    assert not lost.called.wait(0.2)


def test_a_daemon_that_is_gone_before_the_watch_is_told() -> None:
    daemon, lost = subprocess.Popen(["true"]), Lost()
    daemon.wait()
    with pytest.raises(SystemExit):
        DaemonMonitor({daemon.pid: "raylet"}, lost)
    assert lost == [("the Ray head", "the Ray head (raylet) died")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.05, "CONNECT_TIMEOUT_S": 0.5, "HEAD_LOST_S": 0.5}.items():
        monkeypatch.setattr(ray_monitor, name, value)


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@pytest.mark.usefixtures("quick")
def test_a_head_that_stays_away_is_lost() -> None:
    lost, server = Lost(), listening()
    address = "{}:{}".format(*server.getsockname())
    HeadMonitor(address, lost)
    assert not lost.called.wait(0.7)
    server.close()
    assert lost.called.wait(5)
    ((who, message),) = lost
    assert who == "the Ray head"
    assert message.startswith(f"the Ray head at {address} has not answered for ")
    assert message.endswith("Connection refused")


@pytest.mark.usefixtures("quick")
def test_a_head_that_comes_back_in_time_is_not_lost() -> None:
    lost, server = Lost(), listening()
    port = server.getsockname()[1]
    watch = HeadMonitor(f"127.0.0.1:{port}", lost)
    server.close()
    time.sleep(0.2)
    with listening(port):
        assert not lost.called.wait(1.0)
        watch.close()


def test_on_a_restart_what_a_cluster_lacks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from rlcli.cluster import placement
    from rlcli.errors import SetupError

    nodes = ([{"Alive": alive, "Resources": {"CPU": 2.0}}] for alive in (False, False, True))
    monkeypatch.setattr(ray, "nodes", nodes.__next__)
    monkeypatch.setattr(placement, "RETRY_EVERY_S", 0.01)
    two = placement.Pool(workers=2, device="cpu", threads=1)
    with pytest.raises(SetupError, match="needs 2 CPUs, the cluster has 0"):
        placement.retried(lambda: placement._cluster_resources([two]))
    monkeypatch.setattr(placement, "is_restart", lambda: True)
    assert placement.retried(lambda: placement._cluster_resources([two])) == [{"CPU": 2.0}]


def test_the_address_of_rays_client_server_is_refused() -> None:
    from rlcli.cluster import ray_session
    from rlcli.errors import SetupError

    with (
        pytest.raises(SetupError, match=r"ray://head:10001 is .*HOST:6379"),
        ray_session.ray_session("ray://head:10001", 1),
    ):
        pass


def test_an_address_of_the_environment_is_named_as_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcli.cluster import ray_session
    from rlcli.errors import SetupError

    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with (
        pytest.raises(SetupError, match=r"ray://head:10001 \(from the environment variable RAY_ADDRESS\) is "),
        ray_session.ray_session("", 1),
    ):
        pass
    assert ray_session.with_origin("auto") == "auto"
    monkeypatch.delenv("RAY_ADDRESS")
    assert ray_session.with_origin("") == ""
