"""On CPUs: the norm and the gated unit of vLLM's models, which it leaves to a compiler that is off there.

vLLM writes both as a handful of torch calls that torch.compile is to fuse. For the norm a kernel is in its CPU build
all the same; the gated unit needs but two calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

KERNELS = ("rms_norm", "fused_add_rms_norm")


def install(model: Any) -> int:
    """Have the layers of `model` that fit run these; how many do. Called in the worker through `apply_model`.
    0 where this build of vLLM has no such kernels or its layers no such seam."""
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
    """x [..., 2 · D] → silu of its first half times its second, [..., D]. By torch, whose silu computes several numbers
    at once, where vLLM's kernel takes one by one; in place, where vLLM's own way takes a tensor more."""
    import torch

    width = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :width]).mul_(x[..., width:])
