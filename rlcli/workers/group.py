"""A group of Ray actors that run the same program (SPMD), called as if it were one object."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import RlcliError, RunFailed
from rlcli.workers.dispatch import Dispatch, add_up, dispatch_of

CLOSE_TIMEOUT_S = 20.0
DEATH_GRACE_S = 3.0
LOG_TAIL_LINES = 8


class WorkerGroup:
    """Actors of one class, by rank. A method of the class that is marked with `@dispatch` is called on all of them:

        group.update(0)      # every rank updates; the returned numbers are added up

    The first error of any rank is raised without waiting for ranks that hang in a collective on the failed one. Where a
    rank has died, that is the error, and not the broken connections of the others.

    places: the placement group that holds the actors' resources; it goes with them. name: how their logs are called,
    `name`-0.log and so on.
    """

    def __init__(self, worker: type, actors: Sequence[Any], logs: Path, places: Any, name: str = "rank") -> None:
        self._worker = worker
        self._actors = list(actors)
        self._logs = logs
        self._places = places
        self._name = name

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
        """End the processes now and give their places back."""
        import ray

        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._places)

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
        except ray.exceptions.RayActorError as error:
            raise self._died(name, rank, error) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RlcliError):
                raise error.cause from None
            for other, death in self._deaths():
                raise self._died(name, other, death) from error
            raise RunFailed(
                f"worker {rank} failed in {name}: {type(error.cause).__name__}: {str(error.cause).strip()}",
                f"its log is {self._log(rank)}",
            ) from error
        except ray.exceptions.RayError as error:  # Ray's own: out of memory, an object that was lost
            raise RunFailed(f"worker {rank} failed in {name}: {type(error).__name__}: {_last_line(error)}") from error

    def _deaths(self) -> Iterator[tuple[int, Exception]]:
        """Ranks that are dead, or found to be within a moment: their peers notice before Ray does."""
        import ray

        rank_of = {actor.__ray_ready__.remote(): rank for rank, actor in enumerate(self._actors)}
        # Actors that are alive answer when they are done with what they do, if ever.
        answered, _ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=DEATH_GRACE_S)
        for call in answered:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError as death:
                yield rank_of[call], death

    def _died(self, name: str, rank: int, death: Exception) -> RunFailed:
        tail = " | ".join(self._tail(rank))
        # Its log tells more than Ray, unless it never got as far as to write to it.
        why = f"; its log {self._log(rank)} ends: {tail}" if tail else f": {_last_line(death)}"
        return RunFailed(f"worker {rank} died in {name}{why}")

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._name}-{rank}.log"

    def _tail(self, rank: int) -> list[str]:
        try:
            lines = self._log(rank).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line.strip() for line in lines if line.strip()][-LOG_TAIL_LINES:]


def _last_line(error: Exception) -> str:
    """Where Ray's messages end with the cause."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
