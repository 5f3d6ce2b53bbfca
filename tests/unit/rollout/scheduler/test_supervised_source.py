from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from rlcli_data_prep.arithmetic import CONVERTER

from rlcli.data.messages import RolloutBatch
from rlcli.data.packer import plan_batches
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.sample_shard import SampleShard
from rlcli.model.io.tiny_model import tiny_tokenizer
from rlcli.prep.pipeline import prepare
from rlcli.rollout.scheduler.supervised_source import SupervisedSource
from rlcli.training.loop.metrics import reward_metrics
from rlcli.types import ConvertOptions, Outcome

ROWS = 10
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def prompts() -> TokenizedPrompts:
    rows = prepare(CONVERTER, ConvertOptions(count=ROWS, test_count=1)).splits["train"]
    return TokenizedPrompts.tokenize(rows, TOKENIZER, 64, response="response", max_response_tokens=64)


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> list[SampleShard]:
    """The shards put into the object store; a reference is an index into this list."""
    shards: list[Any] = []

    def put(shard: Any) -> int:
        shards.append(shard)
        return len(shards) - 1

    monkeypatch.setattr("ray.put", put)
    return shards


def source(prompts: TokenizedPrompts, per_step: int = 4, shuffle: bool = True) -> SupervisedSource:
    return SupervisedSource(prompts, PromptCursor(len(prompts), seed=7, shuffle=shuffle), per_step)


def rows_of(batch: RolloutBatch, stored: list[SampleShard]) -> list[tuple[list[int], list[int]]]:
    """Prompt and response tokens of each sample, found the way that workers find them."""
    pairs = []
    for sample in batch.samples:
        row = stored[batch.shards[sample.shard]].row(sample.row)
        assert row.log_probs.dtype == np.float32
        assert row.log_probs.tolist() == [0.0] * sample.response_tokens
        pairs.append((row.tokens[~row.response_mask].tolist(), row.response_ids.tolist()))
    return pairs


def test_a_batch_holds_the_cursors_rows_token_for_token(prompts: TokenizedPrompts, stored: list[SampleShard]) -> None:
    row_source, cursor = source(prompts), PromptCursor(ROWS, seed=7, shuffle=True)
    for step in range(1, 8):  # 28 rows: two ends of an epoch are within a step
        expected = []
        for index in cursor.take(4):
            row = prompts.prompts[index]
            prompt = TOKENIZER.apply_chat_template(list(row.messages), add_generation_prompt=True)["input_ids"]
            response = TOKENIZER(row.extra_info["response"], add_special_tokens=False)["input_ids"]
            expected.append((prompt, [*response, TOKENIZER.eos_token_id]))
        assert rows_of(row_source.take(step), stored) == expected


def test_each_sample_is_a_group_of_its_own_and_right(prompts: TokenizedPrompts, stored: list[SampleShard]) -> None:
    batch = source(prompts).take(1)
    assert len(batch.shards) == len(stored) == 1
    assert len(stored[0]) == 4
    for i, (sample, (prompt, response)) in enumerate(zip(batch.samples, rows_of(batch, stored), strict=True)):
        assert (sample.prompt, sample.sample, sample.shard, sample.row, sample.version) == (i, 0, 0, i, 0)
        assert (sample.prompt_tokens, sample.response_tokens) == (len(prompt), len(response))
        assert (sample.verdict.score, sample.verdict.outcome, sample.stop_reason) == (1.0, Outcome.OK, "stop")
    assert (batch.stats.generate_s, batch.stats.verify_s) == (0.0, 0.0)
    assert reward_metrics(batch.samples)["reward/mean"] == 1.0


def test_an_epoch_gives_each_row_once(prompts: TokenizedPrompts, stored: list[SampleShard]) -> None:
    row_source = source(prompts, per_step=5)
    seen = [row for step in (1, 2) for row in rows_of(row_source.take(step), stored)]
    every = [(prompts.tokens(i).tolist(), prompts.responses(i).tolist()) for i in range(ROWS)]
    assert sorted(seen) == sorted(every)
    assert seen != every


def test_a_restored_cursor_goes_on_with_the_next_rows(prompts: TokenizedPrompts, stored: list[SampleShard]) -> None:
    uninterrupted = source(prompts)
    uninterrupted.take(1)
    state = json.loads(json.dumps(uninterrupted.cursor.state()))
    expected = [rows_of(uninterrupted.take(step), stored) for step in (2, 3, 4)]
    resumed = SupervisedSource(prompts, PromptCursor(ROWS, 0, False).restored(state), 4)
    assert [rows_of(resumed.take(step), stored) for step in (2, 3, 4)] == expected


def test_the_packer_deals_every_response_to_a_rank_once(prompts: TokenizedPrompts, stored: list[SampleShard]) -> None:
    batch = source(prompts, per_step=8).take(1)
    plan = plan_batches(
        [s.prompt_tokens for s in batch.samples],
        [s.response_tokens for s in batch.samples],
        [s.prompt for s in batch.samples],
        minibatches=2,
        ranks=2,
        tokens_per_microbatch=100,
        max_response_tokens=64,
    )
    assert sum(mini.tokens for mini in plan.minibatches) == sum(s.response_tokens for s in batch.samples)
    dealt = [index for mini in plan.minibatches for rank in mini.ranks for micro in rank for index in micro]
    assert sorted(dealt) == list(range(8))


def test_prompts_tokenized_without_responses_are_no_source(prompts: TokenizedPrompts) -> None:
    plain = TokenizedPrompts.tokenize(prompts.prompts, TOKENIZER, 64)
    with pytest.raises(AssertionError, match="without responses"):
        source(plain).take(1)
