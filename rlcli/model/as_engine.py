"""Adjustments of transformers' models so that they compute what the engine and the original implementation compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcli.model.io.model_config import LATENT
from rlcli.model.tensor_names import FIXED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Names of the norms of compressed queries, keys and values."""


def adjusted(lm: PreTrainedModel) -> PreTrainedModel:
    """`lm`, changed in place. For latent attention transformers sets the epsilon of the compressed tensors' norms to
    1e-6, whereas vLLM uses `rms_norm_eps`; so does the result. The bias with which a router selects experts stays in
    float32, as it is sent."""
    if lm.config.model_type not in LATENT:
        return lm
    for name, module in lm.named_modules():
        if name.endswith(LATENT_NORMS):
            module.variance_epsilon = lm.config.rms_norm_eps
        for key, buffer in module.named_buffers(recurse=False):
            if f".{key}" == FIXED:
                setattr(module, key, buffer.to(torch.float32))
    return lm
