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
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rlcli.errors import VerifierError
from rlcli.scoring.nursery import Nursery
from rlcli.scoring.nursery_main import MAX_REPLY_BYTES
from rlcli.scoring.registry import VERIFIERS
from rlcli.types import Outcome, Verdict, VerifyRequest

MAX_COMPLETION_CHARS = 1 << 20
"""A longer completion loses its beginning before it is sent: answers stand at the end. About 250,000 tokens."""


class ScoringPool:
    """Runs verifiers by name in `processes` worker processes, each verification for at most `deadline_s` seconds.

    The deadline counts from when the verification starts, not from `submit`. Past it the worker is killed and replaced
    within milliseconds, and the verdict is (0, TIMEOUT); a verifier that raises or dies gives (0, CRASH) with the
    reason as detail. A pool that cannot work raises `VerifierError`, from here or from the future: never a score of 0.
    Verifiers named here are imported at once, others at their first use; an unknown name raises `UnknownName`.

    Any thread may submit; in asyncio, await `asyncio.wrap_future(pool.submit(...))`. Workers are forked from a fresh
    interpreter, never from the calling process (pebble and multiprocessing import the caller's `__main__` into every
    child and hand its environment on, which under Ray and vLLM is slow and wrong).

        with ScoringPool(processes=2, deadline_s=5.0, verifiers=["gsm8k"]) as pool:
            future = pool.submit("gsm8k", VerifyRequest(completion="6 × 7 = 42\\n#### 42", ground_truth="42"))
            assert future.result().score == 1.0
    """

    def __init__(self, processes: int, deadline_s: float, verifiers: Sequence[str] = ()) -> None:
        assert processes >= 1, processes
        assert deadline_s > 0, deadline_s
        targets = {name: VERIFIERS.target(name) for name in verifiers}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._nursery = Nursery()
        try:
            for name, target in targets.items():
                self._nursery.load(name, target)
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
        """Queue one verification. Raises `UnknownName`, and `VerifierError` once the pool is closed."""
        target = VERIFIERS.target(verifier)
        if len(request.completion) > MAX_COMPLETION_CHARS:
            request = replace(request, completion=request.completion[-MAX_COMPLETION_CHARS:])
        job = _Job(verifier, target, pickle.dumps((target, request)), Future())
        with self._lock:
            if self._closed:
                raise VerifierError("the scoring pool is closed")
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Kill all scoring processes. Futures without a result yet raise `CancelledError`. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job.future.cancel()
        self._nursery.close()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, worker: _Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                verdict = worker.verify(job)
            except Exception as error:
                job.future.set_exception(CancelledError() if self._closed else error)
            else:
                job.future.set_result(verdict)


@dataclass(frozen=True, slots=True)
class _Job:
    verifier: str
    target: str
    message: bytes
    future: Future[Verdict]


class _Worker:
    """One worker process after another in one slot, driven by one thread."""

    def __init__(self, nursery: Nursery, slot: int, deadline_s: float) -> None:
        self.slot = slot
        self._nursery = nursery
        self._deadline_s = deadline_s
        self._connection, _ = nursery.start(slot)
        self._known = nursery.loaded

    def verify(self, job: _Job) -> Verdict:
        """The verdict on one job. Raises `VerifierError` when that is not the verifier's doing."""
        if job.target not in self._known:
            self._nursery.load(job.verifier, job.target)
            self._start()
        started = self._send(job)
        if not self._connection.poll(self._deadline_s):
            self._start()
            detail = f"killed after {self._deadline_s:g} s"
            return Verdict(0.0, Outcome.TIMEOUT, detail=detail, latency_s=time.monotonic() - started)
        try:
            reply = self._connection.recv_bytes(MAX_REPLY_BYTES)
        except (EOFError, OSError):
            status = self._start()
            detail = f"the verifier's process died ({_how(status)})"
            return Verdict(0.0, Outcome.CRASH, detail=detail, latency_s=time.monotonic() - started)
        return _read(reply, time.monotonic() - started)

    def _send(self, job: _Job) -> float:
        """Hand the job over; returns when its verification started."""
        started = time.monotonic()
        try:
            self._connection.send_bytes(job.message)
        except OSError:  # it died while it was idle (the kernel's OOM killer, say), which is not this job's fault
            self._start()
            started = time.monotonic()
            try:
                self._connection.send_bytes(job.message)
            except OSError as error:
                raise VerifierError(f"two scoring processes in a row died before they started: {error}") from error
        return started

    def _start(self) -> int | None:
        """Replace the process; returns the exit status of the former."""
        self._connection.close()
        known = self._nursery.loaded  # before the fork: what another thread loads meanwhile may be missing
        self._connection, status = self._nursery.start(self.slot)
        self._known = known
        return status


def _read(reply: bytes, latency_s: float) -> Verdict:
    """The verdict in a worker's reply; one that is malformed or not finite is a crash of the verifier."""
    try:
        fields: dict[str, Any] = json.loads(reply)
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
