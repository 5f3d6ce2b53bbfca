"""Samples of agent programs: real processes, a real engine, and the trajectories that come out of a round."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.data.messages import PromptTask, RolloutBatch
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.data.trajectories import Trajectory
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.errors import ConfigError, SetupError
from rlcli.launch.environment_checks import check_environments
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.rollout.engine import EngineSpec, Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.transformers_engine import TransformersEngine
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.types import ENDED, Outcome, Prompt
from tests.unit.rollout.worker.scorers import Scorer

AGENT = """
import contextlib, json, os, random, sys, time, urllib.request
from pathlib import Path

reward_key = Path(os.environ["RLCLI_REWARD_KEY"]).read_text()

def post(path, body, timeout=None, key=os.environ["OPENAI_API_KEY"]):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    while True:
        try:
            return json.load(urllib.request.urlopen(request, timeout=timeout))
        except urllib.error.HTTPError as error:
            if error.code != 409:  # the gateway may see a little later that the client is gone
                raise

def ask(messages, **more):
    answer = post("/v1/chat/completions", {"messages": messages}, **more)["choices"][0]["message"]
    return [*messages, answer, {"role": "user", "content": f"heard {len(answer['content'])}"}]

how, marks = sys.argv[1], Path(sys.argv[2])
row = json.load(open(os.environ["RLCLI_ROW"]))
mark = marks / row["id"]
if how == "nothing" or (how in ("crash", "die") and row["id"] in ("always", "once") and not mark.exists()):
    if row["id"] == "once":
        mark.touch()
    if how != "nothing":
        ask(row["messages"])
    if how == "die":
        os.abort()
    sys.exit("no" if how == "crash" else 0)
if how == "slow":
    time.sleep(random.random() / 5)
if how == "impatient":
    with contextlib.suppress(TimeoutError):
        ask(row["messages"], timeout=0.02)
messages = ask(row["messages"])
if how == "slow":
    time.sleep(random.random() / 5)
if how == "branches":
    ask([{"role": "user", "content": "A sub-agent's task."}])
messages = ask(messages)
if how == "endless":
    while True:
        messages = ask(messages)
if how == "of before":
    with contextlib.suppress(urllib.error.HTTPError):
        post("/reward", {"reward": 0.5})
elif how != "silent":
    post("/reward", {"reward": 0.5}, key=reward_key)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
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


def config_of(model: Path, behavior: str = "", marks: Path | str = "", **environment: Any) -> RunConfig:
    command = shlex.join([sys.executable, str(model.parent / "agent.py"), behavior, str(marks)])
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 48},
            "environment": {"name": command, "context_tokens": 80, "turn_tokens": 12, **environment},
        }
    )


def prompt_of(name: str, verifier: str = "environment") -> Prompt:
    return Prompt(name, ({"role": "user", "content": f"task {name}"},), "", "", verifier, "")


def held(
    engine: TransformersEngine,
    config: RunConfig,
    ids: list[str],
    samples: int = 2,
    *,
    ordered: bool = False,
    **row: str,
) -> tuple[RolloutBatch, list[Trajectory], Scorer]:
    """The samples of one prompt each, their trajectories and what was verified."""
    scorer, prompt = Scorer(), np.arange(3, dtype=np.int32)
    tasks = [PromptTask(n, prompt, prompt_of(i, **row), samples) for n, i in enumerate(ids)]
    stops = engine.spec.stop_token_ids
    with AgentPool(config, load_tokenizer(config.model.path), stops) as agents:
        role = RolloutRole(
            0, engine, scorer, stop_token_ids=stops, environments=agents, conversing=True, ordered=ordered
        )  # type: ignore[arg-type]
        *_, report = role.run(tasks, RolloutArguments(Sampling(1.0, 48), 7, "train", 1))
    assert isinstance(report, RolloutBatch)
    shard = role.take_shard()
    assert shard is not None
    table = report.samples.sorted()
    return report, [shard.row(row) for row in table.row.tolist()], scorer


