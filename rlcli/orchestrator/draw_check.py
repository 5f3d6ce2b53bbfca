"""Check that the data cursor moves."""

from __future__ import annotations

from rlcli.errors import RunFailed
from rlcli.workers.roles.integrity import REPORT


class DrawCheck:
    """Compares each draw of prompts with the previous two. count: of the prompts in the dataset, the smallest of
    several. An epoch's first prompts may equal the last ones of the epoch before, but not a third time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: list[list[int]] = [[], []]

    def check(self, indexes: list[int]) -> None:
        """Raise RunFailed if the same prompts are drawn a third time although the dataset has others."""
        if len(indexes) > 1 and self._before == [indexes, indexes] and 2 * len(indexes) <= self.count:
            raise RunFailed(
                f"the last {len(indexes)} prompts are drawn a third time, of {self.count} in the dataset: the data "
                "cursor does not move",
                REPORT,
            )
        self._before = [self._before[1], indexes]
