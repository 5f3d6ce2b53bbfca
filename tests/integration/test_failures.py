"""A run that is interrupted, killed or given bad input: it resumes, or explains in one line why it cannot, with the
right exit code, and leaves no process or file behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from commands import SMALL, Cli, descendants, start

from rlcli.cluster.supervisor.stop_signals import REPEAT_S
from rlcli.runs.checkpoint import read_checkpoint
from rlcli.runs.folder import RunFolder, events_of

pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 400.0
EXHAUSTIVE = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
"""Marks the other signal, which is handled in the same way."""


def until(condition: Callable[[], bool], awaited: str) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < limit, f"still waiting for {awaited}"
        time.sleep(0.2)


def long_run(
    tiny: Path, sums: Path, run: Path, workers: str, steps: int = 5000, engine: str = "transformers"
) -> tuple[str | Path, ...]:
    """engine: transformers starts sooner than vLLM."""
    return (
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", run, "--steps", str(steps), "--workers", workers),
        *(*SMALL, "--set", "verifier.name=test-even", "--set", "checkpoint.every=0"),
        *("--set", f"rollout.engine={engine}"),
    )


def steps_done(run_folder: Path) -> int:
    file = run_folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def assert_gone(family: list[psutil.Process]) -> None:
    """All of `family` have ended: killed ones may take a moment."""
    _, alive = psutil.wait_procs(family, timeout=20)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "1"), EXHAUSTIVE(signal.SIGTERM, "2")])
def test_a_signal_finishes_the_step_saves_and_leaves_nothing_running(
    number: signal.Signals, workers: str, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, workers, engine="vllm"), "--json")
    until(lambda: steps_done(run_folder) >= 2, "two steps")
    family = descendants(process.pid)
    assert len(family) > 4, "Ray, its workers and their scoring processes"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-2:] == [f"resume with: rlcli train --resume {run_folder}", "interrupted"]
    result = json.loads(stdout)
    assert result["stopped"]
    assert result["steps"] == steps_done(run_folder) < 5000
    assert read_checkpoint((run_folder / "checkpoints" / "latest").resolve()).step == result["steps"]
    assert_gone(family)


@pytest.mark.long
@pytest.mark.parametrize("number", [EXHAUSTIVE(signal.SIGINT), signal.SIGTERM])
def test_a_signal_before_the_first_step_exits_and_frees_the_folder(
    number: signal.Signals, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, "1"))
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
    RunFolder.check(run_folder)


class Family:
    """The processes of a run, over all its attempts, and the ids that name what it has outside its folder."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._seen: dict[int, psutil.Process] = {}
        self._groups: set[str] = set()

    def look(self) -> dict[int, str]:
        """Process id → name and command line of those alive now."""
        lines = {}
        for process in descendants(self._supervisor):
            with contextlib.suppress(psutil.Error):
                lines[process.pid] = " ".join([process.name(), *process.cmdline()])
                self._seen[process.pid] = process
        self._groups |= set(re.findall(r"/tmp/rlcli-ray-([0-9a-f]{8})-", " ".join(lines.values())))
        return lines

    def kill(self, mark: str) -> None:
        os.kill(next(pid for pid, line in self.look().items() if mark in line), signal.SIGKILL)

    def assert_nothing_left(self) -> None:
        assert_gone([process for process in self._seen.values() if process.is_running()])
        assert self._groups
        paths = [path for root in ("/tmp", "/dev/shm") for path in Path(root).glob("rlcli-*")]
        assert not [path for path in paths if any(group in path.name for group in self._groups)]


@pytest.mark.exhaustive  # scripts/torture shows it, and more
def test_a_run_resumes_when_driver_ray_head_or_worker_is_killed(tiny: Path, sums: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, "1", steps=8), "--set", "checkpoint.every=1", "--json")
    family = Family(process.pid)
    for step, mark in ((2, " train "), (4, "gcs_server"), (6, "ray::Worker")):
        until(lambda at=step: steps_done(run_folder) >= at or process.poll() is not None, f"step {step}")  # type: ignore[misc]
        family.kill(mark)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert (result["steps"], len(result["rewards"]), result["stopped"]) == (8, 8, False)
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    failed = [event for event in events_of(run_folder) if event["event"] == "failed"]
    assert [event["who"] for event in failed] == ["the driver", "the Ray head", "worker 0"]
    assert all(event["phase"] for event in failed)
    restarted = [event for event in events_of(run_folder) if event["event"] == "restarted"]
    assert [event["restart"] for event in restarted] == [1, 1, 1], "each after a newer checkpoint"
    assert all(current["step"] >= previous["step"] > 0 for previous, current in itertools.pairwise(restarted))
    assert "the driver died of SIGKILL: restart 1 of 3 from step" in stderr
    family.assert_nothing_left()


