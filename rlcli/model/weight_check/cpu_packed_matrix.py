"""A matrix packed for a CPU kernel, which can be unpacked bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

TYPICAL_ROWS = 64
"""Rows of the inputs for which the packed layout is optimised; products with other numbers of rows use it, too."""


class PackedMatrix:
    """`[outputs, inputs]`, packed by oneDNN through torch.

        matrix = PackedMatrix(weight)
        matrix(x, weight, bias)     # [rows, inputs] → [rows, outputs]; `weight` is ignored
        matrix.read()               # the bits that the kernel multiplies by, unpacked

    vLLM's binding of the same kernels gives the same bits, but can only be read by a product with the identity matrix.
    Raises `RuntimeError` for a dtype that the CPU cannot multiply.
    """

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        product: Tensor = self._multiply(x, self._packed, bias, "none", [], "")
        return product

    def read(self) -> Tensor:
        matrix: Tensor = self._packed.to_dense()
        return matrix.contiguous()


def can_pack() -> bool:
    """True if this build of torch has the kernels."""
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
