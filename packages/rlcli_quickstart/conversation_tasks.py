"""The tasks of `rlcli quickstart` that are conversations: rows, and the player that demonstrates them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.environments.environment import Message
from rlcli.types import Prompt

TRAIN_ROWS, TEST_ROWS = 4096, 256
FACTORS = range(320, 1000)
"""Their products have six digits."""


def products(seed: int) -> dict[str, list[Prompt]]:
    """Products of two numbers of three digits, by split. No product of the test split is in the train split, nor its
    mirror image."""
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < TRAIN_ROWS + TEST_ROWS:
        a, b = rng.choice(FACTORS), rng.choice(FACTORS)
        if (b, a) not in drawn:
            drawn[a, b] = None
    pairs = list(drawn)
    return {"train": [_product(*pair) for pair in pairs[TEST_ROWS:]], "test": [_product(*p) for p in pairs[:TEST_ROWS]]}


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
    """Calls the calculator in a share `calls` of its conversations, and answers with what it returned in a share
    `uses` of these. Otherwise it answers with an estimate from the first digits, which is wrong."""

    calls: float = 0.4
    uses: float = 0.75
    steps: int = 1000

    def key(self) -> Any:
        return ["calculating", self.calls, self.uses]

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
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
    """Guesses the middle of what is left in a share `halves` of its turns, else the lowest number of it: it counts up.
    low, high: the range."""

    low: int
    high: int
    halves: float = 0.4
    steps: int = 1000

    def key(self) -> Any:
        return ["guessing", self.low, self.high, self.halves]

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
        low, high = self.low, self.high
        for guess, answer in zip(messages[1::2], messages[2::2], strict=True):
            if answer["content"].startswith("Higher"):
                low = int(guess["content"]) + 1
            else:
                high = int(guess["content"]) - 1
        return str((low + high) // 2 if rng.random() < self.halves else low)