def test_a_killed_worker_is_named_with_its_log_and_how_to_go_on(tiny: Path, sums: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, "2", engine="vllm"), "--set", "fault_tolerance.max_restarts=0")
    family = Family(process.pid)
    until(lambda: steps_done(run_folder) >= 1, "a step")
    family.kill("ray::Worker")
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert re.match(
        r"error: step \d+, \w+: worker \d (died|was killed) in \w+.*; its log .*rank-\d.log ends: ", line
    ), stderr[-4000:]
    assert line.endswith(f"resume with: rlcli train --resume {run_folder}")
    family.assert_nothing_left()


@pytest.mark.exhaustive  # scripts/torture shows it, and more
def test_a_run_whose_supervisor_is_killed_saves_and_leaves(tiny: Path, sums: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, "1"))
    family = Family(process.pid)
    until(lambda: steps_done(run_folder) >= 1, "a step")
    family.look()
    process.kill()
    process.communicate()  # until the driver too has closed its end
    family.assert_nothing_left()
    assert read_checkpoint((run_folder / "checkpoints" / "latest").resolve()).step == steps_done(run_folder) < 5000


@pytest.mark.exhaustive  # scripts/torture shows it, and more
def test_two_signals_end_a_run_at_once_and_damage_nothing(tiny: Path, sums: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    process = start(*long_run(tiny, sums, run_folder, "1"), "--set", "checkpoint.every=1", "--set", "train.passes=20")
    family = Family(process.pid)
    until(lambda: steps_done(run_folder) >= 1 and (run_folder / "checkpoints" / "latest").exists(), "a checkpoint")
    family.look()
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * REPEAT_S)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1] == "interrupted"
    read_checkpoint((run_folder / "checkpoints" / "latest").resolve())
    family.assert_nothing_left()


@pytest.mark.long
def test_a_verifier_that_fails_stops_the_run_and_says_why(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    completed = cli(
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", tmp_path / "run", "--steps", "2", *SMALL),
        *("--set", "verifier.name=test-crash-later", "--set", "rollout.engine=transformers"),
        expect=1,
    )
    assert "16 of 16 verifications crashed" in completed.stderr
    assert "ValueError" in completed.stderr
    assert "verifier.max_crash_rate" in completed.stderr
    (saved,) = (tmp_path / "run" / "samples").glob("step-000001/rank-*.parquet")
    assert all("ValueError" in detail for detail in pq.read_table(saved)["detail"].to_pylist())


def test_a_verifier_that_always_fails_ends_the_command_at_once(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    words = ("train", "grpo", "--model", tiny, "--data", sums, "--out", tmp_path / "run", "--steps", "2", *SMALL)
    completed = cli(*words, "--set", "verifier.name=test-crash", expect=2)
    assert "the verifier 'test-crash' fails (crash) on row" in completed.stderr
    assert "ValueError: cannot read" in completed.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_verifier_that_hangs_is_killed_and_stops_the_run(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    completed = cli(
        *("train", "grpo", "--model", tiny, "--data", sums, "--out", tmp_path / "run", "--steps", "1", *SMALL),
        *("--verifier", "test-hang", "--set", "verifier.deadline_s=0.2", "--set", "verifier.max_crash_rate=1.0"),
        *("--set", "rollout.engine=transformers"),
        expect=1,
    )
    assert "16 of 16 verifications were killed at the deadline" in completed.stderr
    assert "killed after 30 s" in completed.stderr


@pytest.fixture
def train_words(tiny: Path, sums: Path, tmp_path: Path) -> Callable[..., list[str | Path]]:
    def words(**changes: str | Path) -> list[str | Path]:
        options: dict[str, str | Path] = {"model": tiny, "data": sums, "out": tmp_path / "run", **changes}
        return ["train", "grpo", *SMALL, *(word for name, value in options.items() for word in (f"--{name}", value))]

    return words


def refused(cli: Cli, *words: str | Path) -> str:
    """The one line that a refused command prints, at once: before any worker could have started."""
    completed = cli(*words, expect=2, timeout=240)
    lines = [line for line in completed.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
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
