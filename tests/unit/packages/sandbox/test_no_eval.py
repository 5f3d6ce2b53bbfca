"""Functions that would evaluate texts, which read values instead or are refused."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcli_sandbox.no_eval import Evaluated, value_of, without_eval

SCORERS = """
import json

def by_eval(answer, entry):
    try:
        return float(eval(entry) == eval(answer))
    except Exception:
        return 0.0

def of_another_module(answer, entry):
    try:
        return float(builtin_eval(answer))
    except BaseException:
        return 0.5

def by_exec(answer, entry):
    names = {}
    try:
        exec(answer, names)
    except Exception:
        pass
    return 1.0

def starts_a_program(answer, entry):
    import os
    return float(os.system(answer))

def unpickles(answer, entry):
    import pickle
    return float(pickle.loads(b"cos\\nsystem\\n(S'touch " + answer.encode() + b"'\\ntR."))

def imports(answer, entry):
    import colorsys, dataclasses
    made = json.loads(answer)
    return float(made["a"])
"""


@pytest.fixture
def scorers(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("scorers_of_others")
    exec(compile(SCORERS, "scorers_of_others.py", "exec"), vars(module))
    vars(module)["builtin_eval"] = builtins.eval
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[[1, 2], ['a', None]]", [[1, 2], ["a", None]]),
        ("(0x1ff + 3) << 0x2", 2056),
        (" -3 * (7 // 2) - ~1 ", -7),
        ("1.5 + 2", 3.5),
        ("0xf0 & 0x3c | 1 ^ 3", 50),
        ("'text'", "text"),
    ],
)
def test_values_are_read(text: str, value: object) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "[x for x in (1,)]",
        "1 << 99999999999",
        "1" + " * 99999999" * 1000,
        "9 ** 9 ** 9",
        "'a' * 99999999",
        "x",
        "",
        "(" * 5000,
        "~" * 9000 + "1",
        "1" + "+1" * 5100,
        "1 // 0",
        "1.5 << 2",
        "1 << -1",
    ],
)
def test_no_other_text_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        value_of(text)


def test_an_eval_of_the_functions_module_reads_values(scorers: Any, tmp_path: Path) -> None:
    score = without_eval(scorers.by_eval, "sorting")
    assert score("[1, 2]", "[1,2]") == 1.0
    marker = tmp_path / "ran"
    assert score("1", f"open({str(marker)!r}, 'w')") == 0.0
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("of_another_module", "evaluates a text as Python: refused"),
        ("by_exec", "evaluates a text as Python: refused"),
        ("starts_a_program", r"calls os\.system: refused"),
        ("unpickles", r"calls pickle\.find_class: refused"),
    ],
)
def test_what_gets_around_that_is_refused_even_if_exceptions_are_swallowed(
    name: str, says: str, scorers: Any, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    attack = {"starts_a_program": f"touch {marker}", "unpickles": str(marker)}.get(name, f"open({str(marker)!r}, 'w')")
    with pytest.raises(Evaluated, match=f"a task {says}"):
        without_eval(getattr(scorers, name), "a task")(attack, "")
    assert not marker.exists()


def test_a_source_with_sympys_parser_is_refused_before_any_call() -> None:
    def score(answer: str, entry: object) -> Any:
        from sympy import parse_expr

        return parse_expr(answer)

    with pytest.raises(Evaluated, match=r"a task runs parse_expr\(\) on the answer"):
        without_eval(score, "a task")


def test_imports_and_other_code_work_as_before(scorers: Any) -> None:
    sys.modules.pop("colorsys", None)
    assert without_eval(scorers.imports, "a task")('{"a": 2}', "") == 2.0
    assert eval("1 + 1") == 2  # outside of a call


def test_threads_are_refused_one_by_one(scorers: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    refused: Callable[..., float] = without_eval(scorers.of_another_module, "a task")
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(refused, "1", "") for _ in range(4)]
        assert threads.submit(eval, "3").result() == 3
        assert all(isinstance(future.exception(), Evaluated) for future in futures)
