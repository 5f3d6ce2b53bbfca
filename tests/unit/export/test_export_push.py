"""`rlcli export --push`, to a hub on the loopback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.runs.folder import add_event, write_json
from tests.export_fixtures import export
from tests.loopback_hub import TOKEN, LoopbackHub, loopback_hub
from tests.report_runs import unpacked


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_push_is_a_private_repository_with_the_whole_folder(
    hub: LoopbackHub, saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(saved_runs / "full", "--out", tmp_path / "out", "--push", "me/model", "--json")
    assert json.loads(capsys.readouterr().out)["pushed"] == f"{hub.url}/me/model"
    assert hub.repos["me/model"]["visibility"] == "private"
    assert hub.files["me/model"] == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_a_report_is_pushed_with_the_model_and_names_no_machine(
    hub: LoopbackHub, saved_runs: Path, tmp_path: Path
) -> None:
    run, export_folder = tmp_path / "runs" / "first", tmp_path / "out"
    shutil.copytree(saved_runs / "full", run)
    write_json(run / "environment.json", {"host": "node-7", "directory": str(tmp_path), "python": "3.11"})
    add_event(run, "failed", message=f"worker 3 on node-7 died: see {run}/logs/worker-3.log")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.625}\n')
    export(run, "--out", export_folder, "--push", "me/model", "--report")
    page = (export_folder / "report" / "index.html").read_text()
    assert "0.625" in page
    assert "worker-3.log" in page
    card = (export_folder / "README.md").read_text()
    assert "`report/index.html`" in card
    files = {
        path.relative_to(export_folder).as_posix(): path.read_bytes()
        for path in export_folder.rglob("*")
        if path.is_file()
    }
    assert hub.files["me/model"] == files
    packed = re.findall(r'"application/gzip" data-name="[^"]*">(.*?)</script>', page)
    files |= {f"block {number}": unpacked(text) for number, text in enumerate(packed)}
    for name in ("node-7", str(tmp_path), str(saved_runs)):
        assert not [path for path, content in files.items() if name.encode() in content], name


def test_a_checkpoint_without_a_run_has_no_report(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint, *_) = (saved_runs / "full" / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    export(tmp_path / checkpoint.name, "--out", tmp_path / "out", "--report", expect=2)
    assert "is not in the folder of a run; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_fails_its_checks_is_not_pushed(hub: LoopbackHub, saved_runs: Path, tmp_path: Path) -> None:
    export(saved_runs / "unmoved", "--out", tmp_path / "out", "--push", "me/model", expect=1)
    assert not hub.repos


def test_a_push_that_fails_leaves_the_export_and_says_how_to_go_on(
    hub: LoopbackHub, saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.full, export_folder = True, tmp_path / "out"
    export(saved_runs / "full", "--out", export_folder, "--push", "me/model", "--no-check", expect=1)
    stderr = capsys.readouterr().err
    assert f"{export_folder} is exported, but not pushed to me/model: 403 Forbidden: Storage quota exceeded" in stderr
    assert f"hf upload --private me/model {export_folder}" in stderr
    assert (export_folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("token", "repo", "message"),
    [
        ("", "me/model", "no Hugging Face token found; log in with `hf auth login`, or set HF_TOKEN"),
        ("wrong", "me/model", "the hub refuses: Invalid user token"),
        (TOKEN, "me/my/model", "Repo id must be in the form"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_any_work(
    hub: LoopbackHub,
    saved_runs: Path,
    token: str,
    repo: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    export(saved_runs / "full", "--out", tmp_path / "out", "--push", repo, expect=2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
