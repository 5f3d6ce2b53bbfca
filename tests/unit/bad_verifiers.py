"""Verifiers that misbehave, for the tests of the scoring pool. Loaded by name in the scoring processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

from rlcli.types import Outcome, Verdict, VerifyRequest


def misbehave(request: VerifyRequest) -> Any:
    """Does what the completion says."""
    return _DEEDS[request.completion.partition(":")[0]](request)


def misbehave_slowly(request: VerifyRequest) -> Verdict:
    time.sleep(0.01)
    return Verdict(1.0, Outcome.OK)


def how(request: VerifyRequest) -> Verdict:
    """Answers with the response's fields of the request."""
    request_fields = (
        request.finish_reason,
        request.thinking,
        list(request.completion_ids),
        request.prompt,
        request.data_source,
    )
    return Verdict(1.0, Outcome.OK, answer=repr(request_fields))


def _right(request: VerifyRequest) -> Verdict:
    return Verdict(1.0, Outcome.OK, answer=request.completion, parts={"length": len(request.completion)})


def _hang(request: VerifyRequest) -> Any:
    while True:
        pass


def _hang_in_c(request: VerifyRequest) -> Any:
    return pow(7, 10**9)


def _say_pid(request: VerifyRequest) -> Any:
    with open(request.ground_truth, "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        pass


def _sleep_and_say_pid(request: VerifyRequest) -> Any:
    with open(f"{request.ground_truth}.tmp", "w") as file:
        file.write(f"{os.getpid()}\n")
    os.rename(f"{request.ground_truth}.tmp", request.ground_truth)
    time.sleep(0.5)
    return _right(request)


def _hang_up(request: VerifyRequest) -> Any:
    os.closerange(3, 1024)
    time.sleep(600)


def _child(request: VerifyRequest) -> Any:
    child = subprocess.Popen(["sleep", "600"])
    with open(request.ground_truth, "w") as file:
        file.write(f"{child.pid}\n")
    child.wait()


def _busy_child(request: VerifyRequest) -> Any:
    subprocess.run([sys.executable, "-S", "-c", "while True: pass"], check=True)


def _once(request: VerifyRequest) -> Verdict:
    """Misbehaves as the completion says after the colon, the first time."""
    if not os.path.exists(request.ground_truth):
        with open(request.ground_truth, "x") as file:
            file.write(str(os.getpid()))
        return cast(Verdict, _DEEDS[request.completion.partition(":")[2]](request))
    return Verdict(1.0, Outcome.OK, answer=str(os.getpid()))


def _hang_then_raise(request: VerifyRequest) -> Any:
    if os.path.exists(request.ground_truth):
        raise LookupError("no such thing")
    with open(request.ground_truth, "x"):
        _hang(request)


def _raise(request: VerifyRequest) -> Any:
    raise LookupError("no such thing")


def _memory(request: VerifyRequest) -> Any:
    return Verdict(1.0, Outcome.OK, answer=str(len(bytearray(6 << 30))))


def _surroundings(request: VerifyRequest) -> Verdict:
    facts = {
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "preload": os.environ.get("LD_PRELOAD"),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "vllm": [name for name in os.environ if name.startswith("VLLM_")],
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "pid": os.getpid(),
        "length": len(request.completion),
    }
    return Verdict(1.0, Outcome.OK, answer=repr(facts))


_DEEDS = {
    "right": _right,
    "hang": _hang,
    "hang in C": _hang_in_c,
    "say pid": _say_pid,
    "child": _child,
    "busy child": _busy_child,
    "once": _once,
    "hang then raise": _hang_then_raise,
    "sleep long": lambda request: time.sleep(600),
    "raise": _raise,
    "memory": _memory,
    "surroundings": _surroundings,
    "sleep and say pid": _sleep_and_say_pid,
    "hang up": _hang_up,
    "kill": lambda request: os.kill(os.getpid(), signal.SIGKILL),
    "slow": lambda request: (time.sleep(0.01), _right(request))[1],
    "sleep": lambda request: (time.sleep(0.2), _right(request))[1],
    "exit": lambda request: os._exit(3),
    "sys.exit": lambda request: sys.exit(4),
    "segfault": lambda request: ctypes.string_at(0),
    "none": lambda request: None,
    "text": lambda request: "1.0",
    "nan": lambda request: Verdict(float("nan"), Outcome.OK),
    "infinite part": lambda request: Verdict(1.0, Outcome.OK, parts={"speed": float("inf")}),
    "long": lambda request: Verdict(1.0, Outcome.OK, parts={str(i): 1.0 for i in range(100_000)}),
    "odd outcome": lambda request: Verdict(1.0, "splendid"),  # type: ignore[arg-type]
    "fork": lambda request: (os.fork(), _right(request))[1],
    "own crash": lambda request: Verdict(1.0, Outcome.CRASH, answer="42", detail="the service is down"),
    "pop": lambda request: Verdict(1.0, Outcome.OK, answer=str(request.extra_info["left"].pop())),
    "flood": lambda request: ([print("x" * 999, flush=True) for _ in range(2000)], _right(request))[1],
    "print": lambda request: (print("noise", flush=True), _right(request))[1],
}


def ranked_before(request: VerifyRequest, *, rivals: int = 0) -> Verdict:
    """The same under the names of the last release."""
    return Verdict(float(rivals), Outcome.OK, answer=repr(list(request.rivals)))


def ranked(request: VerifyRequest, *, other_responses: int = 0) -> Verdict:
    """The value to compare with."""
    return Verdict(float(other_responses), Outcome.OK, answer=repr(list(request.other_responses)))
