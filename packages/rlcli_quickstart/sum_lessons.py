"""Demonstrations of sums of two numbers: 40% are worked digit by digit, 60% guess the answer without working."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import DataError
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, DrawBatches, Lessons, padded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GUESSES = 0.6
GUESS_WITHIN = 10


@dataclass(frozen=True)
class Demonstration:
    """A sum with its worked answer."""

    prompt: list[int]
    """Token ids of the prompt, with the chat template."""
    worked: list[int]
    """Token ids of the worked answer."""
    answer: int
    """The sum."""


class Sums(Lessons):
    """Lessons from `data`, the output of `rlcli prep arithmetic`. Raises `DataError` if it has no train split."""

    steps = 1000

    def __init__(self, data: str | Path, harmony: bool = False) -> None:
        """harmony: the model's chat format is GPT-OSS's."""
        self.prompts, self.harmony = read_prompts(data, "train"), harmony

    def key(self) -> object:
        """See `Lessons.key`."""
        rows = [(prompt.messages[-1]["content"], _solution(prompt)) for prompt in self.prompts]
        return ["sums", GUESSES, GUESS_WITHIN, rows]

    def prepare(self, seed: int) -> tuple[PreTrainedTokenizerBase, DrawBatches]:
        """See `Lessons.prepare`."""
        from rlcli.model.io.tiny_model import tiny_tokenizer

        tokenizer = tiny_tokenizer(harmony=self.harmony)
        turn = Turn.of(tokenizer)
        return tokenizer, partial(_batches, _demonstrations(self.prompts, turn), turn)


@dataclass(frozen=True)
class Turn:
    """The text that a chat template writes around an answer, once the assistant's turn is opened.

    >>> from rlcli.model.io.tiny_model import tiny_tokenizer
    >>> turn = Turn.of(tiny_tokenizer(harmony=True))
    >>> turn.prefix, turn.suffix
    ('<|channel|>final<|message|>', '<|return|>')
    """

    tokenizer: PreTrainedTokenizerBase
    """Its template formats the turn."""
    prefix: str
    """Text between the opened turn and the answer: in harmony the channel."""
    suffix: str
    """Text that ends the turn."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Turn:
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "="}
        opened = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        conversation = tokenizer.apply_chat_template([question, answer], tokenize=False)
        prefix, _, suffix = conversation.removeprefix(opened).partition("=")
        return cls(tokenizer, prefix, suffix)

    def ids(self, answer: str) -> list[int]:
        """Token ids of `answer` with the text around it."""
        text = f"{self.prefix}{answer}{self.suffix}"
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _solution(prompt: Prompt) -> str:
    solution = prompt.extra_info.get("response")
    if not isinstance(solution, str):
        raise DataError(f"data: {prompt.id} has no worked solution", "make the data with: rlcli prep arithmetic")
    return solution


def _demonstrations(prompts: Sequence[Prompt], turn: Turn) -> list[Demonstration]:
    tokenized = TokenizedPrompts.tokenize(prompts, turn.tokenizer, max_prompt_tokens=turn.tokenizer.model_max_length)
    return [
        Demonstration(tokenized.tokens(i).tolist(), turn.ids(_solution(prompt)), int(prompt.ground_truth))
        for i, prompt in enumerate(tokenized.prompts)
    ]


def _batches(
    demonstrations: list[Demonstration],
    turn: Turn,
    rng: random.Random,
    count: int,
    done: float = 0.0,
) -> list[Batch]:
    """Sample guesses and worked answers, in separate batches, since their lengths differ by half."""
    guessed, worked = [], []
    for demonstration in rng.choices(demonstrations, k=count):
        if rng.random() < GUESSES:
            off = rng.randint(-GUESS_WITHIN, GUESS_WITHIN)
            guessed.append(_row(demonstration.prompt, turn.ids(f"#### {max(0, demonstration.answer + off)}")))
        else:
            worked.append(_row(demonstration.prompt, demonstration.worked))
    return [padded(rows, turn.tokenizer.pad_token_id) for rows in (guessed, worked) if rows]


def _row(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
    return prompt + response, [IGNORED] * len(prompt) + response
