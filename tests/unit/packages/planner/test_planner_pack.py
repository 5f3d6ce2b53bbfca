"""The largest micro-batch that the planner counts on, against what the packer makes of a step."""

from __future__ import annotations

import random

import pytest
from rlcli_planner.plan_input import RunPlanInput

from rlcli.data.packer import WORTH_SHARING, Plan, plan_batches
from tests.planner_settings import qwen_7b, setting


def step(prompt: int, responses: list[int], run: RunPlanInput) -> tuple[Plan, list[int]]:
    """The packer's plan of these responses, and by sample its prompt."""
    rollout, train = run.config.rollout, run.config.train
    prompts = [sample // rollout.samples_per_prompt for sample in range(len(responses))]
    plan = plan_batches(
        [prompt] * len(responses),
        responses,
        prompts,
        minibatches=train.minibatches,
        ranks=run.ranks,
        tokens_per_microbatch=train.tokens_per_microbatch,
        max_response_tokens=rollout.max_response_tokens,
        prompts=prompts,
    )
    return plan, prompts


def largest(prompt: int, responses: list[int], run: RunPlanInput) -> tuple[int, int, int]:
    """Most tokens, places in attention and response tokens of all micro-batches."""
    plan, prompts = step(prompt, responses, run)
    tokens, attention_tokens, answers = [], [], []
    for bin in (bin for minibatch in plan.minibatches for rank in minibatch.ranks for bin in rank):
        sharing = {prompts[sample] for sample in bin if prompt >= WORTH_SHARING * (prompt + responses[sample])}
        alone = sum(prompt < WORTH_SHARING * (prompt + responses[sample]) for sample in bin)
        answers.append(sum(responses[sample] for sample in bin))
        tokens.append((len(sharing) + alone) * prompt + answers[-1])
        attention_tokens.append(len(bin) * prompt + answers[-1])
    return max(tokens), max(attention_tokens), max(answers)


def keys(prompt: int, response: int, prompts: int, samples: int, budget: int) -> list[str]:
    return [
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_response_tokens={response}",
        f"rollout.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={samples}",
        f"train.tokens_per_microbatch={budget}",
    ]


@pytest.mark.parametrize("prompt", [12, 100, 1000])
@pytest.mark.parametrize("response", [64, 104, 512, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_micro_batch_exceeds_the_predicted_one(
    prompt: int,
    response: int,
    ranks: int,
) -> None:
    tried = 0
    for prompts in (4, 32):
        for samples in (4, 8, 16):
            for budget in (1720, 8192, 16384):
                if prompt + response > budget:
                    continue
                run = setting(qwen_7b(), f"cpu:{ranks}", *keys(prompt, response, prompts, samples, budget))
                responses = [response] * (prompts * samples)
                largest_pack = largest(prompt, responses, run)
                counted = (run.pack.tokens, run.pack.attention_tokens, run.pack.responses)
                assert all(mine >= its - 1e-6 for mine, its in zip(counted, largest_pack, strict=True)), (
                    counted,
                    largest_pack,
                )
                if ranks == 1 and step(prompt, responses, run)[0].microbatches == 1:
                    assert counted == pytest.approx(largest_pack)
                tried += 1
    assert tried


def test_shorter_responses_make_no_larger_micro_batch_and_fill_it() -> None:
    run = setting(qwen_7b(), "cpu", *keys(12, 512, 16, 8, 4096))
    rng = random.Random(0)
    largest_tokens = []
    for _ in range(20):
        largest_tokens.append(largest(12, [rng.randint(1, 512) for _ in range(128)], run)[0])
    assert max(largest_tokens) <= run.pack.tokens
    assert max(largest_tokens) > 0.95 * run.pack.tokens


def test_samples_of_one_prompt_lie_together() -> None:
    """Of prompts that are much longer than their responses many more fit than tokens would say."""
    run = setting(qwen_7b(), "cpu", *keys(1000, 64, 32, 16, 8192))
    assert run.pack.tokens == pytest.approx(8192)
    assert run.pack.attention_tokens > 8 * run.pack.tokens
