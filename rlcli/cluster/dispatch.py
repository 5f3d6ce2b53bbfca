"""Dispatch of a worker's method to a whole group: the arguments of each rank, and the combined result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from rlcli.cluster.process.busy_lanes import busy
from rlcli.cluster.process.peak_memory import measured
from rlcli.cluster.process.worker_profile import span
from rlcli.cluster.watchdog import progress, watched

Send = Literal["broadcast", "scatter", "data", "first"]
Collect = Literal["all", "first", "sum", "stream"]
Sums = dict[str, float]

T = TypeVar("T")
A = TypeVar("A")
"""The first parameter of a method."""
P = ParamSpec("P")
"""Its parameters, or those after the first."""
R = TypeVar("R")
"""Its result on one worker, or the items that it yields."""
GroupParams = ParamSpec("GroupParams")
"""Parameters of a call on the whole group."""
GroupResult = TypeVar("GroupResult")
"""Result of a call on the whole group."""
R_co = TypeVar("R_co", covariant=True)
GroupResult_co = TypeVar("GroupResult_co", covariant=True)
W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)
"""The workers' class."""


@dataclass(frozen=True)
class Dispatch:
    """The dispatch of a method to a group."""

    send: Send = "broadcast"
    """`broadcast` sends every rank the same arguments; `scatter` sends rank i the i-th item of the first one, and all
    ranks the others; `data` sends each rank the item of its data rank, which the worker's method `data_rank` returns;
    `first` calls rank 0 alone."""
    collect: Collect = "all"
    """`all` returns a list by rank; `first` the result of rank 0; `sum` adds dicts of numbers key by key, those of the
    first rank of each data rank; `stream` iterates over what generator methods yield, from any rank, in order of
    arrival."""
    shared: frozenset[str] = frozenset()
    """Parameters whose argument is large and the same for all ranks: it is serialised once, whatever the number of
    ranks, and each reads it from the object store."""
    parameters: tuple[str, ...] = ()
    """Names of all parameters."""

    def stored(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], store: Callable[[object], object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments, with the shared ones replaced by `store` of them, unless they are None."""

        def sent(name: str, value: object) -> object:
            return store(value) if name in self.shared and value is not None else value

        positional = tuple(sent(name, value) for name, value in zip(self.parameters, args, strict=False))
        return positional, {name: sent(name, value) for name, value in kwargs.items()}


class Dispatched(Generic[W_contra, P, R_co, GroupParams, GroupResult_co]):
    """The type of a method that is marked with `@dispatch`: what `WorkerGroup.call` checks a call against.

    On an instance it is the method itself, with parameters `P` and result `R_co`. A call on the group has parameters
    `GroupParams` and result `GroupResult_co`. (At run time it is a plain function, as Ray needs it, with the attribute
    `dispatch`.)
    """

    __name__: str
    dispatch: Dispatch

    if TYPE_CHECKING:

        @overload
        def __get__(self, worker: None, owner: type) -> Dispatched[W_contra, P, R_co, GroupParams, GroupResult_co]: ...
        @overload
        def __get__(self, worker: object, owner: type) -> Callable[P, R_co]: ...
        def __get__(self, worker: object, owner: type) -> Any: ...


@overload
def dispatch(
    send: Literal["broadcast", "first"] = "broadcast",
    collect: Literal["all"] = "all",
    *,
    shared: Collection[str] = (),
) -> Callable[[Callable[Concatenate[W, P], R]], Dispatched[W, P, R, P, list[R]]]: ...
@overload
def dispatch(
    send: Literal["broadcast", "first"] = "broadcast",
    *,
    collect: Literal["first"],
    shared: Collection[str] = (),
) -> Callable[[Callable[Concatenate[W, P], R]], Dispatched[W, P, R, P, R]]: ...
@overload
def dispatch(
    send: Literal["broadcast", "first"] = "broadcast",
    *,
    collect: Literal["sum"],
    shared: Collection[str] = (),
) -> Callable[[Callable[Concatenate[W, P], Sums]], Dispatched[W, P, Sums, P, Sums]]: ...
@overload
def dispatch(
    send: Literal["broadcast", "first"] = "broadcast",
    *,
    collect: Literal["stream"],
    shared: Collection[str] = (),
) -> Callable[[Callable[Concatenate[W, P], Iterator[R]]], Dispatched[W, P, Iterator[R], P, Iterator[R]]]: ...
@overload
def dispatch(
    send: Literal["scatter", "data"],
    collect: Literal["all"] = "all",
    *,
    shared: Collection[str] = (),
) -> Callable[
    [Callable[Concatenate[W, A, P], R]],
    Dispatched[W, Concatenate[A, P], R, Concatenate[Sequence[A], P], list[R]],
]: ...
@overload
def dispatch(
    send: Literal["scatter", "data"],
    collect: Literal["sum"],
    *,
    shared: Collection[str] = (),
) -> Callable[
    [Callable[Concatenate[W, A, P], Sums]],
    Dispatched[W, Concatenate[A, P], Sums, Concatenate[Sequence[A], P], Sums],
]: ...
@overload
def dispatch(
    send: Literal["scatter", "data"],
    collect: Literal["stream"],
    *,
    shared: Collection[str] = (),
) -> Callable[
    [Callable[Concatenate[W, A, P], Iterator[R]]],
    Dispatched[W, Concatenate[A, P], Iterator[R], Concatenate[Sequence[A], P], Iterator[R]],
]: ...
def dispatch(send: Send = "broadcast", collect: Collect = "all", *, shared: Collection[str] = ()) -> Any:
    """Mark a worker's method as callable through a `WorkerGroup`, with the way to split arguments and combine results.

    class Echo:
        @dispatch(send="data", collect="sum")
        def count(self, rows: list[int]) -> dict[str, float]:
            return {"rows": len(rows)}

    With two data ranks, `group.call(Echo.count, [[1, 2], [3]])` is `{"rows": 3}`. While the method runs its process is
    watched (see `rlcli.cluster.watchdog`): it has to end, to yield, or to call `progress` regularly. shared: names of
    large arguments that are the same for all ranks (see `Dispatch`).
    """

    def mark(method: Callable[..., Any]) -> Any:
        parameters = tuple(inspect.signature(method).parameters)[1:]  # without `self`
        assert set(shared) <= set(parameters), f"{method.__name__} has no parameter {set(shared) - set(parameters)}"
        return _marked(method, Dispatch(send, collect, frozenset(shared), parameters))

    return mark


def implements(
    declared: Dispatched[W, P, R, GroupParams, GroupResult],
) -> Callable[[Callable[Concatenate[Any, P], R]], Dispatched[W, P, R, GroupParams, GroupResult]]:
    """Mark a method as the implementation of one that another class declares with `@dispatch`: it has the same name,
    parameters, result and dispatch."""

    def mark(method: Callable[Concatenate[Any, P], R]) -> Dispatched[W, P, R, GroupParams, GroupResult]:
        assert method.__name__ == declared.__name__, f"{method.__name__} implements {declared.__name__}"
        return cast("Dispatched[W, P, R, GroupParams, GroupResult]", _marked(method, declared.dispatch))

    return mark


def _marked(method: Callable[..., Any], dispatch: Dispatch) -> Callable[..., Any]:
    """The method, watched while it runs, with its dispatch."""

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

    marked: Callable[..., Any] = stream if dispatch.collect == "stream" else call
    marked.__dict__["dispatch"] = dispatch
    return marked


def per_rank(
    dispatch: Dispatch, args: tuple[Any, ...], ranks: int, data_ranks: Sequence[int] = ()
) -> list[tuple[Any, ...]]:
    """The positional arguments of each rank that is called. data_ranks: the data rank of each rank, for `data`.

    >>> per_rank(Dispatch("scatter", "all"), ([1, 2], "both"), 2)
    [(1, 'both'), (2, 'both')]
    >>> per_rank(Dispatch("data", "all"), (["a", "b"],), 4, data_ranks=[0, 0, 1, 1])  # two share each part
    [('a',), ('a',), ('b',), ('b',)]
    >>> per_rank(Dispatch("first", "first"), ("to rank 0",), 2)
    [('to rank 0',)]
    """
    if dispatch.send in ("broadcast", "first"):
        return [args] * (ranks if dispatch.send == "broadcast" else 1)
    parts, *others = args
    part_of = data_ranks if dispatch.send == "data" else range(ranks)
    count = 1 + max(part_of)
    assert len(parts) == count, f"one item for each of {count} {dispatch.send} ranks"
    return [(parts[part], *others) for part in part_of]


def first_per_data_rank(results: Sequence[T], data_ranks: Sequence[int]) -> list[T]:
    """The result of the first rank of each data rank.

    >>> first_per_data_rank(["a", "a again", "b", "b again"], data_ranks=[0, 0, 1, 1])
    ['a', 'b']
    """
    return [results[data_ranks.index(data_rank)] for data_rank in range(1 + max(data_ranks))]


def sum_by_key(results: list[Sums]) -> Sums:
    """Sum dicts key by key; some may lack keys.

    >>> sum_by_key([{"a": 1.0}, {"a": 2.0, "b": 1.0}])
    {'a': 3.0, 'b': 1.0}
    """
    total: Sums = {}
    for result in results:
        for key, value in result.items():
            total[key] = total.get(key, 0.0) + value
    return total
