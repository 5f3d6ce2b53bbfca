"""What a run does when it is interrupted, killed or fed something bad: one line, the right exit code, nothing left
behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import SMALL, Cli, descendants, start

from rlcli.trainer.run_folder import RunFolder

pytestmark = pytest.mark.timeout(600)

DEADLINE_S = 120.0
AGAIN = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
"""The other signal, which takes the same way."""


def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < limit, f"still waiting for {what}"
        time.sleep(0.2)


def long_run(tiny: Path, sums: Path, out: Path, workers: str) -> tuple[str | Path, ...]:
    return (
        *(
            "train",
            "grpo",
            "--model",
            tiny,
            "--data",
            sums,
            "--out",
            out,
            "--steps",
            "5000",
            "--workers",
            workers,
            *SMALL,
        ),
        *("--set", "verifier.name=test-even", "--set", "checkpoint.every=0"),
    )


def steps_done(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def assert_gone(family: list[psutil.Process]) -> None:
    """All of `family` have ended: killed ones may take a moment."""
    _, alive = psutil.wait_procs(family, timeout=20)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), AGAIN(signal.SIGTERM, "1")])
def test_a_signal_finishes_the_step_saves_and_leaves_nothing_running(
    number: signal.Signals, workers: str, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(*long_run(tiny, sums, out, workers), "--json")
    until(lambda: steps_done(out) >= 2, "two steps")
    family = descendants(process.pid)
    assert len(family) > 4, "Ray, its workers and their scoring processes"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1] == "interrupted"
    result = json.loads(stdout)
    assert result["stopped"]
    assert result["steps"] == steps_done(out) < 5000
    assert (out / "checkpoints" / "latest" / "config.json").exists()
    assert_gone(family)


@pytest.mark.parametrize("number", [AGAIN(signal.SIGINT), signal.SIGTERM])
def test_a_signal_before_the_first_step_leaves_at_once_and_the_folder_can_be_used_again(
    number: signal.Signals, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(*long_run(tiny, sums, out, "1"))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("… load model"):
            break
    family = descendants(process.pid)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1] == "interrupted"
    assert_gone(family)
    RunFolder.check(out)


def test_killing_the_driver_ends_every_process_of_the_run(tiny: Path, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*long_run(tiny, sums, out, "1"))
    until(lambda: steps_done(out) >= 1, "a step")
    family = descendants(process.pid)
    sessions = {
        word for p in family for word in " ".join(p.cmdline()).replace("=", " ").split() if "rlcli-ray-" in word
    }
    folders = {Path(word).parts[2] for word in sessions}
    assert len(folders) == 1, folders
    process.kill()
    process.communicate()
    assert_gone(family)
    until(lambda: not (Path("/tmp") / min(folders)).exists(), "the session's folder to go")


def test_a_killed_worker_is_named_with_its_log(tiny: Path, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*long_run(tiny, sums, out, "2"))
    until(lambda: steps_done(out) >= 1, "a step")
    family = descendants(process.pid)
    victim = next(p for p in family if "ray::Worker" in " ".join(p.cmdline()))
    os.kill(victim.pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    line = next(line for line in stderr.splitlines() if line.startswith("error:"))
    assert "worker" in line
    assert "died in" in line
    assert "rank-" in line
    assert_gone(family)


def test_a_verifier_that_fails_stops_the_run_and_says_why(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    done = cli(
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", tmp_path / "run", "--steps", "2", *SMALL),
        *("--set", "verifier.name=test-crash"),
        expect=1,
    )
    assert "16 of 16 verifications crashed" in done.stderr
    assert "ValueError" in done.stderr
    assert "verifier.max_crash_rate" in done.stderr


def test_a_verifier_that_hangs_is_killed_and_stops_the_run(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    done = cli(
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", tmp_path / "run", "--steps", "1", *SMALL),
        *("--verifier", "test-hang", "--set", "verifier.deadline_s=0.2", "--set", "verifier.max_crash_rate=1.0"),
        expect=1,
    )
    assert "16 of 16 verifications were killed at the deadline" in done.stderr
    assert "killed after 0.2 s" in done.stderr


@pytest.fixture
def train_words(tiny: Path, sums: Path, tmp_path: Path) -> Callable[..., list[str | Path]]:
    def words(**changes: str | Path) -> list[str | Path]:
        options: dict[str, str | Path] = {"model": tiny, "data": sums, "out": tmp_path / "run", **changes}
        return ["train", "grpo", *SMALL, *(word for name, value in options.items() for word in (f"--{name}", value))]

    return words


def refused(cli: Cli, *words: str | Path) -> str:
    """The one line that a refused command prints, at once: before any worker could have started."""
    began = time.monotonic()
    done = cli(*words, expect=2, timeout=60)
    assert time.monotonic() - began < 60
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_bad_input_is_refused_in_one_line(
    cli: Cli, train_words: Callable[..., list[str | Path]], sums: Path, tiny: Path, tmp_path: Path
) -> None:
    import shutil

    import pyarrow.parquet as pq

    assert "no-such-model" in refused(cli, *train_words(model=tmp_path / "no-such-model"))
    assert "rlcli prep" in refused(cli, *train_words(data=tmp_path / "nothing"))

    broken = tmp_path / "broken"
    broken.mkdir()
    pq.write_table(pq.read_table(sums / "train.parquet").drop_columns(["prompt"]), broken / "train.parquet")
    assert "'prompt'" in refused(cli, *train_words(data=broken))

    mute = tmp_path / "mute"
    shutil.copytree(tiny, mute)
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chat template" in refused(cli, *train_words(model=mute))

    assert "did you mean rollout.temperature" in refused(cli, *train_words(), "--set", "rollout.temprature=1")
    assert "is not whole" in refused(cli, *train_words(), "--set", "train.minibatches=3")
    assert "no-such" in refused(cli, *train_words(), "--set", "verifier.name=no-such")
    assert "GPU" in refused(cli, *train_words(), "--set", "cluster.device=cuda")

    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.txt").write_text("precious")
    assert "--out" in refused(cli, *train_words(out=used))
    assert (used / "thesis.txt").read_text() == "precious"
