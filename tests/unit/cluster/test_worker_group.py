"""Calls on a group of workers without Ray: actors are objects of this process, and references their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.worker_group import WorkerGroup


class Worker:
    """Two ranks share each part of the rows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @dispatch()
    def data_rank(self) -> int:
        return self.rank // 2

    @dispatch()
    def scaled(self, value: int, by: int = 1) -> int:
        return (self.rank + 1) * value * by

    @dispatch(collect="first")
    def first_of_all(self) -> int:
        return self.rank

    @dispatch(send="first", collect="first")
    def alone(self, text: str) -> str:
        return f"{text} {self.rank}"

    @dispatch(send="data", collect="sum", shared=["table"])
    def count(self, rows: list[int], scale: int, table: Any = None) -> dict[str, float]:
        return {"rows": float(scale * len(rows)), f"rank {self.rank}": 1.0, "table": float(table or 0)}

    @dispatch(send="scatter", collect="stream")
    def spell(self, word: str, end: str) -> Iterator[str]:
        yield from word + end


class Actor:
    """A worker's actor. closes: what its `close` does."""

    def __init__(self, worker: Worker, closes: Callable[[], None] = lambda: None) -> None:
        self.worker, self.closes = worker, closes

    def __getattr__(self, name: str) -> Any:
        return Method(self.closes if name == "close" else getattr(self.worker, name))


class Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def options(self, num_returns: str) -> Method:
        assert num_returns == "streaming"
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return Reference(lambda: self.method(*args, **kwargs))


class Reference:
    """To the result of `work`; or, where that is an iterator, to the items that it yields."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.items: Iterator[Any] | None = None

    def __next__(self) -> Reference:
        self.items = self.items or self.work()
        item = next(self.items)
        return Reference(lambda: item)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Values that were put into the object store, whose references are the values' negatives."""
    stored: list[Any] = []

    def put(value: Any) -> Any:
        stored.append(value)
        return -value

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(
        ray,
        "get",
        lambda references: (
            [reference.work() for reference in references] if type(references) is list else references.work()
        ),
    )
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (list(calls), []))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    return stored


def group_of(folder: Path, *closes: Callable[[], None]) -> WorkerGroup[Worker]:
    does = closes or (lambda: None,) * 4
    return WorkerGroup([Actor(Worker(rank), close) for rank, close in enumerate(does)], folder, None)


def test_a_call_collects_what_its_dispatch_says(stored: list[Any], tmp_path: Path) -> None:
    group = group_of(tmp_path)
    assert group.call(Worker.scaled, 10) == [10, 20, 30, 40]
    assert group.call(Worker.scaled, 10, by=2) == [20, 40, 60, 80]
    assert group.call(Worker.first_of_all) == 0
    assert group.call(Worker.alone, "rank") == "rank 0"
    assert sorted(group.call(Worker.spell, ["a", "bc", "", "d"], ".")) == [".", ".", ".", ".", "a", "b", "c", "d"]
    assert stored == []


def test_rows_are_divided_by_data_rank_and_shared_values_stored_once(stored: list[Any], tmp_path: Path) -> None:
    group = group_of(tmp_path)
    assert group.data_ranks == 2
    sums = group.call(Worker.count, [[1, 2], [3]], 10, 7)
    assert sums == {"rows": 30.0, "rank 0": 1.0, "rank 2": 1.0, "table": -14.0}
    assert group.call(Worker.count, [[], [3]], 1, table=5)["table"] == -10.0
    assert stored == [7, 5], "each once, for four ranks"
    group.call(Worker.count, [[], []], 1)
    assert stored == [7, 5], "nothing is shared"


def test_as_many_items_as_ranks_are_scattered(stored: list[Any], tmp_path: Path) -> None:
    group = group_of(tmp_path)
    with pytest.raises(AssertionError, match="one item for each of 4 scatter ranks"):
        list(group.call(Worker.spell, ["a"], "."))
    with pytest.raises(AssertionError, match="one item for each of 2 data ranks"):
        group.call(Worker.count, [[1]] * 4, 1)


def test_a_worker_that_fails_to_close_is_reported_with_its_log(
    stored: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError("samples of the last rollout may not be saved: No space left on device")

    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    group_of(tmp_path, lambda: None, fails).close()
    assert capsys.readouterr().err == (
        f"warning: worker 1 (its log is {tmp_path / 'rank-1.log'}) failed to close: OSError: "
        "samples of the last rollout may not be saved: No space left on device\n"
    )
    assert len(killed) == 2


def test_a_worker_that_does_not_close_in_time_is_reported(
    stored: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls[:1], calls[1:]))
    group_of(tmp_path, lambda: None, lambda: None).close()
    assert "rank-1.log) did not close within 20 s, and is killed" in capsys.readouterr().err


def test_what_cannot_be_killed_or_released_is_reported(
    stored: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(target: Any) -> None:
        raise ConnectionError("Ray is gone")

    monkeypatch.setattr(ray, "kill", gone)
    monkeypatch.setattr(ray.util, "remove_placement_group", gone)
    group_of(tmp_path, lambda: None, lambda: None).kill()
    first, second, last = capsys.readouterr().err.splitlines()
    assert "rank-0.log) could not be killed: its process may still run: ConnectionError: Ray is gone" in first
    assert "rank-1.log) could not be killed" in second
    assert last == "warning: the resources of rank stay reserved until Ray ends: ConnectionError: Ray is gone"
