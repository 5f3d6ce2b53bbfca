"""Sessions of environments in separate processes, which can hang, crash or be killed without affecting the run."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Generic, Self, TypeAlias, TypedDict, TypeVar, cast

from rlcli.environments import host_main
from rlcli.environments.calls import cleaned
from rlcli.environments.chat_messages import Message
from rlcli.environments.environment import (
    ENVIRONMENTS,
    Cause,
    EnvironmentFailed,
    Failure,
    Opening,
    Reply,
    check_size,
    opening_of,
    reply_of,
)
from rlcli.environments.process_variables import for_environment, hint_of
from rlcli.errors import ConfigError, SetupError
from rlcli.support.json_types import JsonValue
from rlcli.support.redact import printable

START_TIMEOUT_S = 120.0
"""Longest time for a process to import the environment."""
LOOK_S = 0.05
"""Interval of checks for calls past their deadline."""
MOST_LINE_BYTES = 1 << 28
"""Longest line that a process may write, with images."""
PRINTED_BYTES = 1 << 20
"""Limit of the output of the environments of one process: further output is read and dropped."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Specification of an environment's processes."""

    name: str
    """Name of an entry point, `module:Class` or `file.py:Class`."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Arguments of its constructor."""
    python: str = ""
    """An interpreter that has its packages; empty: this one."""
    processes: int = 1
    """Number of processes."""
    deadline_s: float = 60.0
    """Longest time of one call."""
    memory_bytes: int = 0
    """Memory limit of one process; 0: none."""
    sandbox: str = ""
    """Sandbox in which the built-in environments run programs; empty: that of RLCLI_SANDBOX."""
    variables: Sequence[str] = ()
    """Names of environment variables that it inherits although they look like secrets."""

    @property
    def target(self) -> str:
        """`module:Class` or `/path/to/file.py:Class`. Raises `UnknownName` with similar names, or `ConfigError`."""
        path, _, attribute = self.name.rpartition(":")
        if path.endswith(".py"):
            return f"{Path(path).absolute()}:{attribute}"
        if self.name.endswith(".py"):
            raise ConfigError(f"environment.name = {self.name}: no class is named", f"write {self.name}:CLASS")
        if path:
            return self.name
        target = ENVIRONMENTS.target(self.name)
        if not self.python or not ENVIRONMENTS.origin(self.name).startswith("rlcli "):
            return target
        module, _, attribute = target.rpartition(":")  # that interpreter need not have rlcli
        module_spec = importlib.util.find_spec(module)
        return f"{module_spec.origin}:{attribute}" if module_spec is not None else target


class Session:
    """One conversation's environment. Its methods return at once; the futures raise `EnvironmentFailed`, whose `cause`
    shows whether this session caused the failure. If several sessions may have caused it, the next try is in a session
    that is alone: its process runs one call at a time."""

    def __init__(self, process: _Process, number: int, options: Mapping[str, JsonValue]) -> None:
        self._process, self._number, self._options = process, number, options

    def reset(self, row: Mapping[str, object], seed: int) -> Future[Opening]:
        return self._process.call(self._number, "reset", [self._options, row, seed], opening_of)

    def step(self, message: Message) -> Future[Reply]:
        return self._process.call(self._number, "step", [message], reply_of)

    def close(self) -> None:
        """Close the session. Idempotent, also after a failure."""
        self._process.call(self._number, "close", [], lambda returned: None)
        self._process.sessions.discard(self._number)


