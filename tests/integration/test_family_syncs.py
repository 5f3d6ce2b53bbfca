"""Families whose attention or experts vLLM holds in an order of its own, in a real engine: after each of three syncs,
every tensor is compared, and the tokens that the engine draws have the trainer's log-probs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import spawned

from tests.mxfp4_files import store_in_mxfp4

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LARGER = 5.0
"""Factor on random weights; without it, attention and routing are nearly uniform."""


def drawn(lm: Any, seed: int) -> None:
    """Fill `lm` with random weights, and its fixed ones."""
    import torch

    from rlcli.model.tensor_names import named_weights

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in named_weights(lm):
            random = torch.randn(tensor.shape, generator=generator)
            if name.endswith("sinks"):
                tensor.copy_(random)
            elif tensor.ndim > 1:
                tensor.copy_(random * 0.02 * LARGER)
            else:
                tensor.add_(random * 0.1)


def compared(engine: Any, lm: Any) -> dict[str, Any]:
    """Send the weights of `lm`, and draw tokens."""
    import numpy as np
    import torch

    from rlcli.model.packed import pack
    from rlcli.model.policy import PolicyModel
    from rlcli.model.tensor_names import named_weights
    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    sums = Checksums()
    engine.load_weights(sums.of((name, tensor.detach()) for name, tensor in named_weights(lm)))
    verified = engine.verify(sums.sent())
    random = np.random.default_rng(0)
    prompts = [random.integers(6, lm.config.vocab_size, length).astype(np.int32) for length in (3, 40, 90)]
    requests = [GenerationRequest(key, prompts[key % 3], seed=key + 1) for key in range(6)]
    generations = sorted(finished(engine, requests, Sampling(1.0, 24)), key=lambda generation: generation.key)
    rows = [
        (np.concatenate([request.prompt, generation.tokens]).astype(np.int64), len(request.prompt))
        for request, generation in zip(requests, generations, strict=True)
    ]
    with torch.no_grad():
        trainer = PolicyModel(lm, dtype=torch.float32, source="tiny")(pack(rows, torch.device("cpu"))).log_probs
    difference = np.abs(np.concatenate([generation.log_probs for generation in generations]) - trainer.numpy())
    return {
        "tensors": verified.tensors,
        "unchecked": verified.unchecked,
        "differences": verified.differences,
        "sent": len(sums.sent()),
        "difference": [float(difference.max()), float(difference.mean())],
        "log_prob": float(trainer.std()),
    }


def main(model: str, result_file: str) -> None:
    """In the spawned process."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlcli.model.io.loading import read_model
    from rlcli.model.io.model_config import read_config
    from rlcli.rollout.engine import EngineSpec, engine_named

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{result_file}.store", rank=0, world_size=1)
    sizes: dict[str, Any] = {"max_length": 256, "max_concurrent": 8, "tensor_parallel": 1, "lora_rank": 0}
    sizes |= {"kv_cache_bytes": 64 << 20, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    engine: Any = engine_named("vllm")(
        EngineSpec(
            model, "float32", "cpu", weights_follow=True, stop_token_ids=(1,), group_id=f"s-{os.getpid()}", **sizes
        )
    )
    lm = read_model(AutoModelForCausalLM, model, read_config(model), dtype=torch.float32)
    comparisons = []
    for seed in (1, 2, 3):
        drawn(lm, seed)
        comparisons.append(compared(engine, lm))
    Path(result_file).write_text(json.dumps(comparisons))


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "gpt_oss",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("glm4_moe_lite", "gpt_oss in MXFP4")),
    ],
)
def test_every_sync_reaches_all_weights_of_the_engine(kind: str, tmp_path: Path) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", kind=kind.split()[0], hidden=64, layers=3, heads=2, kv_heads=1)
    if kind.endswith("MXFP4"):
        store_in_mxfp4(model)
    syncs: Any = spawned(__file__, model, tmp_path / "out.json")
    assert len(syncs) == 3
    for sync in syncs:
        assert sync["differences"] == []
        assert sync["unchecked"] == 0
        assert sync["tensors"] == sync["sent"]
        assert sync["log_prob"] > 0.3, "weights are large enough to tell log-probs apart"
        assert sync["difference"][0] < 1e-4
        assert sync["difference"][1] < 1e-5


if __name__ == "__main__":
    main(*sys.argv[1:])
