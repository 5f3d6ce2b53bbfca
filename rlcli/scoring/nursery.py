"""The owner's side of the nursery: start it, have it load verifiers and start (or replace) workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from rlcli.errors import ConfigError, VerifierError
from rlcli.scoring.registry import VERIFIERS, target
from rlcli.scoring.spec import Composition

ANSWER_TIMEOUT_S = 120.0
"""Longest that the nursery may take to import a verifier or to fork; past it the pool is broken."""

_CLOSE_TIMEOUT_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Not `-m`, nor multiprocessing: both would bring the owner's `__main__` or another sys.path along.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlcli.scoring.nursery_main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Facts(NamedTuple):
    """What is known of an expression once its verifiers are loaded. at_once: most requests that it is given at once.
    needs_sandbox: whether it runs programs. patience_s: how long its verifiers themselves wait, by their option
    `timeout_s`: less than the deadline at which they are killed, or they cannot tell what took so long."""

    at_once: int
    needs_sandbox: bool
    patience_s: float


class Nursery:
    """A fresh, single-threaded interpreter that forks the pool's workers (see `nursery_main`). Thread-safe.

    sandbox: the backend in which verifiers run programs; empty: as RLCLI_SANDBOX says.
    Raises `VerifierError` when it cannot be started, does not answer, or has died; it is of no more use then.
    """

    def __init__(self, sandbox: str = "") -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_TIMEOUT_S)
        self._lock = threading.Lock()
        self._loaded: dict[str, Facts] = {}
        path = json.dumps([str(folder) for folder in sys.path])
        arguments = [sys.executable, "-c", _START, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    env=_environment(sandbox),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # a verifier that prints must not spoil `--json`
                )
            except OSError as error:
                self._control.close()
                raise VerifierError(f"the scoring processes cannot be started: {error}") from error

    @property
    def loaded(self) -> Mapping[str, Facts]:
        """The expressions that a worker started now knows."""
        return dict(self._loaded)

    def load(self, composition: Composition) -> Facts:
        """Import the verifiers of an expression, once, and check their options.

        Raises `UnknownName` for a verifier that there is not, `ConfigError` for options that it does not take, and
        `VerifierError` for one that does not load.
        """
        expression = str(composition)
        if expression in self._loaded:
            return self._loaded[expression]
        parts = [
            {"name": name, "target": target(term.ref), "options": dict(term.options), "weight": term.weight}
            for name, term in zip(composition.names, composition.terms, strict=True)
        ]
        answer = self._ask({"load": expression, "is_sum": composition.is_sum, "parts": parts})
        if "error" not in answer:
            self._loaded[expression] = Facts(**answer)
            return self._loaded[expression]
        if answer["index"] is None:
            raise ConfigError(f"the verifier '{expression}': {answer['error']}", "rlcli verifiers show NAME tells more")
        ref = composition.terms[answer["index"]].ref
        if ":" in ref:
            raise VerifierError(f"the verifier '{ref}' does not load: {answer['error']}", "mend it, or its name")
        raise VerifierError(
            f"the verifier '{ref}' ({VERIFIERS.origin(ref)}, {target(ref)}) does not load: {answer['error']}",
            "mend or reinstall its package",
        )

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


def _environment(sandbox: str) -> dict[str, str]:
    """The owner's environment without what was meant for its own process: preloaded libraries, GPUs, thread counts."""
    dropped = ("LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    single_threaded = dict.fromkeys(_THREAD_VARIABLES, "1")
    # A fixed hash seed: sympy's set orders, and so rare verdicts, are the same in every run.
    chosen = {"RLCLI_SANDBOX": sandbox} if sandbox else {}
    return {**kept, **single_threaded, **chosen, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
