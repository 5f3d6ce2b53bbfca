"""Rows that repeat a prompt, within a dataset and between two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcli.data.prompts.overlap import repeated_rows, rows_in
from rlcli.data.prompts.tokenized_prompts import Ragged, TokenizedPrompts
from rlcli.types import Prompt


def tokenized(rows: Sequence[Sequence[int]], extra: Sequence[int] = ()) -> TokenizedPrompts:
    ragged = Ragged.of(rows)
    prompts = [
        Prompt(
            f"sums:{n}", ({"role": "user", "content": str(row)},), "sums", "", "exact", "", {"seed": seed, "index": n}
        )
        for n, (row, seed) in enumerate(zip(rows, extra or [0] * len(rows), strict=True))
    ]
    return TokenizedPrompts(prompts, 0, ragged.flat, ragged.offsets)


def test_rows_with_the_tokens_of_an_earlier_row_are_counted() -> None:
    assert repeated_rows(tokenized([[1, 2], [3], [1, 2], [1, 2], [2, 1], [1]])) == 2
    assert repeated_rows(tokenized([[1, 2], [1], [2]])) == 0


def test_rows_of_one_set_that_are_in_another_are_counted() -> None:
    train, test = tokenized([[1, 2], [3, 4], [1, 2], [5]]), tokenized([[1, 2], [5, 6]])
    assert rows_in(train, test) == 2
    assert rows_in(test, train) == 1
    assert rows_in(train, tokenized([[9]])) == 0


def test_counts_equal_those_of_plain_loops() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = ([rng.integers(0, 3, rng.integers(1, 4)).tolist() for _ in range(200)] for _ in range(2))
    assert repeated_rows(tokenized(ours)) == sum(row in ours[:n] for n, row in enumerate(ours))
    assert rows_in(tokenized(ours), tokenized(theirs)) == sum(row in theirs for row in ours)


def test_an_environments_task_in_extra_info_makes_another_row() -> None:
    train, test = tokenized([[1], [1], [1]], [1, 2, 3]), tokenized([[1], [1]], [2, 9])
    assert rows_in(train, test) == 3
    assert rows_in(train, test, conversing=True) == 1
