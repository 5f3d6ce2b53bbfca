"""The ground truths that `code` reads, each one JSON text.

    {"kind": "check", "test": "def check(candidate): …", "entry_point": "f"}
    {"kind": "asserts", "asserts": ["assert f(1) == 2"], "setup": "import math"}
    {"kind": "stdio", "cases": [{"input": "1 2\\n", "output": "3\\n"}]}
    {"kind": "functional", "entry_point": "f", "cases": [{"input": [1, 2], "output": 3}]}
    {"inputs": […], "outputs": […], "fn_name": "f"}
    {"assert_case": ["assert f(1) == 2"]}
    {"functional": "def check(candidate): …\n\ncheck(Solution().f)"}
    [{"input": "…", "output": "…", "testtype": "functional"}]

HumanEval's form (a `setup` may precede its test); MBPP's; standard input and output; calls of a function, or of a
method of class `Solution`; that of APPS, TACO and verl (without fn_name: standard input and output); verl's asserts
(blank inputs and outputs may stand beside them); Code-R1's of LeetCode; LiveCodeBench's (testtype "stdin" or
"functional", and then the function's name is in extra_info "func_name"). In the forms of APPS and LiveCodeBench,
arguments and results given as text are JSON, one argument per line. If APPS gives them as lists, it wraps each result
in a list of one: the result itself is right there too.

Tests that cannot fail are refused: no expected output but blank ones or null.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from rlcli_sandbox.judge import Job

_INT_DIGITS = 4300
_CALL = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\s*\(")
_CHECK = re.compile(r"check\((?:Solution\(\)\.)?(?P<name>[A-Za-z_]\w*)\)")


@dataclass(frozen=True)
class Scripts:
    """Standard inputs and their expected outputs."""

    cases: Sequence[Mapping[str, str]]


def read_truth(text: str, extra_info: Mapping[str, object]) -> Job | Scripts:
    """The tests in a ground truth. Raises `ValueError` if they cannot be read."""
    try:
        truth = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the ground truth is not JSON ({error}): {text[:80]!r}") from None
    if isinstance(truth, list):
        return _of_livecodebench(truth, extra_info)
    if isinstance(truth, dict) and "assert_case" in truth:
        return _of_assert_case(truth)
    if isinstance(truth, dict) and "inputs" in truth and "outputs" in truth:
        return _of_apps(truth)
    if isinstance(truth, dict) and isinstance(truth.get("functional"), str):
        return _of_code_r1(truth["functional"])
    kind = truth.get("kind") if isinstance(truth, dict) else None
    if kind == "check":
        return Job(kind="check", setup=_text(truth, "setup", ""), test=_text(truth, "test"), entry_point=_entry(truth))
    if kind == "asserts":
        return Job(kind="asserts", setup=_text(truth, "setup", ""), asserts=_texts(truth, "asserts"))
    if kind == "stdio":
        return _scripts([_script(case) for case in _list(truth, "cases")])
    if kind == "functional":
        return _cases(_entry(truth), [_call(case) for case in _list(truth, "cases")])
    raise ValueError(f"the ground truth is in no form that code reads: {text[:80]!r}")


def called_names(truth: Job | Scripts) -> list[str]:
    """The functions and classes of a program that the tests call, as far as that can be determined."""
    if isinstance(truth, Scripts):
        return []
    if entry := truth.get("entry_point"):
        return [entry]
    called = dict.fromkeys(name for line in truth.get("asserts", []) for name in _CALL.findall(line))
    return [name for name in called if not hasattr(builtins, name)]


def _of_livecodebench(tests: list[object], extra_info: Mapping[str, object]) -> Job | Scripts:
    if not tests:
        raise ValueError("the ground truth holds no tests")
    scripts = [_script(test) for test in tests]
    if all(cast("dict[str, object]", test).get("testtype", "stdin") == "stdin" for test in tests):
        return _scripts(scripts)
    name = extra_info.get("func_name") or extra_info.get("entry_point")
    if not isinstance(name, str):
        raise ValueError('tests of a function, but no extra_info "func_name" names it')
    return _cases(name, [{"input": _arguments(s["input"]), "output": _json(s["output"])} for s in scripts])


def _of_code_r1(source: str) -> Job:
    test, _, call = source.rstrip().rpartition("\n")
    match = _CHECK.fullmatch(call.strip())
    if match is None:
        raise ValueError(f"the ground truth's 'functional' does not end in check(…) of a function: {call[:80]!r}")
    return Job(kind="check", setup="", test=test, entry_point=match["name"])


def _of_apps(truth: Mapping[str, object]) -> Job | Scripts:
    inputs, outputs = _list(truth, "inputs"), _list(truth, "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if not truth.get("fn_name"):
        return _scripts(
            [_script({"input": _lines(a), "output": _lines(b)}) for a, b in zip(inputs, outputs, strict=True)]
        )
    cases = [
        {"input": _arguments(a) if isinstance(a, str) else a, "output": _json(b) if isinstance(a, str) else b}
        for a, b in zip(inputs, outputs, strict=True)
    ]
    wrapped = not all(isinstance(a, str) for a in inputs)
    return _cases(_text(truth, "fn_name"), [_call(case) for case in cases], wrapped)


def _of_assert_case(truth: Mapping[str, object]) -> Job:
    lists = [cast("list[object]", truth.get(key) or []) for key in ("inputs", "outputs")]
    other_tests = [value for values in lists for value in values if str(value).strip()]
    if other_tests:
        raise ValueError(f"the ground truth has inputs or outputs beside 'assert_case': {str(other_tests[0])[:80]!r}")
    return Job(kind="asserts", setup=_text(truth, "setup", ""), asserts=_texts(truth, "assert_case"))


def _scripts(cases: list[dict[str, str]]) -> Scripts:
    if not any(case["output"].strip() for case in cases):
        raise ValueError("the ground truth has nothing to compare: every expected output is blank")
    return Scripts(cases)


def _cases(entry_point: str, cases: list[dict[str, object]], wrapped: bool = False) -> Job:
    if all(case["output"] in (None, [None]) for case in cases):
        raise ValueError("the ground truth has nothing to compare: every expected result is null")
    return Job(kind="cases", entry_point=entry_point, cases=cases, wrapped=wrapped)


def _lines(value: object) -> object:
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _script(case: object) -> dict[str, str]:
    if not isinstance(case, dict):
        raise ValueError(f"the ground truth has a case that is not an object: {str(case)[:80]!r}")
    return {"input": _text(case, "input"), "output": _text(case, "output")}


def _call(case: object) -> dict[str, object]:
    if not isinstance(case, dict) or not isinstance(case.get("input"), list) or "output" not in case:
        raise ValueError(f"the ground truth has a case without a list of inputs and an output: {str(case)[:80]!r}")
    return {"input": case["input"], "output": case["output"]}


def _arguments(text: str) -> list[object]:
    return [_json(line) for line in text.split("\n")]


def _json(text: object) -> object:
    try:
        value: object = json.loads(text, parse_int=_integer) if isinstance(text, str) else text
        return value
    except (ValueError, RecursionError):
        raise ValueError(f"the ground truth has a value that is not JSON: {str(text)[:80]!r}") from None


def _integer(digits: str) -> int:
    """An integer of any length: `int` refuses more than 4,300 digits, `Decimal` does not."""
    return int(digits) if len(digits) <= _INT_DIGITS else int(Decimal(digits))


def _texts(truth: Mapping[str, object], key: str) -> list[str]:
    texts = _list(truth, key)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the ground truth's {key!r} are not all texts")
    return cast("list[str]", texts)


def _entry(truth: Mapping[str, object]) -> str:
    name = _text(truth, "entry_point")
    if not name.isidentifier():
        raise ValueError(f"the ground truth's 'entry_point' is not a name: {name[:80]!r}")
    return name


def _list(truth: Mapping[str, object], key: str) -> list[object]:
    value = truth.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"the ground truth's {key!r} is not a list of tests: {str(value)[:80]!r}")
    return value


def _text(truth: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = truth.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"the ground truth's {key!r} is not text: {str(value)[:80]!r}")
    return value
