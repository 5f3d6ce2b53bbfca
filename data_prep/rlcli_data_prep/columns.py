"""Values of a row by the names of columns, of fields in structs (`reward_model.ground_truth`) and of items in lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.support.reading import parse_json


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """True if the row has a column, or a field or item within one, of this name."""
    try:
        column_value(row, name, "prompt")
    except DataError:
        return False
    return True


def column_value(row: Mapping[str, Any], name: str, ours: str) -> Any:
    """The value of the column `name`, or of the field that its dots lead to: `a.b.c`, and `turns.0.value` in a list.
    JSON text on the way is parsed. A column whose own name has dots is read as it is.

    ours: our name of the column, for the error. Raises `DataError` if the row lacks it: more likely the mapping is
    wrong than the row.
    """
    if name in row:
        return row[name]
    value: Any = row
    passed: list[str] = []
    for part in name.split("."):
        value = unpacked(value) if passed else value
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise _lacking(name, ".".join(passed), value, ours)
        passed.append(part)
    return value


def unpacked(value: Any) -> Any:
    """The object or list that a JSON text holds; any other value as it is.

    >>> unpacked('["42"]'), unpacked("[2, 3)")
    (['42'], '[2, 3)')
    """
    if not isinstance(value, str) or value.strip()[:1] + value.strip()[-1:] not in ("[]", "{}"):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def is_json(value: Any) -> bool:
    """True if JSON can hold the value as it is: not bytes, times, or numbers that are not finite."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _lacking(name: str, passed: str, value: Any, ours: str) -> DataError:
    holder = f"'{passed}'" if passed else "the row"
    if isinstance(value, Mapping):
        has = f"{holder} has {', '.join(map(str, value)) or 'nothing'}"
    elif isinstance(value, list | tuple):
        has = f"{holder} is a list of {len(value)}"
    else:
        has = f"{holder} is {value!r:.60}"
    return DataError(f"no column '{name}' ({has})", f"name the column with --columns {ours}=THEIRS")