class EnvironmentHost:
    """Hosts the sessions of one environment on `spec.processes` processes. Thread-safe.

        with EnvironmentHost(EnvironmentSpec("guess_number", processes=2)) as host:
            session = host.session()
            opening = session.reset({}, seed=1).result()
            reply = session.step({"role": "assistant", "content": "5"}).result()

    What the environments print goes to this process's standard error, up to PRINTED_BYTES of each process of theirs. A
    call that does not end within its deadline fails (TIMEOUT) and ends its process; the other sessions of that
    process fail too (DIED, `Cause.ANOTHER`), and a new process takes their place.

    Raises `SetupError` if the environment does not load.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._serial: _Process | None = None
        self._closed = threading.Event()
        try:
            self._processes += [_Process(spec) for _ in range(spec.processes)]
            for process in self._processes:
                process.wait_ready()
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="rlcli-environments", daemon=True)
        self._watcher.start()

    def session(self, *, alone: bool = False) -> Session:
        """A new session, on the process with the fewest. alone: on one that works at one call at a time."""
        with self._lock:
            number = next(self._numbers)
            if alone:
                if self._serial is None or (self._serial.ended and not self._closed.is_set()):
                    self._serial = _Process(self.spec, serial=True)
                self._serial.sessions.add(number)
                return Session(self._serial, number, self.spec.options)
            for index, process in enumerate(self._processes):
                if process.ended and not self._closed.is_set():
                    self._processes[index] = _Process(self.spec)
            process = min(self._processes, key=lambda each: len(each.sessions))
            process.sessions.add(number)
        return Session(process, number, self.spec.options)

    def describe(self) -> host_main.Description:
        """Its docstring, and the options of its constructor. Raises `EnvironmentFailed`."""
        return self._processes[0].call(-1, "describe", [], _description_of).result()

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return [process.pid for process in self._all()]

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._closed.set()
        for process in self._all():
            process.kill(Failure.DIED, "the host is closed")

    def _all(self) -> list[_Process]:
        return [*self._processes, *([self._serial] if self._serial else [])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            for process in self._all():
                process.end_if_late()


def _description_of(returned: JsonValue) -> host_main.Description:
    return cast("host_main.Description", returned)  # of `host_main.described`, not of the environment


class _HostReply(TypedDict, total=False):
    """A line that `host_main` writes. The process is not trusted: what is not of this form ends it."""

    ready: bool
    """The environment is imported."""
    began: int
    """Id of a call that the environment runs now."""
    id: int
    """Id of a call that has ended, with one of the following fields."""
    ok: JsonValue
    """Its result."""
    error: object
    """Exception that it raised; without an id: why the environment does not load."""
    unsendable: object
    """Why its result cannot be sent."""


Result = TypeVar("Result", Opening, Reply, host_main.Description, None)
"""Result of a call."""


@dataclass
class _Call(Generic[Result]):
    """A call of a session's method."""

    do: str
    """The method."""
    deadline: float
    """When it fails, by the monotonic clock."""
    future: Future[Result]
    """Its result."""
    check: Callable[[JsonValue], Result]
    """Validates and converts the result."""
    began: bool = False
    """True if the environment runs it; before, it waits for a thread of the process."""

    def settle(self, reply: _HostReply, line_bytes: int, is_alone: bool) -> None:
        """line_bytes: of the whole reply. is_alone: whether no other session has memory in the process."""
        if "error" in reply:
            # Another session may have taken the memory.
            out_of_memory = str(reply["error"]).startswith("MemoryError") and not is_alone
            cause = Cause.UNKNOWN if out_of_memory else Cause.OWN
            return self.fail(Failure.CRASH, f"{self.do} raised {reply['error']}", cause)
        if "unsendable" in reply:
            return self.fail(Failure.PROTOCOL, f"{self.do} returned what cannot be sent: {reply['unsendable']}")
        with contextlib.suppress(InvalidStateError):
            try:
                check_size(self.do, reply["ok"], line_bytes)
                self.future.set_result(self.check(reply["ok"]))
            except EnvironmentFailed as error:
                self.fail(error.failure, error.detail)
            except Exception as error:  # a reply may be anything
                self.fail(Failure.PROTOCOL, f"{self.do} returned what cannot be read: {type(error).__name__}: {error}")

    def fail(self, failure: Failure, detail: str, cause: Cause = Cause.OWN) -> None:
        """Unless it has a result already: a late reply and its deadline may come at once."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(EnvironmentFailed(failure, detail, cause))


_AnyCall: TypeAlias = _Call[Opening] | _Call[Reply] | _Call[host_main.Description] | _Call[None]


class _Process:
    """One process, and the calls that wait for its replies. serial: it gets a call once it has replied to the one
    before."""

    def __init__(self, spec: EnvironmentSpec, *, serial: bool = False) -> None:
        self._spec, self._serial = spec, serial
        self._unsent: deque[tuple[int, bytes]] = deque()  # of a serial one: behind the call that it works at
        self.sessions: set[int] = set()
        self._calls: dict[int, _AnyCall] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._why: tuple[Failure, str] | None = None
        self._ready: Future[None] = Future()
        self._started = time.monotonic()
        self._is_over = False
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        command = [spec.python or sys.executable, "-u", host_main.__file__, spec.target, str(spec.memory_bytes)]
        environment = for_environment(os.environ, spec.variables) | {"PYTHONDONTWRITEBYTECODE": "1"}
        if spec.sandbox:
            environment["RLCLI_SANDBOX"] = spec.sandbox
        if not spec.python:  # what is importable here is importable there
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(
                f"the environment '{spec.name}' cannot be started with {command[0]}: {error.strerror}",
                "give environment.python the path of a Python interpreter",
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        threads = [(self._write, self._process.stdin), (self._read, self._process.stdout)]
        for function, pipe in [*threads, (self._print, self._process.stderr)]:
            threading.Thread(target=function, args=(pipe,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._why is not None

    def wait_ready(self) -> None:
        """Raises `SetupError` if the environment does not load."""
        try:
            self._ready.result(START_TIMEOUT_S)
        except TimeoutError:
            raise SetupError(
                f"the environment '{self._spec.name}' was not imported within {START_TIMEOUT_S:g} s",
                "see what it does when it is imported",
            ) from None

    def call(
        self, session: int, do: str, arguments: Sequence[object], check: Callable[[JsonValue], Result]
    ) -> Future[Result]:
        """Call a method of a session. arguments: sent as JSON. check: validates and converts its result."""
        future: Future[Result] = Future()
        with self._lock:
            if self._why is not None:
                future.set_exception(EnvironmentFailed(*self._why, Cause.ANOTHER))
                return future
            number = next(self._ids)
            request = {"id": number, "do": do, "session": session, "arguments": arguments}
            line = json.dumps(request).encode() + b"\n"
            waits = self._serial and bool(self._calls)
            deadline = math.inf if waits else time.monotonic() + self._spec.deadline_s
            self._calls[number] = _Call(do, deadline, future, check)
            if waits:
                self._unsent.append((number, line))
            else:
                self._requests.put(line)
        return future

    def end_if_late(self) -> None:
        now = time.monotonic()
        if not self._ready.done():
            if now - self._started > START_TIMEOUT_S:
                self.kill(Failure.TIMEOUT, f"its process did not import it within {START_TIMEOUT_S:g} s")
            return
        with self._lock:
            began = [call for call in self._calls.values() if call.began]
            late = [call for call in began or self._calls.values() if call.deadline < now]
            if not late or self._why is not None:
                return
            detail = f"{late[0].do} did not end within {self._spec.deadline_s:g} s"
            self._why = Failure.DIED, f"another session's {detail}"
        for call in late:
            call.fail(Failure.TIMEOUT, detail)
        self.kill(*self._why)

    def kill(self, failure: Failure, detail: str, *, by_itself: bool = False) -> None:
        """End the process; the calls that wait fail. by_itself: it has ended: a call that it was working at is the
        cause."""
        with self._lock:
            by_itself = by_itself and self._why is None
            if self._why is None:
                self._why = failure, detail
            calls, self._calls = self._calls, {}
            self._unsent.clear()
        self._requests.put(b"")
        self._end()
        began = [call for call in calls.values() if call.began] if by_itself else []
        for call in calls.values():
            suspected = Cause.OWN if len(began) == 1 else Cause.UNKNOWN
            call.fail(*self._why, suspected if call in began else Cause.ANOTHER)

    def _end(self) -> None:
        """End the process with what it has started, unless that is done: its id may be another one's by then."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, requests: IO[bytes]) -> None:
        """Write requests, in a separate thread: a process that does not read must not block the caller."""
        with contextlib.suppress(OSError), requests:  # the reader sees its end
            while line := self._requests.get():
                requests.write(line)
                requests.flush()

    def _print(self, printed: IO[bytes]) -> None:
        """Copy the process's untrusted output, without control characters and up to a limit."""
        room = PRINTED_BYTES
        while line := printed.readline(PRINTED_BYTES):  # to the end: a process whose output nobody reads waits
            if room > 0:
                text = printable(line[:room].decode(errors="replace").rstrip("\n"))
                room -= len(line)
                note = "" if room > 0 else "\n… what it prints from here on is left out"
                with contextlib.suppress(OSError, ValueError):  # a reader that is gone
                    print(f"[{self._spec.name}] {text}{note}", file=sys.stderr, flush=True)

    def _read(self, replies: IO[bytes]) -> None:
        while line := replies.readline(MOST_LINE_BYTES):
            try:
                self._take(_reply_in(line), len(line))
            except Exception:  # neither the process nor its environment is trusted
                self.kill(Failure.PROTOCOL, f"its process wrote {line[:200]!r} where replies go", by_itself=True)
        self._end()
        self._is_over = True
        status = self._process.wait()
        end = f"exit status {status}" if status >= 0 else f"signal {-status}"
        if not self._ready.done():
            self._became_ready({"error": f"its process ended with {end}"})
        self.kill(Failure.DIED, f"its process ended with {end}", by_itself=True)

    def _take(self, reply: _HostReply, line_bytes: int) -> None:
        if "began" in reply:
            with self._lock:
                if call := self._calls.get(reply["began"]):
                    call.began, call.deadline = True, time.monotonic() + self._spec.deadline_s
        elif "id" in reply:
            with self._lock:
                call = self._calls.pop(reply["id"], None)
                if self._unsent:
                    number, line = self._unsent.popleft()
                    self._calls[number].deadline = time.monotonic() + self._spec.deadline_s
                    self._requests.put(line)
            if call is not None:
                call.settle(reply, line_bytes, self._serial or len(self.sessions) <= 1)
        else:
            self._became_ready(reply)

    def _became_ready(self, reply: _HostReply) -> None:
        if "error" in reply:
            message = f"the environment '{self._spec.name}' does not load: {reply['error']}"
            hint = hint_of(message, os.environ, for_environment(os.environ, self._spec.variables))
            hint = hint or "fix it, or install what it needs into environment.python"
            self._ready.set_exception(SetupError(message, hint))
            return
        with self._lock:  # what was asked meanwhile has waited for the import
            for call in self._calls.values():
                call.deadline = time.monotonic() + self._spec.deadline_s
        self._ready.set_result(None)


def _reply_in(line: bytes) -> _HostReply:
    """The reply in a line. Raises `ValueError` if it is no JSON object."""
    reply = cleaned(json.loads(line))
    if not isinstance(reply, dict):
        raise ValueError("no JSON object")
    return cast("_HostReply", reply)  # a field of another type raises where it is used
