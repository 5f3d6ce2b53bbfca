"""The owner's side of the fork server: start it, make it load verifiers and start (or replace) workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict, final, overload

from rlcli.errors import ConfigError, VerifierError
from rlcli.rewards.expression import Composition
from rlcli.rewards.processes.verifier_output import Output
from rlcli.rewards.verifier_registry import VERIFIERS, target
from rlcli.support.importing import python, without_safe_path
from rlcli.support.machine.gpus import HIDDEN
from rlcli.support.redact import without_service_secrets
from rlcli.support.sandbox_name import backend_name

ANSWER_TIMEOUT_S = 120.0
"""Maximum time for the fork server to import a verifier or to fork; after that the pool is broken."""

RESTARTS = 3
"""Maximum number of times that a fork server killed from outside is replaced for one message: loading a verifier may be
what kills it (out of memory)."""

_CLOSE_TIMEOUT_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Facts(NamedTuple):
    """Properties of an expression, known once its verifiers are loaded."""

    at_once: int
    """Maximum number of requests in one call."""
    needs_sandbox: bool
    """True if one of its verifiers runs programs."""
    patience_s: float
    """Total time that its verifiers wait, by their option `timeout_s`, in seconds. It must be less than the deadline
    that kills them, or they cannot report what took too long."""
    own_limits: tuple[tuple[float, float], ...] = ()
    """For each term its CPU seconds (option `deadline_s`) and wall-clock seconds (option `wait_s`), 0 if it has none;
    empty if no term has any."""
    keys: tuple[tuple[str, str], ...] = ()
    """Environment variables whose values are sent, each with its address."""
    answer_kind: str = ""
    """`ANSWER_KIND` of the first term's module; empty if it sets none."""
    has_gold: bool = False
    """True if the first term's module has a function `gold`."""
    groups: bool = False
    """True if a call needs all responses to a prompt."""

    @classmethod
    def of(cls, answer: LoadedAnswer) -> Facts:
        """The facts in an answer of the fork server."""
        return cls(
            answer["at_once"],
            answer["needs_sandbox"],
            answer["patience_s"],
            tuple((cpu_s, wait_s) for cpu_s, wait_s in answer.get("own_limits", ())),
            tuple((variable, address) for variable, address in answer["keys"]),
            answer["answer_kind"],
            answer["has_gold"],
            answer["groups"],
        )


class FormerWorker(NamedTuple):
    """The end of the previous worker."""

    status: int | None
    """Exit status, negative for a signal; None if its fork server was killed too."""
    killed: bool
    """Ended by a SIGKILL from outside, for example by the kernel's OOM killer."""


class PartFields(TypedDict):
    """A term of an expression in a `LoadRequest`; the fields of `verifier_loading.Part`."""

    name: str
    """Name of its part of the reward."""
    target: str
    """Definition: `module:attribute` or `/path/file.py:attribute`."""
    options: dict[str, object]
    """JSON values by name."""
    weight: float
    """Factor of its score in the sum."""


@final
class LoadRequest(TypedDict):
    """Asks the fork server to import the verifiers of an expression."""

    load: str
    """The expression."""
    is_sum: bool
    """True if scores are weighted or added."""
    parts: list[PartFields]
    """The terms, in order."""


@final
class StartRequest(TypedDict):
    """Asks the fork server to replace a worker; the worker's socket comes with it."""

    start: int
    """Slot of the worker."""
    gone: bool
    """The former worker closed its connection, so wait a moment for its end."""


@final
class LoadedAnswer(TypedDict):
    """The verifiers of a `LoadRequest` are loaded: the fields of `Facts`, as JSON."""

    at_once: int
    """`Facts.at_once`."""
    needs_sandbox: bool
    """`Facts.needs_sandbox`."""
    patience_s: float
    """`Facts.patience_s`."""
    own_limits: NotRequired[Sequence[Sequence[float]]]
    """`Facts.own_limits`, as lists."""
    keys: Sequence[Sequence[str]]
    """`Facts.keys`, as lists."""
    answer_kind: str
    """`Facts.answer_kind`."""
    has_gold: bool
    """`Facts.has_gold`."""
    groups: bool
    """`Facts.groups`."""


