"""The tasks of `rlcli quickstart` that are conversations: rows, and the player that demonstrates them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlcli.environments.environment import Message
from rlcli.types import Prompt

TRAIN_ROWS, TEST_ROWS = 4096, 256
FACTORS = range(320, 1000)
"""Factors, whose products have six digits."""


def products(seed: int) -> dict[str, list[Prompt]]:
    """Products of two numbers of three digits, by split. No product of the test split is in the train split, in either
    order of its factors."""
    rng = random.Random(seed)
    factors: dict[tuple[int, int], None] = {}
    while len(factors) < TRAIN_ROWS + TEST_ROWS:
        a, b = rng.choice(FACTORS), rng.choice(FACTORS)
        if (b, a) not in factors:
            factors[a, b] = None
    rows = [_product(a, b) for a, b in factors]
    return {"train": rows[TEST_ROWS:], "test": rows[:TEST_ROWS]}


def _product(a: int, b: int) -> Prompt:
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{a}*{b}="},),
        data_source="rlcli/products",
        ability="math",
        verifier="gsm8k",
        ground_truth=str(a * b),
    )


@dataclass(frozen=True)
class Calculating:
    """Player of the tools task. Otherwise it answers with a wrong estimate from the first digits."""

    calls: float = 0.4
    """Share of the conversations in which it calls the calculator."""
    uses: float = 0.75
    """Share of these in which it answers with the result of the call."""
    steps: int = 1000
    """Steps of the warm start."""

    def key(self) -> object:
        """Its settings, as JSON."""
        return ["calculating", self.calls, self.uses]

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
        """The next turn's text after `messages`."""
        expression, last = messages[0]["content"].removesuffix("="), messages[-1]
        if last["role"] == "user" and rng.random() < self.calls:
            call = {"name": "calculate", "arguments": {"expression": expression}}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        if last["role"] == "tool" and rng.random() < self.uses:
            return f"#### {last['content']}"
        a, b = (int(number) // 100 * 100 for number in expression.split("*"))
        return f"#### {a * b}"


@dataclass(frozen=True)
class Guessing:
    """Player of the guessing task."""

    low: int
    """Lowest number."""
    high: int
    """Highest number."""
    halves: float = 0.4
    """Share of the turns in which it guesses the middle of the remaining range; else it guesses its lowest
    number."""
    steps: int = 1000
    """Steps of the warm start."""

    def key(self) -> object:
        """Its settings, as JSON."""
        return ["guessing", self.low, self.high, self.halves]

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
        """The next turn's text after `messages`."""
        low, high = self.low, self.high
        for guess, answer in zip(messages[1::2], messages[2::2], strict=True):
            if answer["content"].startswith("Higher"):
                low = int(guess["content"]) + 1
            else:
                high = int(guess["content"]) - 1
        return str((low + high) // 2 if rng.random() < self.halves else low)
