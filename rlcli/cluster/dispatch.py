"""How a worker's method is called on a whole group: the arguments of each rank, and the combined result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from rlcli.cluster.process.memory import measured
from rlcli.cluster.process.profiling import span
from rlcli.cluster.watchdog import progress, watched

Send = Literal["broadcast", "scatter", "first"]
Collect = Literal["all", "first", "sum", "stream"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Shared:
    """A large argument that is the same for all ranks: it is serialised once, whatever the number of ranks, and each
    reads it from the object store. The method receives `value`."""

    value: Any


@dataclass(frozen=True)
class Dispatch:
    """send: `broadcast` gives every rank the same arguments; `scatter` gives rank i the i-th item of each; `first`
    calls rank 0 alone.
    collect: `all` returns a list by rank; `first` the result of rank 0; `sum` adds dicts of numbers key by key;
    `stream` iterates over what generator methods yield, from any rank, in order of arrival."""

    send: Send
    collect: Collect


def dispatch(send: Send = "broadcast", collect: Collect = "all") -> Callable[[F], F]:
    """Mark a worker's method as callable through a WorkerGroup.

    class Echo:
        @dispatch(send="scatter", collect="sum")
        def count(self, rows: list[int]) -> dict[str, float]:
            return {"rows": len(rows)}

    With two ranks, `group.count([[1, 2], [3]])` is `{"rows": 3}`. While the method runs its process is watched (see
    `watch`): it has to end, to yield, or to call `watch.progress` regularly.
    """

    def mark(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with watched(method.__name__), span(method.__name__), measured(method.__name__):
                return method(*args, **kwargs)

        @functools.wraps(method)
        def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with watched(method.__name__), span(method.__name__), measured(method.__name__):
                for item in method(*args, **kwargs):
                    yield item
                    progress()

        marked = stream if collect == "stream" else call
        marked.__dict__["dispatch"] = Dispatch(send, collect)
        return cast(F, marked)

    return mark


def dispatch_of(worker: type, name: str) -> Dispatch:
    """The dispatch of a method; AttributeError if the worker has no such method or it is not marked."""
    method = getattr(worker, name)
    mark = getattr(method, "dispatch", None)
    if not isinstance(mark, Dispatch):
        raise AttributeError(f"{worker.__name__}.{name} is not dispatched: mark it with @dispatch")
    return mark


def per_rank(how: Dispatch, args: tuple[Any, ...], ranks: int) -> list[tuple[Any, ...]]:
    """The arguments of each rank that is called. A `Shared` argument goes to all of them, even in a scatter.

    >>> per_rank(Dispatch("scatter", "all"), ([1, 2], Shared("both")), 2)
    [(1, Shared(value='both')), (2, Shared(value='both'))]
    >>> per_rank(Dispatch("first", "first"), ("to rank 0",), 2)
    [('to rank 0',)]
    """
    if how.send != "scatter":
        return [args] * (ranks if how.send == "broadcast" else 1)
    lists = [[arg] * ranks if isinstance(arg, Shared) else arg for arg in args]
    assert all(len(values) == ranks for values in lists), f"one argument for each of {ranks} ranks"
    return [tuple(values[rank] for values in lists) for rank in range(ranks)]


def add_up(results: list[dict[str, float]]) -> dict[str, float]:
    """Key by key sum of dicts that may lack keys.

    >>> add_up([{"a": 1.0}, {"a": 2.0, "b": 1.0}])
    {'a': 3.0, 'b': 1.0}
    """
    total: dict[str, float] = {}
    for result in results:
        for key, value in result.items():
            total[key] = total.get(key, 0.0) + value
    return total
