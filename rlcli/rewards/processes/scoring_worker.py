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
from rlcli.rewards.service.shared_rows import Held, Source, completion_of
from rlcli.support.importing import how_ended
from rlcli.types import Outcome, Verdict

STARTS = 4
"""Maximum number of processes in a row that die before their first request; more than that is no accident."""

LOOK_S = 0.02
"""Minimum time between two checks of a process's CPU time."""

ASLEEP = 2
"""After so many tries in a row that exceeded the wall-clock limit, a verifier is assumed to hang always: the next ones
get SHORT times the CPU deadline and one try, until one ends. Otherwise a step of a thousand samples would take hours
before the run can stop."""
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
    response: bytes
    future: Future[Verdict] = field(default_factory=Future)


Group = tuple[Job, ...]
"""Verifications that are done in one call: of all responses to a prompt, where the verifier asks for that, else one."""


@dataclass(frozen=True, slots=True)
class Line:
    """The requests that wait for one expression. key: its id in scoring processes."""

    composition: Composition
    key: str
    groups: deque[Group] = field(default_factory=deque)

    @property
    def jobs(self) -> list[Job]:
        """All of its verifications that wait."""
        return [job for group in list(self.groups) for job in group]

    def take(self, most: int) -> list[Group]:
        """Take the first groups, with at most `most` jobs unless the first has more. Callable from any thread."""
        taken: list[Group] = []
        with contextlib.suppress(IndexError):
            while (count := sum(map(len, taken))) < most:
                if taken and count + len(self.groups[0]) > most:
                    break
                taken.append(self.groups.popleft())
        return taken


