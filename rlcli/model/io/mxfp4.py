"""Weights in MXFP4, as the experts of GPT-OSS are published: 4-bit numbers in blocks of 32 with a common scale (OCP
Microscaling Formats 1.0, sections 5.2 and 6.3). They are read as bfloat16, which holds each of them exactly.

Of a parameter `[E, inputs, outputs]` the files have `…_blocks` [E, outputs, inputs / 32, 16], two numbers in a byte,
the first one in its low half, and `…_scales` [E, outputs, inputs / 32], exponents of 2 plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError
from rlcli.model.io.model_config import stored_config

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three lower bits (E2M1); the fourth bit is the sign."""
BLOCK = 32
BIAS = 127


def quantization(path: str) -> dict[str, Any]:
    """`quantization_config` in the config.json of the model at `path`, if its weights are in MXFP4; else empty."""
    values = (stored_config(path) or {}).get("quantization_config")
    return values if isinstance(values, dict) and values.get("quant_method") == "mxfp4" else {}


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """One expert's matrix, bfloat16 `[inputs, outputs]`, from its blocks `[outputs, inputs / 32, 16]` and scales
    `[outputs, inputs / 32]`, uint8.

    >>> import torch
    >>> ones = torch.full((1, 1, 16), 0x22, dtype=torch.uint8)
    >>> dequantized(ones, torch.full((1, 1), 128, dtype=torch.uint8))[:2].tolist()
    [[2.0], [2.0]]
    """
    import torch

    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    numbers = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2)
    values = torch.ldexp(table[numbers.long()], scales[..., None].to(torch.int32) - BIAS)
    return values.flatten(-2).to(torch.bfloat16).t().contiguous()


def read_shapes(path: str, shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of a model's tensors after dequantisation, from those in its files. Raises `ModelError` for blocks
    without matching scales."""
    read = dict(shapes)
    for name, blocks in shapes.items():
        if name.endswith(BLOCKS):
            parameter = name.removesuffix(BLOCKS)
            scales = read.pop(parameter + SCALES, None)
            if scales != blocks[:-1] or len(blocks) != 4 or blocks[-1] * 2 != BLOCK:
                raise ModelError(
                    f"{path}: {name} {blocks} has no scales of shape {blocks[:-1]} ({parameter + SCALES}"
                    f"{'' if scales is None else f' {scales}'}), without which MXFP4 weights mean nothing",
                    "download the whole model",
                )
            del read[name]
            read[parameter] = [blocks[0], blocks[2] * BLOCK, blocks[1]]
    return read
