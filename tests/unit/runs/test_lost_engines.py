"""Whoever watches a run learns of a lost server at once."""

from __future__ import annotations

from pathlib import Path
from queue import Queue

import pytest

from rlcli.runs import lost_engines
from rlcli.runs.folder import EVENTS
from rlcli.runs.lost_engines import LostEngines


def test_a_lost_server_is_named_while_the_run_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_engines, "EVERY_S", 0.01)
    events, messages = tmp_path / EVENTS, Queue[str]()
    events.write_text('{"event": "engine lost", "server": "before", "why": "x"}\n')
    with LostEngines(tmp_path).reporting(messages.put):
        with events.open("a") as file:
            file.write('{"event": "engine lost", "server": "a", "why": "gone"}\n{"event": "engine lo')
        assert messages.get(timeout=60) == "server a is lost and is polled until it answers: gone"
    assert messages.empty()
