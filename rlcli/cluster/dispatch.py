"""How a worker's method is called on a whole group: the arguments of each rank, and the combined result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from rlcli.cluster.process.busy_lanes import busy
from rlcli.cluster.process.peak_memory import measured
from rlcli.cluster.process.worker_profile import span
from rlcli.cluster.watchdog import progress, watched

Send = Literal["broadcast", "scatter", "data", "first"]
Collect = Literal["all", "first", "sum", "stream"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True)
class Shared:
    """A large argument that is the same for all ranks: it is serialised once, whatever the number of ranks, and each
    reads it from the object store. The method receives `value`."""

    value: Any


@dataclass(frozen=True)
class Dispatch:
    """send: `broadcast` gives every rank the same arguments; `scatter` gives rank i the i-th item of each; `data` gives
    each rank the item of its data rank, which the worker's method `data_rank` returns; `first` calls rank 0 alone.
    collect: `all` returns a list by rank; `first` the result of rank 0; `sum` adds dicts of numbers key by key, those
    of the first rank of each data rank; `stream` iterates over what generator methods yield, from any rank, in order
    of arrival."""

    send: Send
    collect: Collect


def dispatch(send: Send = "broadcast", collect: Collect = "all") -> Callable[[F], F]:
    """Mark a worker's method as callable through a WorkerGroup.

    class Echo:
        @dispatch(send="data", collect="sum")
        def count(self, rows: list[int]) -> dict[str, float]:
            return {"rows": len(rows)}

    With two data ranks, `group.count([[1, 2], [3]])` is `{"rows": 3}`. While the method runs its process is watched
    (see `watch`): it has to end, to yield, or to call `watch.progress` regularly.
    """

    def mark(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with watched(method.__name__), span(method.__name__), measured(method.__name__), busy(method.__name__):
                return method(*args, **kwargs)

        @functools.wraps(method)
        def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with watched(method.__name__), span(method.__name__), measured(method.__name__), busy(method.__name__):
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


def per_rank(how: Dispatch, args: tuple[Any, ...], ranks: int, data_ranks: Sequence[int] = ()) -> list[tuple[Any, ...]]:
    """The arguments of each rank that is called. data_ranks: of each rank, for `data`. A `Shared` argument goes to all
    of them, even in a scatter.

    >>> per_rank(Dispatch("scatter", "all"), ([1, 2], Shared("both")), 2)
    [(1, Shared(value='both')), (2, Shared(value='both'))]
    >>> per_rank(Dispatch("data", "all"), (["a", "b"],), 4, data_ranks=[0, 0, 1, 1])  # two share each part
    [('a',), ('a',), ('b',), ('b',)]
    >>> per_rank(Dispatch("first", "first"), ("to rank 0",), 2)
    [('to rank 0',)]
    """
    if how.send in ("broadcast", "first"):
        return [args] * (ranks if how.send == "broadcast" else 1)
    places = data_ranks if how.send == "data" else range(ranks)
    count = 1 + max(places)
    lists = [[arg] * count if isinstance(arg, Shared) else arg for arg in args]
    assert all(len(values) == count for values in lists), f"one argument for each of {count} {how.send} ranks"
    return [tuple(values[place] for values in lists) for place in places]


def one_each(results: Sequence[T], data_ranks: Sequence[int]) -> list[T]:
    """The result of the first rank of each data rank.

    >>> one_each(["a", "a again", "b", "b again"], data_ranks=[0, 0, 1, 1])
    ['a', 'b']
    """
    return [results[data_ranks.index(place)] for place in range(1 + max(data_ranks))]


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
