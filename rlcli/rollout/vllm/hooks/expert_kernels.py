"""Kernels for experts in 16 bits or more: those that compute with the weights as checkpoints have them.

On Blackwell vLLM prefers kernels of FlashInfer, for which it swaps or reorders the weights as they are loaded. What the
engine holds is then not what was sent, and the comparison after the first sync stops the run.
"""

from __future__ import annotations

ARGUMENTS = {"moe_backend": "triton"}
"""vLLM's arguments for them. Models without experts have no use for it."""


def install() -> bool:
    """Let vLLM choose Triton beside an adapter too, where release 0.32 does not look at `ARGUMENTS`. Called before the
    model is built. False if this release asks nothing else there, as 0.24, which always takes Triton."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    name = "_trtllm_bf16_lora_supported"
    if not hasattr(unquantized, name):
        return False
    setattr(unquantized, name, _unsupported)
    return True


def _unsupported(config: object) -> bool:
    return False
