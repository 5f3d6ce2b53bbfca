"""Trajectories: spans, masks and versions; how a shard stores them, the packer counts them and a file records them."""

from __future__ import annotations

import json
import struct
import zlib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.columns import SampleTable
from rlcli.data.messages import PartialRollout, PromptTask
from rlcli.data.packer import plan_batches
from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.signature import tokens_digest
from rlcli.data.step_images import read_images
from rlcli.data.trajectories import Span, Trajectory
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.model.packed import pack
from rlcli.rewards.service.scoring_client import Scored
from rlcli.rollout.scheduler.group_checkpoint import groups_from_json, groups_to_json
from rlcli.rollout.scheduler.groups import Group, GroupState
from rlcli.rollout.worker.pending_samples import Saver, pending_sample
from rlcli.rollout.worker.sample_request import SampleRequest
from rlcli.training.loop.metrics import sample_metrics
from rlcli.types import Outcome, Prompt, Sample, Verdict, image_digest

SOURCE = Prompt("row:0", ({"role": "user", "content": "?"},), "s", "math", "gsm8k", "3")


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def log_probs(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def conversation() -> Trajectory:
    """Two sampled tokens, two of a tool, and one sampled with newer weights."""
    trajectory = Trajectory.single(ids(1, 2, 3), ids(10, 11), log_probs(-0.5, -1.0), version=4, stop_reason=None)
    return trajectory.extended("environment", ids(7, 8)).extended("policy", ids(12), log_probs(-2.0), 6, "stop")


def masks(*runs: int) -> Trajectory:
    """Runs of tokens: a prompt, then drawn and not drawn in turn."""
    trajectory = Trajectory.of_prompt(np.arange(runs[0], dtype=np.int32))
    for index, length in enumerate(runs[1:]):
        tokens: np.ndarray = np.arange(length, dtype=np.int32) + 100 * (index + 1)
        policy_turn = ("policy", tokens, -np.arange(length, dtype=np.float32) - index, index)
        trajectory = trajectory.extended(*policy_turn) if index % 2 == 0 else trajectory.extended("environment", tokens)  # type: ignore[arg-type]
    return replace(trajectory, stop_reason="length")


trajectories = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda runs: masks(*runs))


def test_only_what_the_policy_drew_is_in_the_mask() -> None:
    trajectory = conversation()
    assert trajectory.tokens.tolist() == [1, 2, 3, 10, 11, 7, 8, 12]
    assert trajectory.response_mask.tolist() == [False] * 3 + [True, True, False, False, True]
    assert trajectory.response_ids.tolist() == [10, 11, 12]
    assert trajectory.log_probs.tolist() == [-0.5, -1.0, -2.0]
    assert (trajectory.prompt_tokens, trajectory.response_tokens, trajectory.turns, trajectory.versions) == (
        3,
        3,
        2,
        [4, 6],
    )
    assert trajectory.spans[2] == Span("environment", 5, 7)
    assert trajectory.stop_reason == "stop"


def test_a_response_continued_by_other_weights_is_one_turn() -> None:
    initial = Trajectory.single(ids(1), ids(5, 6), log_probs(-1, -2), version=3, stop_reason=None)
    same = initial.extended("policy", ids(7), log_probs(-3), 3, "stop")
    assert same.spans == (Span("prompt", 0, 1), Span("policy", 1, 4, 3))
    newer = initial.extended("policy", ids(7), log_probs(-3), 5, "stop")
    assert newer.spans == (Span("prompt", 0, 1), Span("policy", 1, 3, 3), Span("policy", 3, 4, 5))
    assert (newer.turns, newer.versions, newer.response_tokens, newer.prompt_tokens) == (1, [3, 5], 3, 1)
    nothing = initial.extended("policy", ids(), log_probs(), 5, "length")
    assert (nothing.spans, nothing.stop_reason) == (initial.spans, "length")


