"""Generated word problems of one sentence, for a small pretrained model: sums up to 32 in three forms."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import ConfigError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow

DATA_SOURCE = "rlcli/words"
TRAIN_ROWS, TEST_ROWS = 2048, 256
PROBLEMS = 8192
"""Most rows of both splits together: a small part of the distinct problems, so that drawing them ends soon."""

INSTRUCTION = "Answer with one short sentence."
PEOPLE = ("Tom", "Mia", "Ben", "Ada", "Leo", "Eva", "Max", "Ida")
THINGS = ("apples", "books", "coins", "pens", "stamps", "shells", "cards", "eggs")
FORMS = {
    "more": "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?",
    "boxes": "There are {a} {things} in one box and {b} in another. How many {things} are there in all?",
    "together": "{who} has {a} {things} and {friend} has {b}. How many {things} do they have together?",
}
"""All ask for a + b. With differences among them a model of 135M parameters learned in 24 steps to add whatever was
asked."""
FIRST, SECOND = range(2, 21), range(1, 13)
"""Values of a and b."""


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """Distinct problems; none is in both splits."""
    train_rows = TRAIN_ROWS if options.count is None else options.count
    test_rows = TEST_ROWS if options.test_count is None else options.test_count
    if train_rows < 1 or test_rows < 1 or train_rows + test_rows > PROBLEMS:
        raise ConfigError(
            f"--count = {train_rows} and --test-count = {test_rows} are not 1 or more each and at most {PROBLEMS} "
            "together",
            "change the counts",
        )
    rng = random.Random(options.seed or 0)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < train_rows + test_rows:
        row = _problem(rng)
        problems.setdefault(row["question"], row)
    rows = list(problems.values())
    return {"train": _rows(rows[test_rows:]), "test": _rows(rows[:test_rows])}


def _problem(rng: random.Random) -> dict[str, str]:
    form, a, b = rng.choice(list(FORMS)), rng.choice(FIRST), rng.choice(SECOND)
    who, friend = rng.sample(PEOPLE, 2)
    question = FORMS[form].format(who=who, friend=friend, things=rng.choice(THINGS), a=a, b=b)
    return {"form": form, "question": question, "answer": str(a + b)}


def _rows(problems: list[dict[str, str]]) -> Iterator[RawRow]:
    for number, row in enumerate(problems):
        yield RawRow(row, f"problem {number}")


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{row['question']} {INSTRUCTION}"},),
        data_source=DATA_SOURCE,
        ability="math",
        verifier="gsm8k(mode=flexible)",
        ground_truth=row["answer"],
        extra_info={"form": row["form"]},
    )


CONVERTER = Converter(
    name="words",
    summary="Word problems of one sentence, for a small pretrained model",
    source="generated",
    verifier="gsm8k(mode=flexible)",
    read=read,
    prompt=prompt,
    options={
        "seed": "seed of the draw (0)",
        "count": f"rows of the train split ({TRAIN_ROWS})",
        "test_count": f"rows of the test split, held out ({TEST_ROWS})",
    },
)
