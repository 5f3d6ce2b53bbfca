"""Demonstrations of counting shapes in an image: some name the content of each cell, most guess."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, DrawBatches, Lessons, padded

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from rlcli.images.image_rule import ImageRule
    from rlcli_quickstart.warm_start import ModelSizes

KIND = "qwen3_vl"
GUESSES = 0.75
LOOKS = 0.75
"""Share of the steps, at the start, in which no demonstration guesses. The model learns to read images much faster."""
MARKERS = ["<think>", "</think>"]
VOCABULARY = 400
"""Upper bound. Fewer tokens are enough for all words of the task; a digit stays one token."""
TOKENIZER_ROWS = 512
"""Rows from which the tokenizer is trained."""
RESPONSE = "response"
"""Field of `extra_info` with the worked solution."""


class Shapes(Lessons):
    """Lessons from `data`, the output of `rlcli prep shapes --kinds count`. Raises `DataError` if it has no train
    split."""

    steps = 1000
    lr = 1e-3

    def __init__(self, data: str | Path) -> None:
        self.prompts: Sequence[Prompt] = list(read_prompts(data, "train"))

    def key(self) -> object:
        """See `Lessons.key`."""
        rows = [
            (prompt.id, prompt.messages[-1]["content"], prompt.extra_info, prompt.image_digests())
            for prompt in self.prompts
        ]
        return ["shapes", KIND, GUESSES, LOOKS, MARKERS, VOCABULARY, TOKENIZER_ROWS, rows]

    def prepare(self, seed: int) -> tuple[ProcessorMixin, DrawBatches]:
        """See `Lessons.prepare`."""
        from rlcli.images.decoding import decode
        from rlcli.model.io.tiny_vision import image_rule, processor, vision_config

        texts = [
            f"{prompt.messages[-1]['content']} {prompt.extra_info[RESPONSE]}"
            for prompt in self.prompts[:TOKENIZER_ROWS]
        ]
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
        images = [[rule.preprocess(decode(image)) for image in prompt.images] for prompt in rows.prompts]
        guesses = [
            [*tokenizer(f"<think></think>{answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for answer in sorted({prompt.ground_truth for prompt in self.prompts})
        ]

        def batches(rng: random.Random, count: int, done: float) -> list[Batch]:
            groups: dict[bool, list[tuple[int, list[int]]]] = {True: [], False: []}
            for i in rng.choices(range(len(rows)), k=count):
                works = done < LOOKS or rng.random() >= GUESSES
                groups[works].append((i, rows.responses(i).tolist() if works else rng.choice(guesses)))
            return [
                _batch(rule, tokenizer.pad_token_id, [(rows.tokens(i).tolist(), end, images[i]) for i, end in group])
                for group in groups.values()
                if group
            ]

        return processor(config, tokenizer), batches

    def model(self, tokenizer: ProcessorMixin, sizes: ModelSizes) -> PreTrainedModel:
        """See `Lessons.model`."""
        import torch

        from rlcli.model.io.tiny_vision import vision_model

        seed = int(torch.randint(1 << 31, ()))
        hidden, layers = sizes["hidden"], sizes["layers"]
        return vision_model(KIND, hidden=hidden, layers=layers, seed=seed, tokenizer=tokenizer.tokenizer)


def tokenizer_for(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE whose merges make one token of each word in `texts`."""
    from rlcli.model.io.tiny_vision import vision_tokenizer

    character_tokenizer = vision_tokenizer(KIND)
    tokenizer = character_tokenizer.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = character_tokenizer.chat_template
    tokenizer.add_tokens(MARKERS)  # no special tokens, which the verifier would not see
    return tokenizer


def _batch(rule: ImageRule, pad_id: int, rows: Sequence[tuple[list[int], list[int], list[np.ndarray]]]) -> Batch:
    """A padded batch with its images. rows: tokens of a prompt, tokens of its response, images."""
    import torch

    ids, labels, _ = padded([(p + end, [IGNORED] * len(p) + end) for p, end, _ in rows], pad_id)
    positions = torch.zeros(3, *ids.shape, dtype=torch.long)
    for row, (prompt, end, row_images) in enumerate(rows):
        row_positions = rule.positions(torch.tensor(prompt + end).numpy(), row_images)
        positions[:, row, : row_positions.shape[1]] = torch.from_numpy(row_positions)
    images = rule.inputs([image for *_, row_images in rows for image in row_images])
    inputs = {name: torch.from_numpy(array) for name, array in images.items()}
    return Batch(ids, labels, {"position_ids": positions, **inputs})
