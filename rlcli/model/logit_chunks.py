"""Chunk sizes for the projection to logits. A separate module, so that the planner does not import torch."""

from __future__ import annotations

MOST_LOGITS = 2**26
"""Most logits in memory on a CPU (256 MiB in float32; two such buffers exist in the backward pass)."""

GPU_LOGITS = 2**28
"""Most logits in memory on a GPU (512 MiB in bfloat16, and at most 2 GiB more in float32). Each chunk reads the head's
weight and adds to its gradient in float32, so fewer chunks cost less: with a vocabulary of 151,936 ten of them for 16k
tokens instead of 38. An estimate: not measured yet."""

GPU_MULTIPLE = 128
"""Tokens of a GPU's chunk are a multiple of this: matrix kernels compute full tiles."""

CACHED_LOGITS = 2**18
"""Logits that fit into a CPU's caches (1 MiB): several passes read them."""

BLOCK_LOGITS = 2**21
"""Logits that fit into part of a CPU's last-level cache (8 MiB): several passes over parts of a chunk read them. With
much smaller parts threads wait for each other too often, above all if other processes run."""

CPU_TOKENS = 512
"""Tokens of a chunk on a CPU if the vocabulary is large: the head's weight is read from memory once per chunk."""


def chunk_tokens(vocabulary: int, on_gpu: bool) -> int:
    """Number of tokens that are projected at once.

    >>> chunk_tokens(151_936, on_gpu=True), chunk_tokens(151_936, on_gpu=False)
    (1664, 441)
    """
    if on_gpu:
        tokens = GPU_LOGITS // vocabulary
        return tokens - tokens % GPU_MULTIPLE if tokens >= GPU_MULTIPLE else max(1, tokens)
    return max(CACHED_LOGITS // vocabulary, min(CPU_TOKENS, max(1, MOST_LOGITS // vocabulary)))
