"""The trainer without an engine: the head by chunk size, MFU and memory of an update, gathering of the weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from _gpu_check import models
from _gpu_check.check import Check
from _gpu_check.flops import UPDATE, forward_flops, utilisation
from _gpu_check.part_mfu import peak_flops, shape_of_model
from _gpu_check.part_sync import measure_gathering

HEAD_TOKENS, CHUNKS = 16384, (441, 1024, 1792, 4096, 8192)
"""Number of tokens, and of tokens projected at a time."""
PROMPT, RESPONSE, SAMPLES = 32, 480, 8
TOKENS = {"0.5b": (8192, 16384), "1.5b": (8192,)}
"""Tokens of a micro-batch."""
REHEARSED_TOKENS, REHEARSED_CHUNKS = 256, (64, 256)
TARGETS = {"0.5b": ">= 0.30", "1.5b": ">= 0.40"}
"""MFU of the update."""
GIB = 2**30


def run(check: Check) -> None:
    import torch.distributed as dist

    backend = "gloo" if check.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        head(check)
        for compiled in (False, True):
            if not (compiled and check.rehearse):  # Inductor would compile for a minute
                update(check, compiled)
    finally:
        dist.destroy_process_group()
    measure_gathering(check)


def head(check: Check) -> None:
    """Seconds and memory of log-probs and entropy, forward and backward, by tokens a chunk."""
    import torch

    from rlcli.model.logprobs import token_log_probs

    shape = (models.REHEARSAL_SHAPES if check.rehearse else models.SHAPES)[check.shape]
    tokens, chunks = (REHEARSED_TOKENS, REHEARSED_CHUNKS) if check.rehearse else (HEAD_TOKENS, CHUNKS)
    width, vocabulary, device = shape["hidden_size"], shape["vocab_size"], check.device
    dtype = torch.float32 if check.rehearse else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device, dtype=dtype) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    check.progress(f"head: {tokens} tokens in chunks of {', '.join(map(str, chunks))}", 10)
    for chunk in chunks:

        def passes(chunk: int = chunk) -> None:
            log_probs, _ = token_log_probs(hidden, weight, targets, 1.0, chunk, True)
            log_probs.sum().backward()
            hidden.grad = weight.grad = None

        seconds = median_seconds(check, passes, 3)
        check.figure(f"head, chunks of {chunk}", 1e3 * seconds, "ms", note=f"{tokens} tokens; peak {peak_gib(check)}")


def update(check: Check, compiled: bool) -> None:
    """MFU of forward and backward passes and of the optimizer, on samples of known lengths."""
    import numpy as np
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.model.io.loading import load_policy
    from rlcli.model.optim import build_optimizer
    from rlcli.model.packed import pack

    model, device = models.make(check, check.shape), torch.device(check.device)
    peak, name = peak_flops(check)
    dtype = torch.float32 if check.rehearse else torch.bfloat16
    draw = np.random.default_rng(0)
    for tokens in (REHEARSED_TOKENS,) if check.rehearse else TOKENS[check.shape]:
        prompt, response = (16, 48) if check.rehearse else (PROMPT, RESPONSE)
        prompts = max(1, tokens // (prompt + SAMPLES * response))
        rows = []
        for _ in range(prompts):
            start = draw.integers(6, 200, prompt)
            responses = (draw.integers(6, 200, response) for _ in range(SAMPLES))
            rows += [(np.concatenate([start, sampled]).astype(np.int32), prompt) for sampled in responses]
        mesh = init_device_mesh(device.type, (1,))
        policy = load_policy(model, dtype=dtype, device=device, mesh=mesh, compiled=compiled)
        optimizer = build_optimizer(policy, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
        batch = pack(rows, device)

        def step(policy: Any = policy, optimizer: Any = optimizer, batch: Any = batch) -> None:
            policy(batch, temperature=1.0, want_entropy=False).log_probs.mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        kind = "compiled" if compiled else "plain"
        check.progress(f"update of {len(rows)} samples, {kind}", 15)
        seconds = median_seconds(check, step, 3)
        flops = UPDATE * forward_flops(shape_of_model(model), prompt, [[response] * SAMPLES] * prompts)
        size = f"{len(rows) * (prompt + response)} tokens"
        note = f"{1e3 * seconds:.0f} ms with AdamW, peak {peak_gib(check)}, {name}"
        target = TARGETS[check.shape] if not compiled else ""
        check.figure(f"MFU of an update, {size}, {kind}", utilisation(flops, seconds, peak), "", target, note)
        del policy, optimizer, step


def median_seconds(check: Check, work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after a warm-up; the memory peak counts from the end of the warm-up."""
    import torch

    seconds: list[float] = []
    for number in range(1 + repeats):
        if not check.rehearse:
            torch.cuda.synchronize()
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        work()
        if not check.rehearse:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def peak_gib(check: Check) -> str:
    import torch

    return "not measured on CPUs" if check.rehearse else f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB"
