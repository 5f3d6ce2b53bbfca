"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import Visitor, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    visitors: list[Visitor] = []

    def visit(origin: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, origin, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.close()
