"""vLLM with linear-attention layers against transformers: log-probs of sampled tokens, checks after two syncs, images.

Each engine runs in a spawned process, since vLLM allows one in a process; the tests read its results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import spawned
from rlcli_planner.engine_memory import block_tokens
from rlcli_planner.model_shape import read_shape

LENGTHS = (5, 80, 17, 40)
LIMIT = 30
KINDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def main(model: str, output_path: str, dtype: str) -> None:
    """In the spawned process: run the engine and write its results."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, engine_named, finished

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{output_path}.store", rank=0, world_size=1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    spec = EngineSpec(model, dtype, "cpu", 256, 16, 1, 0, True, 128 << 20, 0.05, True, (), "test", exact_steps=True)
    engine: Any = engine_named("vllm")(spec)
    random = np.random.default_rng(0)
    prompts = [random.integers(10, lm.config.vocab_size, length).astype(np.int32) for length in LENGTHS]

    def errors(prompt: Any, response: Any) -> list[float]:
        ids = torch.tensor(np.concatenate([prompt, response.tokens]), dtype=torch.int64)[None]
        with torch.no_grad():
            log_probs = lm(ids, use_cache=False).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        expected = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return [float(error) for error in (expected - torch.tensor(response.log_probs)).abs()]

    def synced() -> dict[str, Any]:
        sums = Checksums()
        engine.load_weights(sums.of((name, parameter.detach()) for name, parameter in lm.named_parameters()))
        verified = engine.verify(sums.sent())
        requests = [GenerationRequest(key, prompt, seed=key) for key, prompt in enumerate(prompts * 2)]
        responses = {response.key: response for response in finished(engine, requests, Sampling(1.0, LIMIT))}
        alone = {response.key: response for response in finished(engine, requests[1:2], Sampling(1.0, LIMIT))}
        return {
            "equal": verified.tensors,
            "unchecked": verified.unchecked,
            "differences": verified.differences,
            "apart": [
                error for key, response in responses.items() for error in errors(prompts[key % len(prompts)], response)
            ],
            "tokens": responses[1].tokens.tolist(),
            "alone": alone[1].tokens.tolist(),
            "cached": engine.probe(prompts[1])[0],
        }

    syncs = [synced()]
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    syncs.append(synced())
    page = engine._engine.vllm_config.cache_config.mamba_page_size_padded
    Path(output_path).write_text(json.dumps({"syncs": syncs, "parameters": len(list(lm.parameters())), "page": page}))


def vision_main(kind: str, output_path: str) -> None:
    """In the spawned process: run the engine of a vision-language model on prompts with 1, 2 and no images."""
    import numpy as np
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from rlcli.model.io.tiny_vision import save_vision_model
    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, engine_named, finished
    from tests.vision_fixtures import images_for, model_and_rule, padded_log_probs, row_of

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{output_path}.store", rank=0, world_size=1)
    lm, rule = model_and_rule(kind, hidden=64, layers=3)
    folder = Path(f"{output_path}.model")
    folder.mkdir()
    save_vision_model(lm, folder)
    common = (str(folder), "float32", "cpu", 256, 16, 1, 0, True, 128 << 20, 0.05, True, (), "test")
    engine: Any = engine_named("vllm")(EngineSpec(*common, exact_steps=True, image_rule=rule, max_images=2))
    first_image, second_image = images_for(rule, (2, 3), (1, 2))
    syncs: list[dict[str, Any]] = []
    for _ in range(2):
        sums, errors = Checksums(), list[float]()
        engine.load_weights(sums.of((name, parameter.detach()) for name, parameter in lm.named_parameters()))
        verified = engine.verify(sums.sent())
        for images in ((first_image,), (first_image, second_image), ()):
            tokens, prompt, _images = row_of(rule, images, 0)
            request = GenerationRequest(0, np.asarray(tokens[:prompt], np.int32), seed=3, images=images)
            (response,) = finished(engine, [request], Sampling(1.0, 20))
            expected = padded_log_probs(
                lm, rule, [(np.concatenate([tokens[:prompt], response.tokens]), prompt, images)]
            )
            errors.append(float((expected.detach() - torch.tensor(response.log_probs)).abs().max()))
        syncs.append({"differences": verified.differences, "unchecked": verified.unchecked, "apart": errors})
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    Path(output_path).write_text(json.dumps({"syncs": syncs}))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_engine_sees_the_images_that_transformers_sees(kind: str, tmp_path: Path) -> None:
    results = spawned(__file__, Path(kind), tmp_path / "found.json")
    for sync in results["syncs"]:
        assert sync["differences"] == []
        assert sync["unchecked"] == 0
        assert max(sync["apart"]) < 5e-6


@pytest.mark.exhaustive  # test_hybrids.py: engine and trainer; test_delta_net.py: trainer and transformers
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "dtype", "head"), [*((kind, "float32", 32) for kind in KINDS), (KINDS[0], "bfloat16", 64)]
)
def test_the_engine_computes_what_transformers_does(
    kind: str, dtype: str, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 by vLLM's kernels, which take no smaller heads."""
    from rlcli.model.io import tiny_families, tiny_model

    monkeypatch.setattr(tiny_families, "LINEAR_HEAD", head)
    model = tiny_model.make_tiny_model(tmp_path / "model", kind=kind, hidden=64, heads=2, kv_heads=1, layers=3)
    results = spawned(__file__, model, tmp_path / "found.json", dtype)
    for sync in results["syncs"]:
        assert sync["differences"] == []
        # In bfloat16 vLLM packs the convolutions for its kernels in their place, where they cannot be compared.
        assert sync["unchecked"] == (0 if dtype == "float32" else 2)
        assert sync["equal"] + sync["unchecked"] == results["parameters"]
        assert max(sync["apart"]) < (2e-5 if dtype == "float32" else 0.3)
        assert sum(sync["apart"]) / len(sync["apart"]) < (2e-6 if dtype == "float32" else 0.05)
        assert sync["tokens"] == sync["alone"] or dtype != "float32", "a response does not depend on others"
        assert sync["cached"] == 0, "the prefix cache is off"
    shape, bytes_per_element = read_shape(str(model)), 4 if dtype == "float32" else 2
    assert results["page"] == block_tokens(shape, bytes_per_element) * 2 * shape.key * bytes_per_element, (
        "as rlcli plan counts"
    )
    assert results["syncs"][0]["tokens"] != results["syncs"][1]["tokens"], "other weights draw other tokens"


if __name__ == "__main__":
    (main if len(sys.argv) > 3 else vision_main)(*sys.argv[1:])
