"""One slot of the pool: send requests to its scoring process, watch it, and replace it when it fails."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rlcli.errors import VerifierError
from rlcli.rewards.crash import BEFORE_RESPONSE, shortened
from rlcli.rewards.expression import Composition
from rlcli.rewards.processes.cpu_time import cpu_seconds
from rlcli.rewards.processes.fork_server import ForkServer, FormerWorker
from rlcli.rewards.processes.fork_server_main import MAX_REPLY_BYTES
from rlcli.rewards.service.shared_rows import Source, SourceCache, completion_of
from rlcli.support.importing import how_ended
from rlcli.types import Outcome, Verdict

STARTS = 4
"""Maximum number of processes in a row that die before their first request; more than that is no accident."""

CPU_CHECK_S = 0.02
"""Minimum time between two checks of a process's CPU time."""

ASLEEP = 2
"""Number of tries in a row that may exceed the wall-clock limit. Then the verifier is assumed to hang always: the next
tries get SHORT times the CPU deadline and no retry, until one ends. Otherwise a step of a thousand samples would take
hours before the run can stop."""
SHORT = 2.0

WAIT_SPARE_S = 10.0
"""Seconds beyond a verifier's own wait_s (and a tenth of it) before it is killed."""

OVERRAN = "used up its CPU time twice"
"""Prefix of a verdict's detail if the verification has exceeded its CPU deadline twice."""

FAILED = (Outcome.TIMEOUT, Outcome.CRASH)


def wall_bound(deadline_s: float) -> float:
    """Wall-clock seconds after which a verification is ended that has not used up its CPU seconds.

    >>> wall_bound(1.0), wall_bound(5.0)
    (30.0, 50.0)
    """
    return max(10 * deadline_s, 30.0)


@dataclass(frozen=True, slots=True)
class Job:
    """A queued verification."""

    source: Source
    """The fields of the request that its row has in common."""
    response: bytes
    """The other fields, from `pack_response`."""
    future: Future[Verdict] = field(default_factory=Future)
    """Receives the verdict."""


Group = tuple[Job, ...]
"""Verifications of one call: all responses to a prompt if the verifier needs them together, else one."""


