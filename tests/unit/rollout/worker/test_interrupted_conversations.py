"""Conversations that a round breaks off: a later round replays them to a new session, and continues them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.data.messages import PartialRollout, PromptTask, RolloutBatch
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.environments.environment_pool import Environments
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rollout.engine import EngineSpec, Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments, Slice
from rlcli.rollout.transformers_engine import TransformersEngine
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.rollout.worker.work_queue import NO_SHARED_TASKS, RoundTasks
from rlcli.types import Outcome, Prompt
from tests.unit.rollout.worker.test_conversations import Scorer

ENVIRONMENTS = '''
import asyncio
from pathlib import Path

class Late:
    """The row "late" gets answers, but for the first, once the file `gate` is there. moody: other ones then. Each reset
    is a line in another file."""
    def __init__(self, gate, moody=False):
        self.gate, self.moody, self.at = Path(gate), moody, 0
    def reset(self, row, seed):
        self.row = row["id"]
        with self.gate.with_suffix(".resets").open("a") as file:
            file.write(self.row + "\\n")
        return [{"role": "user", "content": f"task {self.row}"}]
    async def step(self, message):
        self.at += 1
        opened = self.gate.exists()
        while self.row == "late" and self.at > 1 and not self.gate.exists():
            await asyncio.sleep(0.01)
        mood = " again" if self.moody and opened else ""
        answer = [{"role": "user", "content": f"heard {len(message['content'])}{mood}"}]
        return answer, float(self.at), self.at == (1 if self.row == "soon" else 4)
'''
SAMPLES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "late.py").write_text(ENVIRONMENTS)
    return make_tiny_model(folder / "tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[TransformersEngine]:
    tokenizer = load_tokenizer(str(model))
    stops = tuple(chat_template.stop_tokens(tokenizer, str(model), tuple(range(60, 90))))
    transformers_engine = TransformersEngine(
        EngineSpec(str(model), "float32", "cpu", 256, 16, 1, 0, False, None, 0.5, True, stops, "test")
    )
    yield transformers_engine
    transformers_engine.close()


def task(name: str, position: int, samples: int = SAMPLES) -> PromptTask:
    source = Prompt(name, ({"role": "user", "content": "x"},), "", "", "", "")
    return PromptTask(position, np.zeros(1, np.int32), source, samples, step=1)


def round_of(
    engine: TransformersEngine, model: Path, gate: Path, tasks: Sequence[PromptTask], step: int, **settings: object
) -> tuple[RolloutBatch, SampleShard]:
    queue = RoundTasks(f"round {step}", (), int(str(settings["until"]))) if "until" in settings else NO_SHARED_TASKS
    with role_of(engine, model, gate, **settings) as role:
        role.version = step
        *_, report = role.run(list(tasks), RolloutArguments(Sampling(1.0, 64), 7, "train", step), queue)
    assert isinstance(report, RolloutBatch)
    shard = role.take_shard()
    assert shard is not None
    return report, shard


@contextmanager
def role_of(engine: TransformersEngine, model: Path, gate: Path, **settings: object) -> Iterator[RolloutRole]:
    options = {"gate": str(gate), "moody": settings.get("moody", False)}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 64},
            "environment": {
                "name": f"{model.parent}/late.py:Late",
                "options": options,
                "context_tokens": 80,
                "past": settings.get("past", "keep"),
            },
        }
    )
    stops, ordered = engine.spec.stop_token_ids, bool(settings.get("ordered"))
    with Environments(config, [config.environment.name], load_tokenizer(str(model)), stops) as environments:
        yield RolloutRole(
            0,
            engine,
            Scorer(),  # type: ignore[arg-type]
            stop_token_ids=stops,
            environments=environments,
            conversing=True,
            ordered=ordered,
        )


def rows_of(report: RolloutBatch, shard: SampleShard) -> dict[int, Trajectory]:
    return {sample.sample: shard.row(sample.row) for sample in report.samples}


def whole(engine: TransformersEngine, model: Path, tmp_path: Path, **settings: object) -> dict[int, Trajectory]:
    (tmp_path / "open").touch()
    return rows_of(*round_of(engine, model, tmp_path / "open", [task("late", 0)], 1, **settings))


def interrupted(
    engine: TransformersEngine, model: Path, tmp_path: Path, **settings: object
) -> tuple[RolloutBatch, SampleShard, RolloutBatch, SampleShard]:
    """The round that ends when the group "soon" is done, and the one that continues with "late"."""
    gate = tmp_path / "gate"
    report, shard = round_of(engine, model, gate, [task("soon", 0), task("late", 1)], 1, until=1, **settings)
    gate.touch()
    partials = {partial.sample: replace(partial, shard=0) for partial in report.partial if partial.prompt == 1}
    late = replace(task("late", 0), partial=partials, shards=[shard])
    done = {sample.sample for sample in report.samples if sample.prompt == 1}
    late = replace(late, wanted=tuple(sorted(set(range(SAMPLES)) - done)))
    return report, shard, *round_of(engine, model, gate, [late], 2, **settings)


@pytest.mark.long
def test_a_conversation_goes_on_where_it_was_broken_off(
    engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    first, shard, second, rest = interrupted(engine, model, tmp_path)
    partials = {record.sample: shard.row(record.row) for record in first.partial}
    assert any(row.turns > 1 for row in partials.values())
    assert second.stats.replay_diverged == 0
    expected, trajectories = whole(engine, model, tmp_path), rows_of(second, rest)
    assert trajectories.keys() | {s.sample for s in first.samples if s.prompt == 1} == expected.keys()
    for sample, row in trajectories.items():
        # The weights have not changed in truth, and draws depend on their place alone: the same as in one go.
        assert row.tokens.tolist() == expected[sample].tokens.tolist()
        assert row.response_mask.tolist() == expected[sample].response_mask.tolist()
        np.testing.assert_allclose(row.log_probs, expected[sample].log_probs, atol=2e-5)
        assert row.stop_reason == expected[sample].stop_reason
        prefix = partials[sample]
        assert row.log_probs[: prefix.response_tokens].tobytes() == prefix.log_probs.tobytes()
        assert set(row.versions) <= {1, 2}
        assert row.versions[0] == 1
    scores = {s.sample: s.verdict.score for s in second.samples}
    assert all(score == sum(range(1, trajectories[sample].turns + 1)) for sample, score in scores.items())
    for record in second.samples:
        assert record.turn_rewards == tuple(range(1, record.turns + 1)), "what is said again is not rewarded twice"
        assert len(record.turn_states) == record.turns


@pytest.mark.long
@pytest.mark.parametrize("past", ["keep", "per_cycle"])
@pytest.mark.parametrize("where", ["its environment has the turn", "before a turn", "within a turn"])
def test_wherever_it_was_broken_off_the_rest_is_the_same(
    where: str, past: str, engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    expected = {sample: row for sample, row in whole(engine, model, tmp_path, past=past).items() if row.turns > 1}
    assert expected
    assert all(len(row.branch_starts) == (row.turns if past == "per_cycle" else 1) for row in expected.values())
    builder, partials = ShardBuilder(), {}
    for sample, row in expected.items():
        prefix = row.until_turn(1)
        if where != "its environment has the turn":
            answer = row.spans[len(prefix.spans)]
            prefix = prefix.extended(answer.speaker, row.tokens[answer.start : answer.end])
        if where == "within a turn":
            some = (row.until_turn(2).response_tokens - prefix.response_tokens) // 2
            span = slice(prefix.response_tokens, prefix.response_tokens + some)
            prefix = prefix.extended("policy", row.response_ids[span], row.log_probs[span], 1)
        partials[sample] = PartialRollout(0, sample, 0, builder.add(prefix), prefix.response_tokens, 1)
    late = replace(task("late", 0), partial=partials, shards=[builder.build()], wanted=tuple(partials))
    report, shard = round_of(engine, model, tmp_path / "open", [late], 2, past=past)
    assert report.stats.replay_diverged == 0
    trajectories = rows_of(report, shard)
    assert trajectories.keys() == expected.keys()
    for sample, row in trajectories.items():
        assert row.branch_starts == expected[sample].branch_starts
        assert row.tokens.tolist() == expected[sample].tokens.tolist()
        assert row.versions[0] == 1


@pytest.mark.long
def test_what_is_answered_otherwise_is_drawn_anew_and_counted(
    engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    first, _, second, rest = interrupted(engine, model, tmp_path, moody=True)
    heard = [partial for partial in first.partial if partial.prompt == 1]
    assert 0 < second.stats.replay_diverged <= len(heard)
    trajectories = rows_of(second, rest)
    assert all(sample.verdict.outcome is Outcome.OK for sample in second.samples)
    assert sum(set(row.versions) == {2} for row in trajectories.values()) >= second.stats.replay_diverged
    expected = whole(engine, model, tmp_path, moody=True)
    assert all(row.tokens.tolist() == expected[sample].tokens.tolist() for sample, row in trajectories.items())


@pytest.mark.long
@pytest.mark.parametrize("keep", [False, True])
def test_conversations_and_their_environments_go_on_through_updates(
    engine: TransformersEngine, model: Path, tmp_path: Path, keep: bool
) -> None:
    expected = whole(engine, model, tmp_path)
    gate = tmp_path / "gate"
    gate.touch()
    trajectories: dict[int, Trajectory] = {}
    partial_tokens: list[int] = []
    with role_of(engine, model, gate, ordered=True) as role:
        tasks = [task("late", 0)]
        for version in range(1, 200):
            role.pause(keep=keep)
            role.version = version
            arguments = RolloutArguments(Sampling(1.0, 64), 7, "train", 1, slice=Slice(steps=7))
            *_, report = role.run(tasks, arguments)
            assert isinstance(report, RolloutBatch)
            shard, tasks = role.take_shard(), []
            for sample in report.samples:
                assert shard is not None
                trajectories[sample.sample] = shard.row(sample.row)
                assert sample.turn_rewards == tuple(range(1, sample.turns + 1))
                assert (sample.verdict.outcome, report.stats.replay_diverged) == (Outcome.OK, 0)
            if version == 3:  # a checkpoint, which interrupts nothing
                partial_tokens = [partial.tokens for partial in role.snapshot(end=False, keep=keep).partial]
            if len(trajectories) == SAMPLES:
                break
        role.discard_streaming()
    assert partial_tokens
    assert trajectories.keys() == expected.keys()
    for sample, row in trajectories.items():
        # The weights have not changed in truth: the same as in one go, whatever was computed again.
        assert row.tokens.tolist() == expected[sample].tokens.tolist()
        np.testing.assert_allclose(row.log_probs, expected[sample].log_probs, atol=2e-5)
        versions = [version for version in row.versions if version is not None]
        assert versions == sorted(versions)
    assert any(len(set(row.versions)) > 2 for row in trajectories.values())
    assert (tmp_path / "gate.resets").read_text().split() == ["late"] * SAMPLES, "no environment begins anew"


@pytest.mark.long
def test_a_conversation_of_a_checkpoint_equals_the_one_that_went_on(
    engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    """Bit by bit, in a role that counts steps and says conversations again to new environments."""
    gate = tmp_path / "gate"
    gate.touch()
    arguments = RolloutArguments(Sampling(1.0, 64), 7, "train", 1, slice=Slice(steps=7))

    def rest(role: RolloutRole, tasks: list[PromptTask], first: int) -> dict[int, Any]:
        trajectories: dict[int, Trajectory] = {}
        for version in range(first, 200):
            role.pause()
            role.version = version
            *_, report = role.run(tasks, arguments)
            assert isinstance(report, RolloutBatch)
            shard, tasks = role.take_shard(), []
            trajectories |= {sample.sample: shard.row(sample.row) for sample in report.samples if shard is not None}
            if not role.engine.unfinished and not report.samples and trajectories:
                break
        role.discard_streaming()
        return {s: (row.tokens.tobytes(), row.log_probs.tobytes(), row.versions) for s, row in trajectories.items()}

    with role_of(engine, model, gate, ordered=True) as role:
        tasks, done = [task("late", 0)], set[int]()
        for version in (1, 2, 3):
            role.pause()
            role.version = version
            *_, report = role.run(tasks, arguments)
            assert isinstance(report, RolloutBatch)
            tasks, done = [], done | {record.sample for record in report.samples}
            role.take_shard()
        snapshot, shard = role.snapshot(end=False), role.take_shard()
        assert shard is not None
        partials = {record.sample: replace(record, shard=0) for record in snapshot.partial}
        assert any(shard.row(record.row).turns > 1 for record in partials.values())
        went_on = rest(role, [], 4)
    with role_of(engine, model, gate, ordered=True) as other:
        missing = tuple(sorted(set(range(SAMPLES)) - done))
        resumed = rest(other, [replace(task("late", 0), wanted=missing, partial=partials, shards=[shard])], 4)
    assert went_on.keys() == set(missing) == partials.keys()
    assert resumed == went_on
