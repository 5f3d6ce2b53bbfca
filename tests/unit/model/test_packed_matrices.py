"""Matrices that torch has packed: they multiply as before and are read bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlcli.model.weight_check.checksum import Checksums, TensorChecksum
from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix, can_pack
from rlcli.model.weight_check.engine_weights import Layout, LayoutRecorder, Verified, compare, weights_of

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no such kernels")

OUTPUTS, INPUTS = 37, 19
DTYPES = [torch.float32, torch.bfloat16]


def made(dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_are_read_as_they_were_packed(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (OUTPUTS, INPUTS * dtype.itemsize // 2), dtype=torch.int16)
    weight = bits.view(dtype)
    assert torch.equal(PackedMatrix(weight).read().view(torch.int16), bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_it_multiplies_as_a_linear_layer_does(dtype: torch.dtype, rows: int) -> None:
    weight, bias = made(dtype), made(dtype, 1)[:, 0].contiguous()
    inputs = torch.randn(rows, 2 * INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)[:, INPUTS:]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for added in (None, bias):
        expected = linear(inputs.double(), weight.double(), None if added is None else added.double())
        product = PackedMatrix(weight)(inputs, None, added)
        torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance)


def sent_of(weights: dict[str, Tensor]) -> dict[str, TensorChecksum]:
    sums = Checksums()
    for name, tensor in weights.items():
        sums.add(name, tensor)
    return sums.sent()


class Engine(nn.Module):
    """One layer whose weight is packed at each load and then dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.zeros(OUTPUTS, INPUTS))

    def load(self, weights: Any) -> None:
        weight = torch.zeros(OUTPUTS, INPUTS)
        if self.layer.weight.numel():
            weight = self.layer.weight.data
        for _, tensor in weights:
            weight.copy_(tensor)
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        self.layer.cpu_linear = PackedMatrix(weight)
        self.layer.weight = nn.Parameter(torch.empty(0))


def loaded(weights: dict[str, Tensor]) -> tuple[Engine, Layout]:
    engine = Engine()
    with LayoutRecorder(engine) as recorder:
        engine.load(recorder.observe(weights.items()))
    return engine, recorder.layout()


def verified(engine: Engine, layout: Layout, sent: dict[str, TensorChecksum], *, through_kernels: bool) -> Verified:
    return compare(sent, [layout.parts(weights_of(engine, through_kernels=through_kernels), sent)])


@pytest.mark.parametrize("through_kernels", [True, False])
def test_a_packed_copy_that_is_right_is_found_right(through_kernels: bool) -> None:
    weights = {"layer": made(torch.float32)}
    engine, layout = loaded(weights)
    assert verified(engine, layout, sent_of(weights), through_kernels=through_kernels) == (1, 0, [])


@pytest.mark.parametrize("through_kernels", [True, False])
def test_a_packed_copy_of_the_weights_before_is_found(through_kernels: bool) -> None:
    engine, layout = loaded({"layer": made(torch.float32)})
    sent = sent_of({"layer": made(torch.float32, 1)})
    assert verified(engine, layout, sent, through_kernels=through_kernels).differences == ["layer differs"]


@pytest.mark.parametrize("through_kernels", [True, False])
@pytest.mark.parametrize("position", [(0, 0), (17, 11), (OUTPUTS - 1, INPUTS - 1)])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_wrong_bit_in_the_packed_copy_is_found(position: tuple[int, int], bit: int, through_kernels: bool) -> None:
    weights = {"layer": made(torch.float32)}
    engine, layout = loaded(weights)
    corrupted = weights["layer"].clone()
    corrupted.view(torch.int32)[position] ^= 1 << bit if bit < 31 else -(1 << 31)
    engine.pack(corrupted)
    report = verified(engine, layout, sent_of(weights), through_kernels=through_kernels)
    assert report.differences == ["layer differs"]


def test_a_kernel_around_a_packed_copy_is_read_through_the_kernel() -> None:
    weights = {"layer": made(torch.float32)}
    engine, layout = loaded(weights)
    matrix = engine.layer.cpu_linear
    engine.layer.cpu_linear = lambda *args: matrix(*args) * (1 + 2**-20)
    report = verified(engine, layout, sent_of(weights), through_kernels=False)
    assert report.differences == ["layer differs"]
