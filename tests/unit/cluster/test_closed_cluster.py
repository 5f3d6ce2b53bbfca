"""A local Ray cluster starts without being reachable by others; tests/integration/test_neighbours.py starts one."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from rlcli.cluster import rendezvous
from rlcli.cluster.ray_session import CLOSED_ENV, TOKEN_FILE, closed_to_others
from rlcli.cluster.rendezvous import rendezvous_address, store_at
from rlcli.errors import SetupError
from rlcli.support.attempt import remove_shared


def test_a_cluster_starts_on_loopback_with_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    initial = dict(os.environ)
    tokens = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with closed_to_others(tmp_path / name):
            file = tmp_path / name / TOKEN_FILE
            assert {key: os.environ[key] for key in CLOSED_ENV} == CLOSED_ENV
            assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(file))
            assert "RAY_AUTH_TOKEN" not in os.environ, "it would count before the file"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            tokens.append(file.read_text())
        assert dict(os.environ) == initial
    assert len({*tokens}) == 2
    assert {len(token) for token in tokens} == {64}


def test_a_token_is_never_written_to_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError), closed_to_others(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.long
def test_ray_reads_the_settings_of_a_second_session(tmp_path: Path) -> None:
    """A process that has imported Ray before: it has read them then."""
    code = """
import os, sys
from pathlib import Path
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
from ray._private.services import get_node_ip_address, resolve_ip_for_localhost
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode
from rlcli.cluster.ray_session import closed_to_others

def token():
    return AuthenticationTokenLoader.instance().get_raw_token()

for name in sys.argv[1:]:
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    with closed_to_others(Path(name)):
        assert get_authentication_mode() == AuthenticationMode.TOKEN
        assert token() == Path(name, "token").read_text()
        assert get_node_ip_address() == resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
"""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "first", tmp_path / "second"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1"])
def test_the_store_of_ranks_on_one_machine_is_a_file_of_this_user(address: str, tmp_path: Path) -> None:
    name = f"rlcli-test-{tmp_path.name}-{os.getpid()}"
    addresses = {rendezvous_address(address, name) for _ in range(2)}
    try:
        assert len(addresses) == 2, "each group has its own"
        (path, port), *_ = addresses
        folder = Path(path).parent
        assert (folder.name, port, stat.S_IMODE(folder.stat().st_mode)) == (name, 0, 0o700)
        stores = [store_at(path, port, rank, 2, timedelta(seconds=0.5)) for rank in range(2)]
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        with pytest.raises(RuntimeError):
            stores[1].get("nothing")
    finally:
        remove_shared(folder)


def test_ranks_of_several_machines_meet_at_an_address() -> None:
    address, port = rendezvous_address("localhost", "unused")  # a name: its machine may be any
    assert (address, port > 0) == ("localhost", True)
    assert not Path("/dev/shm/unused").exists()


def test_a_place_that_another_user_has_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "stores").symlink_to(tmp_path)
    with pytest.raises(SetupError, match="is a link"):
        rendezvous_address("127.0.0.1", "stores")


def test_the_store_of_several_machines_listens_on_its_address_alone() -> None:
    import psutil

    world = 3
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def joined(rank: int) -> bytes:
        store = store_at("127.0.0.1", port, rank, world, timedelta(seconds=60))
        if rank == 0:
            stores.append(store)
            store.set("key", "value")
        return bytes(store.get("key"))

    stores: list[object] = []
    with ThreadPoolExecutor(world) as pool:
        assert [*pool.map(joined, range(world))] == [b"value"] * world
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_translated_address_is_listened_for_everywhere() -> None:
    """192.0.2.1 is for documentation alone: no machine has it."""
    with rendezvous._listener("192.0.2.1", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", 0)) as bound_socket:
        rendezvous._listener(*bound_socket.getsockname())
