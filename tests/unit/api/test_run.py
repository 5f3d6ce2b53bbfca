"""`rlcli.Run`: the records of a run as plain values, whatever state its folder is in."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest

import rlcli
from rlcli.config.load import dump_toml, resolve
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.data.step_files import ADVANTAGES, advantages_table
from rlcli.errors import RlcliError
from rlcli.runs.folder import RunFolder
from rlcli.types import Outcome, Prompt, Verdict

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def row(sample: int, score: float, **fields: object) -> dict[str, object]:
    prompt = Prompt("sums:train:0", (MESSAGES[0],), "sums", "math", "gsm8k", "2")
    counts: dict[str, object] = {"prompt_tokens": 4, "response_tokens": 1, "finish_reason": "stop"}
    verdict = Verdict(score, Outcome.OK, answer="2", parts={"gsm8k": score} if sample else {})
    return sample_row(prompt, sample, "2", verdict, **counts, **fields)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that was killed in its second step, with a truncated line of metrics."""
    path = tmp_path / "runs" / "killed"
    with RunFolder.create(path) as run:
        run.write_config(dump_toml(resolve("grpo", {"train.steps": 9})))
        run.event("started", step=0)
        run.append_metrics({"step": 0, "eval/pass@1": 0.25})
        run.append_metrics({"step": 1, "reward/mean": 0, "update/grad_norm": math.nan, "samples": 2})
        run.append_metrics({"step": 2, "reward/mean": 0.5, "samples": 2})
        run.write_evaluation(0, {"pass": {"pass@1": {"mean": 0.25}}})
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "rew')
        write_samples(path / "samples" / "step-000001" / "rank-0.parquet", 1, [row(0, 0.0)])
        write_samples(path / "samples" / "step-000002" / "rank-0.parquet", 2, [row(0, 0.0, messages=MESSAGES)])
        write_samples(path / "samples" / "step-000002" / "rank-1.parquet", 2, [row(1, 1.0)])
        write_samples(path / "evaluations" / "step-000000" / "rank-0.parquet", 0, [row(0, 0.25)])
        (path / "samples" / "step-000003").mkdir()
    return path


def test_metrics_are_columns_that_pandas_takes(folder: Path) -> None:
    metrics = rlcli.Run(folder).metrics()
    assert metrics["step"] == [0, 1, 2]
    assert metrics["reward/mean"] == [None, 0.0, 0.5]
    assert all(isinstance(value, float) for value in metrics["reward/mean"][1:])
    assert metrics["samples"] == [None, 2, 2]
    assert math.isnan(metrics["update/grad_norm"][1])
    assert metrics["update/grad_norm"][2] is None
    assert "nonfinite" not in metrics
    assert pandas.DataFrame(metrics)["reward/mean"].max() == 0.5


def test_a_run_reads_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rlcli.Run(folder)
    assert (run.name, run.path, run.state, run.step, run.steps) == ("killed", folder, "killed", 2, 9)
    assert run.config["train"]["steps"] == 9
    assert [event["event"] for event in run.events] == ["started"]
    assert run.evaluations[0]["pass"]["pass@1"]["mean"] == 0.25
    assert repr(run) == f"Run('{folder}'): killed, step 2 of 9, reward 0.500"
    monkeypatch.chdir(folder.parents[1])
    assert rlcli.Run("killed").path == folder
    (folder / "metrics.jsonl").unlink()
    assert run.metrics() == {}
    assert repr(run) == f"Run('{folder}'): killed, step 0 of 9"


def test_samples_are_columns_of_all_ranks(folder: Path) -> None:
    run = rlcli.Run(folder)
    last = run.samples()
    assert last == run.samples(2)
    assert last["step"] == [2, 2]
    assert last["messages"] == [MESSAGES, MESSAGES]
    assert last["parts"] == [{}, {"gsm8k": 1.0}]
    assert pandas.DataFrame(last)["score"].mean() == 0.5
    assert run.samples(0, evaluation=True)["score"] == [0.25]
    assert run.samples(evaluation=True)["score"] == [0.25]


def test_samples_that_are_not_there_are_named(folder: Path) -> None:
    run = rlcli.Run(folder)
    with pytest.raises(RlcliError, match="no samples of step 7; there are those of step 1 to 2"):
        run.samples(7)
    with pytest.raises(RlcliError, match="no samples of an evaluation after step 2; there are those of step 0"):
        run.samples(2, evaluation=True)


def test_what_cannot_be_read_is_left_out_and_named(folder: Path) -> None:
    run = rlcli.Run(folder)
    assert run.notes == ["metrics.jsonl: the last line is incomplete and left out"]
    ranks = [folder / "samples" / "step-000002" / f"rank-{rank}.parquet" for rank in range(2)]
    ranks[0].write_bytes(ranks[0].read_bytes()[:100])
    broken = "samples/step-000002/rank-{}.parquet cannot be read: it is damaged or incomplete"
    with pytest.warns(UserWarning, match=broken.format(0)):
        assert run.samples()["sample"] == [1]
    ranks[1].write_bytes(b"")
    with (
        pytest.warns(UserWarning, match=broken.format("[01]")),
        pytest.raises(RlcliError, match=r"the samples of step 2 in .* cannot be read"),
    ):
        run.samples()
    (folder / "config.toml").unlink()
    run = rlcli.Run(folder)
    assert (run.config, run.steps, run.metrics()["step"]) == ({}, 0, [0, 1, 2])
    assert run.notes[-1] == "config.toml cannot be read: No such file or directory"


def test_samples_have_what_training_made_of_them(folder: Path) -> None:
    room, zero = folder / "samples" / "step-000001", np.zeros(1, np.int64)
    write_samples(room / "rank-0.parquet", 1, [row(0, 0.0, group=0), row(1, 1.0, group=0)])
    table = advantages_table(1, ["sums:train:0"], zero + 1, zero, zero, zero - 0.5, zero + 0.25, [None])
    pq.write_table(table, room / ADVANTAGES)
    samples = rlcli.Run(folder).samples(1)
    assert samples["advantage"] == [-0.5, None]
    assert samples["reward"] == [0.25, None]
    assert samples["trained_step"] == [1, None]
    assert "advantage" not in rlcli.Run(folder).samples(0, evaluation=True)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RlcliError, match="is not a run: it has neither config"):
        rlcli.Run(tmp_path)
