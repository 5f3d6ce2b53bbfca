"""Samples that converse with an environment: real processes, a real engine, and the trajectories that come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.data.messages import PromptTask, RolloutBatch
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.data.trajectories import Trajectory
from rlcli.environments.environment_pool import Environments
from rlcli.environments.finished_conversation import Turn
from rlcli.errors import ConfigError
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rollout.engine import EngineSpec, Sampling
from rlcli.rollout.in_flight import RequestOutput, VersionedTokens
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.transformers_engine import TransformersEngine
from rlcli.rollout.worker.conversations import Conversations
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.types import ENDED, Outcome, Prompt
from tests.unit.rollout.worker.scorers import Scorer

ENVIRONMENTS = '''
import os, random, time
from pathlib import Path

class Echo:
    """Repeats the policy's message; rewards each turn with its number."""
    def __init__(self, turns=3):
        self.turns, self.at = turns, 0
    def reset(self, row, seed):
        return [{"role": "user", "content": f"task {row['id']} {seed % 1000}"}]
    def step(self, message):
        self.at += 1
        return [{"role": "user", "content": f"heard {len(message['content'])}"}], float(self.at), self.at == self.turns

class Slow(Echo):
    def step(self, message):
        time.sleep(random.random() / 50)
        return super().step(message)

class Bad(Echo):
    """Fails for some rows, as `how` says; for the row "once" only the first time."""
    def __init__(self, how="raise", marks=""):
        super().__init__()
        self.how, self.marks = how, Path(marks)
    def reset(self, row, seed):
        self.row = row["id"]
        if self.how == "other":
            return [{"role": "user", "content": str(random.random())}]
        return super().reset(row, seed)
    def step(self, message):
        mark = self.marks / self.row
        if self.row == "once" and mark.exists():
            return super().step(message)
        if self.row in ("always", "once"):
            mark.touch()
            if self.how == "raise":
                raise ValueError("no")
            if self.how == "hang":
                time.sleep(60)
            if self.how == "die":
                os._exit(3)
            if self.how == "protocol":
                return "?"
        return super().step(message)

class Neighbours(Echo):
    """Rows "die…" end the process in each try, the row "large" returns 10 MB, the row "once" raises in its first."""
    def __init__(self, marks=""):
        super().__init__()
        self.marks = Path(marks)
    def reset(self, row, seed):
        self.row = row["id"]
        return super().reset(row, seed)
    def step(self, message):
        time.sleep(0.01)  # so that calls overlap
        mark = self.marks / self.row
        if self.row.startswith("die"):
            os._exit(3)
        if self.row == "large":
            return [{"role": "user", "content": "x" * 10_000_000}], 1.0, False
        if self.row == "once" and not mark.exists():
            mark.touch()
            raise ValueError("no")
        return super().step(message)

class Empty(Echo):
    def reset(self, row, seed):
        return []
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "bad.py").write_text(ENVIRONMENTS)
    return make_tiny_model(folder / "tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[TransformersEngine]:
    tokenizer = load_tokenizer(str(model))
    # A random model ends few turns: more tokens that end one.
    stops = tuple(chat_template.stop_tokens(tokenizer, str(model), tuple(range(60, 90))))
    transformers_engine = TransformersEngine(
        EngineSpec(str(model), "float32", "cpu", 256, 16, 1, 0, False, None, 0.5, True, stops, "test")
    )
    yield transformers_engine
    transformers_engine.close()


def config_of(model: Path, name: str = "Echo", **environment: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 48},
            "environment": {
                "name": f"{model.parent}/bad.py:{name}",
                **{"context_tokens": 80, "turn_tokens": 12, "deadline_s": 5.0, **environment},
            },
        }
    )


