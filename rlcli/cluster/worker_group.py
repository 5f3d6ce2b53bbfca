"""A group of Ray actors that run the same program (SPMD), called as if it were one object."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from rlcli.cluster import worker_errors
from rlcli.cluster.dispatch import Dispatched, first_per_data_rank, per_rank, sum_by_key
from rlcli.cluster.watchdog import MIN_STARTUP_STALL_S, ProgressRecord, StallDetector, read_progress, stall_limit_s
from rlcli.errors import RlcliError, RunFailed
from rlcli.support.redact import printable

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

CLOSE_TIMEOUT_S = 20.0
DEATH_GRACE_S = 10.0
LOST_PEER_GRACE_S = 40.0
"""Time until Ray detects that a machine is gone; processes connected to it notice at once."""
UNAVAILABLE_PAUSE_S = 0.5
PAUSE_PER_RANK_S = 2e-4
"""Answers that arrive within this time of each other are handled together: a `ray.wait` costs as much as an answer."""
LOG_TAIL_LINES = 8

W_co = TypeVar("W_co", covariant=True)
"""The workers' class, or one that declares their methods."""
GroupParams = ParamSpec("GroupParams")
GroupResult = TypeVar("GroupResult")
Ref = TypeVar("Ref")
"""A reference of Ray, or a stream of them."""


