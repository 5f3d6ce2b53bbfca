"""The monitor reads saved samples in a thread, reports each signal once, and never harms the run."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from planted_rows import LEARNT, certain, impressed, run_of
from rlcli_inspect.signals.hacking_alarms import HackingAlarms
from rlcli_inspect.signals.monitor import Monitor
from rlcli_inspect.signals.sample_rows import MAX_ROWS, MAX_STEPS, read_step, rescored_rows, sampled_rows

from rlcli.config.schema import RunConfig
from rlcli.data.sample_files import schema
from rlcli.runs.folder import RunFolder, events_of
from rlcli.training.listener import ListenedRun

HACKED = run_of({"certain": (certain, 0.05, 1.0)}, impressed)


def save(run: Path, step: int, rows: list[dict[str, Any]], rank: int = 0) -> None:
    import pyarrow.parquet as pq

    file = run / "samples" / f"step-{step:06d}" / f"rank-{rank}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    fields = pa.schema([field for field in schema() if field.name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema=fields), file)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses every step is read as soon as it is there."""
    monkeypatch.setattr("rlcli_inspect.signals.monitor.PAUSE", 0.0)


def train(run: Path, first: int, last: int, done: int = 0) -> list[str]:
    """Steps of HACKED with the alarms of a run; returns what was printed, warnings with their step."""
    notes: list[str] = []

    def warn(text: str, step: int) -> None:
        notes.append(f"step {step}: {text}")

    lines, samples = HACKED
    with RunFolder.resume(run) if (run / "config.toml").exists() else RunFolder.create(run) as folder:
        folder.write_config("[train]\nsteps = 30\n")
        config = RunConfig.model_validate({"train": {"steps": 30}})
        alarms = HackingAlarms(ListenedRun(run, config, notes.append, warn, folder.event))
        alarms.begin(done)
        for line, (step, rows) in zip(lines[first - 1 : last], samples[first - 1 : last], strict=True):
            save(run, step, rows)
            folder.append_metrics(line)
            alarms.step(step, line)
            drain(alarms.monitor)
        alarms.finish(last)
    return notes


def drain(monitor: Monitor | None) -> None:
    """Wait until the thread has taken what is waiting, or has ended."""
    while monitor and monitor._thread.is_alive() and monitor._queued:
        threading.Event().wait(0.001)


def test_each_signal_is_one_event_one_note_and_in_the_last_line(tmp_path: Path, quick: None) -> None:
    notes = train(tmp_path / "run", 1, 30)
    events = [event for event in events_of(tmp_path / "run") if event["event"] == "warning"]
    names = [event["name"] for event in events]
    assert "hacking_phrase" in names
    assert len(names) == len(set(names))
    (warned,) = [event["step"] for event in events if event["name"] == "hacking_phrase"]
    assert sum(note.startswith(f"step {warned}: warning hacking_phrase: ") for note in notes) == 1
    assert notes[-1].startswith("signals of reward hacking: ")
    assert "phrase (A phrase is rewarded: «am absolutely certain ####»)" in notes[-1]
    assert "rlcli runs signals" in notes[-1]
    assert all(event["step"] > 5 for event in events)


def test_a_resumed_run_knows_the_samples_before_and_warns_once(tmp_path: Path, quick: None) -> None:
    run = tmp_path / "run"
    train(run, 1, 24)
    warnings_before = [event["name"] for event in events_of(run) if event["event"] == "warning"]
    assert "hacking_phrase" in warnings_before
    notes = train(run, 25, 30, done=24)
    warnings_after = [event["name"] for event in events_of(run) if event["event"] == "warning"]
    assert warnings_after.count("hacking_phrase") == 1
    assert "A phrase is rewarded" in notes[-1]  # six steps alone are too few to tell


def test_an_honest_run_ends_with_none(tmp_path: Path, quick: None) -> None:
    lines, samples = run_of(LEARNT)
    with RunFolder.create(tmp_path / "run") as folder:
        monitor = Monitor(folder.path, 30)
        for line, (step, rows) in zip(lines, samples, strict=True):
            save(folder.path, step, rows)
            monitor.step(step, line)
            drain(monitor)
        assert monitor.finish() == "none"
        assert monitor.take() == []


