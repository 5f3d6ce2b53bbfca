"""Secrets of the environment and of flags reach neither a run folder nor the terminal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rlcli.cli import app
from rlcli.config.load import dump_toml, resolve
from rlcli.errors import RlcliError, RunFailed, SetupError
from rlcli.redact import redacted
from rlcli.sandbox import backend_name
from rlcli.trainer.failing import noting_failure
from rlcli.trainer.run_folder import RunFolder
from rlcli.workers.placing import Pool, worker_environment

NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "SWANLAB_API_KEY")
NAMES += (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "VLLM_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "RAY_AUTH_TOKEN",
)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    planted = {name: f"planted-{index}-secret" for index, name in enumerate(NAMES)}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    return [*planted.values(), "hunter2"]


def test_no_secret_reaches_a_run_folder(secrets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"--set=x={secret}" for secret in secrets[:-1]]
    monkeypatch.setattr(sys, "argv", ["rlcli", "eval", "--endpoint", "http://me:hunter2@host/v1", *words])
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(dump_toml(resolve("grpo", {}, [])))
        with pytest.raises(RunFailed), noting_failure(folder.path):
            raise RunFailed(f"{' '.join(secrets[:-1])} https://me:hunter2@host failed", "mend it")
    written = {path: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"environment.json", "events.jsonl", "config.toml"} <= {path.name for path in written}
    for path, text in written.items():
        assert not [secret for secret in secrets if secret in text], path
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "failed"


def test_no_secret_is_printed_with_an_error(
    secrets: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RlcliError(f"{' '.join(secrets[:-1])} at http://me:hunter2@host")

    monkeypatch.setattr(app, "app", fails)
    assert app.run(["list"]) == 2
    said = capsys.readouterr().err
    assert "error: *** ***" in said
    assert not [secret for secret in secrets if secret in said]


def test_no_secret_is_among_the_variables_that_ray_is_told(secrets: list[str]) -> None:
    found = worker_environment(Pool(1, "cpu", 1), os.environ)
    assert not set(secrets) & set(found.values())


def test_short_values_and_other_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "a")
    monkeypatch.setenv("MONKEY", "banana-bread")
    assert redacted("a banana-bread") == "a banana-bread"


def test_a_sandbox_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "http://me:hunter2@host:8080")
    for asked in ("", "https://me:hunter2@host"):
        with pytest.raises(SetupError, match="the sandbox's address holds a password") as raised:
            backend_name(asked)
        assert "hunter2" not in str(raised.value)