def held(
    engine: TransformersEngine,
    config: RunConfig,
    ids: list[str],
    samples: int = 3,
    *,
    greedy: bool = False,
    ordered: bool = False,
    verifier: str = "",
    grouped: tuple[str, ...] = (),
) -> tuple[RolloutBatch, list[Trajectory], Scorer]:
    """The samples of one prompt each, their trajectories and what was verified."""
    tokenizer, scorer = load_tokenizer(config.model.path), Scorer()
    prompts = [Prompt(i, ({"role": "user", "content": "x"},), "", "", verifier, "") for i in ids]
    tasks = [PromptTask(n, np.zeros(1, np.int32), prompt, samples) for n, prompt in enumerate(prompts)]
    if greedy:
        tasks = [replace(task, greedy=True) for task in tasks]
    stops = engine.spec.stop_token_ids
    with Environments(config, [config.environment.name], tokenizer, stops) as environments:
        role = RolloutRole(
            0,
            engine,
            scorer,  # type: ignore[arg-type]
            stop_token_ids=stops,
            environments=environments,
            conversing=True,
            ordered=ordered,
            grouped=grouped,
        )
        *_, report = role.run(tasks, RolloutArguments(Sampling(1.0, 48), 7, "train", 1))
    assert isinstance(report, RolloutBatch)
    shard = role.take_shard()
    assert shard is not None
    samples_found = report.samples.sorted()
    return report, [shard.row(row) for row in samples_found.row.tolist()], scorer


def test_a_conversation_is_one_trajectory_of_what_was_drawn_and_answered(
    engine: TransformersEngine, model: Path
) -> None:
    report, rows, scorer = held(engine, config_of(model), ["a", "b"])
    samples, tokenizer = report.samples.sorted(), load_tokenizer(str(model))
    assert len(samples) == len(scorer.requests) == 6
    for sample, row in zip(samples, rows, strict=True):
        assert (sample.prompt_tokens, sample.response_tokens) == (row.prompt_tokens, row.response_tokens)
        assert sample.context_tokens == len(row.tokens) - row.prompt_tokens - row.response_tokens
        text = tokenizer.decode(row.tokens[: row.prompt_tokens])
        assert f"task {'ab'[sample.prompt]} " in text
        # What the environment wrote is in the trajectory, is not drawn, and answers what was drawn before it.
        for previous, span, following in zip(row.spans, row.spans[1:], row.spans[2:], strict=False):
            if span.speaker == "environment":
                tokens = row.tokens[previous.start : previous.end].tolist()
                ended = tokens[-1] in engine.spec.stop_token_ids
                heard = tokenizer.decode(tokens[:-1] if ended else tokens)
                assert (previous.speaker, following.speaker) == ("policy", "policy")
                assert f"heard {len(heard)}" in tokenizer.decode(row.tokens[span.start : span.end])
        assert ENDED[sample.ended] in ("done", "turn_tokens", "response_tokens")
        assert (row.stop_reason == "length") == (ENDED[sample.ended] != "done") == (sample.stop_reason == "length")
        assert sample.verdict.score == sum(range(1, sample.turns + 1))
        assert sample.turn_rewards == tuple(range(1, sample.turns + 1))
        assert len(sample.turn_states) == sample.turns == 1 + row.response_turns[-1]
        assert sample.turn_states[0] == samples[3 * sample.prompt].turn_states[0]
    prompts = [row.tokens[: row.prompt_tokens].tolist() for row in rows]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    assert any(row.turns > 1 for row in rows)


def test_log_probs_are_those_of_the_whole_trajectory(engine: TransformersEngine, model: Path) -> None:
    _, rows, _ = held(engine, config_of(model), ["a"])
    for row in rows:
        recomputed = engine.prompt_log_probs(row.tokens)[row.response_mask[1:]]
        np.testing.assert_allclose(row.log_probs, recomputed, atol=2e-5)


def test_the_same_seed_gives_the_same_conversations(engine: TransformersEngine, model: Path) -> None:
    config = config_of(model)
    _, first, _ = held(engine, config, ["a", "b"])
    _, repeated, _ = held(engine, config_of(model, processes=2), ["b", "a"])
    by_prompt = [repeated[3], repeated[4], repeated[5], repeated[0], repeated[1], repeated[2]]
    assert [row.tokens.tolist() for row in first] == [row.tokens.tolist() for row in by_prompt]
    assert len({tuple(row.tokens.tolist()) for row in first}) == 6


