"""On CPUs: vLLM's own kernels for the norm and the gated unit, in the place of what it leaves to a compiler.

vLLM writes both as a handful of torch calls that torch.compile is to fuse, which is off on CPUs. The kernels for them
are in its CPU build all the same, and run row by row: what a token gets does not hang on what else is in the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

KERNELS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul")


def install(model: Any) -> int:
    """Have the layers of `model` that fit call the kernels; how many do. Called in the worker through `apply_model`.
    None where this build of vLLM has no such kernels or its layers no such seam."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    if not all(hasattr(torch.ops._C, name) for name in KERNELS):
        return 0
    found = 0
    for layer in model.modules():
        ours = {RMSNorm: _norm, SiluAndMul: _silu_and_mul}.get(type(layer))
        if ours is not None and hasattr(layer, "_forward_method"):
            layer._forward_method = partial(ours, layer)
            found += 1
    return found


def _norm(layer: Any, x: Any, residual: Any = None) -> Any:
    """As `RMSNorm.forward`: the norm of x, or of x + residual and that sum, both in place."""
    import torch

    # Weights are looked up at every call: a sync may have put others in their place.
    fits = layer.variance_size_override is None and layer.has_weight and layer.weight.dtype == x.dtype
    if not fits or not (residual is None or (x.is_contiguous() and residual.is_contiguous())):
        return layer.forward_native(x, residual)
    weight, epsilon = layer.weight.data, layer.variance_epsilon
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    x = x.contiguous()
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _silu_and_mul(layer: Any, x: Any) -> Any:
    """x [..., 2 · D] → silu of its first half times its second, [..., D]."""
    import torch

    gated = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(gated, x.contiguous())
    return gated
