"""The process that starts scoring processes: it imports the verifiers once, then forks each worker in milliseconds.

    owner ── control socket ──> fork server ── fork ──> worker 0, worker 1, …   (each with its own socket to the owner)

It is a fresh interpreter with a single thread, so that forking it is safe; the owner, which holds threads and CUDA, is
never forked. One control message is one JSON object in one datagram, answered before the next is read:

    {"load": "math + 0.1 * format", "is_sum": true, "parts": [{"name": "math", "target": "package.module:function",
     "options": {}, "weight": 1.0}, …]}   import them, answer with the fields of `fork_server.Facts`; or {"error": …}
    {"start": 0, "gone": false} and       kill and reap worker 0 if there is one, fork another that reads the socket,
     a socket                             answer {"pid": its process id; "status": exit status of the former, negative
                                          for a signal, or null; "killed": whether somebody else ended it by SIGKILL}.
                                          gone: it has closed its connection, so wait a moment for its end

Nothing outlives the owner: the fork server sees the control socket close, or its parent change, and kills its workers;
the kernel kills them (PR_SET_PDEATHSIG) if the fork server itself is killed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from rlcli.errors import DEBUG, RlcliError
from rlcli.rewards.combine import Verified
from rlcli.rewards.crash import describe, user_traceback
from rlcli.rewards.gold_verifiers import GoldResponse
from rlcli.rewards.service.shared_rows import unpack_request
from rlcli.rewards.verifier_loading import NotLoaded, Part, Scorer, WrongOption, load
from rlcli.support.redact import redacted
from rlcli.types import Verdict, VerifyRequest

if TYPE_CHECKING:
    from rlcli.rewards.processes.fork_server import FailedAnswer, LoadedAnswer, LoadRequest, StartAnswer, StartRequest

MEMORY_LIMIT_BYTES = 4 << 30
"""Maximum private memory (RLIMIT_DATA) of one worker, beyond what was loaded before its fork (a reward model); a
verification that needs more ends in a MemoryError."""

MAX_TEXT_CHARS = 1000
"""Maximum length of a verdict's answer and detail."""

MAX_EXTRA_CHARS = 400
"""Maximum length of each text of a verdict's `extra`."""

MAX_REPLY_BYTES = 1 << 16
"""Maximum length of an encoded verdict."""

_PARENT_CHECK_S = 0.3
_EXIT_S = 0.5
"""A process closes its files a moment before it ends; on a busy machine that moment is long."""
_PR_SET_PDEATHSIG = 1


def main(control_fd: str, owner: str) -> None:
    """Serve the owner's control socket until the owner closes it or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the owner decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(control_fd))
    scorers: dict[str, Scorer] = {}
    workers: dict[int, int] = {}
    try:
        while True:
            # A stray fork of the owner could hold the socket open, so check the parent too.
            readable = wait([control], _PARENT_CHECK_S)
            if os.getppid() != int(owner):
                break
            if not readable:
                continue
            message, fds, _, _ = socket.recv_fds(control, 65536, 1)
            if not message:
                break
            _answer(control, json.loads(message), fds, scorers, workers)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner ended between request and answer
    finally:
        for pid in workers.values():
            _end(pid)


def _answer(
    control: socket.socket,
    message: LoadRequest | StartRequest,
    fds: list[int],
    scorers: dict[str, Scorer],
    workers: dict[int, int],
) -> None:
    if "load" in message:
        control.send(json.dumps(_load(message, scorers)).encode())
        return
    former = workers.pop(message["start"], None)
    ended = former is not None and _ends_within(former, _EXIT_S if message["gone"] else 0.0)
    status = None if former is None else _end(former)
    fork_server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _work(Connection(fds[0]), scorers, fork_server)
        finally:
            os._exit(1)  # never return into the fork server's loop
    os.close(fds[0])
    os.setpgid(pid, pid)  # so that processes started by a verifier die with it
    workers[message["start"]] = pid
    killed = ended and status == -signal.SIGKILL
    answer: StartAnswer = {"pid": pid, "status": status, "killed": killed}
    control.send(json.dumps(answer).encode())


def _load(message: LoadRequest, scorers: dict[str, Scorer]) -> LoadedAnswer | FailedAnswer:
    """Import the verifiers of an expression."""
    try:
        parts = [Part(**part) for part in message["parts"]]
        scorer = load(message["load"], parts, is_sum=message["is_sum"])
    except WrongOption as error:
        return {"error": str(error), "index": None}
    except NotLoaded as error:
        if isinstance(cause := error.__cause__, RlcliError):
            return {"error": redacted(cause.message), "hint": redacted(cause.hint), "index": error.index}
        return {"error": describe(cause or error), "index": error.index}
    scorers[message["load"]] = scorer
    gc.freeze()  # keep loaded modules shared with the workers: their collector must not write to them
    facts: LoadedAnswer = {
        "at_once": scorer.at_once,
        "needs_sandbox": scorer.needs_sandbox,
        "patience_s": scorer.patience_s,
        "keys": scorer.keys,
        "groups": scorer.groups,
        "answer_kind": scorer.answer_kind,
        "has_gold": scorer.has_gold,
    }
    if _has_own_limits(scorer):
        facts["own_limits"] = scorer.own_limits
    return facts


def _has_own_limits(scorer: Scorer) -> bool:
    return any(map(any, scorer.own_limits))


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait for a worker that ends by itself or was killed from outside; False on a timeout. It is not reaped."""
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.001)
    return True


