"""Demonstrations of sums of two numbers: 40% are worked digit by digit, 60% guess the answer without working."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import DataError
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, Lessons, padded

GUESSES = 0.6
GUESS_WITHIN = 10


@dataclass(frozen=True)
class Demonstration:
    """prompt: token ids with the chat template. worked: token ids of the worked answer. answer: the sum."""

    prompt: list[int]
    worked: list[int]
    answer: int


class Sums(Lessons):
    """Lessons from `data`, the output of `rlcli prep arithmetic`. Raises `DataError` if it has no train split."""

    steps = 1000

    def __init__(self, data: str | Path, harmony: bool = False) -> None:
        """harmony: the model's chat format is GPT-OSS's."""
        self.prompts, self.harmony = read_prompts(data, "train"), harmony

    def key(self) -> Any:
        rows = [(prompt.messages[-1]["content"], _solution(prompt)) for prompt in self.prompts]
        return ["sums", GUESSES, GUESS_WITHIN, rows]

    def prepare(self, seed: int) -> tuple[Any, Callable[[random.Random, int, float], list[Batch]]]:
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


def _demonstrations(prompts: Sequence[Prompt], turn: Turn) -> list[Demonstration]:
    tokenized = TokenizedPrompts.tokenize(prompts, turn.tokenizer, max_prompt_tokens=turn.tokenizer.model_max_length)
    return [
        Demonstration(tokenized.tokens(i).tolist(), turn.ids(_solution(prompt)), int(prompt.ground_truth))
        for i, prompt in enumerate(tokenized.prompts)
    ]


def _batches(
    demonstrations: list[Demonstration], turn: Turn, rng: random.Random, count: int, done: float = 0.0
) -> list[Batch]:
    """Guesses and worked answers separately, as their lengths differ by half."""
    guessed, worked = [], []
    for drawn in rng.choices(demonstrations, k=count):
        if rng.random() < GUESSES:
            off = rng.randint(-GUESS_WITHIN, GUESS_WITHIN)
            guessed.append(_row(drawn.prompt, turn.ids(f"#### {max(0, drawn.answer + off)}")))
        else:
            worked.append(_row(drawn.prompt, drawn.worked))
    return [padded(rows, turn.tokenizer.pad_token_id) for rows in (guessed, worked) if rows]


def _row(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
    return prompt + response, [IGNORED] * len(prompt) + response
