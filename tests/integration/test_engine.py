"""The vLLM engine alone: log-probs of the weights it was given, and each sample by its own seed.

Everything runs in one spawned process (vLLM wants its environment before its import, and changes much of a process);
the tests read what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LENGTHS = (3, 17, 40, 64)
LIMIT = 24


def main(model: str, out: str) -> None:
    """In the spawned process: drive the engine and write what it gives."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlcli.rollout.engine import GenerationRequest, Sampling
    from rlcli.rollout.vllm_engine import EngineSpec, VllmEngine

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = np.random.default_rng(0)
    printable = np.arange(10, lm.config.vocab_size, dtype=np.int32)
    prompts = [random.choice(printable, n) for n in LENGTHS]
    # Some characters beside the model's own end token, so that random weights are sure to draw one now and then.
    stops = tuple(int(token) for token in printable[::32])
    engine = VllmEngine(
        EngineSpec(
            model=model,
            dtype="float32",
            device="cpu",
            max_length=4096,
            max_concurrent=64,
            tensor_parallel=1,
            lora_rank=0,
            weights_follow=True,
            kv_cache_bytes=256 << 20,
            gpu_memory_utilization=0.5,
            enforce_eager=True,
            stop_token_ids=stops,
            group_id="test",
        )
    )

    def log_probs(prompt: Any, response: Any) -> list[float]:
        """Of the response, by the model's own forward pass at temperature 1."""
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
        with torch.no_grad():
            log_p = lm(ids).logits[0].log_softmax(-1)
        found = log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        return [float(x) for x in found[len(prompt) - 1 :]]

    def generate(requests: list[GenerationRequest], limit: int = LIMIT) -> dict[int, dict[str, Any]]:
        return {
            g.key: {"tokens": g.tokens.tolist(), "log_probs": g.log_probs.tolist(), "finish": g.finish_reason}
            for g in engine.generate(requests, Sampling(1.0, limit))
        }

    def load() -> dict[str, Any]:
        engine.load_weights((name, p.detach()) for name, p in lm.named_parameters())
        requests = [GenerationRequest(key, prompt, seed=1000 + key) for key, prompt in enumerate(prompts * 8)]
        made = generate(requests)
        return {
            "probe": engine.prompt_log_probs(prompts[3]).tolist(),
            "probe_expected": log_probs(prompts[3][:1], prompts[3][1:]),
            "made": made,
            "expected": {
                key: log_probs(requests[key].prompt, np.array(one["tokens"], np.int32)) for key, one in made.items()
            },
        }

    found: dict[str, Any] = {"stops": [*stops, lm.config.eos_token_id], "first": load()}
    with torch.no_grad():
        for parameter in lm.parameters():  # the tied embedding, which is the head, among them
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    found["second"] = load()

    requests = [GenerationRequest(key, prompt, seed=1000 + key) for key, prompt in enumerate(prompts * 8)]
    found["alone"] = {key: generate([requests[key]])[key] for key in (0, 5, 30)}
    found["reversed"] = generate(requests[::-1])
    # Three prompts of 2,000 tokens are more than the scheduler takes in one step.
    long = [GenerationRequest(key, random.choice(printable, 2000), seed=2000 + key) for key in range(5)]
    found["long"], found["long_alone"] = generate(long, 8), {4: generate([long[4]], 8)[4]}
    found["long_expected"] = {
        key: log_probs(long[key].prompt, np.array(one["tokens"], np.int32)) for key, one in found["long"].items()
    }
    engine.close()
    Path(out).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from conftest import ENVIRONMENT

    from rlcli.workers.cluster import WORKER_ENV

    out = tmp_path_factory.mktemp("engine") / "found.json"
    done = subprocess.run(
        [sys.executable, __file__, str(tiny), str(out)],
        env=os.environ | ENVIRONMENT | WORKER_ENV,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert out.exists(), done.stderr[-3000:]
    read: dict[str, Any] = json.loads(out.read_text())
    return read


@pytest.mark.parametrize("load", ["first", "second"])
def test_log_probs_are_those_of_the_weights_last_given(found: dict[str, Any], load: str) -> None:
    given = found[load]
    assert given["probe"] == pytest.approx(given["probe_expected"], abs=1e-4)
    assert len(given["made"]) == 32
    for key, one in given["made"].items():
        assert one["log_probs"] == pytest.approx(given["expected"][key], abs=1e-4), key


def test_the_second_weights_are_others(found: dict[str, Any]) -> None:
    first, second = found["first"]["probe"], found["second"]["probe"]
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.1


def test_a_sample_depends_on_its_own_seed_alone(found: dict[str, Any]) -> None:
    batch = found["second"]["made"]
    for key, one in found["alone"].items():
        assert one["tokens"] == batch[key]["tokens"]
    assert {key: one["tokens"] for key, one in found["reversed"].items()} == {
        key: one["tokens"] for key, one in batch.items()
    }
    # Eight seeds for each prompt, and no two responses alike.
    assert len({tuple(one["tokens"]) for one in batch.values()}) == 32


def test_responses_end_with_the_stop_token_or_at_the_limit(found: dict[str, Any]) -> None:
    made = [one for load in ("first", "second") for one in found[load]["made"].values()]
    assert {one["finish"] for one in made} == {"stop", "length"}
    assert len({one["tokens"][-1] for one in made if one["finish"] == "stop"}) > 2
    for one in made:
        assert len(one["tokens"]) == len(one["log_probs"]) <= LIMIT
        if one["finish"] == "stop":
            assert [i for i, token in enumerate(one["tokens"]) if token in found["stops"]] == [len(one["tokens"]) - 1]
        else:
            assert len(one["tokens"]) == LIMIT
            assert not set(one["tokens"]) & set(found["stops"])


def test_prompts_of_more_tokens_than_one_step_takes_are_sampled_by_their_seeds(found: dict[str, Any]) -> None:
    assert len(found["long"]) == 5
    assert found["long_alone"]["4"]["tokens"] == found["long"]["4"]["tokens"]
    for key, one in found["long"].items():
        assert one["log_probs"] == pytest.approx(found["long_expected"][key], abs=1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
