"""The owner's side of the nursery: start it, have it load verifiers and start (or replace) workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlcli.errors import VerifierError

ANSWER_TIMEOUT_S = 120.0
"""Longest that the nursery may take to import a verifier or to fork; past it the pool is broken."""

_CLOSE_TIMEOUT_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Not `-m`, nor multiprocessing: both would bring the owner's `__main__` or another sys.path along.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlcli.scoring.nursery_main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Nursery:
    """A fresh, single-threaded interpreter that forks the pool's workers (see `nursery_main`). Thread-safe.

    Raises `VerifierError` when it cannot be started, does not answer, or has died; it is of no more use then.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_TIMEOUT_S)
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        path = json.dumps([str(folder) for folder in sys.path])
        arguments = [sys.executable, "-c", _START, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # a verifier that prints must not spoil `--json`
                )
            except OSError as error:
                self._control.close()
                raise VerifierError(f"the scoring processes cannot be started: {error}") from error

    @property
    def loaded(self) -> frozenset[str]:
        """The targets that a worker started now knows."""
        return frozenset(self._loaded)

    def load(self, name: str, target: str) -> None:
        """Import the verifier at `target`, once."""
        if target in self._loaded:
            return
        answer = self._ask({"load": target})
        if answer["error"]:
            raise VerifierError(
                f"the verifier '{name}' ({target}) does not load: {answer['error']}",
                "mend or reinstall its package; a verifier must be importable by its module's name",
            )
        self._loaded.add(target)

    def start(self, slot: int) -> tuple[Connection, int | None]:
        """Kill the worker of `slot`, if any, and fork another.

        Returns the connection to it, and the exit status of the former (negative for a signal).
        """
        ours, theirs = Pipe()
        with theirs:
            return ours, self._ask({"start": slot}, theirs.fileno())["status"]

    def close(self) -> None:
        """End the nursery and all its workers, whatever they are doing."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in an import; the kernel kills its workers after it
            self._process.kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any], *fds: int) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], fds)
                answer = self._control.recv(65536)
            except TimeoutError as error:
                self.close()
                raise VerifierError(f"the scoring processes did not answer for {ANSWER_TIMEOUT_S:g} s") from error
            except OSError:  # a closed socket, in one of its forms
                answer = b""
            if not answer:
                self.close()
                raise VerifierError(f"the scoring processes have ended (exit status {self._process.returncode})")
            decoded: dict[str, Any] = json.loads(answer)
            return decoded


def _environment() -> dict[str, str]:
    """The owner's environment without what was meant for its own process: preloaded libraries, GPUs, thread counts."""
    dropped = ("LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    single_threaded = dict.fromkeys(_THREAD_VARIABLES, "1")
    # A fixed hash seed: sympy's set orders, and so rare verdicts, are the same in every run.
    return {**kept, **single_threaded, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
