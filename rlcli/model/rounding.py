"""Rounding noise of a model: the effect of another order of the same operations on its log-probs.

An engine's kernels round at other points than the trainer's. `rounded_again` simulates that in the trainer alone: each
layer's output is multiplied by 1 + ε u, u uniform in [−1, 1], and rounded. The log-probs then differ from those without
by about as much as a correct engine's do.

ε is half a unit in the last place. With SmolLM2-135M in bfloat16 this moves log-probs by 1.43 times as much as bfloat16
differs from float32, and two implementations in bfloat16 differ by 1.2 to 1.3 times that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of 1.0: the largest relative error of rounding once."""
FP8_UNIT = 2.0**-4
"""The same for float8_e4m3, the engine's 8-bit floating point."""


def unit_of(dtype: str, quantization: str) -> float:
    """The rounding unit of an engine that computes in `dtype`, or with quantised matrices (`rollout.quantization`)."""
    return FP8_UNIT if quantization else UNITS[dtype]


@contextmanager
def rounded_again(model: nn.Module, unit: float, seed: int) -> Iterator[None]:
    """Context in which the outputs of `model`'s layers are rounded once more. unit: relative. Compiled layers run
    uncompiled, since they would not call the hooks."""
    generators: dict[torch.device, torch.Generator] = {}

    def round_output(_: nn.Module, __: object, output: object) -> object:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (round_output(_, __, output[0]), *output[1:])
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        factors = torch.empty(output.shape, device=output.device)
        factors.uniform_(1.0 - unit, 1.0 + unit, generator=generators[output.device])
        return factors.mul_(output).to(output.dtype)

    rounding = [module for module in model.modules() if _rounds(module)]
    hooks = [module.register_forward_hook(round_output) for module in rounding]
    try:
        # Without this import nothing is compiled, and importing it takes seconds.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounds(module: nn.Module) -> bool:
    """True for a leaf module with parameters, such as a matrix or a norm."""
    return any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.children())
