"""`rlcli export --push`, to a hub on the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.export_fixtures import export
from tests.loopback_hub import TOKEN, LoopbackHub, loopback_hub


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


def test_what_fails_its_checks_is_not_pushed(hub: LoopbackHub, saved_runs: Path, tmp_path: Path) -> None:
    export(saved_runs / "unmoved", "--out", tmp_path / "out", "--push", "me/model", expect=1)
    assert not hub.repos


def test_a_push_that_fails_leaves_the_export_and_says_how_to_go_on(
    hub: LoopbackHub, saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.full, out = True, tmp_path / "out"
    export(saved_runs / "full", "--out", out, "--push", "me/model", "--no-check", expect=1)
    said = capsys.readouterr().err
    assert f"{out} is exported, but not pushed to me/model: 403 Forbidden: Storage quota exceeded" in said
    assert f"hf upload --private me/model {out}" in said
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("token", "repo", "said"),
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
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    export(saved_runs / "full", "--out", tmp_path / "out", "--push", repo, expect=2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