def test_broken_and_missing_files_leave_the_run_alone(tmp_path: Path, quick: None) -> None:
    lines, samples = HACKED
    with RunFolder.create(tmp_path / "run") as folder:
        monitor = Monitor(folder.path, 30)
        for line, (step, rows) in zip(lines, samples, strict=True):
            if step % 3:
                save(folder.path, step, rows)
            if step % 5 == 0:
                save(folder.path, step, rows, rank=1)
                (folder.samples / f"step-{step:06d}" / "rank-1.parquet").write_bytes(b"PAR1 not parquet")
            monitor.step(step, line)
            drain(monitor)
        assert "phrase" in monitor.finish()


def test_a_failure_of_the_thread_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("rlcli_inspect.signals.monitor.signals_of", broken)
    with RunFolder.create(tmp_path / "run") as folder:
        monitor = Monitor(folder.path, 30)
        for number in range(1, 6):
            monitor.step(number, {"reward/mean": 0.5})
        assert monitor.finish() == "not computed: MemoryError: no room"
        assert monitor.take() == []


def test_runs_that_are_given_their_responses_have_no_monitor(tmp_path: Path) -> None:
    notes: list[str] = []
    config = RunConfig.model_validate({"data": {"response": "answer"}})
    run = ListenedRun(tmp_path, config, notes.append, lambda text, _: notes.append(text), lambda *_, **__: None)
    alarms = HackingAlarms(run)
    alarms.begin(0)
    alarms.step(1, {"reward/mean": 1.0})
    alarms.finish(1)
    alarms.close()
    assert notes == []


def test_a_bounded_part_of_the_samples_is_read(tmp_path: Path) -> None:
    _, samples = HACKED
    for rank in range(3):
        rows = [row | {"prompt_id": f"{row['prompt_id']}-{rank}"} for row in samples[0][1]]
        save(tmp_path, 1, rows, rank)
    rows = read_step(tmp_path / "samples", 1)
    assert len(rows) == MAX_ROWS
    assert len({row["prompt_id"] for row in rows}) == MAX_ROWS // 8  # whole groups
    few = samples[0][1][:8]
    for step in range(2, 200):
        save(tmp_path, step, few)
    steps = [step for step, _ in sampled_rows(tmp_path)]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1]) == (1, 199)
    assert max(step for step, _ in sampled_rows(tmp_path, upto=50)) == 50


def test_rows_without_a_verdict_are_left_out(tmp_path: Path) -> None:
    rows = HACKED[1][0][1][:8]
    odd = [{"outcome": "crash"}, {"sample": -1}, {"left_out": "timeout"}, {"left_out": "truncated"}]
    save(tmp_path, 1, [row | extra for row, extra in zip(rows, [*odd, *[{}] * 4], strict=True)])
    assert len(read_step(tmp_path / "samples", 1)) == 5


def test_rescored_lines_are_read_from_the_newest_file(tmp_path: Path) -> None:
    folder = tmp_path / "rescored"
    assert list(rescored_rows(tmp_path)) == []
    folder.mkdir()
    (folder / "math.jsonl").write_text('{"step": 1}\n{"step": 2\nnull\n{"step": 3}\n')
    assert list(rescored_rows(tmp_path)) == [{"step": 1}, {"step": 3}]


@pytest.mark.long
def test_random_text_does_no_harm(tmp_path: Path, quick: None) -> None:
    rng = random.Random(0)
    with RunFolder.create(tmp_path / "run") as folder:
        monitor = Monitor(folder.path, 8)
        for step, rows in run_of(LEARNT, steps=8)[1]:
            noise = ["".join(chr(rng.randrange(1, 0xD000)) for _ in range(500)) for _ in rows]
            odd = [row | {"response": text, "response_tokens": 9} for row, text in zip(rows, noise, strict=True)]
            save(folder.path, step, odd)
            monitor.step(step, {"reward/mean": 0.5, "reward/part/x": float("nan")})
            drain(monitor)
        assert monitor.finish() == "none"
