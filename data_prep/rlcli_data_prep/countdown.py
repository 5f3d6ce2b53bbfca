"""Generated Countdown problems: reach a target with given numbers and + - * /; each has a solution."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from rlcli.errors import ConfigError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow

DATA_SOURCE = "rlcli/countdown"
TRAIN_ROWS, TEST_ROWS = 4096, 512
LARGEST_NUMBER, LARGEST_TARGET = 99, 999
LARGEST_STEP = 9999
"""Largest result of a solution step, so that it can be computed mentally."""

# After this many draws in a row without a new problem, hardly any new ones are left.
_MAX_FAILED_DRAWS = 2000


def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
    """Distinct problems. No train problem has the numbers of a test problem, in any order."""
    size = 4 if options.difficulty is None else options.difficulty
    if not 3 <= size <= 6:
        raise ConfigError(f"--difficulty = {size} is not a count of numbers from 3 to 6", "give 3, 4, 5 or 6")
    train_rows = TRAIN_ROWS if options.count is None else options.count
    test_rows = TEST_ROWS if options.test_count is None else options.test_count
    if train_rows < 1 or test_rows < 1:
        raise ConfigError(f"--count = {train_rows}, --test-count = {test_rows}: too few", "give 1 or more of each")
    rng = random.Random(options.seed or 0)
    held_out: set[tuple[int, ...]] = set()
    test = _draw(rng, size, test_rows, held_out)
    held_out = {tuple(sorted(row["numbers"])) for row in test}
    train = _draw(rng, size, train_rows, held_out)
    splits = {"train": train, "test": test}
    return {split: [RawRow(row, f"{split}, row {i}") for i, row in enumerate(rows)] for split, rows in splits.items()}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    numbers, target = row["numbers"], row["target"]
    content = (
        f"Using each of the numbers {', '.join(map(str, numbers))} exactly once, write an expression that equals "
        f"{target}. You may use +, -, *, / and parentheses. Think first, inside <think> and </think>; then give the "
        "expression alone inside <answer> and </answer>, like this: <answer>(1 + 2) / 3</answer>"
    )
    return Prompt(
        id="",
        messages=({"role": "user", "content": content},),
        data_source=DATA_SOURCE,
        ability="math",
        verifier="countdown",
        ground_truth=json.dumps({"numbers": numbers, "target": target}),
        extra_info={
            "answer_format": "tag",
            "response": f"<think>{', '.join(row['steps'])}</think>\n<answer>{row['expression']}</answer>",
        },
    )


def _draw(rng: random.Random, size: int, rows: int, held_out: set[tuple[int, ...]]) -> list[dict[str, Any]]:
    """`rows` problems, no two with the same numbers and target, none with held-out numbers."""
    problems: dict[tuple[tuple[int, ...], int], dict[str, Any]] = {}
    failed_draws = 0
    while len(problems) < rows:
        problem = _problem(rng, size)
        numbers, target = tuple(sorted(problem["numbers"])), problem["target"]
        failed_draws += 1
        new = (numbers, target) not in problems and numbers not in held_out
        if new and target <= LARGEST_TARGET and target not in numbers:
            problems[numbers, target] = problem
            failed_draws = 0
        if failed_draws == _MAX_FAILED_DRAWS:
            raise ConfigError(f"{rows} rows of {size} numbers are more than can be found", "lower --count")
    return list(problems.values())


def _problem(rng: random.Random, size: int) -> dict[str, Any]:
    """Numbers, combined in random pairs until one is left: the target, with the expression and its steps."""
    numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(size)]
    terms, steps = [(number, str(number)) for number in numbers], []
    while len(terms) > 1:
        (x, x_text), (y, y_text) = sorted(rng.sample(terms, 2), reverse=True)
        terms.remove((x, x_text))
        terms.remove((y, y_text))
        value, sign = rng.choice(_results(x, y))
        steps.append(f"{x} {sign} {y} = {value}")
        terms.append((value, f"({x_text} {sign} {y_text})"))
    return {"numbers": numbers, "target": terms[0][0], "expression": terms[0][1][1:-1], "steps": steps}


def _results(x: int, y: int) -> list[tuple[int, str]]:
    """The results of x and y, for whole x >= y > 0: none below 1, above the largest step, or trivial (x * 1)."""
    results = [(x + y, "+")]
    if x > y:
        results.append((x - y, "-"))
    if y > 1 and x * y <= LARGEST_STEP:
        results.append((x * y, "*"))
    if y > 1 and x % y == 0:
        results.append((x // y, "/"))
    return results


CONVERTER = Converter(
    name="countdown",
    summary="Countdown: a target from given numbers and + - * /, generated, solvable",
    source="generated",
    verifier="countdown",
    read=read,
    prompt=prompt,
    options={
        "difficulty": "how many numbers, 3 to 6 (4)",
        "seed": "seed of the draw (0)",
        "count": f"rows of the train split ({TRAIN_ROWS})",
        "test_count": f"rows of the test split, with separate numbers ({TEST_ROWS})",
    },
    reference="after the game of the television show; Gandhi et al., 2024, arXiv:2404.03683",
)
