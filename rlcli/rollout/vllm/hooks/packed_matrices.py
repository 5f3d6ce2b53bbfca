"""Large matrices of vLLM's models on CPUs, packed so that the check after a weight sync can read them.

vLLM packs a matrix for oneDNN and drops the original. Its packed copy could only be read by multiplying it with the
unit matrix, which costs as much as a forward pass over as many tokens as the layer has inputs. torch packs for the same
kernels, with the same bits as the result, and can undo it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch import Tensor, nn

    from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

MIN_ELEMENTS = 1 << 18
"""Size from which torch packs a matrix. A product through torch takes about 8 µs longer, which pays only for a large
matrix; a small one is read through its kernel in less than a millisecond."""


@cache
def install() -> None:
    """Have vLLM pack large matrices by torch, in this process. No effect if this build of vLLM or torch has other
    functions for it: its own packed copies are read through their kernels."""
    from vllm import _custom_ops as ops

    from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix, can_pack

    if not can_pack() or not hasattr(ops, "create_onednn_mm") or not hasattr(ops, "onednn_mm"):
        return
    vllm_pack, vllm_multiply = ops.create_onednn_mm, ops.onednn_mm

    def create_onednn_mm(weight: Shaped[Tensor, "inputs outputs"], *args: object, **kwargs: object) -> object:
        if weight.numel() >= MIN_ELEMENTS:
            try:
                return PackedMatrix(weight.t())
            except RuntimeError:  # float16, on CPUs that cannot multiply it
                pass
        return vllm_pack(weight, *args, **kwargs)

    def onednn_mm(handler: object, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(handler, PackedMatrix):
            return handler(x, None, bias)
        product: Tensor = vllm_multiply(handler, x, bias)
        return product

    ops.create_onednn_mm, ops.onednn_mm = create_onednn_mm, onednn_mm


def expose(model: nn.Module) -> int:
    """Let each layer of `model` that multiplies by a `PackedMatrix` call it directly: the check recognises it by its
    type. Returns how many layers do. Called after each load, which packs again."""
    exposed = 0
    for layer in model.modules():
        matrix = _packed_by(vars(layer).get("cpu_linear"))
        if matrix is not None:
            vars(layer)["cpu_linear"] = matrix
            exposed += 1
    return exposed


def _packed_by(kernel: object) -> PackedMatrix | None:
    """The matrix by which vLLM's function `kernel` multiplies, if torch has packed it."""
    from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

    if isinstance(kernel, PackedMatrix):
        return kernel
    if getattr(kernel, "__module__", "") != "vllm.model_executor.layers.utils":  # a function of another kind
        return None
    held = [cell.cell_contents for cell in getattr(kernel, "__closure__", None) or ()]
    return next((cell_value for cell_value in held if isinstance(cell_value, PackedMatrix)), None)
