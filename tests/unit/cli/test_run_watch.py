"""`rlcli runs watch`: its output for a run that another process trains, and when it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rlcli.cli.main import main
from rlcli.cli.runs import watch as module
from rlcli.cli.runs.watch import Follower, Tail
from rlcli.runs.folder import RunFolder
from rlcli.runs.listing import state_of
from rlcli.runs.record_files import rewind
from rlcli.runs.tracking.run_console import View
from tests.shown_runs import HOSTILE, make_run, metrics


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "GONE_S", 0.0)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that trains: three of nine steps are done."""
    path = make_run(tmp_path / "live")
    with RunFolder.resume(path) as folder:
        folder.event("resumed", step=3, of=9)
        yield folder


def follower_of(folder: RunFolder) -> tuple[Follower, io.StringIO, list[int]]:
    text, steps = io.StringIO(), list[int]()
    view = View(console=Console(file=text, width=200))
    return Follower(folder.path, view, lambda line: steps.append(line["step"])), text, steps


def test_steps_evaluations_and_warnings_are_shown_as_they_come(live: RunFolder) -> None:
    follower, text, steps = follower_of(live)
    follower.begin()
    follower.look()
    live.append_metrics(metrics(4))
    live.event("evaluated", step=4, headline="pass@1 50.0%")
    live.event("warning", step=4, name="no_gradient", text=f"no gradient {HOSTILE}")
    live.event("inputs_changed", step=3, text="mine.py has changed", files=[{"path": "mine.py"}])
    follower.look()
    follower.look()
    lines = text.getvalue().splitlines()
    assert lines[0] == "live: 9 steps, 3 of them done"
    assert lines[1] == "evaluation at step 4: pass@1 50.0%"
    assert lines[2].startswith(r"warning no_gradient: no gradient \x1b[2J\x1b]0;title\x07[red]")
    assert lines[3] == "mine.py has changed"
    assert lines[4].startswith("step 4/9  reward 0.400")
    assert len(lines) == 5
    assert steps == [4]
    assert "mismatch" not in text.getvalue()  # of the earlier steps


def test_a_run_that_goes_back_is_followed_from_there(live: RunFolder) -> None:
    follower, text, steps = follower_of(live)
    follower.begin()
    rewind(live.path, 1)
    live.event("rolled_back", step=4, to=1)
    follower.look()
    live.append_metrics(metrics(2))
    follower.look()
    assert "live: 9 steps, 1 of them done" in text.getvalue()
    assert "rolled_back: step 4, to 1" in text.getvalue()
    assert "step 2/9" in text.getvalue()
    assert steps == [2]


def test_a_phase_is_shown_with_when_it_began(live: RunFolder) -> None:
    follower, _, _ = follower_of(live)
    follower.begin()
    live.at(4, "generate")
    follower.look()
    shown = Console(file=io.StringIO(), width=100)
    shown.print(follower.view.render())
    assert isinstance(shown.file, io.StringIO)
    assert "generate  0:0" in shown.file.getvalue()


def test_lines_are_read_once_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.new() == (False, [])
    file.write_text('{"a": 1}\n7\nbroken\n{"a": ')
    assert tail.new() == (True, [{"a": 1}])
    with file.open("a") as opened:
        opened.write('2}\n{"a": 3}\n')
    assert tail.new() == (False, [{"a": 2}, {"a": 3}])
    assert tail.new() == (False, [])
    file.write_text('{"a": 4}\n')
    assert tail.new() == (True, [{"a": 4}])


def test_it_ends_when_the_run_ends(live: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    def rest() -> None:
        for step in range(4, 10):
            live.append_metrics(metrics(step))
        live.event("finished", step=9)
        live.close()

    thread = threading.Timer(0.2, rest)
    thread.start()
    assert main(["runs", "watch", str(live.path), "--json"]) == 0
    thread.join()
    captured = capsys.readouterr()
    assert [json.loads(line)["step"] for line in captured.out.splitlines()] == [4, 5, 6, 7, 8, 9]
    assert captured.err.splitlines()[-1] == "live: finished at step 9 of 9"


@pytest.mark.parametrize(
    ("end", "code", "state"), [("stopped", 0, "stopped"), ("failed", 1, "failed"), ("", 1, "killed")]
)
def test_the_exit_code_says_how_the_run_ended(
    end: str, code: int, state: str, live: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    if end:
        live.event(end, step=3)
    live.close()
    assert main(["runs", "watch", str(live.path)]) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"live: {state} at step 3 of 9"


def test_a_run_that_restarts_is_waited_for(live: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, _, _ = follower_of(live)
    follower.begin()
    assert follower._patience() == 0.0
    live.event("failed", message="the node is gone")
    live.event("restarted", restart=1, of=3, step=2)
    follower.look()
    assert follower._patience() == module.RESTART_S


def test_ctrl_c_leaves_the_run_alone(live: RunFolder) -> None:
    words = [sys.executable, "-m", "rlcli.cli.main", "runs", "watch", str(live.path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "live: 9 steps, 3 of them done\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "interrupted\n"
    assert state_of(live.path) == "alive"


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "watch", str(tmp_path)]) == 2
    assert "is not a run: it has neither config.toml nor" in capsys.readouterr().err
