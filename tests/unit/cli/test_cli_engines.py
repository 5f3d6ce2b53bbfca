"""`rlcli engines`: the servers of a run, from the files that its engines wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.app import run
from rlcli.rollout.servers.server_record import requested_changes

SERVERS = [
    {"server": "http://a:1", "state": "ready", "running": 3, "finished": 12, "lost": 0, "weights": 4, "why": ""},
    {
        "server": "http://b:1",
        "state": "lost",
        "running": 0,
        "finished": 5,
        "lost": 1,
        "weights": 3,
        "why": "it is gone",
    },
    {"server": "unix:/x", "state": "ready", "running": 0, "finished": 5, "lost": 1, "weights": 4, "why": ""},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    engines = tmp_path / "logs" / "engines"
    engines.mkdir(parents=True)
    (tmp_path / "config.toml").write_text("")
    state: dict[str, Any] = {"time": 1.0, "worker": 0, "weights": 4}
    state["servers"] = [{**server, "kind": "vllm", "pid": None} for server in SERVERS]
    (engines / "worker-0.json").write_text(json.dumps(state))
    return tmp_path


def test_the_servers_of_a_run_are_listed_with_their_states(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engines", "list", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "http://a:1" in shown
    assert "http://b:1: it is gone" in shown
    assert "worker 0, x" in shown, "a server that the run starts itself"
    assert run(["engines", "list", str(folder), "--json"]) == 0
    (state,) = json.loads(capsys.readouterr().out)
    assert [server["state"] for server in state["servers"]] == ["ready", "lost", "ready"]


def test_servers_are_asked_to_join_and_to_leave(folder: Path) -> None:
    assert run(["engines", "add", str(folder), "http://c:1/"]) == 0
    assert run(["engines", "remove", str(folder), "http://a:1"]) == 0
    requests = [(request["wish"], request["server"]) for request in requested_changes(folder / "logs" / "engines")]
    assert requests == [("add", "http://c:1"), ("remove", "http://a:1")]
    with (folder / "logs" / "engines" / "wishes.jsonl").open("a") as file:
        file.write('{"wish": "add"}\n[]\n{"server": 1, "wish": "add"}\nno JSON\n')
    assert len(requested_changes(folder / "logs" / "engines")) == 2, "a line that is no request is left out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "c:1"], "'c:1' is not the URL of a server"),
        (["remove", "http://c:1"], "no server http://c:1; its servers: http://a:1, http://b:1"),
        (["remove", "unix:/x"], "a server that the run starts itself"),
    ],
)
def test_what_is_no_server_is_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["engines", words[0], str(folder), words[1]]) == 2
    assert message in capsys.readouterr().err
    assert requested_changes(folder / "logs" / "engines") == []


def test_a_run_without_servers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert run(["engines", "list", str(tmp_path)]) == 2
    assert "no servers are recorded there; name a run with rollout.engine = server" in capsys.readouterr().err
