"""Which prompts are those of an evaluation set, or near to one.

A prompt is taken as lower-case words and signs, without what all prompts of its file begin or end with (an
instruction). It is one of an evaluation set's where it holds at least a given share of the n-grams of one of its
prompts: n words in a row, signs left out, without those that more than ten of its prompts have, which are a form and
not a question. Prompts are compared whole too, signs included, which is all that those of fewer than n words can be.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlcli.types import Prompt

NGRAM, SHARE = 13, 0.5
"""What holds where nothing else is asked for. Of GSM8K, whose splits are apart, it takes 2 of the 7473 train rows."""
MOST_PROMPTS = 10
_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The words and signs of a prompt. own: without what all prompts of its file have in common."""

    all: tuple[str, ...]
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """index: of the evaluation prompt. share: of its n-grams that the other prompt holds; 1.0 where they are equal."""

    index: int
    share: float


class EvaluationSet:
    """The prompts of one evaluation set, to look others up in.

    >>> asked = EvaluationSet(["What is 2 + 2?", "What is 3 + 4?"], n=13)
    >>> asked.match(tokens_of(["Add: 3 + 4.", "Add: 5 - 1."])[0])
    Match(index=1, share=1.0)
    """

    def __init__(self, texts: Sequence[str], n: int) -> None:
        assert n >= 1, n
        self._n = n
        self._whole: dict[tuple[str, ...], int] = {}
        found: dict[str, list[int]] = defaultdict(list)
        for index, tokens in enumerate(tokens_of(texts)):
            for gram in set(_grams(tokens.own, n)):
                found[gram].append(index)
            for whole in (tokens.all, tokens.own or tokens.all):  # nothing of its own: no two such are equal
                self._whole.setdefault(whole, index)
        self._holders = {gram: holders for gram, holders in found.items() if len(holders) <= MOST_PROMPTS}
        self._sizes = Counter(index for holders in self._holders.values() for index in holders)

    def match(self, tokens: Tokens) -> Match | None:
        """The evaluation prompt that the prompt of `tokens` holds most of; None where it holds nothing of any."""
        for whole in (tokens.all, tokens.own):
            if whole in self._whole:
                return Match(self._whole[whole], 1.0)
        grams = {gram for gram in _grams(tokens.own, self._n) if gram in self._holders}
        shared = Counter(index for gram in grams for index in self._holders[gram])
        if not shared:
            return None
        index = max(shared, key=lambda one: (shared[one] / self._sizes[one], -one))
        return Match(index, shared[index] / self._sizes[index])


def question(prompt: Prompt) -> str:
    """What is asked: all messages but the system's."""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")


def normalised(text: str) -> str:
    """`text` as two prompts that a reader would call the same have it: form of letters, case and spaces set aside.

    >>> normalised("  What is  ２+2?\\n") == normalised("what is 2+2?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens_of(texts: Iterable[str]) -> list[Tokens]:
    """The words and signs of the texts of one file.

    >>> [tokens.own for tokens in tokens_of(["What is 2+2? Think.", "What is 3+4? Think."])]
    [('2', '+', '2'), ('3', '+', '4')]
    """
    every = [tuple(_TOKEN.findall(normalised(text))) for text in texts]
    if len(distinct := set(every)) < 2:
        return [Tokens(one, one) for one in every]
    # What the least and the greatest have in common at their beginning, all have.
    start = _common(distinct)
    end = _common({one[start:][::-1] for one in distinct})
    return [Tokens(one, one[start : len(one) - end]) for one in every]


def _common(distinct: set[tuple[str, ...]]) -> int:
    least, greatest = min(distinct), max(distinct)
    pairs = zip(least, greatest, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(least), len(greatest)))


def _grams(tokens: Sequence[str], n: int) -> Iterator[str]:
    words = [token for token in tokens if token[0].isalnum()]
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
