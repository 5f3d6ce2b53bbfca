"""Checksums: parts add up to the whole, and nothing that differs agrees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlcli.model.weight_check import checksum as checksums
from rlcli.model.weight_check.checksum import Checksums, checksum, columns_of, keys, part_checksum

SHAPES = [(), (7,), (8,), (5, 8), (5, 7), (3, 4, 6)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slowly(tensor: Tensor) -> int:
    """The definition, number by number, in Python's integers."""
    columns = columns_of(tensor.shape)
    bits = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).tolist()
    row_keys = keys(max(1, len(bits) // columns), 0, tensor.device).tolist()
    column_keys = keys(columns, 1, tensor.device).tolist()
    total = 0
    for i, bit in enumerate(bits):
        row, column = divmod(i, columns)
        word, key = bit, column
        if tensor.itemsize == 2:  # the low or the high half of a word
            word, key = (bit << 16 if column % 2 else bit % (1 << 16)), column // 2
        total += word * row_keys[row] * column_keys[key]
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_checksum_is_what_it_is_defined_as(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype)
    assert int(checksum(tensor)) == slowly(tensor)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_bit_one_swap_or_one_row_elsewhere_shows(dtype: torch.dtype) -> None:
    tensor = made((6, 8), dtype)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])[3, 5] ^= 1
    swapped[2, 1], swapped[2, 6] = tensor[2, 6], tensor[2, 1]
    neighbours = tensor.clone()
    neighbours[2, 2], neighbours[2, 3] = tensor[2, 3], tensor[2, 2]
    signs = tensor.clone()
    signs[1, 1], signs[1, 5] = -tensor[1, 1], -tensor[1, 5]
    others = [flipped, swapped, neighbours, signs, tensor.roll(1, 0), tensor.roll(1, 1), -tensor, tensor[:, :-1]]
    others += [tensor.t().contiguous()]
    assert len({int(checksum(variant)) for variant in [tensor, *others]}) == 1 + len(others)


@given(rows=st.integers(2, 9), columns=st.integers(2, 9), data=st.data())
def test_the_checksums_of_parts_add_up_to_that_of_the_whole(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = made((rows, columns), torch.bfloat16, seed=rows * columns)
    at_row, at_column = data.draw(st.integers(1, rows - 1)), data.draw(st.integers(1, columns - 1))
    row_keys = keys(rows, 0, tensor.device)
    total = 0
    for top, bottom in ((0, at_row), (at_row, rows)):
        for left, right in ((0, at_column), (at_column, columns)):
            total += int(part_checksum(tensor[top:bottom, left:right], row_keys[top:bottom], left))
    assert (total - int(checksum(tensor))) % (1 << 64) == 0


def test_pieces_of_bounded_size_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = made((50, 7), torch.float32)
    expected = int(checksum(tensor))
    monkeypatch.setitem(checksums.CHUNK, "cpu", 21)
    assert int(checksum(tensor)) == expected


@pytest.mark.parametrize("dtype", TYPES)
def test_what_kernels_read_as_zero_is_zero_and_no_number_is_not(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    zeros = torch.tensor([0.0, -0.0, tiny / 2, -tiny / 2], dtype=dtype)
    assert int(checksum(zeros)) == 0
    assert len({int(checksum(torch.tensor([x], dtype=dtype))) for x in (0.0, math.nan, math.inf, -math.inf)}) == 4


def test_the_checksums_of_a_stream_are_told_in_the_end() -> None:
    weights = [("a", made((5, 8), torch.bfloat16)), ("b", made((3,), torch.float32))]
    sums = Checksums()
    passed = list(sums.of(weights))
    assert all(entry is other for (_, entry), (_, other) in zip(weights, passed, strict=True))
    sent = sums.sent()
    assert {name: (entry.checksum, entry.numel, entry.dtype) for name, entry in sent.items()} == {
        name: (int(checksum(tensor)), tensor.numel(), tensor.dtype) for name, tensor in weights
    }
    assert Checksums().sent() == {}
