"""The history of each prompt: how often it was sampled and how its pass rate changed. Imports nothing heavy."""

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
    """The scored groups of one prompt."""

    prompt_id: str
    """Dataset, split and row."""
    groups: int = 0
    """Groups that were scored."""
    samples: int = 0
    """Scored samples."""
    right: int = 0
    """Scored samples that are correct."""
    kept: int = 0
    """Groups that the filter of dynamic sampling kept."""
    tokens: int = 0
    """Tokens that were generated for it."""
    first: float | None = None
    """Pass rate of its first group with scored samples."""
    last: float | None = None
    """Pass rate of its last group with scored samples."""
    step: int = 0
    """Step that completed the last group."""
    in_a_row: int = 0
    """Number of its last groups whose samples were all correct."""
    retired: bool = False
    """True if `in_a_row` has reached `data.retire`."""

    @property
    def pass_rate(self) -> float | None:
        """Share of correct ones among its scored samples; None if there are none."""
        return self.right / self.samples if self.samples else None

    def add(self, step: int, counted: int, right: int, tokens: int, was_kept: bool) -> None:
        """Add a group, as in `RolloutBatch.scored_groups`."""
        self.groups += 1
        self.samples += counted
        self.right += right
        self.kept += was_kept
        self.tokens += tokens
        self.step = step
        if counted:
            self.last = right / counted
            self.first = self.last if self.first is None else self.first
            self.in_a_row = self.in_a_row + 1 if right == counted else 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "pass_rate": self.pass_rate}


def histories(run: Path, note: Callable[[str], None]) -> list[PromptHistory]:
    """The history of each prompt that the run in the folder `run` has sampled, in the order of their first groups.
    note: called with the number of lines and groups of prompts.jsonl that cannot be read."""
    data = config_of(run).get("data")
    retire = int(number(data.get("retire")) or 0) if isinstance(data, dict) else 0
    by_prompt, unread = histories_of(judged_of(run))
    if unread:
        note(f"warning: {unread} groups in {run / PROMPTS} cannot be read and are left out")
    for history in by_prompt:
        history.retired = 0 < retire <= history.in_a_row
    return by_prompt


def histories_of(lines: Iterable[Mapping[str, Any]]) -> tuple[list[PromptHistory], int]:
    """The histories in the lines of prompts.jsonl, and the number of groups that cannot be read.

    >>> [history], unread = histories_of([{"step": 3, "groups": [["a:0", 8, 2, 96, True], "a:1"]}])
    >>> history.prompt_id, history.pass_rate, history.tokens, unread
    ('a:0', 0.25, 96, 1)
    """
    by_prompt: dict[str, PromptHistory] = {}
    unread = 0
    for line in lines:
        entry = line.get("groups")
        groups: list[Any] = entry if isinstance(entry, list) else [entry]
        for group in groups:
            try:
                prompt_id, counted, right, tokens, was_kept = group
                step, counted, right, tokens = int(line["step"]), int(counted), int(right), int(tokens)
            except (TypeError, ValueError, OverflowError):
                unread += 1
            else:
                history = by_prompt.setdefault(str(prompt_id), PromptHistory(str(prompt_id)))
                history.add(step, counted, right, tokens, bool(was_kept))
    return list(by_prompt.values()), unread
