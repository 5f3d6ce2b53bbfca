"""BM25: rank texts by the words that they share with a query (Robertson and Zaragoza, 2009)."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 64


class Bm25:
    """An index of texts. The score of a text is, over the words w of the query,

        Σ log(1 + (N − n_w + ½) / (n_w + ½)) · c (k₁ + 1) / (c + k₁ (1 − b + b l / l̄))

    N: texts; n_w: those with w; c: how often the text has w; l: its words, l̄ their mean.

    >>> Bm25(["the cat sat", "a dog", "the dog sat on the cat"]).best("dog sat", 2)
    [2, 1]
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.texts = len(texts)
        self.words: dict[str, int] = {}
        word_of, text_of, count_of, length_of = array("i"), array("i"), array("i"), array("i")
        for index, text in enumerate(texts):
            counts = Counter(_WORD.findall(text.casefold()))
            length_of.append(counts.total())
            word_of.extend(self.words.setdefault(word, len(self.words)) for word in counts)
            text_of.extend([index] * len(counts))
            count_of.extend(counts.values())
        word, lengths = np.asarray(word_of), np.asarray(length_of, np.float32)
        order = np.argsort(word, kind="stable")
        holding = np.bincount(word, minlength=len(self.words))
        self.starts = np.concatenate([[0], np.cumsum(holding)])
        self.text_of = np.asarray(text_of)[order]
        count = np.asarray(count_of, np.float32)[order]
        rarity = np.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5)).astype(np.float32)
        length = (lengths / max(float(lengths.mean()) if len(texts) else 0.0, 1.0))[self.text_of]
        self.weights = np.repeat(rarity, holding) * count * (k1 + 1) / (count + k1 * (1 - b + b * length))

    def best(self, query: str, count: int) -> list[int]:
        """Indices of the `count` best texts, best first, of those that share a word with the query."""
        scores: np.ndarray = np.zeros(self.texts, np.float32)
        for word in dict.fromkeys(_WORD.findall(query.casefold())[:MAX_QUERY_WORDS]):
            if word in self.words:
                start, end = self.starts[self.words[word] : self.words[word] + 2]
                scores[self.text_of[start:end]] += self.weights[start:end]
        matching = np.flatnonzero(scores)
        best = matching[np.lexsort((matching, -scores[matching]))][:count]
        return [int(index) for index in best]
