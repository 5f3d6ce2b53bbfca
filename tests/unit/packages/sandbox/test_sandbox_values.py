"""Values exchanged by the judge and a program: their types, their bounds, and the equality of results."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_sandbox import Limits
from rlcli_sandbox.judge import same_output
from rlcli_sandbox.judge.tester import same
from rlcli_sandbox.judge.wire import (
    MAX_DEPTH,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    NotPlain,
    OutOfProtocol,
    TooBig,
    decode,
    encode,
    receive,
    send,
)

# ---- the wire


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.binary()
)
KEYS = st.recursive(ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)


def through(value: Any) -> Any:
    """A value that has crossed a pipe."""
    read, write = os.pipe()
    sender = threading.Thread(target=send, args=(write, encode(value)))
    sender.start()
    try:
        return decode(receive(read))
    finally:
        sender.join()
        os.close(read)
        os.close(write)


def exactly(value: Any) -> Any:
    """A value's types and parts, so that 1 is not True, -0.0 is not 0.0, and a set has an order."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(exactly, value)))
    if isinstance(value, dict):
        return type(value), [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(item) for item in value]
    return type(value), repr(value)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_a_value_crosses_as_itself(value: Any) -> None:
    assert exactly(through(value)) == exactly(value)


@pytest.mark.parametrize(
    "value",
    [-0.0, math.inf, -math.inf, -(1 << 63) - 1, "\ud83d\ude00", "\ud800", b"\0\xff", complex(-0.0, 1)],
)
def test_values_that_plain_json_would_bend(value: Any) -> None:
    got = through(value)
    assert type(got) is type(value)
    assert got == value
    if isinstance(value, float):
        assert math.copysign(1, got) == math.copysign(1, value)


def test_an_int_of_any_size_crosses() -> None:
    assert through(-(10**6000)) == -(10**6000)


def test_nan_crosses() -> None:
    assert math.isnan(through(math.nan))


class Colour(IntEnum):
    RED = 3


Point = namedtuple("Point", "x y")


class Liar(str):
    """Says what it likes, and means "no"."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return "yes"

    def __iter__(self) -> Iterator[str]:
        return iter("yes")

    def encode(self, *args: Any) -> bytes:  # type: ignore[override]
        return b"yes"


class LyingList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(["forged"])


class LyingInt(int):
    def __int__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "7"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Colour.RED, 3),
        (range(3), [0, 1, 2]),
        ((x * x for x in (1, 2)), [1, 4]),
        (map(str, [1]), ["1"]),
        (zip("ab", [1, 2], strict=True), [("a", 1), ("b", 2)]),
        ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.items(), [("a", 1)]),
        (bytearray(b"x"), b"x"),
        (Liar("no"), "no"),
        (LyingList([1]), [1]),
        (LyingInt(3), 3),
        ([Liar("no"), {LyingInt(1): ()}], ["no", {1: ()}]),
    ],
)
def test_subclasses_and_iterators_cross_as_what_they_are_made_of(value: Any, plain: Any) -> None:
    got = through(value)
    assert type(got) is type(plain)
    assert got == plain


def test_numpy_values_cross_as_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    assert through([numpy.int64(3), numpy.float64(0.5), numpy.array([[1, 2]]), numpy.bool_(True)]) == [
        3,
        0.5,
        [[1, 2]],
        True,
    ]


@pytest.mark.parametrize("value", [object(), len, Limits(wall_s=4.0), [lambda: 1], {1: object}])
def test_other_objects_do_not_cross(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value)


def test_a_value_has_bounds() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    itself: list[Any] = []
    itself.append(itself)
    for value in (deep, itself, iter(range(MAX_ITEMS + 1))):
        with pytest.raises(TooBig):
            encode(value)
    with pytest.raises(TooBig):
        send(-1, "x" * MAX_FRAME_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"int": "x"},
        {"int": 5},
        {"set": [[]]},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"pickle": "gASVAAAA"},
        {"tuple": 5},
        {"tuple": [], "list": []},
        {"bytes": "0"},
        {"float": []},
        {"complex": [1]},
        {"str": "ff"},
    ],
)
def test_what_is_no_value_is_out_of_protocol(data: Any) -> None:
    with pytest.raises(OutOfProtocol):
        decode(data)


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\0\0\0\2{]", b"\0\0\0\2\xff\xfe", b"\0\1\0\0" + b"[" * 65536])
def test_a_frame_that_is_none_is_out_of_protocol(frame: bytes) -> None:
    read, write = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write, frame), os.close(write)))
    writer.start()
    with pytest.raises(OutOfProtocol):
        receive(read)
    os.close(read)
    writer.join()


def test_a_nested_reply_is_refused_before_it_is_built() -> None:
    data: Any = 1
    for _ in range(MAX_DEPTH + 1):
        data = {"tuple": [data]}
    with pytest.raises(OutOfProtocol):
        decode(data)


# ---- comparing


@pytest.mark.parametrize(
    ("expected", "got"),
    [(3, 3), (0.5, 0.5 + 1e-9), (2.0, 2), ([1, [2]], (1, (2,))), ({"1": [2]}, {1: (2,)}), (None, None), ("a", "a")],
)
def test_results_that_are_the_expected_ones(expected: Any, got: Any) -> None:
    assert same(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (3, 4),
        (0.5, 0.501),
        ([1], [1, 1]),
        ([1], 1),
        (1, [1]),
        ("1", 1),
        (None, 0),
        ({"1": 2}, {1: 2, "1": 2}),
        (0.5, "0.5"),
    ],
)
def test_results_that_are_not(expected: Any, got: Any) -> None:
    assert not same(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ("3\n", "3"),
        ("1 2\n3\n", " 1   2 \r\n3\n\n"),
        ("0.333333333", "0.3333333331"),
        ("2.50", "2.5"),
        ("x 1.0", "x 1"),
        ("5", "5.0"),
    ],
)
def test_outputs_that_are_the_expected_ones(expected: str, got: str) -> None:
    assert same_output(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ("3", "4"),
        ("", "3"),
        ("3", ""),
        ("1\n2", "1 2"),
        ("0110", "110"),
        ("50000000000000000", "50000000000000001"),
        ("0.5", "0.51"),
        ("nan", "1"),
        ("1e999", "1e998"),
        ("1", "1_0"),
        ("yes", "YES"),
        ("10", "٣"),
    ],
)
def test_outputs_that_are_not(expected: str, got: str) -> None:
    assert not same_output(expected, got)
