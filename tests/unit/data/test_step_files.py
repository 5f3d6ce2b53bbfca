"""The files beside a step's samples, and the row of a sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from rlcli.data.sample_files import is_conversation, sample_row, write_samples, write_table
from rlcli.data.step_files import RecordedSample, TokenValues, advantages_table, tokens_row, tokens_table
from rlcli.data.trajectories import Trajectory
from rlcli.types import Outcome, Prompt, Verdict

SOURCE = Prompt(
    "sums:0", ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}), "s", "math", "exact", "2"
)
ASKED = {"prompt_tokens": 4, "response_tokens": 1, "finish_reason": "stop"}


def test_a_saved_sample_has_all_messages_also_of_a_single_turn(tmp_path: Path) -> None:
    held = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "2"}]
    single = sample_row(SOURCE, 0, "3", Verdict(0.0, Outcome.WRONG), **ASKED, group=5)  # type: ignore[arg-type]
    game = sample_row(SOURCE, 1, "2", Verdict(1.0, Outcome.OK), **ASKED, messages=held, ended="done")  # type: ignore[arg-type]
    write_samples(tmp_path / "rank-0.parquet", 7, [single, game])
    first, second = pq.read_table(tmp_path / "rank-0.parquet").to_pylist()
    assert json.loads(first["messages"]) == [*SOURCE.messages, {"role": "assistant", "content": "3"}]
    assert json.loads(second["messages"]) == held
    assert (first["group"], second["group"]) == (5, None)
    assert (is_conversation(first), is_conversation(second)) == (False, True)


def test_advantages_that_are_not_known_are_null(tmp_path: Path) -> None:
    integers: np.ndarray = np.arange(2)
    table = advantages_table(
        3,
        ["a", "a"],
        integers + 2,
        integers,
        integers,
        np.array([0.5, np.nan]),
        np.array([1.0, np.nan]),
        [None, "crash"],
    )
    write_table(tmp_path / "advantages.parquet", table)
    first, second = pq.read_table(tmp_path / "advantages.parquet").to_pylist()
    assert first == {
        "step": 3, "prompt_id": "a", "saved_step": 2, "group": 0, "sample": 0,
        "advantage": 0.5, "reward": 1.0, "left_out": None,
    }  # fmt: skip
    assert (second["advantage"], second["reward"], second["left_out"]) == (None, None, "crash")


def test_values_of_tokens_stand_where_the_policy_drew_them(tmp_path: Path) -> None:
    ids: np.ndarray = np.arange(10, 16, dtype=np.int32)
    log_probs = np.array([-0.5, -1.0, -2.0], np.float32)
    trajectory = Trajectory.single(ids[:2], ids[2:4], log_probs[:2], version=1)
    trajectory = trajectory.extended("environment", ids[4:5]).extended("policy", ids[5:6], log_probs[2:], version=2)
    values = TokenValues(trainer_log_probs=log_probs + 0.25, advantages=np.ones(3, np.float32))
    known = RecordedSample(0, "a", 2, 1, 3, forwarded=True)
    idle = RecordedSample(1, "b", 3, 0, 0, forwarded=False)
    rows = [
        tokens_row(3, known, trajectory, list("abcdef"), values),
        tokens_row(3, idle, trajectory, [""] * 6, TokenValues()),
    ]
    write_table(tmp_path / "tokens-0.parquet", tokens_table(rows))
    first, second = pq.read_table(tmp_path / "tokens-0.parquet").to_pylist()
    assert (first["ids"], "".join(first["text"])) == (list(range(10, 16)), "abcdef")
    assert first["drawn"] == [False, False, True, True, False, True]
    assert first["engine_log_prob"] == [None, None, -0.5, -1.0, None, -2.0]
    assert first["trainer_log_prob"] == [None, None, -0.25, -0.75, None, -1.75]
    assert first["advantage"] == [None, None, 1.0, 1.0, None, 1.0]
    assert first["version"] == [None, None, 1, 1, None, 2]
    assert first["entropy"] == [None] * 6
    assert [first[name] for name in ("step", "prompt_id", "saved_step", "group", "sample")] == [3, "a", 2, 1, 3]
    assert second["trainer_log_prob"] == second["advantage"] == [None] * 6
    assert second["engine_log_prob"] == first["engine_log_prob"]
