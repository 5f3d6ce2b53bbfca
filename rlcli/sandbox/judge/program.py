"""The program under test as the tester sees it: functions to call by name, and values that come back.

This file runs inside the sandbox: the standard library and `wire` are all that it may import.
"""

from __future__ import annotations

import builtins
import os
from typing import Any

from rlcli.sandbox.judge.wire import NotPlain, OutOfProtocol, TooBig, decode, encode, receive, send

MAX_TEXT_CHARS = 300

# What a program may raise in the tests: no SystemExit, and no StopIteration, which would end the tests' loops early.
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup))
}
_ERRORS["UnicodeError"] = UnicodeError


class Stop(BaseException):
    """Ends the tests; no `except Exception` of theirs holds it up. `verdict` is one of the verdicts in `Result`."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict
        self.detail = detail


class Program:
    """The program under test, seen from here."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self.calls = 0
        self.arguments_are_data = False
        """Whether nothing that the program returned is among the arguments it is given."""
        self.gave_objects = False
        self.stopped: Stop | None = None

    def load(self) -> None:
        """Wait until the program is loaded. Raises `Stop`."""
        self._receive("unstarted")
        loaded = self._receive("gone")
        if loaded.get("loaded") is not True:
            raise self._stop("wrong", f"{loaded.get('text')}")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the program's function returns, or raises as a built-in exception. Raises `Stop`."""
        if self.stopped:
            raise self.stopped
        self.calls += 1
        # Its number is not known to a reply that was sent before the request.
        number = int.from_bytes(os.urandom(6), "big")
        try:
            send(
                self.requests, {"id": number, "name": name, "args": encode(list(args)), "kwargs": encode(dict(kwargs))}
            )
        except NotPlain as error:
            whose = "wrong" if self.gave_objects else "data"
            raise self._stop(whose, f"the tests pass what cannot cross to the program: {error}") from None
        except TooBig as error:
            whose = "data" if self.arguments_are_data else "wrong"
            raise self._stop(whose, f"the tests pass too much to the program: {error}") from None
        except OSError:
            raise self._stop("gone", "") from None
        reply = self._receive("gone")
        try:
            if reply.get("id") != number:
                raise OutOfProtocol("a reply to no request")
            if "error" in reply:
                raise _ERRORS.get(str(reply["error"]), RuntimeError)(str(reply.get("text"))[:MAX_TEXT_CHARS])
            if "object" in reply:
                self.gave_objects = True
                return Object(str(reply["object"]), reply.get("true") is True)
            return decode(reply.get("value"))
        except OutOfProtocol as error:
            raise self._stop("wrong", f"the program sent {error}") from None

    def _receive(self, if_closed: str) -> dict[str, Any]:
        try:
            reply = receive(self.replies)
        except OutOfProtocol as error:
            raise self._stop("wrong", f"the program sent {error}") from None
        if reply is None:
            raise self._stop(if_closed, "")
        if not isinstance(reply, dict):
            raise self._stop("wrong", "the program sent a message that is no object")
        return reply

    def _stop(self, verdict: str, detail: str) -> Stop:
        self.stopped = Stop(verdict, detail)
        return self.stopped


class Proxy:
    """A function of the program, by name."""

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.call(self.__name__, args, kwargs)


class Object:
    """What the program returned of no built-in type (a `re.Match`, say): true or false, and equal to nothing else."""

    def __init__(self, kind: str, true: bool) -> None:
        self._kind = kind
        self._true = true

    def __bool__(self) -> bool:
        return self._true

    def __repr__(self) -> str:
        return f"<an object of type {self._kind[:50]}>"
