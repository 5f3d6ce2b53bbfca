"""`rlcli report` and `rlcli view` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rlcli_inspect.commands import view

from rlcli.cli.main import main
from tests.report_runs import write_run


def test_a_report_prints_what_to_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "sums", steps=2)
    assert main(["report", "sums", "--out", "out"]) == 0
    assert capsys.readouterr().out.startswith("out/index.html (0.")
    assert main(["report", "runs/sums", "--out", "out", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["path"], written["files"]) == ("out/index.html", 1)
    assert written["kept"]["sums"]["samples"] == {"steps": 2, "of": 2, "groups": 6, "of_groups": 6}


def test_a_report_of_a_killed_run_warns_of_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=2, alive=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "re')
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "warning: run: metrics.jsonl: the last line is incomplete and left out\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere", "--out", "out"], "nowhere is not a run: no such folder; give the folder of a run"),
        (["report", ".", "--out", "out"], ". is not a run: it has neither config.toml nor metrics.jsonl"),
        (["view", "nowhere"], "nowhere is not a run: no such folder"),
        (["report", "run", "--out", "run"], "--out run has files that are not a report's; give another folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "run" in words:
        write_run(tmp_path / "run", steps=1)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_view_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    words = [sys.executable, "-m", "rlcli.cli.main", "view", str(folder), "--no-browser"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url.replace("/?token=", "/api/index?token="), timeout=60) as response:
            assert json.load(response)["runs"][0]["name"] == "run"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "ended\n")
    finally:
        process.kill()
        process.wait()


def test_no_browser_is_opened_without_a_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not view.open_browser("http://127.0.0.1:1/")
    monkeypatch.setitem(os.environ, "DISPLAY", ":0")
    assert view.open_browser("http://127.0.0.1:1/")
    assert opened == ["http://127.0.0.1:1/"]
