"""Changes to models of transformers by which they compute what their engine computes, and what their authors did."""

from __future__ import annotations

from typing import Any

import torch

from rlcli.model.io.model_config import LATENT
from rlcli.model.tensor_names import FIXED

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Names of the norms of compressed queries, keys and values."""


def adjusted(lm: Any) -> Any:
    """`lm`, changed in place. In a model with latent attention transformers gives the norms of the compressed tensors
    an epsilon of 1e-6 whatever `rms_norm_eps` is, and vLLM that; here they have that too. The bias with which a router
    chooses experts stays in float32, as it is sent."""
    if lm.config.model_type not in LATENT:
        return lm
    for name, module in lm.named_modules():
        if name.endswith(LATENT_NORMS):
            module.variance_epsilon = lm.config.rms_norm_eps
        for key, buffer in module.named_buffers(recurse=False):
            if f".{key}" == FIXED:
                setattr(module, key, buffer.to(torch.float32))
    return lm
