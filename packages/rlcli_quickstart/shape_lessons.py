"""Demonstrations of counting shapes in a picture: some name what each cell holds, most answer without looking."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, Lessons, padded

KIND = "qwen3_vl"
GUESSES = 0.75
LOOKS = 0.75
"""The share of the steps, the first ones, in which all look. A model learns to see much faster so."""
MARKERS = ["<think>", "</think>"]
VOCABULARY = 400
"""Upper bound. Fewer tokens are enough for all words of the task; a digit stays one token."""
READ = 512
"""Rows whose words become tokens."""
RESPONSE = "response"
"""The field of `extra_info` with the solution that looks."""


class Shapes(Lessons):
    """Lessons from `data`, the output of `rlcli prep shapes --kinds count`. Raises `DataError` if it has no train
    split."""

    steps = 1000
    lr = 1e-3

    def __init__(self, data: str | Path) -> None:
        self.prompts: Sequence[Prompt] = list(read_prompts(data, "train"))

    def key(self) -> Any:
        rows = [
            (prompt.id, prompt.messages[-1]["content"], prompt.extra_info, prompt.image_digests())
            for prompt in self.prompts
        ]
        return ["shapes", KIND, GUESSES, LOOKS, MARKERS, VOCABULARY, READ, rows]

    def prepare(self, seed: int) -> tuple[Any, Callable[[random.Random, int, float], list[Batch]]]:
        from rlcli.images.decoding import decode
        from rlcli.model.io.tiny_vision import image_rule, processor, vision_config

        texts = [f"{one.messages[-1]['content']} {one.extra_info[RESPONSE]}" for one in self.prompts[:READ]]
        tokenizer = tokenizer_for(texts)
        config = vision_config(KIND, tokenizer=tokenizer)
        rule = image_rule(config, tokenizer)
        rows = TokenizedPrompts.tokenize(
            self.prompts,
            tokenizer,
            max_prompt_tokens=tokenizer.model_max_length,
            response=RESPONSE,
            max_response_tokens=tokenizer.model_max_length,
            rule=rule,
        )
        seen = [[rule.prepared(decode(image)) for image in prompt.images] for prompt in rows.prompts]
        guesses = [
            [*tokenizer(f"<think></think>{answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for answer in sorted({prompt.ground_truth for prompt in self.prompts})
        ]

        def batches(rng: random.Random, count: int, done: float) -> list[Batch]:
            groups: dict[bool, list[tuple[int, list[int]]]] = {True: [], False: []}
            for i in rng.choices(range(len(rows)), k=count):
                looks = done < LOOKS or rng.random() >= GUESSES
                groups[looks].append((i, rows.responses(i).tolist() if looks else rng.choice(guesses)))
            return [
                _batch(rule, tokenizer.pad_token_id, [(rows.tokens(i).tolist(), end, seen[i]) for i, end in group])
                for group in groups.values()
                if group
            ]

        return processor(config, tokenizer), batches

    def model(self, tokenizer: Any, sizes: Mapping[str, int]) -> Any:
        import torch

        from rlcli.model.io.tiny_vision import vision_model

        seed = int(torch.randint(1 << 31, ()))
        size = {"hidden": sizes["hidden"], "layers": sizes["layers"]}
        return vision_model(KIND, **size, seed=seed, tokenizer=tokenizer.tokenizer)


def tokenizer_for(texts: Sequence[str]) -> Any:
    """A byte-level BPE whose merges make one token of each word in `texts`."""
    from rlcli.model.io.tiny_vision import vision_tokenizer

    letters = vision_tokenizer(KIND)
    tokenizer = letters.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = letters.chat_template
    tokenizer.add_tokens(MARKERS)  # no special tokens, which the verifier would not see
    return tokenizer


def _batch(rule: Any, pad_id: int, rows: Sequence[tuple[list[int], list[int], list[Any]]]) -> Batch:
    """rows: the tokens of a prompt and of its response, and the pictures."""
    import torch

    ids, labels, _ = padded([(p + end, [IGNORED] * len(p) + end) for p, end, _ in rows], pad_id)
    places = torch.zeros(3, *ids.shape, dtype=torch.long)
    for row, (prompt, end, pictures) in enumerate(rows):
        own = rule.positions(torch.tensor(prompt + end).numpy(), pictures)
        places[:, row, : own.shape[1]] = torch.from_numpy(own)
    shown = rule.inputs([picture for *_, pictures in rows for picture in pictures])
    return Batch(ids, labels, {"position_ids": places, **{name: torch.from_numpy(one) for name, one in shown.items()}})
