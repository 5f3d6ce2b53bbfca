"""One worker without Ray, with policy and engine in this process, to measure between its calls."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from _gpu_check import models
from _gpu_check.check import Check

MAX_PROMPT, MAX_RESPONSE = 256, 256


@contextlib.contextmanager
def worker(check: Check, shape: str, lora_rank: int = 0) -> Iterator[Any]:
    """A `rlcli.training.worker.worker.Worker` that trains and generates; it is closed with the block."""
    model = models.make(check, shape)
    check.progress("starting one worker with its engine", 45)
    from rlcli.cluster.placement import WORKER_ENV

    os.environ.update(WORKER_ENV)
    from rlcli.training.worker.worker import Worker

    # The worker redirects its process's output to its log; here the output stays in the part's.
    outputs = (os.dup(1), os.dup(2))
    started = Worker(0, 1)
    started.begin(spec(check, model, lora_rank))
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        started.join("127.0.0.1", port)
        started.build()
        yield started
    finally:
        started.close()


def spec(check: Check, model: str, lora_rank: int) -> Any:
    from rlcli.config.schema import RunConfig
    from rlcli.context import RunContext, RunFacts
    from rlcli.data.prompts.chat_template import stop_tokens
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.training.worker.worker_spec import WorkerSpec

    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"max_prompt_tokens": MAX_PROMPT},
            "rollout": {"max_response_tokens": MAX_RESPONSE, "gpu_memory_utilization": 0.3, "sleep": "all"},
            "train": {"tokens_per_microbatch": MAX_PROMPT + MAX_RESPONSE},
            "lora": {"rank": lora_rank},
            "verifier": {"processes": 1},
        }
    )
    facts = RunFacts(
        device=check.device,
        dtype="float32" if check.rehearse else "bfloat16",
        max_length=MAX_PROMPT + MAX_RESPONSE,
        kv_cache_bytes=64 << 20 if check.rehearse else None,
        roles=frozenset({"policy", "engine"}),
        stop_tokens=stop_tokens(load_tokenizer(model), model, ()),
    )
    context = RunContext(config, facts)
    return WorkerSpec(context, facts.roles, "rank", str(check.work), f"gpu-check-{os.getpid()}")


def probe() -> Any:
    """Tokens (int32) of a prompt whose log-probs engine and trainer compute."""
    import numpy as np

    return np.arange(10, 10 + 64, dtype=np.int32)


def free_bytes(check: Check) -> int:
    """Free memory of the device after emptying torch's cache; 0 on CPUs."""
    if check.rehearse:
        return 0
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
