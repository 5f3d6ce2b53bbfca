"""How many tokens' logits are held at once. A separate module, so that a plan does not import torch."""

from __future__ import annotations

MOST_LOGITS = 2**26
"""Held at once (256 MiB in float32; two such buffers exist in the backward pass)."""

CACHED_LOGITS = 2**18
"""What a CPU's caches hold (1 MiB): several passes read them."""

BLOCK_LOGITS = 2**21
"""What a CPU's last cache holds beside other things (8 MiB): several passes over parts of a chunk read them. Much
smaller parts have threads wait for each other too often, above all where other processes run."""

CPU_TOKENS = 512
"""Tokens of a chunk on a CPU if the vocabulary is large: the head's weight is read from memory once per chunk."""


def chunk_tokens(vocabulary: int, on_gpu: bool) -> int:
    """How many tokens are projected at once."""
    most = max(1, MOST_LOGITS // vocabulary)
    return most if on_gpu else max(CACHED_LOGITS // vocabulary, min(CPU_TOKENS, most))
