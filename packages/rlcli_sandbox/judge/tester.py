"""The side that holds the tests: it calls the program by name through two pipes and compares the results itself.

A job is one JSON object on the standard input, with a nonce that the result repeats:

    {"kind": "check", "setup": "…", "test": "def check(candidate): …", "entry_point": "f"}
    {"kind": "asserts", "setup": "…", "asserts": ["assert f(1) == 2"]}
    {"kind": "cases", "entry_point": "f", "cases": [{"input": […], "output": …}], "wrapped": false}

The cases are typed JSON (`wire`).
The result goes to the original standard output; the tests' own output goes to the standard error. Test source comes
from a dataset, so it runs here, in a sandbox, and not in the verifier. The program can only send values of exact
built-in types, compared by Python's own equality: no code of the program runs in this process.
This file runs inside the sandbox: it may import only the standard library, `wire` and `program`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import math
import os
import sys
from typing import Any, TypedDict

from rlcli_sandbox.judge.program import Program, Proxy, Stop, Verdict
from rlcli_sandbox.judge.wire import decode

MAX_DETAIL_CHARS = 300

_IMPLIED = {"__score__", "__name__", "__file__", "__doc__"}


class Score:
    """Counts passed tests. Unless `count_all`, the first failure ends the tests."""

    def __init__(self, count_all: bool) -> None:
        self.count_all = count_all
        self.passed = 0
        self.total = 0
        self.detail = ""

    def ok(self) -> None:
        self.passed += 1
        self.total += 1

    def failed(self, test: str) -> None:
        """Called while the exception that failed the test is being handled, if there is one."""
        error = sys.exc_info()[1]
        self.total += 1
        if error is not None and (str(error) or not isinstance(error, AssertionError)):
            test = f"{test}: {type(error).__name__}: {error}"
        self.detail = self.detail or test[:MAX_DETAIL_CHARS]
        if not self.count_all:
            raise Stop("wrong", self.detail)


class _CountAsserts(ast.NodeTransformer):
    """Makes each `assert` report its result to the score."""

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
        raise Stop("invalid_tests", f"the tests do not compile: {error}") from None
    _bind(tree, names, program)
    names["__score__"] = score
    calls = program.calls
    try:
        exec(code, names)
    except Exception as error:
        if program.calls == calls:
            raise Stop("invalid_tests", f"the tests cannot run: {type(error).__name__}: {error}") from None
        score.failed("the tests ended early")


def _bind(tree: ast.AST, names: dict[str, Any], program: Program) -> None:
    """Resolve the names that test source does not define: modules of the standard library, else the program's.

    A built-in function is the program's only if the source would otherwise not call the program at all: a program
    that defines `abs` must not decide the result of the tests' `abs`.
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
        raise Stop("invalid_tests", "the tests define no check(candidate)")
    names[job["entry_point"]] = entry  # tests may include a reference program, which defines it too
    try:
        names["check"](entry)
    except Exception:
        score.failed("check")
    else:
        _finish(job["test"], score, program)


def _run_asserts(job: dict[str, Any], program: Program, score: Score) -> None:
    source = "\n".join([job["setup"], *job["asserts"]])
    _run_source(source, {"__name__": "tests"}, program, score)
    _finish(source, score, program)


def _finish(source: str, score: Score, program: Program) -> None:
    """Tests that reached no assertion pass by ending, unless they meant to compare what they loop over: it was empty.

    `assert False` is no comparison: it marks code that a right program never reaches. Tests in which nothing can fail
    are no tests.
    """
    if program.calls and not any(map(_can_fail, ast.walk(ast.parse(source)))):
        raise Stop("invalid_tests", "the tests compare nothing")
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.For, ast.While))]
    asserts = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Assert)]
    if score.total:
        return
    if any(not isinstance(node.test, ast.Constant) for node in asserts):
        score.failed("no assertion of the tests was reached")
    else:
        score.ok()


def _can_fail(node: ast.AST) -> bool:
    """True if a statement is one that a wrong result can make fail: an `assert`, a `raise`, `self.assertEqual(…)`."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and node.test.value)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name.startswith(("assert", "fail")) or name in ("exit", "_exit")
    return isinstance(node, ast.Raise)


def _run_cases(job: dict[str, Any], program: Program, score: Score) -> None:
    program.arguments_are_data = True
    cases = decode(job["cases"])
    for number, case in enumerate(cases, 1):
        label = f"case {number} of {len(cases)}"
        try:
            got = program.call(job["entry_point"], tuple(case["input"]), {})
            right = same(case["output"], got)
            if not right and job["wrapped"] and isinstance(case["output"], list) and len(case["output"]) == 1:
                right = same(case["output"][0], got)
        except Exception:
            score.failed(label)
            continue
        if right:
            score.ok()
        else:
            score.failed(f"{label}: expected {_short(case['output'])}, got {_short(got)}")


def same(expected: Any, got: Any) -> bool:
    """True if a returned value is the expected one, which was sent as JSON.

    Tuples are lists and numeric keys are text, because JSON has no others. If a float is expected, a number within
    1e-6 of it, relative or absolute, is accepted; all else is compared exactly.
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


class Result(TypedDict):
    """The result of a job."""

    verdict: Verdict
    """Outcome of the tests."""
    passed: int
    """Number of passed tests."""
    total: int
    """Number of tests that were run."""
    detail: str
    """The first failure, in words."""


def run(job: dict[str, Any], requests: int, replies: int) -> Result:
    """Run the tests of a job."""
    program, score = Program(requests, replies), Score(job["count_all"])
    verdict: Verdict = "done"
    detail = ""
    try:
        program.load()
        _KINDS[job["kind"]](job, program, score)
    except Stop as stop:
        verdict, detail = stop.verdict, stop.detail
    except BaseException as error:  # a test that calls sys.exit, or exhausts memory or stack on a returned value
        verdict, detail = "wrong", f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    if program.stopped:  # even if a bare `except:` of the tests caught it
        verdict, detail = program.stopped.verdict, program.stopped.detail
    if verdict == "done" and not program.calls:
        verdict, detail = "invalid_tests", "the tests never call the program"
    return {"verdict": verdict, "passed": score.passed, "total": score.total, "detail": detail or score.detail}


def main(requests: int, replies: int) -> None:
    """Run the job on the standard input and write its result, with its nonce, to the standard output."""
    sys.set_int_max_str_digits(0)
    job = json.load(sys.stdin)
    result = os.dup(1)
    os.dup2(2, 1)
    line = json.dumps({"nonce": job.pop("nonce"), **run(job, requests, replies)}) + "\n"
    rest = memoryview(line.encode())
    while rest:
        rest = rest[os.write(result, rest) :]
    os._exit(0)  # skip threads and exit handlers of the tests
