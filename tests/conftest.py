"""Fixtures of every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# `nohup` and a shell's `&` start a program with these ignored, and what it starts inherits that: a test that
# interrupts a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _restored_environment() -> Iterator[None]:
    """Undo what a file's tests changed in the environment: a command run in this process sets `PYTHONSAFEPATH`."""
    initial = dict(os.environ)
    yield
    for name in os.environ.keys() - initial.keys():
        del os.environ[name]
    os.environ.update(initial)
