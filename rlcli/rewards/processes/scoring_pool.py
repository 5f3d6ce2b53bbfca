"""Verify in processes that can be killed: a verification that hangs or crashes affects only its own verdict."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Self, TypeVar
from weakref import WeakValueDictionary

from rlcli.errors import VerifierError
from rlcli.rewards.expression import parse
from rlcli.rewards.processes.fork_server import Facts, ForkServer
from rlcli.rewards.processes.scoring_worker import Group, Job, Line, ScoringWorker, wall_bound
from rlcli.rewards.service.shared_rows import Source, pack_response
from rlcli.rewards.verifier_registry import target
from rlcli.types import Verdict, VerifyRequest

MAX_COMPLETION_CHARS = 1 << 20
"""The beginning of a longer completion is cut before sending: answers are at the end. About 250,000 tokens."""

IN_FLIGHT = 512
"""Maximum number of verifications that `in_order` has queued in a pool."""

T = TypeVar("T")


class ScoringPool:
    """Runs verifiers in `processes` worker processes, each verification for at most `deadline_s` seconds of CPU time.

    A verifier is named by an expression (`rewards.expression`): `math`, `math + 0.1 * format`, `some/file.py:function`.
    The deadline counts CPU time of the process and of all that it starts, so that machine load changes no verdict; one
    that sleeps is ended `wall_s` seconds after its verification started (0: `wall_bound(deadline_s)`). A process past
    either limit is killed and replaced within milliseconds. A failed verification is retried once in a fresh process:

    - CPU deadline exceeded twice: (0, WRONG), with a detail that begins with `scoring_worker.OVERRAN`;
    - else ended by the wall clock, or once by its CPU deadline: (0, TIMEOUT);
    - raised or died again: (0, CRASH), with the reason as detail.

    If the process was killed from outside (by the kernel, out of memory), the verification is repeated without counting
    as one of the two tries. A pool that cannot work raises `VerifierError`, from here or from the future: never a score
    of 0. Expressions named here are loaded at once, others at their first use; an unknown name raises `UnknownName`.

    Verifiers that take batches or are async get the queued requests (at most `verifier_loading.AT_ONCE`) in one
    message, under one deadline. If a batch fails as a whole, its requests are verified one by one, each with its two
    tries: a bad request affects only itself. A verifier that reads the responses to a prompt together (`Facts.groups`)
    gets all those of `submit_group` in one message; one that fails affects its group.

    Any thread may submit; in asyncio, await `asyncio.wrap_future(pool.submit(...))`. Workers are forked from a fresh
    interpreter, never from the calling process (pebble and multiprocessing import the caller's `__main__` into every
    child and pass on its environment, which under Ray and vLLM is slow and wrong). The data of a row, common to all its
    verifications, is sent to each process once (see `shared_rows`). sandbox: the backend for verifiers that run
    programs, passed as RLCLI_SANDBOX; empty: from the environment. log: the file for output of verifiers.

        with ScoringPool(processes=2, deadline_s=5.0, verifiers=["gsm8k"]) as pool:
            future = pool.submit("gsm8k", VerifyRequest(completion="6 × 7 = 42\\n#### 42", ground_truth="42"))
            assert future.result().score == 1.0
    """

    def __init__(
        self,
        processes: int,
        deadline_s: float,
        verifiers: Sequence[str] = (),
        sandbox: str = "",
        *,
        wall_s: float = 0.0,
        log: Path | None = None,
    ) -> None:
        assert processes >= 1, processes
        assert deadline_s > 0, deadline_s
        wall_s = wall_s or wall_bound(deadline_s)
        self._lines = {expression: _line(expression) for expression in verifiers}
        # One ticket for each group; the worker that gets it may take more groups of its line.
        self._tickets: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        # Each source is stored once, however many responses wait for it.
        self._sources: WeakValueDictionary[bytes, Source] = WeakValueDictionary()
        self._fork_server = ForkServer(sandbox, log)
        try:
            for line in self._lines.values():
                self._fork_server.load(line.composition)
            self._workers = [ScoringWorker(self._fork_server, slot, deadline_s, wall_s) for slot in range(processes)]
        except BaseException:
            self._fork_server.close()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"rlcli-scoring-{worker.slot}", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, verifier: str, request: VerifyRequest) -> Future[Verdict]:
        """Queue one verification by the expression `verifier`.

        Raises `ConfigError` if it cannot be parsed, `UnknownName`, and `VerifierError` once the pool is closed.
        """
        [future] = self.submit_together(verifier, [request])
        return future

    def submit_together(self, verifier: str, requests: Sequence[VerifyRequest]) -> list[Future[Verdict]]:
        """Queue the verifications of responses to one prompt, for one call of the verifier. Raises like `submit`."""
        source = Source.of(requests[0])
        source = self._sources.setdefault(source.key, source)
        responses = [pack_response(request.tail(MAX_COMPLETION_CHARS)) for request in requests]
        return self.submit_group(verifier, source, responses)

    def submit_response(self, verifier: str, source: Source, response: bytes) -> Future[Verdict]:
        """Like `submit`, for a request that is split into its source and its `pack_response`."""
        [future] = self.submit_group(verifier, source, [response])
        return future

    def submit_group(self, verifier: str, source: Source, responses: Sequence[bytes]) -> list[Future[Verdict]]:
        """Queue the verifications of all responses to a prompt, for one call of the verifier. responses: as in
        `submit_response`."""
        line = self._lines.get(verifier)
        if line is None:
            line = self._lines.setdefault(verifier, _line(verifier))
        group = tuple(Job(source, response) for response in responses)
        with self._lock:
            if self._closed:
                raise VerifierError("the scoring pool is closed")
            line.groups.append(group)
            self._tickets.put(line)
        return [job.future for job in group]

    @property
    def grouped(self) -> list[str]:
        """The loaded expressions whose verifiers read the responses to a prompt together."""
        loaded = self._fork_server.loaded
        return [name for name, line in list(self._lines.items()) if line.key in loaded and loaded[line.key].groups]

    @property
    def loaded(self) -> Mapping[str, Facts]:
        """The facts of each expression named at construction or verified since."""
        return self._fork_server.loaded

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all scoring processes."""
        return sum(worker.bytes_sent for worker in self._workers)

    def close(self) -> None:
        """Kill all scoring processes. Futures without a result yet raise `CancelledError`. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for line in list(self._lines.values()):
            for job in line.jobs:
                job.future.cancel()
            line.groups.clear()
        self._fork_server.close()
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: ScoringWorker) -> None:
        while (line := self._tickets.get()) is not None:
            if not line.groups:
                continue  # taken with an earlier ticket of this line
            groups: list[list[Job]] = []
            try:
                groups = _running(line.take(worker.prepare(line)))
                verdicts = worker.verify(line, groups) if groups else []
                for job, verdict in zip((job for group in groups for job in group), verdicts, strict=True):
                    job.future.set_result(verdict)
            except Exception as error:
                for job in (job for group in groups or _running(line.take(1)) for job in group):
                    if not job.future.done():
                        job.future.set_exception(CancelledError() if self._closed else error)


def _running(groups: Iterable[Group]) -> list[list[Job]]:
    """Mark the jobs of groups as running and return those that are not cancelled."""
    running = ([job for job in group if job.future.set_running_or_notify_cancel()] for group in groups)
    return [group for group in running if group]


def in_order(items: Iterable[T], submit: Callable[[T], Future[Verdict]]) -> Iterator[tuple[T, Verdict]]:
    """The verdict on each item, in their order. A bounded number is queued: items are made as they are needed."""
    waiting: deque[tuple[T, Future[Verdict]]] = deque()
    for item in items:
        waiting.append((item, submit(item)))
        if len(waiting) >= IN_FLIGHT:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def _line(expression: str) -> Line:
    """The queue of an expression. Raises `ConfigError` if it cannot be parsed, and `UnknownName`."""
    composition = parse(expression).located()
    for term in composition.terms:
        target(term.ref)
    return Line(composition, str(composition))
