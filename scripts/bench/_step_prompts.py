"""Prompts of an exact number of tokens, for any tokenizer and chat template."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

WORD = re.compile(r"[a-z]{1,12}")
WORDS, CANDIDATES = 512, 16384
"""Number of vocabulary words in the texts, and number of candidate tokens from which these are selected."""

TRIES = 200
"""Texts that are tried for one prompt. Each try fills about half of what is missing, so ten suffice as a rule."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as text and as tokens."""

    question: str
    """Content of the only message, a user's."""
    ids: tuple[int, ...]
    """The whole prompt by the model's chat template, with the answer opened."""


def make_prompts(model: str, count: int, tokens: int) -> tuple[BenchPrompt, ...]:
    """`count` prompts of exactly `tokens` tokens each by the tokenizer and chat template in the folder `model`."""
    from transformers import AutoTokenizer

    return prompts_for(AutoTokenizer.from_pretrained(model), count, tokens)


def prompts_for(tokenizer: Any, count: int, tokens: int) -> tuple[BenchPrompt, ...]:
    """Exits with one line if there are no such prompts, as for fewer tokens than the template alone has."""
    words = vocabulary(tokenizer)
    texts = [
        question(lambda text: len(prompt_ids(tokenizer, text)), words, tokens, np.random.default_rng(number))
        for number in range(count)
    ]
    return tuple(BenchPrompt(text, tuple(prompt_ids(tokenizer, text))) for text in texts)


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The message in the chat template, with the answer opened, as every contestant forwards it."""
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def vocabulary(tokenizer: Any) -> list[str]:
    """Words of small letters that the tokenizer writes, with the space before them, as at most two tokens, with the
    single letters in front."""
    size = len(tokenizer)
    token_ids = np.random.default_rng(0).choice(size, min(size, CANDIDATES), replace=False)
    texts = (tokenizer.decode([int(token)]).strip() for token in token_ids)
    words = [text for text in dict.fromkeys(texts) if len(text) > 1 and WORD.fullmatch(text)]
    short = (word for word in words if len(tokenizer.encode(f" {word}", add_special_tokens=False)) <= 2)
    return [*"abcdefghijklmnopqrstuvwxyz", *itertools.islice(short, WORDS)]


def question(measure: Callable[[str], int], words: list[str], tokens: int, chance: np.random.Generator) -> str:
    """Words, and at the end letters, for which `measure` gives exactly `tokens`.

    Text is added while it fits: half as many words as tokens are missing, at the end single letters with or without a
    space. What a tokenizer merges, or a template strips, is measured with the rest.
    """
    text, missing = "", tokens - measure("")
    for _ in range(TRIES):
        if missing == 0:
            return text
        if missing < 0:
            break
        if missing > 3:
            added = " ".join(chance.choice(words, missing // 2))
            candidate = f"{text} {added}".strip()
        else:
            candidate = text + str(chance.choice(["", " "])) + str(chance.choice(words[:26]))
        remaining = tokens - measure(candidate)
        if 0 <= remaining <= missing:
            text, missing = candidate, remaining
    raise SystemExit(
        f"no prompt of {tokens} tokens: the chat template alone has {measure('')}; take other --prompt-tokens"
    )
