"""The process that raises scoring processes: it imports the verifiers once, then forks a worker in milliseconds.

    owner ── control socket ──> nursery ── fork ──> worker 0, worker 1, …      (each with its own socket to the owner)

It is a fresh interpreter with a single thread, so that forking it is safe; the owner, which holds threads and CUDA, is
never forked. One control message is one JSON object in one datagram, answered before the next is read:

    {"load": "math + 0.1 * format", "is_sum": true, "parts": [{"name": "math", "target": "package.module:function",
     "options": {}, "weight": 1.0}, …]}   import them, answer with the fields of `nursery.Facts`; or {"error": …}
    {"start": 0, "gone": false} and       kill and reap worker 0 if there is one, fork another that reads the socket,
     a socket                             answer {"pid": its process id; "status": exit status of the former, negative
                                          for a signal, or null; "killed": whether it was not us who ended it by
                                          SIGKILL}. gone: it has hung up, so that its end is waited for a moment

Nothing outlives the owner: the nursery sees the control socket close, or its parent change, and kills its workers; the
kernel kills them (PR_SET_PDEATHSIG) where the nursery itself is killed.
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
from multiprocessing.connection import Connection, wait
from typing import Any

from rlcli.redact import redacted
from rlcli.scoring.combine import Verified
from rlcli.scoring.load import NotLoaded, Part, Scorer, WrongOption, load
from rlcli.scoring.sources import joined
from rlcli.types import Verdict

MEMORY_LIMIT_BYTES = 4 << 30
"""Private memory (RLIMIT_DATA) of one worker; a verification that needs more ends in a MemoryError."""

MAX_TEXT_CHARS = 1000
"""Longest answer and detail that a verdict brings back."""

MAX_REPLY_BYTES = 1 << 16
"""Longest verdict, encoded."""

_PARENT_CHECK_S = 0.3
_EXIT_S = 0.5
"""A process that ends closes its files a moment before it has ended; on a busy machine the moment is long."""
_PR_SET_PDEATHSIG = 1


def main(control_fd: int, owner: int) -> None:
    """Serve the owner's control socket until the owner closes it or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group: the owner decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=control_fd)
    scorers: dict[str, Scorer] = {}
    workers: dict[int, int] = {}
    try:
        while True:
            # A stray fork of the owner could hold the socket open, hence the look at the parent.
            readable = wait([control], _PARENT_CHECK_S)
            if os.getppid() != owner:
                break
            if not readable:
                continue
            message, fds, _, _ = socket.recv_fds(control, 65536, 1)
            if not message:
                break
            _answer(control, json.loads(message), fds, scorers, workers)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner went away between question and answer
    finally:
        for pid in workers.values():
            _end(pid)


def _answer(
    control: socket.socket,
    message: dict[str, Any],
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
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _work(Connection(fds[0]), scorers, nursery)
        finally:
            os._exit(1)  # whatever happened, never back into the nursery's loop
    os.close(fds[0])
    os.setpgid(pid, pid)  # so that what a verifier starts dies with it
    workers[message["start"]] = pid
    killed = ended and status == -signal.SIGKILL
    control.send(json.dumps({"pid": pid, "status": status, "killed": killed}).encode())


def _load(message: dict[str, Any], scorers: dict[str, Scorer]) -> dict[str, Any]:
    """Import the verifiers of an expression. `error` says why that failed, `index` which of
    them does not load, null where an option is wrong."""
    try:
        parts = [Part(**part) for part in message["parts"]]
        scorer = load(message["load"], parts, is_sum=message["is_sum"])
    except WrongOption as error:
        return {"error": str(error), "index": None}
    except NotLoaded as error:
        return {"error": _describe(error.__cause__ or error), "index": error.index}
    scorers[message["load"]] = scorer
    gc.freeze()  # what is loaded stays shared with the workers: their collector must not write to it
    return {"at_once": scorer.at_once, "needs_sandbox": scorer.needs_sandbox, "patience_s": scorer.patience_s}


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a worker ends by itself, or by someone else's hand. It is left to be reaped."""
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.001)
    return True


def _end(pid: int) -> int:
    """Kill a worker and all that it started; returns its exit status, negative for a signal."""
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def _work(connection: Connection, scorers: dict[str, Scorer], nursery: int) -> None:
    """The life of a worker: a pickled (expression, sources that are new to it, keys of those to forget, requests as
    `sources.joined` takes them) in, a JSON reply out, until the owner hangs up: a list of a verdict or a crash for each
    request, or one crash for all.

    Replies are JSON so that nothing which a verifier's process sends is ever unpickled in the owner.
    """
    _die_with(nursery)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    worker, held = os.getpid(), dict[bytes, bytes]()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        reply = _verify(message, scorers, held)
        if os.getpid() != worker:  # a verifier forked: two replies to one message would give others its score
            return
        connection.send_bytes(reply)


def _verify(message: bytes, scorers: dict[str, Scorer], held: dict[bytes, bytes]) -> bytes:
    """held: the sources' data by key, which the message changes."""
    try:
        expression, new, gone, responses = pickle.loads(message)
        held.update(new)
        for key in gone:
            del held[key]
        requests = [joined(held[key], response) for key, response in responses]
        return b"[" + b",".join(map(_reply, scorers[expression].verify(requests))) + b"]"
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: whatever it raises, it crashed
        return _crash(error)


def _reply(verified: Verified) -> bytes:
    """One verdict, or why there is none, as JSON."""
    try:
        if isinstance(verified, BaseException):
            return _crash(verified)
        reply = json.dumps(_encode(verified)).encode()
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError(f"the verdict takes {len(reply)} bytes, more than {MAX_REPLY_BYTES}")
        return reply
    except Exception as error:  # a verdict that holds what no verdict should
        return _crash(error)


def _crash(error: BaseException) -> bytes:
    return json.dumps({"crash": _describe(error)}).encode()


def _encode(verdict: Verified) -> dict[str, Any]:
    assert isinstance(verdict, Verdict), verdict
    return {
        "score": float(verdict.score),
        "outcome": str(verdict.outcome),
        "answer": None if verdict.answer is None else str(verdict.answer)[:MAX_TEXT_CHARS],
        "parts": {str(name): float(part) for name, part in verdict.parts.items()},
        "detail": str(verdict.detail)[:MAX_TEXT_CHARS],
    }


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return redacted(f"{type(error).__name__}: {text}")[:MAX_TEXT_CHARS]
