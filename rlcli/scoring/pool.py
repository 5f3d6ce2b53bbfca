"""Verifications in processes that can be killed: one that hangs or crashes costs its own verdict and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rlcli.errors import VerifierError
from rlcli.scoring.nursery import Facts, Former, Nursery
from rlcli.scoring.nursery_main import MAX_REPLY_BYTES
from rlcli.scoring.registry import target
from rlcli.scoring.spec import Composition, parse
from rlcli.types import Outcome, Verdict, VerifyRequest

STARTS = 4
"""How many processes in a row may die before they are asked anything; more than that is no accident."""

_ALIVE = Former(None, killed=False)

MAX_COMPLETION_CHARS = 1 << 20
"""A longer completion loses its beginning before it is sent: answers stand at the end. About 250,000 tokens."""


class ScoringPool:
    """Runs verifiers in `processes` worker processes, each verification for at most `deadline_s` seconds.

    A verifier is named by an expression (see `scoring.spec`): `math`, `math + 0.1 * format`, `some/file.py:function`.
    The deadline counts from when the verification starts, not from `submit`. Past it the worker is killed and replaced
    within milliseconds, and the verdict is (0, TIMEOUT); a verifier that raises or dies gives (0, CRASH) with the
    reason as detail. Where the process was killed by someone else (the kernel, for want of memory), the verification is
    done once more, and only then it is a CRASH. A pool that cannot work raises `VerifierError`, from here or from the
    future: never a score of 0. Expressions named here are loaded at once, others at their first use; an unknown name
    raises `UnknownName`.

    Verifiers that take many requests, or await, get those that are queued (at most `load.AT_ONCE`) in one message,
    under one deadline. Where that fails as a whole they are verified one by one: a bad request costs itself alone.

    Any thread may submit; in asyncio, await `asyncio.wrap_future(pool.submit(...))`. Workers are forked from a fresh
    interpreter, never from the calling process (pebble and multiprocessing import the caller's `__main__` into every
    child and hand its environment on, which under Ray and vLLM is slow and wrong). sandbox: the backend for verifiers
    that run programs, handed on as RLCLI_SANDBOX; empty: as the environment says.

        with ScoringPool(processes=2, deadline_s=5.0, verifiers=["gsm8k"]) as pool:
            future = pool.submit("gsm8k", VerifyRequest(completion="6 × 7 = 42\\n#### 42", ground_truth="42"))
            assert future.result().score == 1.0
    """

    def __init__(self, processes: int, deadline_s: float, verifiers: Sequence[str] = (), sandbox: str = "") -> None:
        assert processes >= 1, processes
        assert deadline_s > 0, deadline_s
        self._lines = {expression: _line(expression) for expression in verifiers}
        # One ticket for each request; whoever draws it may take more requests of its line along.
        self._tickets: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._nursery = Nursery(sandbox)
        try:
            for line in self._lines.values():
                self._nursery.load(line.composition)
            workers = [_Worker(self._nursery, slot, deadline_s) for slot in range(processes)]
        except BaseException:
            self._nursery.close()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"rlcli-scoring-{worker.slot}", daemon=True)
            for worker in workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, verifier: str, request: VerifyRequest) -> Future[Verdict]:
        """Queue one verification by the expression `verifier`.

        Raises `ConfigError` where it cannot be read, `UnknownName`, and `VerifierError` once the pool is closed.
        """
        line = self._lines.get(verifier)
        if line is None:
            line = self._lines.setdefault(verifier, _line(verifier))
        job = _Job(pickle.dumps(request.tail(MAX_COMPLETION_CHARS)))
        with self._lock:
            if self._closed:
                raise VerifierError("the scoring pool is closed")
            line.jobs.append(job)
            self._tickets.put(line)
        return job.future

    @property
    def loaded(self) -> Mapping[str, Facts]:
        """What is known of the expressions that it was made with, and of those that were verified since."""
        return self._nursery.loaded

    def close(self) -> None:
        """Kill all scoring processes. Futures without a result yet raise `CancelledError`. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for line in list(self._lines.values()):
            for job in line.take(len(line.jobs)):
                job.future.cancel()
        self._nursery.close()
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, worker: _Worker) -> None:
        while (line := self._tickets.get()) is not None:
            if not line.jobs:
                continue  # whoever drew an earlier ticket of this line took them along
            jobs: list[_Job] = []
            try:
                at_once = worker.prepare(line)
                jobs = [job for job in line.take(at_once) if job.future.set_running_or_notify_cancel()]
                for job, verdict in zip(jobs, worker.verify(line, jobs) if jobs else (), strict=True):
                    job.future.set_result(verdict)
            except Exception as error:
                for job in jobs or [job for job in line.take(1) if job.future.set_running_or_notify_cancel()]:
                    if not job.future.done():
                        job.future.set_exception(CancelledError() if self._closed else error)


