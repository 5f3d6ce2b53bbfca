"""Answers in the forms of public datasets, as the text that a row's verifier compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlcli.errors import DataError, RlcliError
from rlcli.registry import Registry
from rlcli.value_text import value_text
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

    Numbers, dates and lists are written as a person writes them; tests of code in a form that `code` reads; other
    structs as JSON. Raises `DataError` for a value that no response could match.
    """
    if kind == CODE:
        return text_of(code_tests(value, column, row), column)
    if kind in (*FORMULAS, CHOICE, TEXT):
        return _answer(value, column, kind)
    if isinstance(value, list | tuple) and value and all(map(_is_scalar, value)) and kind != "countdown":
        return ", ".join(_answer(item, column, "") for item in value)
    return _answer(value, column, "") if value is None or _is_scalar(value) else _json(value, column)


def _answer(value: Any, column: str, kind: str) -> str:
    """One answer: a text, or several that are one answer together, as the roots of an equation."""
    value = _unpacked(value, column) if kind in (*FORMULAS, CHOICE) else value
    if value is None or isinstance(value, str):
        text = text_of(value, column).strip()
        if kind in FORMULAS and text.lower() in ABSENT:
            raise DataError(f"'{column}' holds {text!r}, the text of a missing value", "fix that row")
        return text
    if isinstance(value, Mapping):
        return _answer(_part(value, column), column, kind)
    if isinstance(value, list | tuple):
        texts = list(dict.fromkeys(_answer(item, column, kind) for item in value))
        if not texts:
            raise DataError(f"'{column}' holds an empty list", "fix that row")
        if len(texts) > 1 and kind not in FORMULAS:
            raise DataError(
                f"'{column}' holds {len(texts)} answers ({', '.join(texts)!r:.80}), and the verifier compares with one",
                "keep one of them, or score the rows with a function of yours (--verifier FILE.py:FUNCTION)",
            )
        return ", ".join(texts)
    return _scalar(value, column)


def _unpacked(value: Any, column: str) -> Any:
    """The list of texts or the struct that a JSON text holds. A list without quotes may be an interval or a point."""
    if not isinstance(value, str):
        return value
    found = unpacked(value)
    if isinstance(found, Mapping) or (isinstance(found, list) and any(isinstance(item, str) for item in found)):
        return found
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
