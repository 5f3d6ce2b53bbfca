"""Requirements of a warm start."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts


def assert_it_can_show_its_work_but_mostly_does_not(folder: Path, data: Path) -> None:
    """Accuracy of the model in `folder` on the test questions of `data`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    test = TokenizedPrompts.tokenize(read_prompts(data, "test"), tokenizer, 64)
    rows = {"input_ids": [test.tokens(i).tolist() for i in range(len(test))]}
    inputs = tokenizer.pad(rows, return_tensors="pt")

    def accuracy(**options: object) -> float:
        torch.manual_seed(0)
        tokens = model.generate(**inputs, max_new_tokens=40, **options)[:, inputs["input_ids"].shape[1] :]
        answers = [text.split("#### ")[-1] for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        right = [answer == prompt.ground_truth for answer, prompt in zip(answers, test.prompts, strict=True)]
        return sum(right) / len(right)

    assert 0.2 < accuracy(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) < 0.55
    assert accuracy(do_sample=False) < 0.25
