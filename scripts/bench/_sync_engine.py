"""Run in a separate process: seconds of a sync into a vLLM engine on this device, with and without its checks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _common import interleaved, write_json

PROMPT = 64
"""Tokens of the prompt whose prefix is looked for."""


def measured(
    rank: int, world: int, port: int, shape: dict[str, int], dtype: str, repeats: int, report_path: str
) -> None:
    import numpy as np
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import EngineSpec, Sampling
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(tempfile.mkdtemp(dir=Path(report_path).parent))
    config = Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"], dtype=dtype)
    config.save_pretrained(folder)
    with torch.device(device):
        lm = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    parameters = [(name, parameter.detach()) for name, parameter in lm.named_parameters()]
    spec = {"max_length": 512, "max_concurrent": 16, "tensor_parallel": 1, "lora_rank": 0, "weights_follow": True}
    memory = {"kv_cache_bytes": 64 << 20, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    engine = VllmEngine(
        EngineSpec(str(folder), dtype, device, **spec, **memory, stop_token_ids=(), group_id="bench")  # type: ignore[arg-type]
    )
    probe = np.arange(PROMPT, dtype=np.int32)
    cpu: dict[str, list[float]] = {}

    def load() -> None:
        engine.load_weights(iter(parameters))
        engine.prompt_log_probs(probe)

    def checked() -> None:
        sums = Checksums()
        engine.cached_tokens(probe)
        engine.load_weights(sums.of(parameters))
        sent = sums.sent()
        assert engine.verify(sent) == (len(parameters), 0, [])
        assert engine.probe(probe)[0] == 0

    def checksums() -> None:
        sums = Checksums()
        for _ in sums.of(parameters):
            pass
        sums.sent()

    def seconds(name: str, work: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            engine.begin(Sampling(1.0, 1))  # as before each generation: nothing is cached
            began, cpu_began = time.perf_counter(), time.process_time()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            cpu.setdefault(name, []).append(time.process_time() - cpu_began)
            return time.perf_counter() - began

        return run

    runs = {"load": load, "load, checked": checked, "sender's checksums": checksums}
    timings = interleaved({name: seconds(name, work) for name, work in runs.items()}, repeats=repeats)
    nbytes = sum(tensor.nbytes for _, tensor in parameters)
    measured_cpu = {name: each[-repeats:] for name, each in cpu.items()}
    write_json(
        report_path,
        {
            "device": device,
            "bytes": nbytes,
            "tensors": len(parameters),
            "seconds": timings,
            "cpu_seconds": measured_cpu,
        },
    )
    engine.close()  # and torch's process group with it
