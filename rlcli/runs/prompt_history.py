"""What became of each prompt of a run: how often it was drawn, and how its pass rate changed. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.runs.folder import PROMPTS
from rlcli.runs.listing import config_of, number
from rlcli.runs.record_files import judged_of


@dataclass
class PromptHistory:
    """One prompt's judged groups. samples, right: the judged samples, and the right ones. kept: groups that the filter
    kept. tokens: that were drawn for it. first, last: the pass rate of its first and of its last group with judged
    samples. step: that completed the last one. in_a_row: its last groups whose samples were all right. retired: whether
    these are as many as `data.retire`."""

    prompt_id: str
    groups: int = 0
    samples: int = 0
    right: int = 0
    kept: int = 0
    tokens: int = 0
    first: float | None = None
    last: float | None = None
    step: int = 0
    in_a_row: int = 0
    retired: bool = False

    @property
    def pass_rate(self) -> float | None:
        """Of all its judged samples; None if there are none."""
        return self.right / self.samples if self.samples else None

    def add(self, step: int, counted: int, right: int, tokens: int, kept: bool) -> None:
        """One more group, as in `RolloutBatch.judged`."""
        self.groups += 1
        self.samples += counted
        self.right += right
        self.kept += kept
        self.tokens += tokens
        self.step = step
        if counted:
            self.last = right / counted
            self.first = self.last if self.first is None else self.first
            self.in_a_row = self.in_a_row + 1 if right == counted else 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "pass_rate": self.pass_rate}


def histories(run: Path, note: Callable[[str], None]) -> list[PromptHistory]:
    """Each prompt that the run in the folder `run` has drawn, in the order of their first groups. note: called with how
    many lines and groups of prompts.jsonl are left out because they cannot be read."""
    data = config_of(run).get("data")
    retire = int(number(data.get("retire")) or 0) if isinstance(data, dict) else 0
    found, unread = histories_of(judged_of(run))
    if unread:
        note(f"warning: {unread} groups in {run / PROMPTS} cannot be read and are left out")
    for one in found:
        one.retired = 0 < retire <= one.in_a_row
    return found


def histories_of(lines: Iterable[Mapping[str, Any]]) -> tuple[list[PromptHistory], int]:
    """The histories in the lines of prompts.jsonl, and how many groups cannot be read.

    >>> [found], unread = histories_of([{"step": 3, "groups": [["a:0", 8, 2, 96, True], "a:1"]}])
    >>> found.prompt_id, found.pass_rate, found.tokens, unread
    ('a:0', 0.25, 96, 1)
    """
    found: dict[str, PromptHistory] = {}
    unread = 0
    for line in lines:
        read = line.get("groups")
        groups: list[Any] = read if isinstance(read, list) else [read]
        for group in groups:
            try:
                prompt_id, counted, right, tokens, kept = group
                values = int(line["step"]), int(counted), int(right), int(tokens), bool(kept)
            except (TypeError, ValueError, OverflowError):
                unread += 1
            else:
                found.setdefault(str(prompt_id), PromptHistory(str(prompt_id))).add(*values)
    return list(found.values()), unread
