"""Stand-ins for a group of workers: a call goes to the method of that name, in this process."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock


class CalledByName:
    """For a class with some methods of `WorkerCalls`, each with the result for the whole group."""

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method.__name__)(*args, **kwargs)


def mock_group() -> MagicMock:
    """A group whose calls are recorded by their names: `call(WorkerCalls.texts, 1)` as `texts(1)`."""
    group = MagicMock()
    group.call = lambda method, *args, **kwargs: getattr(group, method.__name__)(*args, **kwargs)
    return group
