"""Rounding noise of a model: what another order of the same operations does to its log-probs.

An engine's kernels round at other places than the trainer's. `rounded_again` has the trainer do so by itself: each
layer's output is multiplied by 1 + ε u, u uniform in [−1, 1], and rounded. So its log-probs differ from those without
by about as much as a sound engine's differ from them, and nothing of the engine takes part in this.

ε is half a unit in the last place. With SmolLM2-135M in bfloat16 this moves log-probs by 1.43 times as much as bfloat16
differs from float32, and two implementations in bfloat16 differ by 1.2 to 1.3 times that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of 1.0: the largest relative error of rounding once."""
FP8_UNIT = 2.0**-4
"""The same of the engine's 8-bit floating point with 3 bits after the leading one, float8_e4m3."""


def unit_of(dtype: str, quantization: str) -> float:
    """The unit of an engine that computes in `dtype`, or whose matrices are quantised (`rollout.quantization`)."""
    return FP8_UNIT if quantization else UNITS[dtype]


@contextmanager
def rounded_again(model: nn.Module, unit: float, seed: int) -> Iterator[None]:
    """Within the block, the outputs of `model`'s layers are rounded once more. unit: relative. Compiled layers run
    uncompiled, or they would not call the hooks."""
    generators: dict[torch.device, torch.Generator] = {}

    def again(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (again(_, __, output[0]), *output[1:])
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        factors = torch.empty(output.shape, device=output.device)
        factors.uniform_(1.0 - unit, 1.0 + unit, generator=generators[output.device])
        return factors.mul_(output).to(output.dtype)

    rounding = [module for module in model.modules() if _rounds(module)]
    hooks = [module.register_forward_hook(again) for module in rounding]
    try:
        # Nothing is compiled where this was not imported, and importing it takes seconds.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounds(module: nn.Module) -> bool:
    """Whether a module is a layer with parameters of its own, such as a matrix or a norm."""
    return any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.children())
