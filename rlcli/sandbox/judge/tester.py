"""The side that holds the tests. It calls the program by name through two pipes and compares what comes back itself.

A job is one JSON object on the standard input, with a nonce that the result repeats:

    {"kind": "check", "setup": "…", "test": "def check(candidate): …", "entry_point": "f"}
    {"kind": "asserts", "setup": "…", "asserts": ["assert f(1) == 2"]}
    {"kind": "cases", "entry_point": "f", "cases": [{"input": […], "output": …}], "wrapped": false}

The result goes to what was the standard output; the tests' own output goes to the standard error. Test source is a
dataset's, so it runs here, in a sandbox, and not in the verifier. What the program sends can only ever be a value of
exact built-in types, compared by Python's own equality: no code of the program's runs in this process.
This file runs inside the sandbox by its source: the standard library and `wire` are all that it may import.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import math
import os
import sys
from typing import Any

from rlcli.sandbox.judge.wire import NotPlain, OutOfProtocol, TooBig, decode, encode, receive, send

MAX_DETAIL_CHARS = 300

# What a program may raise in the tests: no SystemExit, and no StopIteration, which would end the tests' loops early.
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup))
}
_ERRORS["UnicodeError"] = UnicodeError


_IMPLIED = {"__score__", "__name__", "__file__", "__doc__"}


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
            raise self._stop("wrong", f"the tests pass too much to the program: {error}") from None
        except OSError:
            raise self._stop("gone", "") from None
        reply = self._receive("gone")
        try:
            if reply.get("id") != number:
                raise OutOfProtocol("a reply to no request")
            if "error" in reply:
                raise _ERRORS.get(str(reply["error"]), RuntimeError)(str(reply.get("text"))[:MAX_DETAIL_CHARS])
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


class Score:
    """Counts what passed. Unless all are wanted, the first failure ends the tests."""

    def __init__(self, count_all: bool) -> None:
        self.count_all = count_all
        self.passed = 0
        self.total = 0
        self.detail = ""

    def ok(self) -> None:
        self.passed += 1
        self.total += 1

    def failed(self, what: str) -> None:
        """Called while the exception that failed the test is being handled, if there is one."""
        error = sys.exc_info()[1]
        self.total += 1
        if error is not None and (str(error) or not isinstance(error, AssertionError)):
            what = f"{what}: {type(error).__name__}: {error}"
        self.detail = self.detail or what[:MAX_DETAIL_CHARS]
        if not self.count_all:
            raise Stop("wrong", self.detail)


class _CountAsserts(ast.NodeTransformer):
    """Makes each `assert` tell the score how it ended."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        counted: ast.Try = ast.parse(
            "try:\n pass\nexcept Exception:\n __score__.failed('')\nelse:\n __score__.ok()"
        ).body[0]  # type: ignore[assignment]
        counted.body = [node]
        call = counted.handlers[0].body[0]
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        call.value.args = [ast.Constant(ast.unparse(node)[:MAX_DETAIL_CHARS])]
        return ast.copy_location(counted, node)


