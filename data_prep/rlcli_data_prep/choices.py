"""Choices of a question as datasets store them, in a column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcli.errors import DataError
from rlcli.support.value_text import value_text
from rlcli.types import Message
from rlcli_data_prep.columns import unpacked

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Choices:
    """The choices of one question."""

    texts: list[str]
    """Each choice, without its letter."""
    labels: list[str]
    """The source's name of each: letters, unless it numbers them."""


def read_choices(value: Any, column: str) -> Choices:
    """The choices in a column: a list of texts (`["Rome", "Paris"]`, `["A) Rome", "B) Paris"]`) or of structs (`label`,
    `text`), a struct of lists (`text`, `label`: ARC), a struct of letters (`A`, `B`: MedQA), or JSON text of these.
    Raises `DataError`."""
    items = unpacked(value)
    labels: list[Any] = []
    if isinstance(items, Mapping):
        items = {str(name): item for name, item in items.items() if item is not None}
        if isinstance(items.get("text"), list):
            items, labels = items["text"], items.get("label") or []
        else:
            labels, items = list(items), list(items.values())
    elif isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items):
        labels = [item.get("label") for item in items]
        items = [item.get("text") for item in items]
    if not isinstance(items, list) or not 2 <= len(items) <= len(LETTERS):
        raise DataError(
            f"'{column}' holds no list of 2 to {len(LETTERS)} choices: {value!r:.80}", "give a list of texts"
        )
    texts = _without_letters([_text(item, column) for item in items])
    names = [_text(label, column) for label in labels] if len(labels) == len(texts) else list(LETTERS[: len(texts)])
    return Choices(texts, names)


def letter_of(truth: str, choices: Choices) -> str:
    """The letter of the choice that the source calls `truth`; `truth` itself if it calls none so.

    >>> letter_of("2", Choices(["Rome", "Paris"], ["1", "2"]))
    'B'
    """
    return LETTERS[choices.labels.index(truth)] if choices.labels.count(truth) == 1 else truth


def with_choices(messages: tuple[Message, ...], choices: Choices) -> tuple[Message, ...]:
    """The messages with the lettered choices after the last one, unless the chat shows them already."""
    shown = "\n".join(message["content"] for message in messages)
    lettered = list(zip(LETTERS, choices.texts, strict=False))
    if all(re.search(rf"\b{letter}\b[\s).:\]*]*{re.escape(text)}", shown) for letter, text in lettered):
        return messages
    lines = "\n".join(f"{letter}. {text}" for letter, text in lettered)
    last = messages[-1]
    return (*messages[:-1], {**last, "content": f"{last['content']}\n\n{lines}"})


def _text(value: Any, column: str) -> str:
    text = value.strip() if isinstance(value, str) else value_text(value)
    if not text:
        raise DataError(f"'{column}' holds a choice without text: {value!r:.80}", "fix that row")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"'{column}' holds an unpaired surrogate: {value!a:.80}", "fix that row") from None
    return text


def _without_letters(texts: list[str]) -> list[str]:
    """The texts without their letters, if each begins with its own."""
    marks = [re.match(rf"\(?{letter}\s?[).:]\s*(?=\S)", text) for letter, text in zip(LETTERS, texts, strict=False)]
    return [text[mark.end() :] for text, mark in zip(texts, marks, strict=True) if mark] if all(marks) else texts
