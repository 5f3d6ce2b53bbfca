"""The type of arbitrary JSON, which is read with isinstance checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""A value of JSON. `json.loads` makes lists and dicts; what only reads or writes one takes tuples and mappings too."""