class WorkerGroup(Generic[W_co]):
    """Actors of one class, by rank. A method of the class that is marked with `@dispatch` is called on all of them:

        group.call(Worker.update, 0)      # every rank updates; the returned numbers are added up

    The first error of any rank is raised without waiting for ranks that hang in a collective on the failed one. If a
    rank has died, that is the error, not the broken connections of the others. A rank that makes no progress for
    `stall_s` seconds is an error too, with the location from its stack.

    placement_group: holds the actors' resources; it is removed with them. name: prefix of their logs, `name`-0.log and
    so on. stall_s: None waits indefinitely; else the workers record their progress (see `watchdog`). same_bits: every
    run must give the same bits, so that nothing may depend on which rank is faster.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        logs: Path,
        placement_group: PlacementGroup,
        name: str = "rank",
        stall_s: float | None = None,
        same_bits: bool = True,
    ) -> None:
        self.same_bits = same_bits
        self._actors = list(actors)
        self._logs = logs
        self._placement_group = placement_group
        self._name = name
        self._progress_files = [logs / f"{name}-{rank}.stack" for rank in range(len(self._actors))]
        self._stall_s = stall_s
        self._no_file_s = max(MIN_STARTUP_STALL_S, stall_s or 0.0)
        self._oom_kills = worker_errors.kernel_oom_kills()

    def __len__(self) -> int:
        return len(self._actors)

    def call(
        self,
        method: Dispatched[W_co, ..., Any, GroupParams, GroupResult],
        *args: GroupParams.args,
        **kwargs: GroupParams.kwargs,
    ) -> GroupResult:
        """Call a method on the ranks of its dispatch; returns their results as its dispatch combines them."""
        import ray

        name, dispatch = method.__name__, method.dispatch
        # Ray passes the value of a reference to a method, not the reference.
        positional, keywords = dispatch.stored(args, kwargs, ray.put)
        data_ranks = self._data_ranks if dispatch.send == "data" or dispatch.collect == "sum" else []
        arguments = per_rank(dispatch, positional, len(self), data_ranks)
        if dispatch.collect == "stream":
            return cast(GroupResult, self._stream(name, arguments, keywords))
        actors = self._actors[: len(arguments)]
        calls = [
            getattr(actor, name).remote(*rank_arguments, **keywords)
            for actor, rank_arguments in zip(actors, arguments, strict=True)
        ]
        results: Any = self._gather(name, calls)
        if dispatch.collect == "first":
            results = results[0]
        elif dispatch.collect == "sum":
            results = sum_by_key(first_per_data_rank(results, data_ranks))
        return cast(GroupResult, results)

    @property
    def data_ranks(self) -> int:
        """Number of parts that work is divided into: workers with the same data rank get the same part."""
        return 1 + max(self._data_ranks)

    @cached_property
    def _data_ranks(self) -> list[int]:
        """The data rank of each worker, queried once."""
        return self._gather("data_rank", [actor.data_rank.remote() for actor in self._actors])

    def close(self) -> None:
        """Ask each actor to close, then kill its process, even if it did not answer. A failure is reported: the run's
        results are written by then, but the records of its last step or its memory may be incomplete."""
        import ray

        closing = {actor.close.remote(): rank for rank, actor in enumerate(self._actors)}
        closed: list[ObjectRef] = []
        with self._reporting("waiting for the workers failed, and they are killed"):
            closed, late = ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
            for rank in sorted(closing[call] for call in late):
                _report(f"{self._who(rank)} did not close within {CLOSE_TIMEOUT_S:g} s, and is killed")
        for call in closed:
            with self._reporting(f"{self._who(closing[call])} failed to close"):
                ray.get(call)
        self.kill()

    def kill(self) -> None:
        """End the processes now and release their resources."""
        import ray

        for rank, actor in enumerate(self._actors):
            with self._reporting(f"{self._who(rank)} could not be killed: its process may still run"):
                ray.kill(actor)
        with self._reporting(f"the resources of {self._name} stay reserved until Ray ends"):
            ray.util.remove_placement_group(self._placement_group)

    @contextlib.contextmanager
    def _reporting(self, problem: str) -> Iterator[None]:
        """Report an error within the block instead of raising it: the workers are being given up."""
        try:
            yield
        except Exception as error:  # of the workers' roles, or of a Ray that is gone
            _report(f"{problem}: {type(error).__name__}: {worker_errors.last_line(error)}")

    def _who(self, rank: int) -> str:
        return f"worker {rank} (its log is {self._log(rank)})"

    def _gather(self, name: str, calls: list[ObjectRef]) -> list[Any]:
        results: dict[int, Any] = {}
        rank_of = {call: rank for rank, call in enumerate(calls)}
        waiting = list(calls)
        stalls = self._stall_detector(name)
        while waiting:
            ready = _ready(waiting, stalls.interval_s)
            results |= self._values(name, [(rank_of[call], call) for call in ready])
            waiting = [call for call in waiting if rank_of[call] not in results]
            self._watch(name, stalls, [rank_of[call] for call in waiting])
        if len(calls) == len(self):
            self._no_file_s = float("inf")  # All have answered: a file that is not visible is on another disk.
        return [results[rank] for rank in range(len(calls))]

    def _stream(self, name: str, arguments: list[tuple[Any, ...]], kwargs: dict[str, object]) -> Iterator[Any]:
        streams = [
            getattr(actor, name).options(num_returns="streaming").remote(*rank_arguments, **kwargs)
            for actor, rank_arguments in zip(self._actors, arguments, strict=True)
        ]
        rank_of = {stream: rank for rank, stream in enumerate(streams)}
        waiting = list(streams)
        stalls = self._stall_detector(name)
        while waiting:
            items = []
            for stream in _ready(waiting, stalls.interval_s):
                try:
                    items.append((rank_of[stream], next(stream)))
                except StopIteration:
                    waiting.remove(stream)
                    continue
                stalls.progressed(rank_of[stream])
            yield from self._values(name, items).values()
            self._watch(name, stalls, [rank_of[stream] for stream in waiting])

    def _stall_detector(self, name: str) -> StallDetector:
        stall_s = None if self._stall_s is None else stall_limit_s(name, self._stall_s)
        return StallDetector(self._progress_files, stall_s, self._no_file_s)

    def _watch(self, name: str, stalls: StallDetector, waiting: list[int]) -> None:
        """Raise if ranks that are waited for make no progress."""
        stalled = stalls.stalled(waiting)
        if not stalled:
            return
        symptom = f"makes no progress in {name} for {stalls.stall_s:g} s"
        parts = [
            f"worker {rank} {symptom}: {self._describe_stall(rank, record)}" for rank, record in sorted(stalled.items())
        ]
        if all(record and record.waits_for_peers for record in stalled.values()):
            parts.append("all wait in a collective, for each other or for a worker that is done")
        records = {rank: read_progress(self._progress_files[rank]) for rank in waiting if rank not in stalled}
        parts += [
            f"worker {rank} waits for it"
            for rank, record in sorted(records.items())
            if record and record.waits_for_peers
        ]
        logs = ", ".join(str(self._log(rank)) for rank in sorted(stalled))
        hint = f"see its log {logs}, and its full stack in .stack beside it"
        raise RunFailed("; ".join(parts), hint, retry=True, who=", ".join(f"worker {rank}" for rank in sorted(stalled)))

    def _describe_stall(self, rank: int, record: ProgressRecord | None) -> str:
        if record is not None and record.threads:
            return record.location
        tail = self._tail(rank)
        ending = f"; its log ends: {tail}" if tail else ""
        return f"it does not answer (stopped, swapped out, or its machine is gone){ending}"

    def _values(self, name: str, ready: list[tuple[int, ObjectRef]]) -> dict[int, Any]:
        """Rank → the value of its reference. One call to Ray for all of them, unless one failed."""
        import ray

        try:
            return dict(zip([rank for rank, _ in ready], ray.get([reference for _, reference in ready]), strict=True))
        except Exception:
            return {rank: self._get(name, rank, reference) for rank, reference in ready}

    def _get(self, name: str, rank: int, reference: ObjectRef) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.ActorUnavailableError as error:  # Its connection broke: Ray will find out why.
            for other, death in self._deaths(LOST_PEER_GRACE_S):
                raise self._died(name, other, death) from error
            raise self._died(name, rank, error) from error
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise self._died(name, rank, error) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RlcliError):
                raise error.cause from None
            raise self._failed(name, rank, error.cause) from error
        except ray.exceptions.RayError as error:  # for example an object that was lost with its machine
            parts = f"worker {rank} failed in {name}: {type(error).__name__}: {worker_errors.last_line(error)}"
            raise RunFailed(parts, retry=True, who=f"worker {rank}") from error

    def _failed(self, name: str, rank: int, cause: BaseException) -> RunFailed:
        if worker_errors.is_out_of_memory(cause):
            return worker_errors.out_of_memory_error(rank, name, cause)
        lost = worker_errors.is_peer_failure(cause)
        for other, death in self._deaths(LOST_PEER_GRACE_S if lost else DEATH_GRACE_S):
            return self._died(name, other, death)
        return RunFailed(
            f"worker {rank} failed in {name}: {type(cause).__name__}: {str(cause).strip()}",
            f"its log is {self._log(rank)}",
            retry=lost or worker_errors.is_gpu_failure(cause),
            who=f"worker {rank}",
        )

    def _deaths(self, grace_s: float) -> Iterator[tuple[int, Exception]]:
        """Ranks that are dead, or found dead within `grace_s`: their peers notice before Ray does."""
        import ray

        rank_of = {actor.__ray_ready__.remote(): rank for rank, actor in enumerate(self._actors)}
        # Living actors answer when their current call ends, if ever.
        waiting, until = list(rank_of), time.monotonic() + grace_s
        while waiting:
            answered, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not answered:
                return
            rank = rank_of[answered[0]]
            try:
                ray.get(answered[0])
            except ray.exceptions.ActorUnavailableError:
                time.sleep(UNAVAILABLE_PAUSE_S)
                waiting.append(retry := self._actors[rank].__ray_ready__.remote())
                rank_of[retry] = rank
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as death:
                yield rank, death

    def _died(self, name: str, rank: int, death: Exception) -> RunFailed:
        oom_kills = worker_errors.kernel_oom_kills() - self._oom_kills
        return worker_errors.actor_died(rank, name, death, self._log(rank), self._tail(rank), oom_kills)

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._name}-{rank}.log"

    def _tail(self, rank: int) -> str:
        """The end of its log, in one line."""
        try:
            lines = self._log(rank).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join([line.strip() for line in lines if line.strip()][-LOG_TAIL_LINES:])


def _report(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


def _ready(waiting: list[Ref], timeout: float | None) -> list[Ref]:
    """All references that are ready shortly after the first is, or none after `timeout` seconds. Checking n of them
    takes n steps: one call per reference would take n² for a call on n ranks."""
    import ray

    first, _ = ray.wait(waiting, num_returns=1, timeout=timeout)
    if not first:
        return []
    ready: list[Ref]
    ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=len(waiting) * PAUSE_PER_RANK_S)
    return ready
