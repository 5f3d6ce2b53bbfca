"""Generated sums of two numbers: for experiments, tests and the quickstart's tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import ConfigError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow

DATA_SOURCE = "rlcli/arithmetic"
TRAIN_ROWS, TEST_ROWS = 4096, 512


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """Distinct sums of two numbers of up to `difficulty` digits; no sum of the test split, nor its mirror image
    (34+12 for 12+34), is in the train split. If few sums exist, the default counts are lower."""
    digits = 2 if options.difficulty is None else options.difficulty
    if not 1 <= digits <= 4:
        raise ConfigError(f"--difficulty = {digits} is not a number of digits from 1 to 4", "give 1, 2, 3 or 4")
    pairs = 10 ** (2 * digits)
    test_rows = min(TEST_ROWS, pairs // 5) if options.test_count is None else options.test_count
    train_rows = min(TRAIN_ROWS, pairs - 2 * test_rows) if options.count is None else options.count
    if (options.count is not None and options.count < 1) or test_rows < 1:
        raise ConfigError(f"--count = {train_rows}, --test-count = {test_rows}: too few", "give 1 or more of each")
    if train_rows < 1 or train_rows + 2 * test_rows > pairs:
        raise ConfigError(
            f"--count = {max(1, train_rows)} and --test-count = {test_rows} (held out with its mirror images) are more "
            f"than the {pairs} sums of {digits} digits",
            "lower the counts or raise --difficulty",
        )
    train, test = _draw(random.Random(options.seed or 0), 10**digits, train_rows, test_rows)
    return {split: _rows(sums, digits) for split, sums in (("train", train), ("test", test))}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    a, b = row["a"], row["b"]
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{a}+{b}="},),
        data_source=DATA_SOURCE,
        ability="math",
        verifier="gsm8k",
        ground_truth=str(a + b),
        extra_info={"response": working(a, b, row["digits"])},
    )


def working(a: int, b: int, digits: int) -> str:
    """The sum worked digit by digit from the right, each step `x+y+carry=sum`, then the answer.

    >>> working(58, 67, digits=2)
    '8+7+0=15,5+6+1=12#### 125'
    """
    steps, carry = [], 0
    for exponent in range(digits):
        x, y = a // 10**exponent % 10, b // 10**exponent % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry}")
        carry = (x + y + carry) // 10
    return f"{','.join(steps)}#### {a + b}"


def _draw(
    rng: random.Random, size: int, train_rows: int, test_rows: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    # At most `test_rows` of the sums drawn after the test split are its mirror images, so enough remain for train.
    pairs = [divmod(pair, size) for pair in rng.sample(range(size * size), train_rows + 2 * test_rows)]
    test, rest = pairs[:test_rows], pairs[test_rows:]
    mirrored = {(b, a) for a, b in test}
    return [pair for pair in rest if pair not in mirrored][:train_rows], test


def _rows(sums: list[tuple[int, int]], digits: int) -> Iterator[RawRow]:
    for number, (a, b) in enumerate(sums):
        yield RawRow({"a": a, "b": b, "digits": digits}, f"sum {number}")


CONVERTER = Converter(
    name="arithmetic",
    summary="Sums of two numbers, with their working",
    source="generated",
    verifier="gsm8k",
    read=read,
    prompt=prompt,
    options={
        "difficulty": "digits of the numbers, 1 to 4 (2)",
        "seed": "seed of the draw (0)",
        "count": f"rows of the train split ({TRAIN_ROWS})",
        "test_count": f"rows of the test split, held out ({TEST_ROWS})",
    },
)
