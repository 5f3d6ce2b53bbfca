"""Files of GPT-OSS as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcli.model.io.mxfp4 import VALUES


def packed(weight: Tensor) -> dict[str, Tensor]:
    """Blocks and scales of `[E, inputs, outputs]`, rounded to the nearest number."""
    turned = weight.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponents = turned.abs().amax(-1).log2().floor().sub(2).clamp(-127, 127)
    scaled = turned / torch.exp2(exponents)[..., None]
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    numbers = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
    blocks = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}


def store_in_mxfp4(folder: Path) -> None:
    """Store the experts of a model in MXFP4, and all else in bfloat16."""
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights |= {name + end: tensor.contiguous() for end, tensor in packed(weights.pop(name)).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    values = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    file.write_text(json.dumps(values))
