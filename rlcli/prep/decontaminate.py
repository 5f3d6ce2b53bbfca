"""Finds prompts that are in an evaluation set, or close to one of its prompts.

A prompt is compared as lower-case words and signs, without the beginning and end that its whole file shares (an
instruction). It matches an evaluation set if it holds at least a given share of the n-grams of one of its prompts. An
n-gram is n words in a row without signs; n-grams in more than ten of the set's prompts are ignored, since they are a
form, not a question. Prompts are also compared whole, with signs: the only way to match those of fewer than n words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlcli.types import IMAGE, Prompt

NGRAM, SHARE = 13, 0.5
"""Defaults. On GSM8K, whose splits are disjoint, they remove 2 of the 7473 train rows."""
MOST_PROMPTS = 10
_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The words and signs of a prompt."""

    all: tuple[str, ...]
    distinct: tuple[str, ...]
    """Without the parts that all prompts of its file share."""


@dataclass(frozen=True, slots=True)
class Match:
    """A prompt of an evaluation set that another prompt is close to."""

    index: int
    """Row in the evaluation set."""
    share: float
    """Share of its n-grams that the other prompt contains; 1.0 if they are equal."""


class EvaluationSet:
    """An index of the prompts of one evaluation set.

    >>> evaluation_set = EvaluationSet(["What is 2 + 2?", "What is 3 + 4?"], n=13)
    >>> evaluation_set.match(tokens_of(["Add: 3 + 4.", "Add: 5 - 1."])[0])
    Match(index=1, share=1.0)
    """

    def __init__(self, texts: Sequence[str], n: int) -> None:
        assert n >= 1, n
        self._n = n
        self._whole: dict[tuple[str, ...], int] = {}
        holders_of: dict[str, list[int]] = defaultdict(list)
        for index, tokens in enumerate(tokens_of(texts)):
            for gram in set(_grams(tokens.distinct, n)):
                holders_of[gram].append(index)
            # `distinct` may be empty: such prompts are compared whole.
            for tokens_key in (tokens.all, tokens.distinct or tokens.all):
                self._whole.setdefault(tokens_key, index)
        self._holders = {gram: holders for gram, holders in holders_of.items() if len(holders) <= MOST_PROMPTS}
        self._sizes = Counter(index for holders in self._holders.values() for index in holders)

    def match(self, tokens: Tokens) -> Match | None:
        """The evaluation prompt with the largest share of n-grams in `tokens`; None if there is no overlap."""
        for tokens_key in (tokens.all, tokens.distinct):
            if tokens_key in self._whole:
                return Match(self._whole[tokens_key], 1.0)
        grams = {gram for gram in _grams(tokens.distinct, self._n) if gram in self._holders}
        shared = Counter(index for gram in grams for index in self._holders[gram])
        if not shared:
            return None
        index = max(shared, key=lambda candidate: (shared[candidate] / self._sizes[candidate], -candidate))
        return Match(index, shared[index] / self._sizes[index])


def question(prompt: Prompt) -> str:
    """The question: all messages except the system's. A digest stands for each image: the same text about another image
    is another question."""
    text = "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")
    for digest in prompt.image_digests():
        text = text.replace(IMAGE, f" {digest} ", 1)
    return text


def normalised(text: str) -> str:
    """`text` normalised for comparison: Unicode form, case and spaces are ignored.

    >>> normalised("  What is  ２+2?\\n") == normalised("what is 2+2?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens_of(texts: Iterable[str]) -> list[Tokens]:
    """The words and signs of the texts of one file.

    >>> [tokens.distinct for tokens in tokens_of(["What is 2+2? Think.", "What is 3+4? Think."])]
    [('2', '+', '2'), ('3', '+', '4')]
    """
    token_lists = [tuple(_TOKEN.findall(normalised(text))) for text in texts]
    if len(distinct := set(token_lists)) < 2:
        return [Tokens(tokens, tokens) for tokens in token_lists]
    # A prefix that the smallest and the largest share is shared by all.
    start = _common(distinct)
    end = _common({tokens[start:][::-1] for tokens in distinct})
    return [Tokens(tokens, tokens[start : len(tokens) - end]) for tokens in token_lists]


def _common(distinct: set[tuple[str, ...]]) -> int:
    least, greatest = min(distinct), max(distinct)
    pairs = zip(least, greatest, strict=False)
    return next(
        (index for index, (first, second) in enumerate(pairs) if first != second), min(len(least), len(greatest))
    )


def _grams(tokens: Sequence[str], n: int) -> Iterator[str]:
    words = [token for token in tokens if token[0].isalnum()]
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
