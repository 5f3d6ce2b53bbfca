"""The protocol between the tests and the program: values of exact built-in types, as typed JSON in frames.

A value is None, a bool, int, float, complex, str, bytes, list, tuple, set, frozenset or dict, with only such contents.
JSON's own types represent themselves; every other value is an object with one key that names its type:

    {"int": "0x1f…"} beyond 64 bits   {"float": "nan"}   {"complex": [1.0, 2.0]}   {"str": "eda080"} (UTF-8, surrogates)
    {"object": 3} (an object of the program, by its handle)
    {"bytes": "00ff"}   {"tuple": […]}   {"set": […]}   {"frozenset": […]}   {"dict": [[key, value], …]}

`encode`, on the sending side, converts subclasses (Counter, namedtuple, IntEnum, NumPy's scalars and arrays) to their
base type, and iterators, ranges and views to lists. `decode` builds exact types only, whatever it receives: no pickle,
no look-up of classes.
This file runs inside the sandbox: it may import only the standard library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

MAX_FRAME_BYTES = 8 << 20
"""Maximum length of a message, in both directions."""

MAX_DEPTH = 100
"""Maximum nesting of a value."""

MAX_ITEMS = 1_000_000
"""Maximum number of items read from an iterator."""

_LENGTH_BYTES = 4
_VIEWS: tuple[type, ...] = (range, type({}.keys()), type({}.values()), type({}.items()))


class Remote:
    """An object of the program that stays in its process. handle: its number there; -1: it may not be passed back."""

    handle: int = -1


class NotPlain(TypeError):
    """A value that is not of a built-in type and cannot be converted to one."""


class TooBig(ValueError):
    """A value beyond `MAX_DEPTH`, `MAX_ITEMS` or `MAX_FRAME_BYTES`."""


class OutOfProtocol(Exception):
    """The other side sent data that is not a valid frame."""


def encode(value: Any, depth: int = 0) -> Any:
    """A value as typed JSON. Raises `NotPlain` and `TooBig`, and any exception of an iterator of the program."""
    if depth > MAX_DEPTH:
        raise TooBig(f"a value is nested more than {MAX_DEPTH} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, (int, float, complex, str, bytes, bytearray, Remote)):
        return _encode_atom(value)

    def items(values: Iterable[Any]) -> list[Any]:
        return [encode(item, depth + 1) for item in values]

    if isinstance(value, list):
        return items(list.__iter__(value))
    if isinstance(value, dict):
        return {"dict": [items(pair) for pair in dict.items(value)]}
    for name, base in _CONTAINERS.items():
        if isinstance(value, base):
            return {name: items(base.__iter__(value))}
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    if isinstance(value, _VIEWS) or hasattr(type(value), "__next__"):
        listed = list(islice(value, MAX_ITEMS + 1))
        if len(listed) > MAX_ITEMS:
            raise TooBig(f"an iterator gave more than {MAX_ITEMS} items")
        return items(listed)
    raise NotPlain(f"a value of type {type(value).__name__} cannot be sent: only built-in values can")


def _encode_atom(value: Any) -> Any:
    if isinstance(value, Remote):
        if value.handle < 0:
            raise NotPlain(f"a value of type {type(value).__name__} cannot be sent: only built-in values can")
        return {"object": value.handle}
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
    if isinstance(value, float):
        value = float.__float__(value)
        return value if math.isfinite(value) else {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [_encode_atom(value.real), _encode_atom(value.imag)]}
    if isinstance(value, str):
        text = "".join(str.__iter__(value))
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON would join two lone surrogates into one character
            return {"str": text.encode("utf-8", "surrogatepass").hex()}
        return text
    return {"bytes": bytes(value).hex()}


def decode(data: Any, depth: int = 0, objects: Sequence[Any] = ()) -> Any:
    """The value that typed JSON represents. objects: by their handles. Raises `OutOfProtocol`."""
    if depth > MAX_DEPTH:
        raise OutOfProtocol(f"a value nested more than {MAX_DEPTH} deep")
    if isinstance(data, list):
        return [decode(item, depth + 1, objects) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise OutOfProtocol("a value of no type")
    ((kind, content),) = data.items()
    try:
        if kind in _ATOMS:
            return _ATOMS[kind](content)
        if kind == "object":
            return objects[content]
        items = [decode(item, depth + 1, objects) for item in content]
        return _CONTAINERS[kind](items)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise OutOfProtocol(f"no value of type {str(kind)[:50]!r}") from error


def _number(data: Any) -> float:
    return float(data["float"] if isinstance(data, dict) else data)


_ATOMS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(_number(parts[0]), _number(parts[1])),
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
}
_CONTAINERS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def send(fd: int, message: Any) -> None:
    """Write one frame: its length, four bytes, and its JSON. Raises `TooBig`, and `OSError` if the reader is gone."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise TooBig(f"a message of {len(body)} bytes, more than {MAX_FRAME_BYTES}")
    rest = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    while rest:
        rest = rest[os.write(fd, rest) :]


def receive(fd: int) -> Any:
    """Read one frame; None if the other side has closed. Raises `OutOfProtocol`."""
    head = _exactly(fd, _LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise OutOfProtocol(f"a message of {length} bytes, more than {MAX_FRAME_BYTES}")
    body = _exactly(fd, length)
    if body is None:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise OutOfProtocol("a message that is not JSON") from error


def _exactly(fd: int, count: int) -> bytes | None:
    chunks = []
    while count:
        chunk = os.read(fd, min(count, 1 << 16))
        if not chunk:
            return None
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
