"""Secrets of the environment and of flags reach neither a run folder nor the terminal."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli import app
from rlcli.cluster.placement import Pool, worker_environment
from rlcli.cluster.supervisor.failure_record import noting_failure
from rlcli.config.load import dump_toml, resolve
from rlcli.errors import RlcliError, RunFailed, SetupError
from rlcli.rewards.expression import parse
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.verifier_output import Output
from rlcli.runs.folder import RunFolder
from rlcli.support.redact import _redacting, redacted
from rlcli.support.sandbox_name import backend_name
from rlcli.types import VerifyRequest

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
    stderr = capsys.readouterr().err
    assert "error: *** ***" in stderr
    assert not [secret for secret in secrets if secret in stderr]


def test_no_secret_is_among_the_variables_that_ray_is_told(secrets: list[str]) -> None:
    environment = worker_environment(Pool(1, "cpu", 1), os.environ)
    assert not set(secrets) & set(environment.values())


def test_short_values_and_other_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "a")
    monkeypatch.setenv("MONKEY", "banana-bread")
    assert redacted("a banana-bread") == "a banana-bread"


def test_a_sandbox_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "http://me:hunter2@host:8080")
    for address in ("", "https://me:hunter2@host"):
        with pytest.raises(SetupError, match="the sandbox's address holds a password") as raised:
            backend_name(address)
        assert "hunter2" not in str(raised.value)


def test_what_is_cut_off_at_the_bound_shows_no_part_of_a_secret(
    secrets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcli.rewards.processes.verifier_output.LOG_BYTES", 1000)
    output = Output(tmp_path / "log")
    for part in (b"x" * 990 + secrets[0][:5].encode(), secrets[0][5:].encode() + b"\n", b"more\n" * 10):
        os.write(output.fd, part)
    output.close()
    log = (tmp_path / "log").read_text()
    assert log.startswith("x" * 990 + "***\nmore\n")
    assert "plant" not in log
    assert log.endswith("dropped\n")


def test_output_to_what_is_no_text_file_is_redacted_too(secrets: list[str]) -> None:
    code = (
        "import os, sys\nfrom rlcli.support.redact import redact_output\n"
        "class Unbuffered:\n"
        "    def __init__(self, stream): self.stream = stream\n"
        "    def __getattr__(self, name): return getattr(self.stream, name)\n"
        "sys.stdout, sys.stderr = Unbuffered(sys.stdout), Unbuffered(sys.stderr)\n"
        "redact_output()\nprint(os.environ['HF_TOKEN'])\nprint(os.environ['HF_TOKEN'], file=sys.stderr)\n"
        "os.write(1, b'whole')\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("***\nwhole", "***\n")


PRINTS = """
import logging, os, sys, warnings
from rlcli.cli import app
def fails(*words, **options):
    print("out", os.environ["HF_TOKEN"], "http://data@host")
    print("err", os.environ["HF_TOKEN"], "http://me:hunter2@host", file=sys.stderr)
    logging.getLogger("a.library").warning("logged %s", os.environ["WANDB_API_KEY"])
    warnings.warn("warned " + os.environ["HF_TOKEN"])
    raise ValueError("raised " + os.environ["WANDB_API_KEY"])
app.app, sys.argv = fails, ["rlcli", *sys.argv[1:]]
sys.exit(app.run())
"""


@pytest.mark.parametrize("words", [["list"], ["list", "--debug"]])
def test_no_secret_is_printed_whatever_prints_it(words: list[str], secrets: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
    assert done.stdout == "out *** http://data@host\n"
    for line in ("err *** http://***@host", "logged ***", "warned ***", "ValueError: raised ***"):
        assert line in done.stderr
    assert ("Traceback" in done.stderr) == ("--debug" in words)


LEAKS = """
import os, sys
print("imported", dict(os.environ), flush=True)
def verify(request):
    print("verified", os.environ.get("OPENAI_API_KEY"), file=sys.stderr, flush=True)
    raise ValueError(" ".join(os.environ.values()))
"""


def test_verifiers_see_no_secret_of_hub_or_trackers(
    secrets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@host")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "mine.py").write_text(LEAKS)
    expression = str(parse(f"{tmp_path}/mine.py:verify").located())
    with ScoringPool(1, 60.0, [expression], log=tmp_path / "log") as pool:
        detail = pool.submit(expression, VerifyRequest("1", "1")).result().detail
    log = (tmp_path / "log").read_text()
    assert "imported" in log
    assert "verified ***" in log, "its own endpoint's key, which it may use and not print"
    assert str(tmp_path / "hub") in log
    assert not [secret for secret in secrets if secret in log]
    assert detail.startswith("ValueError: ")
    assert not [secret for secret in secrets if secret in detail]


def test_a_redacted_stream_that_is_dropped_leaves_the_stream_open(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        wrapped = _redacting(stream, lambda text, secrets: text.upper())
        wrapped.write("one\n")
        del wrapped
        gc.collect()
        stream.write("two\n")
    assert (tmp_path / "out").read_text() == "ONE\ntwo\n"