def test_in_order_no_bit_depends_on_how_long_environments_take(engine: TransformersEngine, model: Path) -> None:
    config = config_of(model, "Slow")
    (_, first, _), (_, repeated, _) = (held(engine, config, ["a", "b", "c", "d"], ordered=True) for _ in range(2))
    assert sum(row.turns for row in first) > len(first) + 4
    for original, other in zip(first, repeated, strict=True):
        assert original.tokens.tolist() == other.tokens.tolist()
        assert original.log_probs.tobytes() == other.log_probs.tobytes()


def test_the_verifier_gets_the_last_turn_and_the_whole_conversation(engine: TransformersEngine, model: Path) -> None:
    report, rows, scorer = held(engine, config_of(model), ["a"], samples=1, greedy=True)
    assert list(report.baselines) == [0]
    sent = {tokens: fields for _, tokens, fields in scorer.requests}
    fields = sent[rows[0].last_turn.astype("int32").tobytes()]
    assert [m["role"] for m in fields["conversation"]][:2] == ["user", "assistant"]
    assert len(fields["environment"]["rewards"]) == rows[0].turns
    assert fields["finish_reason"] == rows[0].stop_reason


def test_a_verifier_that_compares_gets_the_next_ones_of_the_group(engine: TransformersEngine, model: Path) -> None:
    report, rows, scorer = held(
        engine, config_of(model), ["a", "b"], 3, verifier="math + 0.1 * own.py:ranked(other_responses=2)"
    )
    stops = engine.spec.stop_token_ids
    last_turns = [(row.last_turn.tobytes(), int(row.last_turn[-1] in stops)) for row in rows]
    groups = {"a": last_turns[:3], "b": last_turns[3:]}
    others = {(name, tokens): fields["other_responses"] for name, tokens, fields in scorer.requests}
    assert others == {
        (name, group[index][0]): [*group[index + 1 :], *group[:index]]
        for name, group in groups.items()
        for index in range(3)
    }
    alone, _, scorer = held(engine, config_of(model), ["a"], 1, verifier="ranked.py:ranked(other_responses=2)")
    assert [fields["other_responses"] for _, _, fields in scorer.requests] == [[]]
    assert (len(report.samples), len(alone.samples)) == (6, 1)