def _end(pid: int) -> int:
    """Kill a worker and all processes it started; returns its exit status, negative for a signal."""
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work(connection: Connection, scorers: dict[str, Scorer], fork_server: int) -> None:
    """Main loop of a worker, until the owner closes the connection.

    In: a pickled (expression, sources that are new to it, keys of sources to drop, requests as `unpack_request` takes
    them). Out: a JSON reply, a list of a verdict or a crash for each request, or one crash for all. If a term of the
    expression has its own limits, the index of each term is sent, as digits, before it is verified.

    Replies are JSON so that the owner never unpickles data from a verifier's process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != fork_server:  # it died before the call
        os._exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + MEMORY_LIMIT_BYTES
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    worker, sources = os.getpid(), dict[bytes, bytes]()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        reply = _verify(message, scorers, sources, connection)
        if os.getpid() != worker:  # a verifier forked: a second reply would be taken as another request's score
            return
        connection.send_bytes(reply)


def _data_bytes() -> int:
    """This process's private memory, as RLIMIT_DATA counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _verify(
    message: bytes, scorers: dict[str, Scorer], sources: dict[bytes, bytes], connection: Connection | None = None
) -> bytes:
    """Verify the requests of a message; returns the reply.

    sources: the sources' data by key, which the message changes. connection: receives the index of each term that
    begins.
    """
    requests: list[VerifyRequest] = []
    try:
        expression, new, gone, responses = pickle.loads(message)
        sources.update(new)
        for key in gone:
            del sources[key]
        requests = [unpack_request(sources[key], response) for key, response in responses]
        scorer, worker = scorers[expression], os.getpid()

        def begins(index: int) -> None:
            if connection and os.getpid() == worker:
                connection.send_bytes(b"%d" % index)

        verified = scorer.verify(requests, begins) if _has_own_limits(scorer) else scorer.verify(requests)
        replies = [_reply(result, request.completion) for result, request in zip(verified, requests, strict=True)]
        return b"[" + b",".join(replies) + b"]"
    except BaseException as error:  # including SystemExit and KeyboardInterrupt: any exception is a crash
        return _crash(error, requests[0].completion if len(requests) == 1 else None)


def _reply(verified: Verified, completion: str) -> bytes:
    """One verdict, or the reason for its absence, as JSON."""
    try:
        if isinstance(verified, BaseException):
            return _crash(verified, completion)
        reply = json.dumps(_encode(verified)).encode()
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError(f"the verdict has {len(reply)} bytes, more than {MAX_REPLY_BYTES}")
        return reply
    except Exception as error:  # a verdict with invalid contents
        return _crash(error, completion)


def _crash(error: BaseException, completion: str | None) -> bytes:
    """completion: None for an error about several requests, which are then verified one by one."""
    reply = {"crash": describe(error, completion)}
    if os.environ.get(DEBUG) and completion is not None and (text := user_traceback(error)):
        reply["traceback"] = text
    return json.dumps(reply).encode()


def _encode(verdict: Verified) -> dict[str, object]:
    assert isinstance(verdict, Verdict), verdict
    max_chars = None if isinstance(verdict, GoldResponse) else MAX_TEXT_CHARS
    return {
        "score": float(verdict.score),
        "outcome": str(verdict.outcome),
        "answer": None if verdict.answer is None else str(verdict.answer)[:max_chars],
        "parts": {str(name): float(part) for name, part in verdict.parts.items()},
        "detail": str(verdict.detail)[:MAX_TEXT_CHARS],
        **({"extra": _texts(verdict.extra)} if verdict.extra else {}),
    }


def _texts(extra: Mapping[str, object]) -> dict[str, str]:
    return {str(name)[:MAX_TEXT_CHARS]: str(text)[:MAX_EXTRA_CHARS] for name, text in extra.items()}
