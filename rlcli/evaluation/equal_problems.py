"""Merges rows of an evaluation that pose the same problem: their responses are samples of one prompt.

Published evaluation files repeat a problem, such as the 30 of a contest 32 times each. Responses to equal prompts are
samples of one distribution: counted as separate prompts, they would make intervals too narrow and differences too
significant. In training data a repeated row is a weight, and each copy is a separate group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.errors import DataError
from rlcli.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int64


@dataclass(frozen=True, eq=False)
class Problems:
    """The distinct problems of some rows, numbered from 0 in the order of their first rows.

    >>> problems = Problems.of(["a", "b", "a"])
    >>> problems.of_row.tolist(), problems.first_rows
    ([0, 1, 0], [0, 1])
    """

    of_row: Int64[np.ndarray, " rows"]
    """The problem of each row."""
    first_rows: list[int]
    """The first row of each problem."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> Problems:
        """problems: a text for each row, equal for rows that pose the same problem."""
        import numpy as np

        numbers: dict[str, int] = {}
        first_rows: list[int] = []
        for row, problem in enumerate(problems):
            if problem not in numbers:
                numbers[problem] = len(numbers)
                first_rows.append(row)
        of_row = np.array([numbers[problem] for problem in problems], dtype=np.int64)
        return cls(of_row, first_rows)

    @classmethod
    def of_prompts(cls, prompts: Sequence[Prompt], *, conversing: bool = False) -> Problems:
        """The problems of prompts. conversing: an environment takes part, which may read its task in `extra_info`."""
        return cls.of([prompt.problem(with_extra_info=conversing) for prompt in prompts])

    def __len__(self) -> int:
        return len(self.first_rows)


def repeats_note(rows: int, problems: int) -> str:
    """One line if rows repeat a problem; empty if none does.

    >>> repeats_note(960, 30)
    '960 rows are 30 prompts: rows with equal prompt and ground truth count as samples of one prompt'
    >>> repeats_note(30, 30)
    ''
    """
    if rows == problems:
        return ""
    return f"{rows} rows are {problems} prompts: rows with equal prompt and ground truth count as samples of one prompt"


def check_rows(prompts: Sequence[Prompt], path: str) -> None:
    """Raise `DataError` if all of several rows, read from `path`, have the same prompt. With equal ground truths they
    are one problem, so that no interval could be computed; with different ones a model cannot distinguish them. Both
    are nearly always the wrong column. Ends at the first row that differs."""
    if len(prompts) < 2:
        return
    first = prompts[0]
    if any(prompt.messages != first.messages or prompt.images != first.images for prompt in prompts):
        return
    problem = f"{path}: all {len(prompts)} rows to evaluate ask the same prompt, {first.messages[-1]['content']!r:.80}"
    column = "check which column became the prompt (rlcli prep … --columns prompt=NAME)"
    truths = (prompt.ground_truth for prompt in prompts)
    other = next((truth for truth in truths if truth != first.ground_truth), None)
    if other is None:
        raise DataError(problem, f"{column}, or keep one row and generate several samples of it (--samples)")
    raise DataError(
        f"{problem}, with different ground truths ({first.ground_truth!r:.40} and {other!r:.40}, for two): nothing in "
        "the prompt says which is asked for",
        column,
    )
