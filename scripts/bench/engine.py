"""Effect of the vLLM settings on CPUs on generation speed.

    .venv/bin/python scripts/bench/engine.py [--model tiny-1m] [--tokens 64] [--repeats 10] [--json engine.json]

Engines as a worker builds them, in one process of one thread, generate the same requests in turn:

    as it is        blocks of 32 tokens in the KV cache, vLLM's kernel for norms, two calls of torch for gated units
    blocks of 128   vLLM's default
    unit's kernel   vLLM's own for the gated unit
    left alone      norms and gated units as vLLM runs them on CPUs
    adapter apart   an adapter in vLLM's LoRA kernels; as it is, a float32 adapter is in the weights

CPU seconds of the process, which has a worker's heap, medians; a ratio is the median of the quotients, turn by turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

from _common import in_workers_heap, interleaved, ratio, write_json
from _step_work import make_model
from rich.console import Console
from rich.table import Table

SAMPLES, PROMPT_TOKENS, RANK = 8, 32, 16
KV_CACHE_BYTES = 256 << 20
AS_IT_IS = "as it is"


@contextmanager
def engines(model: str, tokens: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Way → a `VllmEngine`."""
    from unittest.mock import patch

    import torch.distributed as dist

    from rlcli.rollout.engine import EngineSpec
    from rlcli.rollout.vllm import vllm_arguments
    from rlcli.rollout.vllm.hooks import cpu_kernels
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    ways = {
        AS_IT_IS: (0, nullcontext()),
        "blocks of 128": (0, patch.object(vllm_arguments, "CPU_BLOCK", 128)),
        "unit's kernel": (0, patch.object(cpu_kernels, "_silu_and_mul", _unit_by_kernel)),
        "left alone": (0, patch.object(cpu_kernels, "install", lambda model: None)),
        "adapter apart": (RANK, nullcontext()),
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    by_variant: dict[str, Any] = {}
    with ExitStack() as stack:
        for variant, (rank, changed) in ways.items():
            spec = EngineSpec(
                model=model,
                dtype="float32",
                device="cpu",
                max_length=PROMPT_TOKENS + tokens,
                max_concurrent=256,
                tensor_parallel=1,
                lora_rank=rank,
                weights_follow=False,
                kv_cache_bytes=KV_CACHE_BYTES,
                gpu_memory_utilization=0.3,
                enforce_eager=True,
                stop_token_ids=(),
                group_id=f"bench{len(by_variant)}",
            )
            with changed:
                by_variant[variant] = VllmEngine(spec)
            stack.callback(by_variant[variant].close)
            if rank:
                by_variant[variant].load_adapter(adapter(model, folder / "adapter"))
        yield by_variant


def _unit_by_kernel(layer: Any, x: Any) -> Any:
    import torch

    gated = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(gated, x.contiguous())
    return gated


def adapter(model: str, folder: Path) -> str:
    """On all linear layers of the model, with weights that are not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return str(folder)


def generating(engine: Any, prompts: int, tokens: int) -> Callable[[], float]:
    """CPU seconds of generating `tokens` tokens for each of 8 samples of each prompt."""
    import numpy as np

    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    params = engine._params

    def to_the_end(request: GenerationRequest) -> Any:
        sampling = params(request)
        sampling.ignore_eos, sampling.stop_token_ids = True, []
        return sampling

    engine._params = to_the_end
    draws = np.random.default_rng(0)
    ids = [draws.integers(5, 200, PROMPT_TOKENS).astype(np.int32) for _ in range(prompts)]
    requests = [GenerationRequest(i, ids[i // SAMPLES], i, greedy=False) for i in range(prompts * SAMPLES)]

    def run() -> float:
        began = time.process_time()
        total = sum(len(completion.tokens) for completion in finished(engine, requests, Sampling(1.0, tokens)))
        assert total == len(requests) * tokens
        return time.process_time() - began

    return run


def measure(model: str, prompts: int, tokens: int, repeats: int, folder: Path) -> dict[str, list[float]]:
    with engines(make_model(model, folder / "model"), tokens, folder) as built:
        runs = {variant: generating(engine, prompts, tokens) for variant, engine in built.items()}
        return interleaved(runs, repeats=repeats, warm_up=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-1m", help="tiny-1m, tiny-10m, or a folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="length of the responses")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    in_workers_heap()

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(options.model, options.prompts, options.tokens, options.repeats, Path(folder))
    table = Table("way", "CPU s", f"÷ {AS_IT_IS}")
    for variant, each in seconds.items():
        table.add_row(variant, f"{median(each):.3f}", f"{ratio(each, seconds[AS_IT_IS]):.2f}")
    Console().print(table)
    write_json(options.json, {"model": options.model, "tokens": options.tokens, "seconds": seconds})
    os._exit(0)  # vLLM's engines in one process do not all end by themselves


if __name__ == "__main__":
    main()
