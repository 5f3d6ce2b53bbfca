"""A verifier and a dataset by somebody who has read the documentation and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.types import Converter, ConvertOptions, Outcome, Prompt, RawRow, Verdict, VerifyRequest

ROW_OPTIONS = ("ignore_case",)
CAPITAL_OF = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}


def verify(request: VerifyRequest, *, ignore_case: bool = False) -> Verdict:
    """The last word of the response is the ground truth."""
    words = request.completion.split()
    if not words:
        return Verdict(score=0.0, outcome=Outcome.NO_ANSWER)
    answer, truth = words[-1].rstrip("."), request.ground_truth
    right = answer.lower() == truth.lower() if ignore_case else answer == truth
    return Verdict(score=float(right), outcome=Outcome.OK if right else Outcome.WRONG, answer=answer)


def gold(request: VerifyRequest) -> str:
    """A right response, for the audit."""
    return f"It must be {request.ground_truth}."


def read(options: ConvertOptions) -> Mapping[str, list[RawRow]]:
    rows = [
        RawRow({"country": country, "capital": capital}, f"row {number}")
        for number, (country, capital) in enumerate(CAPITAL_OF.items())
    ]
    return {"train": rows[:3], "test": rows[3:]}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"What is the capital of {row['country']}? End with its name."},),
        data_source="capitals",
        ability="geography",
        verifier="last-word",
        ground_truth=row["capital"],
    )


CAPITALS = Converter("capitals", "Capitals of the world", "generated", "last-word", read, prompt)
