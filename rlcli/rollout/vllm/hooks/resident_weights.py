"""Weights that stay on the device while vLLM sleeps, whose KV cache alone is released."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

POOLED = "_maybe_get_memory_pool_context"
"""The method of vLLM's GPU worker that chooses the memory for what is allocated next, by a tag."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """An engine that is built inside the block has its weights in torch's memory, not in the pool that sleeps."""
    from vllm.v1.worker.gpu_worker import Worker

    pooled = getattr(Worker, POOLED)

    def context(worker: object, tag: str) -> AbstractContextManager[object]:
        if tag == "weights":
            return contextlib.nullcontext()
        memory_pool: AbstractContextManager[object] = pooled(worker, tag)
        return memory_pool

    setattr(Worker, POOLED, context)
    try:
        yield
    finally:
        setattr(Worker, POOLED, pooled)