@dataclass(frozen=True, slots=True)
class _Job:
    request: bytes
    future: Future[Verdict] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Line:
    """The requests that wait for one expression. key: what scoring processes know it by."""

    composition: Composition
    key: str
    jobs: deque[_Job] = field(default_factory=deque)

    def take(self, most: int) -> list[_Job]:
        """The first jobs, at most `most`. Any thread may."""
        taken: list[_Job] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self.jobs.popleft())
        return taken


def _line(expression: str) -> _Line:
    """Raises `ConfigError` for an expression that cannot be read, and `UnknownName`."""
    composition = parse(expression).located()
    for term in composition.terms:
        target(term.ref)
    return _Line(composition, str(composition))


class _Worker:
    """One worker process after another in one slot, driven by one thread."""

    def __init__(self, nursery: Nursery, slot: int, deadline_s: float) -> None:
        self.slot = slot
        self._nursery = nursery
        self._deadline_s = deadline_s
        self._connection, _ = nursery.start(slot)
        self._known = nursery.loaded

    def prepare(self, line: _Line) -> int:
        """Have the process know the verifiers of `line`; returns how many of its requests it may be given at once."""
        if line.key not in self._known:
            self._nursery.load(line.composition)
            self._start()
        return self._known[line.key].at_once

    def verify(self, line: _Line, jobs: Sequence[_Job]) -> list[Verdict]:
        """The verdict on each job. Raises `VerifierError` when that is not the verifier's doing."""
        verdicts = self._ask(line, jobs)
        if isinstance(verdicts, list):
            return verdicts
        if len(jobs) == 1:
            return [verdicts]
        return [verdict for job in jobs for verdict in self.verify(line, [job])]

    def _ask(self, line: _Line, jobs: Sequence[_Job]) -> list[Verdict] | Verdict:
        """The verdict on each job, or one TIMEOUT or CRASH on all of them. Once more in a new process where the first
        was killed from outside, which is nobody's fault here."""
        message = pickle.dumps((line.key, [job.request for job in jobs]))
        verdicts, former = self._once(message, len(jobs))
        return self._once(message, len(jobs))[0] if former.killed else verdicts

    def _once(self, message: bytes, count: int) -> tuple[list[Verdict] | Verdict, Former]:
        """The verdicts on `count` jobs, or one on all, and how the process ended, if it did."""
        started = self._send(message)
        if not self._connection.poll(self._deadline_s):
            self._start()
            detail = f"killed after {self._deadline_s:g} s"
            return Verdict(0.0, Outcome.TIMEOUT, detail=detail, latency_s=time.monotonic() - started), _ALIVE
        try:
            reply = self._connection.recv_bytes(2 * MAX_REPLY_BYTES * count)
        except (EOFError, OSError):
            former = self._start(gone=True)
            detail = f"the verifier's process died ({_how(former.status)})"
            return Verdict(0.0, Outcome.CRASH, detail=detail, latency_s=time.monotonic() - started), former
        latency_s = time.monotonic() - started
        try:
            replies = json.loads(reply)
        except ValueError as error:
            replies = {"crash": f"{type(error).__name__}: {error}"}
        if not isinstance(replies, list) or len(replies) != count:
            return _read(replies, latency_s), _ALIVE
        return [_read(one, latency_s / count) for one in replies], _ALIVE

    def _send(self, message: bytes) -> float:
        """Hand a message over; returns when its verification started."""
        for _ in range(STARTS):
            started = time.monotonic()
            try:
                self._connection.send_bytes(message)
            except OSError:  # it died while it was idle (the kernel's OOM killer, say), which is not this job's fault
                self._start(gone=True)
                continue
            return started
        raise VerifierError(f"{STARTS} scoring processes in a row died before they were asked anything")

    def _start(self, gone: bool = False) -> Former:
        """Replace the process; returns how the former ended. gone: it has hung up."""
        self._connection.close()
        known = self._nursery.loaded  # before the fork: what another thread loads meanwhile may be missing
        self._connection, former = self._nursery.start(self.slot, gone)
        self._known = known
        return former


def _read(fields: Any, latency_s: float) -> Verdict:
    """The verdict in a worker's reply; one that is malformed or not finite is a crash of the verifier."""
    try:
        if "crash" in fields:
            return Verdict(0.0, Outcome.CRASH, detail=fields["crash"], latency_s=latency_s)
        verdict = Verdict(**{**fields, "outcome": Outcome(fields["outcome"])}, latency_s=latency_s)
        for name, number in {"score": verdict.score, **verdict.parts}.items():
            if not math.isfinite(number):
                raise ValueError(f"the verifier's {name} is {number}")
    except (KeyError, TypeError, ValueError) as error:
        return Verdict(0.0, Outcome.CRASH, detail=f"{type(error).__name__}: {error}", latency_s=latency_s)
    return verdict


def _how(status: int | None) -> str:
    return (
        f"exit status {status}" if status is None or status >= 0 else f"signal {-status}: {signal.strsignal(-status)}"
    )
