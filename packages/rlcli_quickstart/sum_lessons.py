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
    """What a chat template writes before and after an answer, once the assistant's turn is opened: in harmony the
    channel, and the token that ends the turn.

    >>> from rlcli.model.io.tiny_model import tiny_tokenizer
    >>> turn = Turn.of(tiny_tokenizer(harmony=True))
    >>> turn.before, turn.after
    ('<|channel|>final<|message|>', '<|return|>')
    """

    tokenizer: Any
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any) -> Turn:
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "="}
        opened = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([question, answer], tokenize=False)
        before, _, after = whole.removeprefix(opened).partition("=")
        return cls(tokenizer, before, after)

    def ids(self, answer: str) -> list[int]:
        text = f"{self.before}{answer}{self.after}"
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


def _solution(prompt: Prompt) -> str:
    solution = prompt.extra_info.get("response")
    if not isinstance(solution, str):
        raise DataError(f"data: {prompt.id} has no worked solution", "make the data with: rlcli prep arithmetic")
    return solution


def _demonstrations(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    tokenized = TokenizedPrompts.tokenize(prompts, tokenizer, max_prompt_tokens=tokenizer.model_max_length)
    return [
        Demonstration(tokenized.tokens(i).tolist(), turn.ids(_solution(prompt)), int(prompt.ground_truth))
        for i, prompt in enumerate(tokenized.prompts)
    ]


def _ids(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def _batches(
    demonstrations: list[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    count: int,
    done: float = 0.0,
) -> list[Batch]:
    """Sample guesses and worked answers, in separate batches, since their lengths differ by half."""
    guessed, worked = [], []
    for demonstration in rng.choices(demonstrations, k=count):
        if rng.random() < GUESSES:
            off = rng.randint(-GUESS_WITHIN, GUESS_WITHIN)
            guessed.append(_row(demonstration.prompt, _ids(tokenizer, f"#### {max(0, demonstration.answer + off)}")))
        else:
            worked.append(_row(demonstration.prompt, demonstration.worked))
    return [padded(rows, tokenizer.pad_token_id) for rows in (guessed, worked) if rows]


def _row(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
    return prompt + response, [IGNORED] * len(prompt) + response
