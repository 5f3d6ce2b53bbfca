"""The commands in the blocks of a page run, one after another, in a folder that has what they name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page_blocks import name_of
from tests.page_commands import NOT_RUN, PAGES, not_run, shown
from tests.page_runs import as_run, failure

IN_BLOCKS = [command for page in PAGES for command in shown(page) if command.complete]
RUN = [command for command in IN_BLOCKS if not not_run(command)]
RUN_PAGES = list(dict.fromkeys(command.page for command in RUN))
DRY_RUNS = ("bigger_model.md", "debug.md", "porting.md")
"""Pages of many dry runs that differ in their keys: before a release."""


@pytest.mark.long  # test_page_commands.py shows that each is accepted
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.exhaustive if page.name in DRY_RUNS else (), id=name_of(page))
        for page in RUN_PAGES
    ],
)
@pytest.mark.usefixtures("forget_algorithms")
def test_the_commands_of_a_page_run(page: Path, enter_page_folder: Callable[[Path], Path], judge: str) -> None:
    enter_page_folder(page)
    for command in RUN:
        if command.page == page:
            assert failure(as_run(command.words[1:], judge)) == "", command


def test_every_command_that_is_not_run_is_on_a_page() -> None:
    assert {*map(not_run, IN_BLOCKS)} - {""} == {*NOT_RUN}


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("runs show runs/none", "runs/none is not a run"),
        ("train grpo --model … --data data/none", "data/none"),
        ("eval --model … --data data/gsm8k --by colour", "no row has that field"),
        ("train --resume runs/gsm8k --set train.seed=1", "train.seed"),
        ("verifiers run my_rewards.py:nothing --input rows.jsonl", "nothing"),
    ],
)
def test_a_command_that_fails_is_found(line: str, why: str, enter_page_folder: Callable[[Path], Path]) -> None:
    enter_page_folder(RUN[0].page)
    assert why in failure(as_run(line.split(), ""))