@pytest.mark.long
def test_an_agents_turns_are_one_trajectory_of_the_engines_ids(engine: TransformersEngine, model: Path) -> None:
    report, rows, scorer = held(engine, config_of(model, processes=3), ["a", "b"], samples=3)
    tokenizer, samples = load_tokenizer(str(model)), report.samples.sorted()
    assert len(samples) == len(scorer.requests) == 6
    for sample, row in zip(samples, rows, strict=True):
        assert (sample.verdict.score, sample.branches, row.turns) == (0.5, 1, 2)
        assert (sample.prompt_tokens, sample.response_tokens) == (row.prompt_tokens, row.response_tokens)
        assert f"task {'ab'[sample.prompt]}" in tokenizer.decode(row.tokens[: row.prompt_tokens])
        assert [span.speaker for span in row.spans] == ["prompt", "policy", "environment", "policy"]
        recomputed = engine.prompt_log_probs(row.tokens)[row.response_mask[1:]]
        np.testing.assert_allclose(row.log_probs, recomputed, atol=2e-5)
        cut = ENDED[sample.ended] == "turn_tokens"
        assert cut == (len(row.last_turn) == 12 and row.last_turn[-1] not in engine.spec.stop_token_ids)
        assert (row.stop_reason == "length") == cut == (sample.stop_reason == "length")
    fields = {tokens: fields for _, tokens, fields in scorer.requests}
    assert [len(fields[row.last_turn.astype("int32").tobytes()]["conversation"]) for row in rows] == [4] * 6
    assert len({tuple(row.tokens.tolist()) for row in rows}) == 6
    assert all(sample.turn_rewards == (0.0, 0.5) for sample in samples)
    inputs = [
        row.tokens[span.start : span.end].tolist() for row in rows for span in row.spans if span.speaker != "policy"
    ]
    states = [state for sample in samples for state in sample.turn_states]
    assert [inputs.index(item) for item in inputs] == [states.index(item) for item in states], (
        "turns that were told the same"
    )
    assert len(set(states)) < len(states)


@pytest.mark.long
def test_the_same_seed_gives_the_same_samples(engine: TransformersEngine, model: Path) -> None:
    _, first, _ = held(engine, config_of(model, processes=1), ["a", "b"])
    _, repeated, _ = held(engine, config_of(model, processes=4), ["b", "a"])
    assert [row.tokens.tolist() for row in first] == [row.tokens.tolist() for row in repeated[2:] + repeated[:2]]


