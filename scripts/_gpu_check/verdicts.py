"""A plugin for pytest that writes each test's verdict as a line of JSON, as soon as there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ORDER = ("passed", "skipped", "failed")
"""Outcomes by rank: the verdict of a test is the highest of its setup, call and teardown."""


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--verdicts", type=Path, help="file to append [name, passed | failed | skipped] to")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    item.verdict = max(report.outcome, getattr(item, "verdict", ORDER[0]), key=ORDER.index)
    if report.when == "teardown":
        with item.config.getoption("verdicts").open("a") as file:
            file.write(json.dumps([item.nodeid, item.verdict]) + "\n")
