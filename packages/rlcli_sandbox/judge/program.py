"""The program under test as the tester sees it: functions to call by name, and values that come back.

This file runs inside the sandbox: it may import only the standard library and `wire`.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlcli_sandbox.judge.wire import NotPlain, OutOfProtocol, Remote, TooBig, decode, encode, receive, send

MAX_TEXT_CHARS = 300

Use = Literal["made", "live", "opaque"]
"""Operations that tests may apply to an object of the program; see `Object`."""

Verdict = Literal["done", "wrong", "invalid_tests", "exited", "not_started"]
"""Outcome of the tests. done: all tests ran. wrong: they stopped because of the program. invalid_tests: they cannot
test any program. exited: the program's process ended or closed its pipe. not_started: it did so before it had read the
program."""

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
    """Ends the tests; no `except Exception` in them catches it."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict
        self.detail = detail


class Program:
    """The program under test, as seen from here."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self.calls = 0
        self.arguments_are_data = False
        """True if the arguments contain nothing that the program returned."""
        self.gave_objects = False
        self.stopped: Stop | None = None

    def load(self) -> None:
        """Wait until the program is loaded. Raises `Stop`."""
        self._receive("not_started")
        loaded = self._receive("exited")
        if loaded.get("loaded") is not True:
            raise self._stop("wrong", f"{loaded.get('text')}")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program's function; its exceptions are raised as built-in ones. Raises `Stop`.

        A capitalized name is a class to the tests that call it: its result may be used as an object.
        """
        return self.ask({"name": name}, args, kwargs, "made" if name[:1].isupper() else "opaque")

    def ask(
        self,
        request: dict[str, Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        use: Use = "opaque",
    ) -> Any:
        """The answer to any request. use: what tests may do with an object that comes back."""
        if self.stopped:
            raise self.stopped
        self.calls += 1
        # A reply sent before the request cannot know its number.
        number = int.from_bytes(os.urandom(6), "big")
        try:
            send(
                self.requests,
                {"id": number, **request, "args": encode(list(args)), "kwargs": encode(dict(kwargs or {}))},
            )
        except NotPlain as error:
            verdict: Verdict = "wrong" if self.gave_objects else "invalid_tests"
            raise self._stop(verdict, f"the tests pass a value that cannot be sent to the program: {error}") from None
        except TooBig as error:
            verdict = "invalid_tests" if self.arguments_are_data else "wrong"
            raise self._stop(verdict, f"the tests pass too much to the program: {error}") from None
        except OSError:
            raise self._stop("exited", "") from None
        reply = self._receive("exited")
        try:
            return self._answer(reply, number, request, use)
        except OutOfProtocol as error:
            raise self._stop("wrong", f"the program sent {error}") from None

    def _answer(self, reply: dict[str, Any], number: int, request: dict[str, Any], use: Use) -> Any:
        if reply.get("id") != number:
            raise OutOfProtocol("a reply to no request")
        if "error" in reply:
            raise _ERRORS.get(str(reply["error"]), RuntimeError)(str(reply.get("message"))[:MAX_TEXT_CHARS])
        if reply.get("method") is True and request.get("get"):
            return Method(self, request["of"], request["name"], use)
        if "object" in reply:
            self.gave_objects = True
            handle = reply.get("handle")
            if type(handle) is not int or handle < 0:
                raise OutOfProtocol("an object without a handle")
            return Object(self, handle, str(reply["object"]), reply.get("true") is True, use)
        return decode(reply.get("value"))

    def _receive(self, if_closed: Verdict) -> dict[str, Any]:
        try:
            reply = receive(self.replies)
        except OutOfProtocol as error:
            raise self._stop("wrong", f"the program sent {error}") from None
        if reply is None:
            raise self._stop(if_closed, "")
        if not isinstance(reply, dict):
            raise self._stop("wrong", "the program sent a message that is not an object")
        return reply

    def _stop(self, verdict: Verdict, detail: str) -> Stop:
        self.stopped = Stop(verdict, detail)
        return self.stopped


class Proxy:
    """A function or class of the program, by name."""

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.call(self.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._program.ask({"of": self.__name__, "name": name, "get": True}, use="live")


class Method:
    """A method of an object or a class of the program."""

    def __init__(self, program: Program, owner: int | str, name: str, use: Use) -> None:
        self._program, self._of, self.__name__, self._use = program, owner, name, use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask({"of": self._of, "name": self.__name__}, args, kwargs, self._use)


def _item_operator(name: str) -> Any:
    def ask(self: Object, *others: Any) -> Any:
        return self._ask(name, others)

    return ask


def _binary_operator(name: str, use: Use = "opaque") -> Any:
    def ask(self: Object, other: Any) -> Any:
        # No code of the program decides whether a plain value is right, or nearly right.
        comparable = isinstance(other, Object) and self.handle >= 0 and other.handle >= 0
        return self._program.ask({"operator": name}, (self, other), use=use) if comparable else NotImplemented

    return ask


class Object(Remote):
    """A program's result of no built-in type: true or false, with methods and attributes; equal to no value.

    use: for an instance of a class, tests may use the length, items and text. What its methods and attributes return is
    live: two live objects are compared and added by the program's own methods, and may be passed on. A function's
    result is opaque: an object that contains everything, is near everything and equals everything must not pass for a
    number or a list.
    """

    def __init__(self, program: Program, handle: int, kind: str, true: bool, use: Use) -> None:
        hidden = {"_program": program, "_handle": handle, "_kind": kind, "_true": true, "_use": use}
        vars(self).update(hidden, handle=-1 if use == "opaque" else handle)

    def _ask(self, name: str, others: tuple[Any, ...] = ()) -> Any:
        if self._use != "made":
            raise TypeError(f"{self!r} is not a value that tests can use")
        return self._program.ask({"operator": name}, (self, *others), use="made")

    def __bool__(self) -> bool:
        return bool(self._true)

    def __repr__(self) -> str:
        return _text(self._ask("repr")) if self._use == "made" else f"<an object of type {self._kind[:50]}>"

    def __str__(self) -> str:
        return _text(self._ask("str")) if self._use == "made" else repr(self)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __iter__(self) -> Any:
        return iter(self._ask("list"))

    def __contains__(self, item: Any) -> bool:
        return self._ask("contains", (item,)) is True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._program.ask({"of": self._handle, "name": name, "get": True}, use=self._use_of_results())

    def _use_of_results(self) -> Use:
        return "opaque" if self._use == "opaque" else "live"

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", (name, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask({"of": self._handle, "name": "__call__"}, args, kwargs, self._use_of_results())

    __eq__ = _binary_operator("eq")
    __ne__ = _binary_operator("ne")
    __lt__ = _binary_operator("lt")
    __le__ = _binary_operator("le")
    __gt__ = _binary_operator("gt")
    __ge__ = _binary_operator("ge")
    __hash__ = object.__hash__
    __add__ = _binary_operator("add", "made")
    __sub__ = _binary_operator("sub", "made")
    __mul__ = _binary_operator("mul", "made")
    __getitem__, __setitem__ = map(_item_operator, ("getitem", "setitem"))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text of an object is no text")
    return value
