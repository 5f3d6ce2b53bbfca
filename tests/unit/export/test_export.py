"""A run or a checkpoint in place of a model: it is exported when it is first asked for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlcli.export.export_folder import model_folder
from tests.export_fixtures import log_probs, stored_log_probs


def test_what_is_no_checkpoint_is_a_model_already(saved_runs: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    for path in ("Qwen/Qwen2.5-0.5B-Instruct", str(saved_runs / "base"), str(tmp_path / "nowhere"), str(tmp_path)):
        assert model_folder(path, notes.append) == path
    assert not notes


def test_a_run_is_exported_once_and_again_when_its_step_is_another(run_of: Any, saved_runs: Path) -> None:
    run, notes = run_of("full"), list[str]()
    exported = Path(model_folder(str(run), notes.append))
    assert exported == run / "exports" / "step-000005"
    assert notes == [f"exporting step 5 of full to {exported}"]
    assert log_probs(exported) == pytest.approx(stored_log_probs(run), abs=1e-5)
    written = (exported / "model.safetensors").stat().st_mtime_ns
    assert model_folder(str(run / "checkpoints" / "latest"), notes.append) == str(exported)
    assert model_folder(str(exported), notes.append) == str(exported)
    assert len(notes) == 1
    assert (exported / "model.safetensors").stat().st_mtime_ns == written
    shutil.rmtree(run / "checkpoints" / "step-000005")
    shutil.copytree(saved_runs / "half" / "checkpoints" / "step-000003", run / "checkpoints" / "step-000005")
    manifest = json.loads((run / "checkpoints" / "step-000005" / "manifest.json").read_text())
    state = run / "checkpoints" / "step-000005" / "state.json"
    state.write_text(state.read_text().replace('"step": 3', '"step": 5'))
    from rlcli.support.files import described

    manifest["step"], manifest["files"]["state.json"] = 5, described(state)
    (run / "checkpoints" / "step-000005" / "manifest.json").write_text(json.dumps(manifest))
    assert model_folder(str(run), notes.append) == str(exported)
    assert len(notes) == 2
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_critic_path_takes_the_critic_and_else_the_policy(run_of: Any) -> None:
    ppo, full = run_of("ppo"), run_of("full")
    assert model_folder(str(ppo), print, critic=True) == str(ppo / "exports" / "step-000003-critic")
    assert "score.weight" in load_file(ppo / "exports" / "step-000003-critic" / "model.safetensors")
    assert model_folder(str(ppo), print) == str(ppo / "exports" / "step-000003")
    assert model_folder(str(full), print, critic=True) == str(full / "exports" / "step-000005")


def test_a_new_run_can_begin_from_a_run_and_the_critic_of_another(run_of: Any) -> None:
    from rlcli.config.load import resolve
    from rlcli.export.export_folder import with_model_folders
    from rlcli.model.io.model_checks import check_model, check_value_model

    full, ppo = run_of("full"), run_of("ppo")
    resolved = resolve("ppo", {"model.path": str(full), "critic.path": str(ppo / "checkpoints" / "latest")}).config
    config = with_model_folders(resolved, print)
    assert config.model.path == str(full / "exports" / "step-000005")
    assert config.critic.path == str(ppo / "exports" / "step-000003-critic")
    check_value_model(config.critic.path, check_model(config.model.path).tokenizer_size)
    assert with_model_folders(config, print) == config


def test_a_run_that_cannot_be_written_is_exported_elsewhere(
    run_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, notes = run_of("full"), list[str]()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(run)))  # root may write anywhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    exported = Path(model_folder(str(run), notes.append))
    assert exported.name == "step-000005"
    assert not (run / "exports").exists()
    assert (exported / "model.safetensors").exists()
    assert any("is not writable" in note for note in notes)