@pytest.mark.long
def test_in_order_no_bit_depends_on_how_long_agents_take(engine: TransformersEngine, model: Path) -> None:
    config = config_of(model, "slow", processes=3)
    (_, first, _), (_, repeated, _) = (held(engine, config, ["a", "b"], ordered=True) for _ in range(2))
    for row, other in zip(first, repeated, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist()
        assert row.log_probs.tobytes() == other.log_probs.tobytes()


@pytest.mark.parametrize(
    ("behavior", "detail"),
    [
        ("crash", "crash: the agent ended with exit status 1: no"),
        ("die", "died: the agent ended with signal 6"),
    ],
)
def test_a_failed_agent_is_started_again_and_then_no_reward(
    behavior: str, detail: str, engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, behavior, tmp_path)
    report, _, scorer = held(engine, config, ["always", "once", "never"], samples=1)
    lost, *saved = report.samples.sorted()
    assert (lost.verdict.outcome, lost.verdict.score, lost.response_tokens) == (Outcome.ENVIRONMENT, 0.0, 0)
    assert (lost.verdict.detail, ENDED[lost.ended]) == (detail, "failed")
    assert [sample.verdict.score for sample in saved] == [0.5, 0.5]
    assert sorted(row for row, _, _ in scorer.requests) == ["never", "once"]


@pytest.mark.parametrize(
    ("behavior", "verifier", "detail"),
    [
        ("silent", "environment + 0.1 * format", "posted no reward, which the verifier"),
        ("of before", "environment", "needs: a reward needs the key in the file RLCLI_REWARD_KEY, not OPENAI_API_KEY"),
        ("", "gsm8k", "posted a reward, which the verifier 'gsm8k' does not read: give --verifier environment"),
    ],
)
def test_a_reward_that_is_missing_or_unread_is_no_reward(
    behavior: str, verifier: str, detail: str, engine: TransformersEngine, model: Path
) -> None:
    report, _, _ = held(engine, config_of(model, behavior), ["a"], samples=1, verifier=verifier)
    assert report.samples[0].verdict.outcome is Outcome.ENVIRONMENT
    assert detail in report.samples[0].verdict.detail


def test_without_a_posted_reward_the_rows_verifier_decides(engine: TransformersEngine, model: Path) -> None:
    report, rows, scorer = held(engine, config_of(model, "silent"), ["a"], samples=1, verifier="gsm8k")
    assert report.samples[0].verdict.outcome is Outcome.OK
    ((_, tokens, fields),) = scorer.requests
    assert (tokens, fields["environment"]["rewards"]) == (rows[0].last_turn.astype("int32").tobytes(), [])
    assert report.samples[0].turn_rewards == (0.0, 0.0)


def test_a_limit_ends_an_agent_and_its_sample_counts(engine: TransformersEngine, model: Path) -> None:
    report, rows, _ = held(engine, config_of(model, "endless", turns=3), ["a"], samples=2)
    assert [sample.verdict.outcome for sample in report.samples] == [Outcome.OK] * 2
    for sample, row in zip(report.samples.sorted(), rows, strict=True):
        assert ENDED[sample.ended] in ("turns", "tokens", "response_tokens")
        assert row.turns == 3 or (ENDED[sample.ended] != "turns" and row.stop_reason == "length")


def test_all_branches_are_trained_on(engine: TransformersEngine, model: Path) -> None:
    report, rows, _ = held(engine, config_of(model, "branches"), ["a"])
    assert report.samples.branches.tolist() == [2, 2]
    tokenizer = load_tokenizer(str(model))
    sub, main = (tokenizer.decode(branch.tokens) for branch in rows[0].branches)
    assert ("sub-agent" in sub, "task a" in sub, "sub-agent" in main, "task a" in main) == (True, False, False, True)
    assert [branch.turns for branch in rows[0].branches] == [1, 2]
    assert report.samples.sorted().response_tokens.tolist() == [row.response_tokens for row in rows]
    assert report.samples.sorted().tokens.tolist() == [len(row.tokens) for row in rows]


def test_the_branches_of_a_sample_fit_a_micro_batch(engine: TransformersEngine, model: Path) -> None:
    config = config_of(model, "branches")
    _, rows, _ = held(engine, config, ["a"])
    limit = min(len(row.tokens) for row in rows) - 1
    _, rows, _ = held(engine, config.changed(train={"tokens_per_microbatch": limit}), ["a"])
    assert [len(row.tokens) <= limit for row in rows] == [True, True]


def test_an_agent_may_give_up_a_request_and_ask_again(engine: TransformersEngine, model: Path) -> None:
    report, rows, _ = held(engine, config_of(model, "impatient"), ["a", "b"])
    assert report.samples.score.tolist() == [0.5] * 4
    assert [row.branches[-1].turns for row in rows] == [2] * 4


@pytest.mark.parametrize("with_answer", [False, True])
def test_a_row_has_the_answer_only_if_it_is_asked_for(
    with_answer: bool, engine: TransformersEngine, model: Path, tmp_path: Path
) -> None:
    copies = "import os, shutil, sys; shutil.copy(os.environ['RLCLI_ROW'], sys.argv[1])"
    name = shlex.join([sys.executable, "-c", copies, str(tmp_path / "row.json")])
    config = config_of(model).changed(environment={"name": name, "ground_truth": with_answer})
    extra = {"index": 3, "question": "6 × 7?", "answer": "so #### 42", "response": "42", "solution": "42"}
    prompt = Prompt("a", ({"role": "user", "content": "6 × 7?"},), "gsm8k", "math", "environment", "42", extra)
    with AgentPool(config, load_tokenizer(str(model)), engine.spec.stop_token_ids) as agents:
        agents.start(prompt, 0)
        agents.events.get()
    row = json.loads((tmp_path / "row.json").read_text())
    assert (row["id"], row["data_source"], row["messages"][0]["content"]) == ("a", "gsm8k", "6 × 7?")
    assert row["extra_info"] == (extra if with_answer else {"index": 3, "question": "6 × 7?"})
    assert row.get("ground_truth") == ("42" if with_answer else None)


def test_an_agent_that_asks_nothing_is_refused_before_the_run(engine: TransformersEngine, model: Path) -> None:
    tokenizer, stops, row = load_tokenizer(str(model)), engine.spec.stop_token_ids, prompt_of("a")

    def check(config: RunConfig) -> tuple[str, ...]:
        return check_environments(config, [[row]], tokenizer, stops, thinking=False)

    config = config_of(model)
    assert check(config) == (config.environment.name,)
    with pytest.raises(ConfigError, match=r"asks for no turn on row a: protocol: the agent ended without a turn"):
        check(config_of(model, "nothing"))
    with pytest.raises(ConfigError, match=r"crash: the agent ended with exit status 2: .*can't open file"):
        check(config.changed(environment={"name": f"{sys.executable} none.py"}))
    with pytest.raises(ConfigError, match=r"timeout: the agent did not ask for a turn within 0\.2 s"):
        check(config.changed(environment={"name": "sleep 600", "deadline_s": 0.2}))
    with pytest.raises(SetupError, match="the agent 'no-such-program x' cannot be started"):
        check(config.changed(environment={"name": "no-such-program x"}))