@dataclass(frozen=True, slots=True)
class _Tried:
    """The result of one try of some requests. verdicts: one each, or one for all if the whole batch failed. final: the
    places of failures that a verifier with a `wait_s` has reported, after tries of its own. overran: it used up the CPU
    time that any verification has. killed: from outside, for example by the kernel's OOM killer."""

    verdicts: list[Verdict]
    whole: bool = True
    final: frozenset[int] = frozenset()
    overran: bool = False
    killed: bool = False

    @classmethod
    def failed(
        cls, outcome: Outcome, detail: str, latency_s: float, *, overran: bool = False, killed: bool = False
    ) -> _Tried:
        verdict = Verdict(0.0, outcome, detail=detail, latency_s=latency_s)
        return cls([verdict], whole=False, overran=overran, killed=killed)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Of the CPU and wall-clock seconds of a verification, or of one of its terms. own: the verifier has set it."""

    cpu_s: float
    wall_s: float
    own: bool = False


class ScoringWorker:
    """Used by one thread. Limits of one verification: cpu_s: CPU seconds of its process and of all that it started;
    wall_s: wall-clock seconds, which end one that sleeps. In an expression with a verifier that has limits of its own
    (its options deadline_s and wait_s), each term has its own limits, so that a slow one loosens no other's."""

    def __init__(self, fork_server: ForkServer, slot: int, cpu_s: float, wall_s: float) -> None:
        self.slot = slot
        self._fork_server = fork_server
        self._cpu_s, self._longest_s = cpu_s, wall_s
        self._connection, self._pid, _ = fork_server.start(slot)
        self._known = fork_server.loaded
        self._fresh = True
        self._held = Held()
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
        tried = self._try(line, [job for group in groups for job in group])
        if not tried.whole and len(groups) > 1:  # one of them made the batch fail
            return [verdict for group in groups for verdict in self.verify(line, [group])]
        verdicts = tried.verdicts if tried.whole else tried.verdicts * len(groups[0])
        again, start, found = self._timeouts < ASLEEP, 0, list[Verdict]()
        for group in groups:
            first = verdicts[start : start + len(group)]
            failed = {
                place
                for place, verdict in enumerate(first)
                if verdict.outcome in FAILED and start + place not in tried.final
            }
            found += self._again(line, group, tried, first, failed) if again and failed else first
            start += len(group)
        return found

    def _again(
        self, line: Line, group: Sequence[Job], before: _Tried, first: Sequence[Verdict], failed: Collection[int]
    ) -> list[Verdict]:
        """The verdicts on a group of which some have failed, those from a fresh process."""
        if not self._fresh:
            self._start()
        tried = self._try(line, group, spare=not before.killed)
        found = list(first)
        for place in failed:
            second = tried.verdicts[place if tried.whole else 0]
            found[place] = replace(second, latency_s=first[place].latency_s + second.latency_s)
        if before.overran and tried.overran and len(group) == 1:
            # Otherwise a response that keeps the verifier busy would score better than a wrong one.
            detail = f"{OVERRAN} (more than {self._cpu_s:g} s)"
            return [Verdict(0.0, Outcome.WRONG, detail=detail, latency_s=found[0].latency_s)]
        return found

    def _try(self, line: Line, jobs: Sequence[Job], spare: bool = True) -> _Tried:
        """One try; repeated in a new process if the first was killed from outside, which nothing here caused."""
        tried = self._once(line, jobs)
        return self._once(line, jobs) if tried.killed and spare else tried

    def _once(self, line: Line, jobs: Sequence[Job]) -> _Tried:
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
            return _Tried.failed(Outcome.CRASH, detail, time.monotonic() - started, killed=former.killed)
        self._timeouts = 0
        latency_s = time.monotonic() - started
        try:
            replies = json.loads(reply)
        except ValueError as error:
            replies = {"crash": f"{type(error).__name__}: {error}"}
        self._fork_server.print_tracebacks(replies if isinstance(replies, list) else [replies])
        if not isinstance(replies, list) or len(replies) != count:
            return _Tried([_read(replies, latency_s)], whole=False)
        waits = any(wait_s for _, wait_s in self._known[line.key].own_limits)
        final = frozenset(i for i, one in enumerate(replies) if waits and one.get("outcome") in FAILED)
        return _Tried([_read(one, latency_s / count) for one in replies], final=final)

    def _killed(self, limit: _Limit, overran: bool, started: float) -> _Tried:
        """Replace the process, which has reached a limit."""
        self._start()
        self._timeouts += not overran
        used = f"{limit.cpu_s:g} s of CPU time" if overran else f"{limit.wall_s:g} s"
        took, wrong = time.monotonic() - started, overran and not limit.own
        return _Tried.failed(Outcome.TIMEOUT, f"killed after {used}", took, overran=wrong)

    def _limit(self, line: Line, term: int, count: int) -> _Limit:
        """Of one term of an expression, for so many requests at once; of the whole, if no term has limits of its own.

        wait_s is the time after which the verifier itself gives up, so it is killed somewhat later.
        """
        own = self._known[line.key].own_limits
        deadline_s, wait_s = own[term] if own else (0.0, 0.0)
        # A group is not divided when it has taken too long: it has the time of all its responses.
        many = count if self._known[line.key].groups else 1
        cpu_s = deadline_s * count or self._cpu_s * many
        if wait_s:
            return _Limit(cpu_s, 1.1 * wait_s + WAIT_SPARE_S, own=True)
        return _Limit(cpu_s, wall_bound(cpu_s), own=True) if deadline_s else _Limit(cpu_s, self._wall_s * many)

    def _await_reply(self, started: float, limit: _Limit) -> bool | None:
        """None once there is a reply; else whether the process has used up its CPU seconds, or has only taken long.

        The first tenth of these is not checked, so that short verifications never read its CPU time.
        """
        cpu_s, wall_s = limit.cpu_s, limit.wall_s
        if self._connection.poll(min(cpu_s / 10, wall_s)):
            return None
        left, before = cpu_s, cpu_seconds(self._pid)
        while left > 0:
            # With one thread it cannot use more CPU time than wall-clock time.
            within = min(max(left, LOOK_S), wall_s - (time.monotonic() - started))
            if self._connection.poll(max(within, 0.0)):
                return None
            left = cpu_s - (cpu_seconds(self._pid) - before)
            if left > 0 and time.monotonic() - started >= wall_s:
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
            new, gone = self._held.change(job.source for job in jobs)
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
        self._held.clear()
        return former


def _read(fields: Any, latency_s: float) -> Verdict:
    """The verdict in a worker's reply; a malformed or non-finite one is a crash of the verifier."""
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
