"""vLLM with layers of linear attention against transformers: log-probs of what it draws, checks after two syncs,
images.

Each engine runs in a spawned process, of which vLLM allows one at a time; the tests read what it found.
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


def main(model: str, out: str, dtype: str) -> None:
    """In the spawned process: drive the engine and write what it gives."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, engine_named, finished

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    spec = EngineSpec(model, dtype, "cpu", 256, 16, 1, 0, True, 128 << 20, 0.05, True, (), "test", exact_steps=True)
    engine: Any = engine_named("vllm")(spec)
    random = np.random.default_rng(0)
    prompts = [random.integers(10, lm.config.vocab_size, length).astype(np.int32) for length in LENGTHS]

    def difference(prompt: Any, one: Any) -> list[float]:
        ids = torch.tensor(np.concatenate([prompt, one.tokens]), dtype=torch.int64)[None]
        with torch.no_grad():
            log_probs = lm(ids, use_cache=False).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        own = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return [float(each) for each in (own - torch.tensor(one.log_probs)).abs()]

    def synced() -> dict[str, Any]:
        sums = Checksums()
        engine.load_weights(sums.of((name, parameter.detach()) for name, parameter in lm.named_parameters()))
        verified = engine.verify(sums.sent())
        requests = [GenerationRequest(key, prompt, seed=key) for key, prompt in enumerate(prompts * 2)]
        made = {one.key: one for one in finished(engine, requests, Sampling(1.0, LIMIT))}
        alone = {one.key: one for one in finished(engine, requests[1:2], Sampling(1.0, LIMIT))}
        return {
            "equal": verified.tensors,
            "unchecked": verified.unchecked,
            "differences": verified.differences,
            "apart": [each for key, one in made.items() for each in difference(prompts[key % len(prompts)], one)],
            "tokens": made[1].tokens.tolist(),
            "alone": alone[1].tokens.tolist(),
            "cached": engine.probe(prompts[1])[0],
        }

    found = [synced()]
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found.append(synced())
    page = engine._engine.vllm_config.cache_config.mamba_page_size_padded
    Path(out).write_text(json.dumps({"syncs": found, "parameters": len(list(lm.parameters())), "page": page}))


def seen(kind: str, out: str) -> None:
    """In the spawned process: what an engine of a vision-language model draws of prompts with 1, 2 and no images."""
    import numpy as np
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from rlcli.model.io.tiny_vision import save_vision_model
    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, engine_named, finished
    from tests.vision_fixtures import images_for, model_and_rule, padded_log_probs, row_of

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    lm, rule = model_and_rule(kind, hidden=64, layers=3)
    folder = Path(f"{out}.model")
    folder.mkdir()
    save_vision_model(lm, folder)
    common = (str(folder), "float32", "cpu", 256, 16, 1, 0, True, 128 << 20, 0.05, True, (), "test")
    engine: Any = engine_named("vllm")(EngineSpec(*common, exact_steps=True, image_rule=rule, max_images=2))
    one, two = images_for(rule, (2, 3), (1, 2))
    found: list[dict[str, Any]] = []
    for _ in range(2):
        sums, apart = Checksums(), list[float]()
        engine.load_weights(sums.of((name, parameter.detach()) for name, parameter in lm.named_parameters()))
        verified = engine.verify(sums.sent())
        for images in ((one,), (one, two), ()):
            tokens, prompt, _images = row_of(rule, images, 0)
            request = GenerationRequest(0, np.asarray(tokens[:prompt], np.int32), seed=3, images=images)
            (drawn,) = finished(engine, [request], Sampling(1.0, 20))
            expected = padded_log_probs(lm, rule, [(np.concatenate([tokens[:prompt], drawn.tokens]), prompt, images)])
            apart.append(float((expected.detach() - torch.tensor(drawn.log_probs)).abs().max()))
        found.append({"differences": verified.differences, "unchecked": verified.unchecked, "apart": apart})
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    Path(out).write_text(json.dumps({"syncs": found}))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_engine_sees_the_images_that_transformers_sees(kind: str, tmp_path: Path) -> None:
    found = spawned(__file__, Path(kind), tmp_path / "found.json")
    for sync in found["syncs"]:
        assert sync["differences"] == []
        assert sync["unchecked"] == 0
        assert max(sync["apart"]) < 5e-6


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "dtype", "head"),
    [
        *(
            pytest.param(kind, "float32", 32, marks=pytest.mark.exhaustive if kind != KINDS[0] else ())
            for kind in KINDS
        ),
        pytest.param(KINDS[0], "bfloat16", 64, marks=pytest.mark.exhaustive),
    ],
)
def test_the_engine_computes_what_transformers_does(
    kind: str, dtype: str, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 by vLLM's kernels, which take no smaller heads."""
    from rlcli.model.io import tiny_families, tiny_model

    monkeypatch.setattr(tiny_families, "LINEAR_HEAD", head)
    model = tiny_model.make_tiny_model(tmp_path / "model", kind=kind, hidden=64, heads=2, kv_heads=1, layers=3)
    found = spawned(__file__, model, tmp_path / "found.json", dtype)
    for sync in found["syncs"]:
        assert sync["differences"] == []
        # In bfloat16 vLLM packs the convolutions for its kernels in their place, where they cannot be compared.
        assert sync["unchecked"] == (0 if dtype == "float32" else 2)
        assert sync["equal"] + sync["unchecked"] == found["parameters"]
        assert max(sync["apart"]) < (2e-5 if dtype == "float32" else 0.3)
        assert sum(sync["apart"]) / len(sync["apart"]) < (2e-6 if dtype == "float32" else 0.05)
        assert sync["tokens"] == sync["alone"] or dtype != "float32", "a response does not depend on others"
        assert sync["cached"] == 0, "the prefix cache is off"
    shape, each = read_shape(str(model)), 4 if dtype == "float32" else 2
    assert found["page"] == block_tokens(shape, each) * 2 * shape.key * each, "as rlcli plan counts"
    assert found["syncs"][0]["tokens"] != found["syncs"][1]["tokens"], "other weights draw other tokens"


if __name__ == "__main__":
    (main if len(sys.argv) > 3 else seen)(*sys.argv[1:])