@final
class FailedAnswer(TypedDict):
    """A verifier of a `LoadRequest` does not load."""

    error: str
    """The reason."""
    index: int | None
    """Index of the term whose verifier does not load; None if an option is wrong."""
    hint: NotRequired[str]
    """The fix, if the verifier refuses its options or lacks a dependency."""


@final
class StartAnswer(TypedDict):
    """A worker is started."""

    pid: int
    """Its process id."""
    status: int | None
    """Exit status of the former worker, negative for a signal; None if there was none."""
    killed: bool
    """True if the former worker was ended by a SIGKILL from outside."""


Answer = LoadedAnswer | FailedAnswer | StartAnswer


class ForkServer:
    """A fresh, single-threaded interpreter that forks the pool's workers (see `fork_server_main`). Thread-safe.

    If it is killed from outside, so are its workers; the next request then starts a new one, which loads the same
    verifiers.

    sandbox: the backend in which verifiers run programs; empty: from RLCLI_SANDBOX. log: see `Output`.
    Raises `SetupError` for an unknown backend, and `VerifierError` when it cannot be started, does not answer, or has
    died by itself; it cannot be used after that.
    """

    def __init__(self, sandbox: str = "", log: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # held to change the process, or to close
        self._closed = False
        self._loaded: dict[str, Facts] = {}
        self._loads: list[LoadRequest] = []
        backend_name(sandbox)  # an unknown one is refused, even if no verifier runs programs
        self._environment = without_safe_path(without_service_secrets(environment_of(sandbox)))
        self._output = Output(log)
        self._tracebacks: set[str] = set()
        try:
            self._spawn()
        except BaseException:
            self._output.close()
            raise

    @property
    def loaded(self) -> Mapping[str, Facts]:
        """The expressions that a worker started now knows."""
        return dict(self._loaded)

    def load(self, composition: Composition) -> Facts:
        """Import the verifiers of an expression, once, and check their options.

        Raises `UnknownName` for an unknown verifier, `ConfigError` for options that it does not take, and
        `VerifierError` for one that does not load.
        """
        expression = str(composition)
        if expression in self._loaded:
            return self._loaded[expression]
        parts: list[PartFields] = [
            {"name": name, "target": target(term.ref), "options": dict(term.options), "weight": term.weight}
            for name, term in zip(composition.names, composition.terms, strict=True)
        ]
        message: LoadRequest = {"load": expression, "is_sum": composition.is_sum, "parts": parts}
        answer = self._ask(message)
        if "error" not in answer:
            self._loads.append(message)
            self._loaded[expression] = Facts.of(answer)
            return self._loaded[expression]
        if answer["index"] is None:
            raise ConfigError(f"the verifier '{expression}': {answer['error']}", "see: rlcli verifiers show NAME")
        ref = composition.terms[answer["index"]].ref
        if "hint" in answer:  # it rejects its options, or lacks a dependency
            raise VerifierError(f"the verifier '{ref}': {answer['error']}", answer["hint"])
        if ":" in ref:
            raise VerifierError(f"the verifier '{ref}' does not load: {answer['error']}", "fix it, or its name")
        raise VerifierError(
            f"the verifier '{ref}' ({VERIFIERS.origin(ref)}, {target(ref)}) does not load: {answer['error']}",
            "fix or reinstall its package",
        )

    def start(self, slot: int, gone: bool = False) -> tuple[Connection, int, FormerWorker]:
        """Kill the worker of `slot`, if any, and fork another. gone: it has closed its connection itself.

        Returns the connection to the new one, its process id, and how the previous one ended.
        """
        ours, theirs = Pipe()
        with theirs:
            answer = self._ask({"start": slot, "gone": gone}, theirs.fileno())
        # A fork server that knows no previous worker has replaced one that was killed.
        return ours, answer["pid"], FormerWorker(answer["status"], answer["killed"] or answer["status"] is None)

    def print_tracebacks(self, replies: Iterable[object]) -> None:
        """Print each traceback in the replies of a worker once; they have some with --debug."""
        for reply in replies:
            text = reply.get("traceback") if isinstance(reply, dict) else None
            if isinstance(text, str) and text not in self._tracebacks:
                self._tracebacks.add(text)
                self._output.write(text)

    def close(self) -> None:
        """End the fork server and all its workers, even if they are busy."""
        with self._changing:
            ended, self._closed = self._closed, True
        self._hang_up()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in an import; the kernel then kills its workers
            self._process.kill()
            self._process.wait()
        if not ended:
            self._output.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _spawn(self) -> None:
        """Start the process. Raises `VerifierError` if it does not start or the pool is closed."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(ANSWER_TIMEOUT_S)
        with self._changing, theirs:
            try:
                if self._closed:
                    raise VerifierError("the scoring pool is closed")
                self._process = subprocess.Popen(
                    python("rlcli.rewards.processes.fork_server_main", str(theirs.fileno()), str(os.getpid())),
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.fd,  # output of a verifier must not corrupt `--json` or the terminal
                    stderr=self._output.fd,
                )
            except (OSError, VerifierError) as error:
                control.close()
                raise VerifierError(f"the scoring processes cannot be started: {error}") from error
            self._control = control

    @overload
    def _ask(self, message: LoadRequest) -> LoadedAnswer | FailedAnswer: ...
    @overload
    def _ask(self, message: StartRequest, fd: int, /) -> StartAnswer: ...
    def _ask(self, message: LoadRequest | StartRequest, *fds: int) -> Answer:
        with self._lock:
            answer = self._exchange(message, *fds)
            for _ in range(RESTARTS):
                if answer or not self._was_killed():
                    break
                self._hang_up()
                self._spawn()
                answer = self._exchange(message, *fds) if self._reload() else None
            if not answer:
                self.close()
                status = self._process.returncode
                raise VerifierError(f"the scoring processes have ended (exit status {status})" + _import_hint(message))
            return answer

    def _reload(self) -> bool:
        """Make a new process load what the previous one had loaded; False if the new one was killed."""
        for message in self._loads:
            answer = self._exchange(message)
            if not answer:
                return False
            if "error" in answer:
                raise VerifierError(f"the verifier '{message['load']}' no longer loads: {answer['error']}")
        return True

    def _exchange(self, message: LoadRequest | StartRequest, *fds: int) -> Answer | None:
        """The answer to a message; None if the process does not answer."""
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
            answer = self._control.recv(65536)
        except TimeoutError as error:
            self.close()
            raise VerifierError(
                f"the scoring processes did not answer for {ANSWER_TIMEOUT_S:g} s" + _import_hint(message)
            ) from error
        except OSError:  # a closed socket, in one of its forms
            answer = b""
        decoded: Answer | None = json.loads(answer) if answer else None
        return decoded

    def _was_killed(self) -> bool:
        """True if the process was killed from outside. A process that ends by itself would do so again."""
        if self._closed:
            return False
        try:
            return self._process.wait(_CLOSE_TIMEOUT_S) in (-signal.SIGKILL, -signal.SIGTERM)
        except subprocess.TimeoutExpired:
            return False


def environment_of(sandbox: str) -> dict[str, str]:
    """The owner's environment without settings for its own process: preloaded libraries, GPUs, thread counts."""
    dropped = ("LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "VLLM_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    single_threaded = dict.fromkeys(_THREAD_VARIABLES, "1")
    # A fixed hash seed: sympy's set orders, and so rare verdicts, are the same in every run.
    backend = {"RLCLI_SANDBOX": sandbox} if sandbox else {}
    return {**inherited, **single_threaded, **backend, **HIDDEN, "PYTHONHASHSEED": "0"}


def _import_hint(message: LoadRequest | StartRequest) -> str:
    """The files that were being imported, if the message was a request to load."""
    if "start" in message:
        return ""
    modules = ", ".join(part["target"].rpartition(":")[0] for part in message["parts"])
    return f", while they imported {modules} for the verifier '{message['load']}'; see what it does when it is imported"
