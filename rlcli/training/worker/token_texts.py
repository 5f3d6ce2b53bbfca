"""The text of single tokens, for viewers."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""Text of a tokenizer for bytes that are not a whole character."""


class TokenTexts:
    """Texts of tokens by id, cached. model: the folder or hub id of the tokenizer, which is loaded on first use."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []

    def of(self, ids: Int32[np.ndarray, " T"]) -> list[str]:
        """The text of each token. Where a character is divided between tokens, the first one has it and the others are
        empty."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
            # Some tokenizers drop the space of a first token.
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        numbers = ids.tolist()
        for number in set(numbers) - self._known.keys():
            self._known[number] = self._after_anchor([number])
        texts = [self._known[number] for number in numbers]
        return self._completed(numbers, texts) if any(INCOMPLETE in text for text in texts) else texts

    def _completed(self, ids: list[int], texts: list[str]) -> list[str]:
        completed: list[str] = []
        for broken, run in groupby(range(len(ids)), key=lambda at: INCOMPLETE in texts[at]):
            positions = list(run)
            if broken:
                text = self._after_anchor([ids[at] for at in positions])
                completed += [text, *[""] * (len(positions) - 1)]
            else:
                completed += [texts[at] for at in positions]
        return completed

    def _after_anchor(self, ids: list[int]) -> str:
        anchor, text = self._decoded(self._anchor), self._decoded([*self._anchor, *ids])
        return text[len(anchor) :] if text.startswith(anchor) else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None, "loaded by `of`"
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
