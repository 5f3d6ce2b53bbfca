"""Where a response of a real model ends: at the token by which its chat template closes a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SMALL, Cli

from tests.chat_templates import CHATML, tokenizer_with

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

SAYS = "4<|im_end|>\n<|im_start|>user\n9+9=<|im_end|>\n<|im_start|>assistant\n18<|im_end|>\n"


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers every question with 4, closes its turn, and continues with a turn that it invents. It never
    generates the end-of-sequence token of its tokenizer, which is another one."""
    import torch
    from transformers import Qwen2ForCausalLM

    from rlcli.model.io.tiny_model import tiny_config

    folder = tmp_path_factory.mktemp("base") / "model"
    tokenizer = tokenizer_with(CHATML)
    config = tiny_config(hidden=64, layers=2, heads=2, kv_heads=1)
    config.vocab_size = len(tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is no faster with more
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in ("2+2=", "1+3=", "3+1=")
    ]
    ids = torch.tensor([tokenizer(prompt + SAYS, add_special_tokens=False)["input_ids"] for prompt in prompts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(80):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.data.prompts.parquet_schema import row, write_rows

    folder = tmp_path_factory.mktemp("fours")
    conversations = [[{"role": "user", "content": question}] for question in ("2+2=", "1+3=", "3+1=")]
    rows = [
        row(data_source="fours", messages=messages, verifier="exact", ground_truth="4") for messages in conversations
    ]
    for split in ("train", "test"):
        write_rows(folder / f"{split}.parquet", rows)
    return folder


@pytest.mark.exhaustive  # what ends a response is in the plan, which the next test reads
def test_a_right_answer_is_not_followed_by_an_invented_turn(cli: Cli, base_model: Path, data: Path) -> None:
    report = json.loads(cli("eval", "--model", base_model, "--data", data, "--max-tokens", "64", "--json").stdout)
    assert report["pass"]["pass@1"]["mean"] == 1.0
    assert report["response_tokens"]["max"] == 2  # the answer, and what closes the turn
    assert report["truncated"] == 0.0


def test_the_plan_says_what_ends_a_response(cli: Cli, base_model: Path, data: Path) -> None:
    ending_settings = ("--set", "rollout.stop_token_ids=5", "--set", "train.truncated=mask")
    done = cli("train", "grpo", "--model", base_model, "--data", data, *SMALL, *ending_settings, "--dry-run", "--json")
    plan = json.loads(done.stdout)["plan"]
    assert plan["a response ends at"] == "1 '<eos>', 5 '<|assistant|>', 263 '<|im_end|>'"
    assert plan["cut-off responses"].startswith("left out of the loss")