def test_a_response_may_be_empty() -> None:
    empty = Trajectory.single(ids(1, 2), ids(), log_probs(), version=3)
    assert (empty.prompt_tokens, empty.response_tokens, empty.turns, empty.versions) == (2, 0, 1, [3])
    assert not empty.response_mask.any()


@pytest.mark.parametrize(("speaker", "count"), [("policy", None), ("policy", 1), ("environment", 2)])
def test_each_drawn_token_has_a_log_prob_and_no_other(speaker: Any, count: int | None) -> None:
    with pytest.raises(AssertionError, match="log-prob"):
        conversation().extended(speaker, ids(1, 2), None if count is None else log_probs(*[-1.0] * count))


@given(st.lists(trajectories, max_size=5))
def test_a_shard_gives_back_its_trajectories(rows: list[Trajectory]) -> None:
    builder = ShardBuilder()
    assert [builder.add(row) for row in rows] == list(range(len(rows)))
    shard = builder.build()
    assert len(shard) == len(rows)
    for index, row in enumerate(rows):
        back = shard.row(index)
        assert (back.spans, back.stop_reason) == (row.spans, row.stop_reason)
        np.testing.assert_array_equal(back.tokens, row.tokens)
        np.testing.assert_array_equal(back.log_probs, row.log_probs)


def older_arrays() -> dict[str, Any]:
    """Two rows as checkpoints held them before there were spans: prompts of 2 and 1, responses of 1 and 2 tokens."""
    return {
        "tokens": ids(1, 2, 9, 3, 8, 7),
        "offsets": np.array([0, 3, 6]),
        "prompt_lengths": ids(2, 1),
        "log_probs": log_probs(-1, -2, -3),
        "log_prob_offsets": np.array([0, 1, 3]),
    }


def test_rows_of_older_checkpoints_are_single_responses() -> None:
    rows = [SampleShard.of_arrays(older_arrays()).row(index) for index in range(2)]
    assert [row.tokens[~row.response_mask].tolist() for row in rows] == [[1, 2], [3]]
    assert [(row.response_ids.tolist(), row.log_probs.tolist()) for row in rows] == [([9], [-1]), ([8, 7], [-2, -3])]
    assert [row.versions for row in rows] == [[None], [None]]


def test_a_partial_rollout_of_an_older_checkpoint_is_continued() -> None:
    partial_rollout = PartialRollout(0, 1, 0, 1, 2, version=3)
    task = PromptTask(
        0, ids(3), SOURCE, 2, partial={1: partial_rollout}, shards=[SampleShard.of_arrays(older_arrays())]
    )
    trajectory = SampleRequest(task, 1, 0, 0).so_far().extended("policy", ids(6), log_probs(-4), 5, "stop")
    assert (trajectory.versions, trajectory.response_ids.tolist()) == ([3, 5], [8, 7, 6])
    assert SampleRequest(task, 0, 0, 0).so_far().tokens.tolist() == [3]


def test_groups_of_older_checkpoints_load() -> None:
    sample = Sample(0, 1, 0, 1, 5, 6, "length", Verdict(1.0, Outcome.OK), 3, seed=7, signature=9)
    talk = SampleTable.of([replace(sample, turns=2, turn_rewards=(0.1, 1.0), turn_states=(2**62, 3))])
    rewarded, shards = groups_to_json([Group(2, samples=talk, shards=["a"])])
    assert list(groups_from_json(json.loads(json.dumps(rewarded)), shards)[0].samples) == list(talk)
    samples = SampleTable.of([sample])
    plain, shards = groups_to_json([Group(2, prompt_index=4, samples=samples, shards=["a"])])
    assert list(groups_from_json(json.loads(json.dumps(plain)), shards)[0].samples) == list(samples)
    (older,) = plain[0]["samples"]
    for name in ("context_tokens", "turns", "newer_by", "turn_rewards", "turn_states"):
        del older[name]
    older["drawn_tokens"], older["finish_reason"] = older.pop("response_tokens"), older.pop("stop_reason")
    assert list(groups_from_json(json.loads(json.dumps(plain)), shards)[0].samples) == list(samples)


