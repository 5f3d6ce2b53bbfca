"""A group of Ray actors that run the same program (SPMD), called as if it were one object."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import RlcliError, RunFailed
from rlcli.workers.dispatch import Dispatch, add_up, dispatch_of

CLOSE_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 8


class WorkerGroup:
    """Actors of one class, by rank. A method of the class that is marked with `@dispatch` is called on all of them:

        group.update(0)      # every rank updates; the returned numbers are added up

    The first error of any rank is raised at once, without waiting for ranks that hang in a collective on the failed
    one.
    """

    def __init__(self, worker: type, actors: Sequence[Any], logs: Path) -> None:
        self._worker = worker
        self._actors = list(actors)
        self._logs = logs

    def __len__(self) -> int:
        return len(self._actors)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        how = dispatch_of(self._worker, name)
        return lambda *args, **kwargs: self._call(name, how, args, kwargs)

    def close(self) -> None:
        """Ask each actor to close, then end its process, whether it answered or not."""
        import ray

        closing = [actor.close.remote() for actor in self._actors]
        with contextlib.suppress(Exception):
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the processes now."""
        import ray

        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _call(self, name: str, how: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size = len(self._actors)
        if how.send == "scatter":
            assert all(len(value) == size for value in args), f"{name}: one argument for each of {size} ranks"
            per_rank = [tuple(value[rank] for value in args) for rank in range(size)]
        else:
            per_rank = [args] * size
        if how.collect == "stream":
            return self._stream(name, per_rank, kwargs)
        calls = [getattr(actor, name).remote(*own, **kwargs) for actor, own in zip(self._actors, per_rank, strict=True)]
        results = self._gather(name, calls)
        if how.collect == "first":
            return results[0]
        return add_up(results) if how.collect == "sum" else results

    def _gather(self, name: str, calls: list[Any]) -> list[Any]:
        import ray

        results: dict[int, Any] = {}
        rank_of = {call: rank for rank, call in enumerate(calls)}
        waiting = list(calls)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            rank = rank_of[ready[0]]
            results[rank] = self._get(name, rank, ready[0])
        return [results[rank] for rank in range(len(calls))]

    def _stream(self, name: str, per_rank: list[tuple[Any, ...]], kwargs: dict[str, Any]) -> Iterator[Any]:
        import ray

        streams = [
            getattr(actor, name).options(num_returns="streaming").remote(*own, **kwargs)
            for actor, own in zip(self._actors, per_rank, strict=True)
        ]
        rank_of = {stream: rank for rank, stream in enumerate(streams)}
        waiting = list(streams)
        while waiting:
            ready, _ = ray.wait(waiting, num_returns=1)
            stream = ready[0]
            try:
                item = next(stream)
            except StopIteration:
                waiting.remove(stream)
                continue
            yield self._get(name, rank_of[stream], item)

    def _get(self, name: str, rank: int, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RlcliError):
                raise error.cause from None
            raise RunFailed(
                f"worker {rank} failed in {name}: {type(error.cause).__name__}: {str(error.cause).strip()}",
                f"its log is {self._log(rank)}",
            ) from error
        except ray.exceptions.RayActorError as error:
            tail = " | ".join(self._tail(rank))
            raise RunFailed(
                f"worker {rank} died in {name}; its log {self._log(rank)} ends: {tail or '(empty)'}"
            ) from error

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def _tail(self, rank: int) -> list[str]:
        try:
            lines = self._log(rank).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line.strip() for line in lines if line.strip()][-LOG_TAIL_LINES:]