def _run_source(source: str, names: dict[str, Any], program: Program, score: Score) -> None:
    """Run test source whose unknown names are the program's functions."""
    try:
        tree = ast.parse(source)
        code = compile(ast.fix_missing_locations(_CountAsserts().visit(tree)), "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Stop("data", f"the tests do not compile: {error}") from None
    _bind(tree, names, program)
    names["__score__"] = score
    calls = program.calls
    try:
        exec(code, names)
    except Exception as error:
        if program.calls == calls:
            raise Stop("data", f"the tests cannot run: {type(error).__name__}: {error}") from None
        score.failed("the tests ended early")


def _bind(tree: ast.AST, names: dict[str, Any], program: Program) -> None:
    """Give the names that test source does not know a meaning: modules of the standard library, else the program's.

    A built-in function is the program's only where the source would not call the program at all otherwise: a program
    that defines `abs` must not decide what the tests' `abs` says.
    """
    nodes = list(ast.walk(tree))
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = read - bound - names.keys() - _IMPLIED
    unknown = {name for name in used if not hasattr(builtins, name)}
    for name in unknown & modules & sys.stdlib_module_names:
        names[name] = importlib.import_module(name)
    if not unknown and not any(isinstance(value, Proxy) for value in names.values()):
        unknown = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name in unknown - names.keys() - _IMPLIED:
        names[name] = Proxy(program, name)


def _run_check(job: dict[str, Any], program: Program, score: Score) -> None:
    entry = Proxy(program, job["entry_point"])
    names: dict[str, Any] = {"__name__": "tests", "candidate": entry, job["entry_point"]: entry}
    _run_source(f"{job['setup']}\n{job['test']}", names, program, score)
    if not callable(names.get("check")) or isinstance(names["check"], Proxy):
        raise Stop("data", "the tests define no check(candidate)")
    names[job["entry_point"]] = entry  # tests may bring along a reference program, which defines it too
    try:
        names["check"](entry)
    except Exception:
        score.failed("check")
    else:
        if not score.total:
            score.ok()


def _run_asserts(job: dict[str, Any], program: Program, score: Score) -> None:
    source = "\n".join([job["setup"], *job["asserts"]])
    _run_source(source, {"__name__": "tests"}, program, score)


def _run_cases(job: dict[str, Any], program: Program, score: Score) -> None:
    for number, case in enumerate(job["cases"], 1):
        what = f"case {number} of {len(job['cases'])}"
        try:
            got = program.call(job["entry_point"], tuple(case["input"]), {})
            right = same(case["output"], got)
            if not right and job["wrapped"] and isinstance(case["output"], list) and len(case["output"]) == 1:
                right = same(case["output"][0], got)
        except Exception:
            score.failed(what)
            continue
        if right:
            score.ok()
        else:
            score.failed(f"{what}: expected {_short(case['output'])}, got {_short(got)}")


def same(expected: Any, got: Any) -> bool:
    """Whether a returned value is the expected one, which came as JSON.

    Tuples are lists and numbers that are keys are text, because JSON has no others. Where a float is expected, a number
    within 1e-6 of it, relative or absolute, will do; all else is compared exactly.
    """
    if isinstance(got, tuple):
        got = list(got)
    if isinstance(expected, list):
        return isinstance(got, list) and len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return False
        keyed = {str(key) if isinstance(key, int) else key: value for key, value in got.items()}
        return (
            len(keyed) == len(got)
            and keyed.keys() == expected.keys()
            and all(same(expected[key], keyed[key]) for key in expected)
        )
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        return math.isclose(expected, got, rel_tol=1e-6, abs_tol=1e-6)
    return bool(expected == got)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = f"a long {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


_KINDS = {"check": _run_check, "asserts": _run_asserts, "cases": _run_cases}


def run(job: dict[str, Any], requests: int, replies: int) -> dict[str, Any]:
    """The result of a job: `verdict` (done, wrong, data, gone, unstarted), `passed`, `total`, `detail`.

    done: all tests ran. wrong: they stopped at what the program did. data: they cannot judge any program. gone: the
    program's process ended or closed its pipe. unstarted: it did so before it had read the program.
    """
    program, score = Program(requests, replies), Score(job["count_all"])
    verdict, detail = "done", ""
    try:
        program.load()
        _KINDS[job["kind"]](job, program, score)
    except Stop as stop:
        verdict, detail = stop.verdict, stop.detail
    except BaseException as error:  # a test that calls sys.exit, or runs out of memory or stack over what came back
        verdict, detail = "wrong", f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    if program.stopped:  # a bare `except:` of the tests does not hide it
        verdict, detail = program.stopped.verdict, program.stopped.detail
    if verdict == "done" and not program.calls:
        verdict, detail = "data", "the tests never call the program"
    return {"verdict": verdict, "passed": score.passed, "total": score.total, "detail": detail or score.detail}


def main(requests: int, replies: int) -> None:
    """Run the job on the standard input and write its result, with its nonce, to the standard output."""
    job = json.load(sys.stdin)
    result = os.dup(1)
    os.dup2(2, 1)
    line = json.dumps({"nonce": job.pop("nonce"), **run(job, requests, replies)}) + "\n"
    rest = memoryview(line.encode())
    while rest:
        rest = rest[os.write(result, rest) :]
    os._exit(0)  # threads and exit handlers of the tests' have no say