@dataclass(frozen=True, slots=True)
class Line:
    """The queue of one expression."""

    composition: Composition
    """The parsed expression."""
    key: str
    """Its id in scoring processes: the canonical text."""
    groups: deque[Group] = field(default_factory=deque)
    """Groups that wait for a worker."""

    @property
    def jobs(self) -> list[Job]:
        """All queued verifications."""
        return [job for group in list(self.groups) for job in group]

    def take(self, limit: int) -> list[Group]:
        """Take the first groups, with at most `limit` jobs unless the first has more. Callable from any thread."""
        batch: list[Group] = []
        with contextlib.suppress(IndexError):
            while (count := sum(map(len, batch))) < limit:
                if batch and count + len(self.groups[0]) > limit:
                    break
                batch.append(self.groups.popleft())
        return batch


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of one try of some requests."""

    verdicts: list[Verdict]
    """One for each request, or one for all if the whole batch failed."""
    per_request: bool = True
    """True if there is a verdict for each request."""
    final: frozenset[int] = frozenset()
    """Indices of failures reported by a verifier with a `wait_s`, which has retried by itself: not tried again."""
    overran: bool = False
    """Used up the CPU time that any verification has."""
    killed: bool = False
    """Killed from outside, for example by the kernel's OOM killer."""

    @classmethod
    def failed(
        cls, outcome: Outcome, detail: str, latency_s: float, *, overran: bool = False, killed: bool = False
    ) -> _Attempt:
        verdict = Verdict(0.0, outcome, detail=detail, latency_s=latency_s)
        return cls([verdict], per_request=False, overran=overran, killed=killed)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Limits of a verification, or of one of its terms."""

    cpu_s: float
    """CPU seconds."""
    wall_s: float
    """Wall-clock seconds."""
    set_by_verifier: bool = False
    """True if the limit comes from an option of the verifier."""


class ScoringWorker:
    """Sends requests to the scoring process of one slot. Used by one thread.

    Limits of one verification: cpu_s: CPU seconds of its process and of all that it started; wall_s: wall-clock
    seconds, which end one that sleeps. In an expression with a verifier that sets limits (its options deadline_s and
    wait_s), each term has separate limits, so that a slow one loosens no other's.
    """

    def __init__(self, fork_server: ForkServer, slot: int, cpu_s: float, wall_s: float) -> None:
        self.slot = slot
        self._fork_server = fork_server
        self._cpu_s, self._longest_s = cpu_s, wall_s
        self._connection, self._pid, _ = fork_server.start(slot)
        self._known = fork_server.loaded
        self._fresh = True
        self._sources = SourceCache()
        self._timeouts = 0
        self.bytes_sent = 0

    def prepare(self, line: Line) -> int:
        """Make the process load the verifiers of `line`; returns the maximum number of its requests in one call."""
        if line.key not in self._known:
            self._fork_server.load(line.composition)
            self._start()
        return self._known[line.key].at_once

    def verify(self, line: Line, groups: Sequence[Sequence[Job]]) -> list[Verdict]:
        """The verdict on each job of the groups, in order; all of a group in one call. Raises `VerifierError` for a
        failure that the verifier did not cause."""
        attempt = self._try(line, [job for group in groups for job in group])
        if not attempt.per_request and len(groups) > 1:  # one of them made the batch fail
            return [verdict for group in groups for verdict in self.verify(line, [group])]
        verdicts = attempt.verdicts if attempt.per_request else attempt.verdicts * len(groups[0])
        retry, start, results = self._timeouts < ASLEEP, 0, list[Verdict]()
        for group in groups:
            first = verdicts[start : start + len(group)]
            failed = {
                index
                for index, verdict in enumerate(first)
                if verdict.outcome in FAILED and start + index not in attempt.final
            }
            results += self._retry_failed(line, group, attempt, first, failed) if retry and failed else first
            start += len(group)
        return results

    def _retry_failed(
        self,
        line: Line,
        group: Sequence[Job],
        first_attempt: _Attempt,
        first: Sequence[Verdict],
        failed: Collection[int],
    ) -> list[Verdict]:
        """The verdicts on a group; those at `failed` come from a second try in a fresh process."""
        if not self._fresh:
            self._start()
        attempt = self._try(line, group, spare=not first_attempt.killed)
        results = list(first)
        for index in failed:
            second = attempt.verdicts[index if attempt.per_request else 0]
            results[index] = replace(second, latency_s=first[index].latency_s + second.latency_s)
        if first_attempt.overran and attempt.overran and len(group) == 1:
            # Otherwise a response that keeps the verifier busy would score better than a wrong one.
            detail = f"{OVERRAN} (more than {self._cpu_s:g} s)"
            return [Verdict(0.0, Outcome.WRONG, detail=detail, latency_s=results[0].latency_s)]
        return results

    def _try(self, line: Line, jobs: Sequence[Job], spare: bool = True) -> _Attempt:
        """One try; repeated in a new process if the first was killed from outside, which nothing here caused."""
        attempt = self._once(line, jobs)
        return self._once(line, jobs) if attempt.killed and spare else attempt

    def _once(self, line: Line, jobs: Sequence[Job]) -> _Attempt:
        started, count = self._send(line, jobs), len(jobs)
        limit, began = self._limit(line, 0, count), started
        try:
            while True:
                overran = self._await_reply(began, limit)
                if overran is not None:
                    return self._killed(limit, overran, started)
                reply = self._connection.recv_bytes(2 * MAX_REPLY_BYTES * count)
                if not reply.isdigit():
                    break
                limit, began = self._limit(line, int(reply), count), time.monotonic()
        except (EOFError, OSError):
            former = self._start(gone=True)
            detail = f"the verifier's process died ({how_ended(former.status)})"
            if count == 1:
                detail += f"{BEFORE_RESPONSE}{shortened(completion_of(jobs[0].response))}"
            return _Attempt.failed(Outcome.CRASH, detail, time.monotonic() - started, killed=former.killed)
        self._timeouts = 0
        latency_s = time.monotonic() - started
        try:
            replies = json.loads(reply)
        except ValueError as error:
            replies = {"crash": f"{type(error).__name__}: {error}"}
        self._fork_server.print_tracebacks(replies if isinstance(replies, list) else [replies])
        if not isinstance(replies, list) or len(replies) != count:
            return _Attempt([_decode_verdict(replies, latency_s)], per_request=False)
        waits = any(wait_s for _, wait_s in self._known[line.key].own_limits)
        final = frozenset(i for i, entry in enumerate(replies) if waits and entry.get("outcome") in FAILED)
        return _Attempt([_decode_verdict(entry, latency_s / count) for entry in replies], final=final)

    def _killed(self, limit: _Limit, overran: bool, started: float) -> _Attempt:
        """Replace the process, which has reached a limit."""
        self._start()
        self._timeouts += not overran
        used = f"{limit.cpu_s:g} s of CPU time" if overran else f"{limit.wall_s:g} s"
        latency_s = time.monotonic() - started
        overran_pool = overran and not limit.set_by_verifier
        return _Attempt.failed(Outcome.TIMEOUT, f"killed after {used}", latency_s, overran=overran_pool)

    def _limit(self, line: Line, term: int, count: int) -> _Limit:
        """The limit of one term of an expression for `count` requests, or of the whole expression if no term sets one.

        wait_s is the time after which the verifier itself gives up, so it is killed somewhat later.
        """
        term_limits = self._known[line.key].own_limits
        deadline_s, wait_s = term_limits[term] if term_limits else (0.0, 0.0)
        # A group is not divided when it has taken too long: it has the time of all its responses.
        responses = count if self._known[line.key].groups else 1
        cpu_s = deadline_s * count or self._cpu_s * responses
        if wait_s:
            return _Limit(cpu_s, 1.1 * wait_s + WAIT_SPARE_S, set_by_verifier=True)
        if deadline_s:
            return _Limit(cpu_s, wall_bound(cpu_s), set_by_verifier=True)
        return _Limit(cpu_s, self._wall_s * responses)

    def _await_reply(self, started: float, limit: _Limit) -> bool | None:
        """None once there is a reply; True if the process used up its CPU seconds, False at the wall-clock limit.

        The first tenth of the CPU seconds is not checked, so that short verifications never read /proc.
        """
        cpu_s, wall_s = limit.cpu_s, limit.wall_s
        if self._connection.poll(min(cpu_s / 10, wall_s)):
            return None
        remaining_s, start_cpu_s = cpu_s, cpu_seconds(self._pid)
        while remaining_s > 0:
            # With one thread it cannot use more CPU time than wall-clock time.
            within = min(max(remaining_s, CPU_CHECK_S), wall_s - (time.monotonic() - started))
            if self._connection.poll(max(within, 0.0)):
                return None
            remaining_s = cpu_s - (cpu_seconds(self._pid) - start_cpu_s)
            if remaining_s > 0 and time.monotonic() - started >= wall_s:
                return False
        return True

    @property
    def _wall_s(self) -> float:
        """The wall-clock limit of the next try."""
        bound = self._longest_s
        return bound if self._timeouts < ASLEEP else min(bound, max(SHORT * self._cpu_s, 0.5))

    def _send(self, line: Line, jobs: Sequence[Job]) -> float:
        """Send the requests, with the sources that the process lacks; returns when their verification started."""
        for _ in range(STARTS):
            new, gone = self._sources.change(job.source for job in jobs)
            message = pickle.dumps((line.key, new, gone, [(job.source.key, job.response) for job in jobs]))
            started = time.monotonic()
            self.bytes_sent += len(message)
            try:
                self._connection.send_bytes(message)
            except OSError:  # it died while idle (e.g. by the OOM killer), which this job did not cause
                self._start(gone=True)
                continue
            self._fresh = False
            return started
        raise VerifierError(f"{STARTS} scoring processes in a row died before their first request")

    def _start(self, gone: bool = False) -> FormerWorker:
        """Replace the process; returns how the previous one ended. gone: it has closed its connection."""
        self._connection.close()
        known = self._fork_server.loaded  # before the fork: another thread's loads meanwhile may be missing
        self._connection, self._pid, former = self._fork_server.start(self.slot, gone)
        self._known, self._fresh = known, True
        self._sources.clear()
        return former


def _decode_verdict(fields: Any, latency_s: float) -> Verdict:
    """The verdict in a worker's reply; a malformed or non-finite one is a crash of the verifier. fields: any JSON: the
    process that wrote it has run a verifier."""
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
