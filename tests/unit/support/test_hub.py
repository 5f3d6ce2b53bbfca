from __future__ import annotations

import os
import socket
import threading

import pytest

from rlcli.support.hub import offline_unless_reachable


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    # Set first, so that what the function sets is undone as well.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return monkeypatch


def test_a_hub_that_answers_stays_online(online: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}/")

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        notes: list[str] = []
        offline_unless_reachable(notes.append)
        thread.join()
    assert notes == []
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid", "http://[", "nonsense"])
def test_a_hub_that_is_not_there_means_the_cache_alone_and_is_said_once(
    endpoint: str, online: pytest.MonkeyPatch
) -> None:
    online.setenv("HF_ENDPOINT", endpoint)
    notes: list[str] = []
    offline_unless_reachable(notes.append)
    offline_unless_reachable(notes.append)
    assert len(notes) == 1
    assert notes[0].startswith(f"{endpoint} cannot be reached (")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