def test_partial_rollouts_are_read_under_the_key_of_older_checkpoints() -> None:
    partial = [PartialRollout(0, 1, 0, 1, 2, version=3)]
    plain, shards = groups_to_json([Group(2, prompt_index=4, state=GroupState.RUNNING, shards=["a"], partial=partial)])
    assert plain[0]["open"] is not None
    older = json.loads(json.dumps(plain))
    older[0]["open"]["begun"] = older[0]["open"].pop("partial")
    for saved in (json.loads(json.dumps(plain)), older):
        assert list(groups_from_json(saved, shards)[0].partial) == partial


def test_the_digest_of_a_single_response_is_that_of_older_runs() -> None:
    prompt, response, engine = ids(5, 6), ids(7, 8, 9), log_probs(-0.5, -1.0, -1.5)
    for count in (3, 0):
        expected = zlib.crc32(struct.pack("<qqq", 2, count, count))
        for values in (prompt, response[:count], engine[:count]):
            expected = zlib.crc32(values.tobytes(), expected)
        assert tokens_digest(Trajectory.single(prompt, response[:count], engine[:count])) == expected


def test_the_digest_depends_on_the_mask() -> None:
    """The same tokens and log-probs, drawn at other places."""
    tokens, engine = np.arange(6, dtype=np.int32), log_probs(-1, -2)
    ways = [
        (Span("prompt", 0, 4), Span("policy", 4, 6, 1)),
        (Span("prompt", 0, 3), Span("policy", 3, 5, 1), Span("environment", 5, 6)),
        (Span("prompt", 0, 3), Span("policy", 3, 4, 1), Span("environment", 4, 5), Span("policy", 5, 6, 1)),
        (Span("prompt", 0, 2), Span("policy", 2, 3, 1), Span("environment", 3, 4), Span("policy", 4, 5, 1)),
    ]
    digests = [tokens_digest(Trajectory(tokens, spans, engine)) for spans in ways]
    assert len(set(digests)) == len(ways)
    parted = (Span("prompt", 0, 4), Span("policy", 4, 5, 1), Span("policy", 5, 6, 2))
    assert tokens_digest(Trajectory(tokens, parted, engine)) == digests[0]


@given(st.lists(trajectories, min_size=1, max_size=4))
def test_a_pack_predicts_each_drawn_token_from_the_token_before(rows: list[Trajectory]) -> None:
    batch = pack([(r.tokens, r.prompt_tokens) for r in rows], torch.device("cpu"), [r.response_mask for r in rows])
    expected = [
        (index, int(row.tokens[at]), at - 1, int(row.tokens[at - 1]))
        for index, row in enumerate(rows)
        for at in np.flatnonzero(row.response_mask)
    ]
    positions, previous_ids = batch.position_ids[batch.response_index], batch.input_ids[batch.response_index]
    columns = (batch.sequence, batch.targets, positions, previous_ids)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_a_plan_forwards_all_tokens_and_divides_by_the_drawn_ones() -> None:
    """Of 10 tokens of context, a micro-batch of 16 tokens has room for no other sample."""
    plan = plan_batches(
        [2, 2, 2, 2],
        [3, 1, 2, 3],
        [0, 1, 2, 3],
        minibatches=1,
        ranks=1,
        tokens_per_microbatch=16,
        max_response_tokens=4,
        context_tokens=[10, 0, 0, 0],
    )
    (mini,) = plan.minibatches
    assert (mini.tokens, mini.sequences, sum(mini.rank_tokens)) == (9, 4, 27)
    assert (0,) in mini.ranks[0]


