"""Guess a whole number within a few questions."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from rlcli_verifiers.answers import last_line, last_tag

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


class GuessNumber:
    """Guess a whole number; each wrong guess is answered with higher or lower.

    The reward is 1.0 for the number within the questions. A turn is one guess: the only number in its last <answer>,
    else in its last line. A turn with several numbers there, or none, uses up a question. It needs no data: the row's
    seed chooses the number.
    low, high: the range, both included. questions: how many guesses; 0: as many as halving the range needs.
    """

    def __init__(self, low: int = 1, high: int = 100, questions: int = 0) -> None:
        if high < low or questions < 0:
            raise ValueError(f"low = {low}, high = {high}, questions = {questions}: there is nothing to guess")
        self.low, self.high = low, high
        self.left = questions or (high - low + 1).bit_length()
        self.asked = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.number = random.Random(seed).randint(self.low, self.high)
        text = (
            f"I have chosen a whole number from {self.low} to {self.high}. You have {self.left} guesses; after each I "
            "say whether my number is higher or lower. End each turn with a line that holds one number, your guess."
        )
        return [{"role": "user", "content": text}]

    def step(self, message: Mapping[str, Any]) -> Any:
        self.asked, self.left = self.asked + 1, self.left - 1
        guess = guess_of(message["content"])
        info = {"questions": self.asked}
        if guess == self.number:
            return [], 1.0, True, info
        if not self.left:
            return [], 0.0, True, info
        answer = "That is not one whole number."
        if guess is not None:
            answer = "Higher." if guess < self.number else "Lower."
        return [{"role": "user", "content": f"{answer} Guesses left: {self.left}."}], 0.0, False, info


def guess_of(text: str) -> int | None:
    """The only number in the last <answer> of a turn, else in its last line.

    >>> guess_of("Between 50 and 100:\\n75."), guess_of("75 or 76"), guess_of("7.5"), guess_of("")
    (75, None, None, None)
    """
    numbers = _NUMBER.findall(last_tag(text) or last_line(text) or "")
    return int(numbers[0]) if len(numbers) == 1 and _WHOLE.fullmatch(numbers[0]) else None
