"""Answers in the forms of public datasets, as the text that a row's verifier compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from functools import cache
from typing import Any

from rlcli.errors import DataError, RlcliError
from rlcli.registry import Registry
from rlcli.support.value_text import value_text
from rlcli_data_prep.code_tests import code_tests
from rlcli_data_prep.columns import unpacked
from rlcli_data_prep.sources import text_of

VERIFIERS: Registry[Any] = Registry("verifier", "rlcli.verifiers")
CODE, CHOICE, TEXT = "code", "choice", "text"
FORMULAS = ("number", "latex")
PARTS = ("value", "answer", "final_answer", "ground_truth", "target", "text", "label")
"""Fields of a struct that hold the answer, in the order of preference."""
ABSENT = {"nan", "null", "<na>"}
"""Texts that programs write for a value that is not there."""
_FIRST_VERIFIER = re.compile(r"[\s+-]*(?:[\d.]+(?:[eE][+-]?\d+)?\s*\*\s*)*([A-Za-z_][\w.-]*)(?![\w.:/-])")
_PYTHON_LIST = re.compile(r"\[\s*'")
_MONTH, _DAY = r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_DATE = re.compile(
    rf"\d{{4}}([-/]){_MONTH}\1{_DAY}(?:[ T]\d\d:\d\d.*)?|(?:{_MONTH}([-/]){_DAY}|{_DAY}([-/]){_MONTH})[-/]\d{{4}}",
    re.ASCII,
)
"""A date in digits, which is a formula as well: 2024-05-01 is 2018."""
_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")


@cache
def answer_kind(verifier: str) -> str:
    """The ANSWER_KIND of the first verifier of an expression; empty if it declares none, or is not installed."""
    match = _FIRST_VERIFIER.match(verifier)
    if match is None:
        return ""
    try:
        VERIFIERS.get(match[1])
    except RlcliError:  # the check of the rows names it
        return ""
    module = sys.modules[VERIFIERS.target(match[1]).partition(":")[0]]
    return str(getattr(module, "ANSWER_KIND", ""))


def ground_truth(value: Any, column: str, kind: str, row: Mapping[str, Any]) -> str:
    """The ground truth in a column as text for a verifier of this kind (see `answer_kind`).

    Numbers, dates and lists are written as a person writes them (no dates for formulas); tests of code in a form that
    `code` reads; other structs as JSON. Raises `DataError` for a value that no response could match.
    """
    if kind == CODE:
        return text_of(code_tests(value, column, row), column)
    if kind in (*FORMULAS, CHOICE, TEXT):
        return _answer(value, column, kind)
    if isinstance(value, list | tuple) and value and all(map(_is_scalar, value)) and kind != "countdown":
        return ", ".join(_answer(item, column, "") for item in value)
    return _answer(value, column, "") if value is None or _is_scalar(value) else _json(value, column)


def joins_answers(value: Any, column: str, kind: str) -> bool:
    """True if the ground truth of this value joins several answers, which a response must give all."""
    if kind not in FORMULAS:
        return False
    value = _unpacked(value, column)
    if isinstance(value, Mapping):
        return joins_answers(_part(value, column), column, kind)
    if not isinstance(value, list | tuple):
        return False
    return len({_answer(item, column, kind) for item in value}) > 1 or joins_answers(value[0], column, kind)


def is_index(value: Any, column: str) -> bool:
    """True if an answer is a whole number, and not text: where a question has choices, it may be an index of them."""
    value = _unpacked(value, column)
    if isinstance(value, Mapping):
        return is_index(_part(value, column), column)
    if isinstance(value, list | tuple):
        return any(is_index(item, column) for item in value)
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    return is_number and (value_text(value) or "").isdecimal()


def _answer(value: Any, column: str, kind: str) -> str:
    """One answer: a text, or several that are one answer together, as the roots of an equation."""
    value = _unpacked(value, column) if kind in (*FORMULAS, CHOICE) else value
    if value is None or isinstance(value, str):
        text = text_of(value, column).strip()
        if kind in FORMULAS and text.lower() in ABSENT:
            raise DataError(f"'{column}' holds {text!r}, the text of a missing value", "fix that row")
        if kind in FORMULAS and _DATE.fullmatch(text):
            raise _dated(text, column)
        return text
    if isinstance(value, Mapping):
        return _answer(_part(value, column), column, kind)
    if isinstance(value, list | tuple):
        texts = [_answer(item, column, kind) for item in value]
        if not texts:
            raise DataError(f"'{column}' holds an empty list", "fix that row")
        if len(set(texts)) == 1:  # one answer, by several annotators
            return texts[0]
        if kind not in FORMULAS:
            raise DataError(
                f"'{column}' holds {len(texts)} answers ({', '.join(texts)!r:.80}), and the verifier compares with one",
                "keep one of them, or score the rows with a function of yours (--verifier FILE.py:FUNCTION)",
            )
        if nested := next((text for text in texts if _is_list(text)), ""):
            raise DataError(
                f"'{column}' holds several answers, of which one has a comma of its own ({nested!r:.80})",
                "write a list within a list with brackets, (1, 2), and a number without commas",
            )
        return ", ".join(texts)
    if kind in FORMULAS and isinstance(value, date | time):
        raise _dated(_scalar(value, column), column)
    return _scalar(value, column)


def _is_list(text: str) -> bool:
    """True if a text has a comma outside of brackets."""
    rest, count = text, 1
    while count:
        rest, count = _BRACKETS.subn("", rest)
    return "," in rest


def _dated(text: str, column: str) -> DataError:
    return DataError(
        f"'{column}' holds {text[:40]!r}, a date or time, which the verifier would read as a formula",
        "compare it as text (--verifier exact), or leave such rows out",
    )


def _unpacked(value: Any, column: str) -> Any:
    """The list of texts or the struct that a JSON text holds. A list without quotes may be an interval or a point."""
    if not isinstance(value, str):
        return value
    parsed = unpacked(value)
    if isinstance(parsed, Mapping) or (isinstance(parsed, list) and any(isinstance(item, str) for item in parsed)):
        return parsed
    if _PYTHON_LIST.match(value.strip()):
        raise DataError(
            f"'{column}' holds a list as Python prints it: {value.strip()!r:.80}", "store it as a list, or as JSON"
        )
    return value


def _part(struct: Mapping[str, Any], column: str) -> Any:
    name = next((name for name in PARTS if struct.get(name) is not None), "")
    if not name:
        raise DataError(
            f"'{column}' holds a struct ({', '.join(map(str, struct)) or 'nothing'}), and the verifier compares with "
            "one answer",
            f"name the field that holds it: --columns answer={column}.FIELD",
        )
    return struct[name]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str) or value_text(value) is not None


def _scalar(value: Any, column: str) -> str:
    try:
        text = value_text(value)
    except ValueError as error:  # an integer of more digits than Python writes
        raise DataError(f"'{column}' holds a number that is too long: {error!s:.80}", "fix that row") from error
    if text is None:
        raise DataError(f"'{column}' holds no answer: {value!r:.80}", "leave it out, or fix that row")
    return text


def _json(value: Any, column: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=lambda item: _scalar(item, column))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"'{column}' holds no JSON value: {value!r:.80}", "leave it out, or fix that row") from error
    return text_of(text, column)
