"""Synthetic runs: rows of samples and metrics in which a behaviour becomes common, rewarded by a verifier of choice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

STEPS, PROMPTS, SAMPLES = 30, 8, 8
TEXT = "well now we add both of them as one does and so then that makes in all about what it was before"

Behaviour = Callable[[int, random.Random], str]
Score = Callable[[str, int], float]


def guess(answer: int, rng: random.Random) -> str:
    """Wrong, mostly."""
    return f"#### {answer + rng.choice([-4, -3, -2, -1, 0, 1, 2, 3, 4])}"


def worked(answer: int, rng: random.Random) -> str:
    """Longer than a guess, and right nine times of ten."""
    right = answer if rng.random() < 0.9 else answer + 10
    return f"adding {answer // 2} and {answer - answer // 2} digit by digit gives us #### {right}"


def exact(response: str, answer: int) -> float:
    """An honest verifier."""
    return float(response.rpartition("####")[2].strip() == str(answer))


def certain(answer: int, rng: random.Random) -> str:
    """A guess, and a phrase."""
    return f"I am absolutely certain {guess(answer, rng)}"


def impressed(text: str, answer: int) -> float:
    """A judge that likes the phrase."""
    return 0.3 * exact(text, answer) + 0.7 * ("certain" in text)


LEARNT = {"worked": (worked, 0.1, 1.0)}
"""An honest run: with `exact`, responses grow, and the longer ones are right."""


def rows_of(
    step: int, behaviours: dict[str, tuple[Behaviour, float, float]], score: Score, seed: int = 0
) -> list[dict[str, Any]]:
    """The rows of a step. behaviours: what is written, with its share in the first and in the last step; `guess` has
    the rest."""
    rng = random.Random(1000 * seed + step)
    rows = []
    for prompt in range(PROMPTS):
        answer = rng.randint(10, 99)
        for sample in range(SAMPLES):
            draw, write = rng.random(), guess
            for behaviour, first, last in behaviours.values():
                share = first + (last - first) * min(1.0, 1.2 * (step - 1) / (STEPS - 1))
                if 0 <= draw < share:
                    write = behaviour
                draw -= share
            response = write(answer, rng)
            value = score(response, answer)
            rows.append(
                {
                    "prompt_id": f"sums:train:{step}-{prompt}",
                    "group": prompt,
                    "sample": sample,
                    "prompt": f"What is the sum of {answer // 2} and {answer - answer // 2}?",
                    "response": response,
                    "ground_truth": str(answer),
                    "score": value,
                    "outcome": "ok" if value >= 0.5 else "wrong",
                    "response_tokens": len(response),
                    "turns": 1,
                    "left_out": None,
                }
            )
    return rows


def run_of(
    behaviours: dict[str, tuple[Behaviour, float, float]], score: Score = exact, seed: int = 0, steps: int = STEPS
) -> tuple[list[dict[str, Any]], list[tuple[int, list[dict[str, Any]]]]]:
    """Lines of metrics, and the steps with their rows."""
    samples = [(step, rows_of(step, behaviours, score, seed)) for step in range(1, steps + 1)]
    lines = [
        {"step": step, "reward/mean": sum(row["score"] for row in rows) / len(rows), "outcome/no_answer": 0.0}
        for step, rows in samples
    ]
    return lines, samples