def test_copies_of_what_environments_showed_are_beside_their_samples(tmp_path: Path) -> None:
    """Of each round, without the row's own images, and only where samples are written whole."""
    source = replace(SOURCE, images=(b"own",))
    task = PromptTask(0, ids(1, 2, 3), source, 2)
    trajectory = Trajectory.single(ids(1, 2, 3), ids(4), log_probs(-3.0))
    scored: Future[Scored] = Future()
    scored.set_result(Scored("text", Verdict(1.0, Outcome.OK)))
    for name, copies in (
        ("rank-{rank}", {"a": b"1"}),
        ("rank-{rank}.round-2", {"b": b"2"}),
        ("rank-{rank}.{part}", {}),
    ):
        saver = Saver(str(tmp_path / f"{name}.parquet"), 3, 1)
        shown = {**copies, image_digest(b"own"): b"3"}
        finished = FinishedConversation(0, trajectory, {"environment": {"ended": "done"}}, 0, 0, copies=shown)
        item = pending_sample(
            task, 0, trajectory, scored, shard=0, seed=0, conversation=finished, keep_copies=saver.keeps_copies
        )
        assert item.copies == copies
        saver.add([item])
        saver.save_rest()
    assert sorted(path.name for path in tmp_path.glob("pictures-*")) == [
        "pictures-3.parquet",
        "pictures-3.round-2.parquet",
    ]
    assert dict(read_images(tmp_path, ["a", "b", "c"])) == {"a": b"1", "b": b"2"}


def test_saved_samples_and_metrics_count_drawn_tokens(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    saver, samples = Saver(str(tmp_path / "rank.parquet"), 0, 1), []
    single = Trajectory.single(ids(1, 2, 3), ids(4), log_probs(-3.0), version=6, stop_reason="length")
    for index, trajectory in enumerate((conversation(), single)):
        scored: Future[Scored] = Future()
        scored.set_result(Scored("text", Verdict(1.0, Outcome.OK)))
        finished = (
            FinishedConversation(index, trajectory, {"environment": {"ended": "done"}}, 0, 0, None, (0.5, 1.0), (7, 8))
            if index == 0
            else None
        )
        task = PromptTask(0, ids(1, 2, 3), SOURCE, 2)
        item = pending_sample(task, index, trajectory, scored, shard=0, seed=index, conversation=finished)
        assert item.digest == tokens_digest(trajectory)
        assert item.checksum == zlib.crc32(trajectory.last_turn.tobytes())
        saver.add([item])
        samples.append(replace(item.sample, verdict=scored.result().verdict, ended=int(index == 0)))
    saver.save_rest()
    first, other = pq.read_table(tmp_path / "rank.parquet").to_pylist()
    names = ("prompt_tokens", "response_tokens", "turns", "version", "newest_version", "finish_reason")
    assert [first[name] for name in names] == [3, 3, 2, 4, 6, "stop"]
    assert [other[name] for name in names] == [3, 1, 1, 6, 6, "length"]
    assert (first["turn_rewards"], other["turn_rewards"]) == ([0.5, 1.0], None)
    assert (samples[0].turn_rewards, samples[0].turn_states) == ((0.5, 1.0), (7, 8))
    assert (first["mean_log_prob"], first["min_log_prob"]) == (pytest.approx(-3.5 / 3), -2.0)
    assert (samples[0].tokens, samples[0].response_tokens, samples[0].context_tokens) == (8, 3, 2)

    metrics = sample_metrics(SampleTable.of(samples))
    assert (metrics["response_tokens/mean"], metrics["response_tokens/max"]) == (2.0, 3.0)
    assert (metrics["turns/mean"], metrics["turns/max"], metrics["context_tokens/mean"]) == (2.0, 2.0, 2.0)
    assert metrics["rollout/several_versions"] == 0.5
    alone = sample_metrics(SampleTable.of(samples[1:]))
    assert not {"turns/mean", "turns/max", "context_tokens/mean", "rollout/several_versions"} & alone.keys()