def test_a_verifier_that_reads_responses_together_gets_whole_groups(engine: TransformersEngine, model: Path) -> None:
    verifier = "rewards.py:unique"
    report, rows, scorer = held(
        engine, config_of(model), ["a", "b"], 3, greedy=True, verifier=verifier, grouped=(verifier,)
    )
    assert sorted(scorer.groups) == [1, 1, 3, 3]  # the greedy baseline is a group of its own
    assert len(report.samples) == 6
    assert list(report.baselines) == [0, 1]
    requests = {(name, tokens) for name, tokens, _ in scorer.requests}
    assert {("ab"[n // 3], row.last_turn.astype("int32").tobytes()) for n, row in enumerate(rows)} <= requests
    assert {fields["step"] for _, _, fields in scorer.requests} == {1}
    _, _, scorer = held(engine, config_of(model), ["a"], 3, verifier="other.py:f", grouped=(verifier,))
    assert scorer.groups == []
    assert all("step" not in fields for _, _, fields in scorer.requests)


@pytest.mark.long
@pytest.mark.parametrize("failure", ["raise", "hang", "die", "protocol"])
def test_a_failed_environment_is_tried_again_and_then_no_reward(
    failure: str, engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    options = {"how": failure, "marks": str(tmp_path)}
    config = config_of(model, "Bad", options=options, deadline_s=0.7, processes=3)
    report, rows, scorer = held(engine, config, ["always", "once"], samples=1)
    lost, saved = report.samples.sorted()
    assert (lost.verdict.outcome, lost.verdict.score, lost.response_tokens) == (Outcome.ENVIRONMENT, 0.0, 0)
    details = {"raise": "crash: step raised ValueError: no", "hang": "timeout", "die": "died", "protocol": "protocol"}
    assert lost.verdict.detail.startswith(details[failure])
    assert (ENDED[lost.ended], rows[0].prompt_tokens > 10) == ("failed", True)
    assert saved.verdict.outcome == Outcome.OK
    assert [row for row, _, _ in scorer.requests] == ["once"]
    failed, verified = report.samples.sorted().exclusion_reasons("keep").tolist()[:2]
    assert verified == 0 < failed


@pytest.mark.long
def test_a_crash_costs_others_of_its_process_no_try(engine: TransformersEngine, model: Path, tmp_path: Path) -> None:
    """Eight rows end the process, twice each or more; the row "once" has used one of its two tries by itself."""
    ids = [*(f"die{number}" for number in range(8)), "large", "once", *(f"good{number}" for number in range(6))]
    report, _, scorer = held(engine, config_of(model, "Neighbours", options={"marks": str(tmp_path)}), ids, samples=1)
    outcomes = {ids[sample.prompt]: sample.verdict for sample in report.samples}
    lost = {row: verdict.detail for row, verdict in outcomes.items() if verdict.outcome is Outcome.ENVIRONMENT}
    assert sorted(lost) == sorted(ids[:9])
    assert all(detail == "died: its process ended with exit status 3" for row, detail in lost.items() if row != "large")
    assert lost["large"] == "too_large: step returned 10.0 MB of text, more than 4.2"
    assert sorted(row for row, _, _ in scorer.requests) == sorted(ids[9:])


def test_nothing_is_kept_of_a_group_that_is_over(engine: TransformersEngine, model: Path) -> None:
    """Its prompt may have images, and a generation in slices lasts as long as the run."""
    stops, config = engine.spec.stop_token_ids, config_of(model)
    with Environments(config, [config.environment.name], load_tokenizer(str(model)), stops) as environments:
        conversations = Conversations(environments, 0, ordered=True)
        source = Prompt("a", ({"role": "user", "content": "x"},), "", "", "", "")
        for key in range(2):
            conversations.open(key, PromptTask(0, np.zeros(1, np.int32), source, 2))
        turns = conversations.poll()
        assert [conversations._groups[0].conversations, len(turns)] == [2, 2]
        ids, log_probs = np.array([70], np.int32), np.zeros(1, np.float32)
        while turns:
            for turn in turns:
                conversations.add_turn(turn.key, RequestOutput(turn.key, [VersionedTokens(ids, log_probs, 0)], "stop"))
            turns = [event for event in conversations.poll() if isinstance(event, Turn)]
        assert not conversations._groups
        assert not conversations._states


def test_a_group_whose_resets_differ_is_no_group(engine: TransformersEngine, model: Path, tmp_path: Path) -> None:
    config = config_of(model, "Bad", options={"how": "other", "marks": str(tmp_path)})
    report, _, _ = held(engine, config, ["a"], samples=2)
    (lost,) = (s for s in report.samples if s.verdict.outcome is Outcome.ENVIRONMENT)
    assert lost.verdict.detail == "protocol: reset returned other messages for the same row and seed"


def test_an_environment_that_opens_nothing_is_refused(engine: TransformersEngine, model: Path) -> None:
    config, tokenizer = config_of(model, "Empty"), load_tokenizer(str(model))
    prompt = Prompt("a", ({"role": "user", "content": "x"},), "", "", "", "")
    with (
        Environments(config, [config.environment.name], tokenizer, engine.spec.stop_token_ids) as environments,
        pytest.raises(ConfigError, match=r"cannot open a conversation for row a: protocol: reset returned no messages"),
    ):
        environments.check({config.environment.name: prompt})
