"""`rollout.speculate` on vLLM: drafts are accepted, and neither tokens nor log-probs nor the distribution change.

Both engines run in one spawned process, as in `test_engine.py`; the tests read their results.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import spawned

pytestmark = pytest.mark.long
DRAWS, TOKENS, LIMIT, TEMPERATURE, TOP_P = 2000, 3, 24, 0.7, 0.9
ENGINES: list[Any] = []
"""Kept alive in the spawned process: a collected engine destroys the process group, which the next one needs."""


def main(model: str, output_path: str) -> None:
    """In the spawned process: run the engine with drafts and without, and write their results."""
    import torch.distributed as dist

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{output_path}.store", rank=0, world_size=1)
    Path(output_path).write_text(json.dumps({str(drafts): run_engine(model, drafts) for drafts in (0, 5)}))


def make_prompts(vocabulary: int) -> Any:
    """One periodic, one random, and one in which every printable token has followed the last token once."""
    import numpy as np

    random = np.random.default_rng(0)
    printable: np.ndarray = np.arange(10, vocabulary, dtype=np.int32)
    last, triples = printable[5], []
    for token in printable:
        triples += [last, token, random.choice(printable)]
    return [np.tile(random.choice(printable, 7), 6), random.choice(printable, 40), np.array([*triples, last], np.int32)]


def run_engine(model: str, drafts: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, finished
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sizes = {"max_length": 1024, "max_concurrent": 64, "tensor_parallel": 1, "kv_cache_bytes": 128 << 20}
    rest = {"lora_rank": 0, "gpu_memory_utilization": 0.5, "enforce_eager": True, "stop_token_ids": (), "group_id": "t"}
    engine = VllmEngine(EngineSpec(model, "float32", "cpu", weights_follow=True, speculate=drafts, **sizes, **rest))
    ENGINES.append(engine)
    engine.load_weights((name, p.detach()) for name, p in lm.named_parameters())
    prompts = make_prompts(lm.config.vocab_size)

    def generate(requests: list[Any], sampling: Any) -> dict[int, Any]:
        return {response.key: response for response in finished(engine, requests, sampling)}

    def expected(prompt: Any, response: Any, temperature: float) -> list[float]:
        ids = torch.tensor(np.concatenate([prompt, response.tokens]), dtype=torch.int64)[None]
        with torch.no_grad():
            rows = (lm(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, response.tokens, strict=True)]

    results: dict[str, Any] = {}
    all_requests = [GenerationRequest(key, prompts[key % 3], 100 + key, greedy=key < 3) for key in range(24)]
    for name, top_p in (("whole", 1.0), ("top_p", TOP_P)):
        responses = generate(all_requests, Sampling(TEMPERATURE, LIMIT, top_p))
        results[name] = {key: response.tokens.tolist() for key, response in responses.items()}
        results[f"{name} log-probs"] = {key: response.log_probs.tolist() for key, response in responses.items()}
        if top_p == 1.0:
            results["expected"] = {
                key: expected(prompts[key % 3], response, 1.0 if key < 3 else TEMPERATURE)
                for key, response in responses.items()
            }
            unfinished = [r for r in all_requests if len(responses[r.key].tokens) > 9]
            continuations = [
                GenerationRequest(r.key, r.prompt, r.seed, r.greedy, responses[r.key].tokens[:9]) for r in unfinished
            ]
            resumed = generate(continuations, Sampling(TEMPERATURE, LIMIT))
            results["resumed"] = {
                key: [*responses[key].tokens[:9].tolist(), *response.tokens.tolist()]
                for key, response in resumed.items()
            }
    results["probe"] = engine.probe(prompts[1])[1].tolist()
    initial_counts = engine.speculated()
    many = [GenerationRequest(key, prompts[2], key) for key in range(DRAWS)]
    results["second"] = [
        int(response.tokens[1])
        for response in generate(many, Sampling(1.0, TOKENS)).values()
        if len(response.tokens) > 1
    ]
    results["counts"] = [initial_counts, engine.speculated()]
    if not drafts:
        results["second_expected"] = second_token_distribution(lm, prompts[2])
    return results


def second_token_distribution(lm: Any, prompt: Any) -> list[float]:
    """The marginal distribution of the second token after `prompt`, given that the first did not end the response."""
    import torch

    ids = torch.tensor(prompt, dtype=torch.int64)
    every = torch.arange(lm.config.vocab_size)
    with torch.no_grad():
        first = lm(ids[None]).logits[0, -1].double().softmax(-1)
        sequences = torch.cat([ids.expand(len(every), -1), every[:, None]], dim=1)
        rows = torch.cat([lm(part, logits_to_keep=1).logits[:, -1] for part in sequences.split(32)])
    first[lm.config.eos_token_id] = 0.0
    return (first[:, None] * rows.double().softmax(-1)).sum(0).div(first.sum()).tolist()


@pytest.fixture(scope="module")
def results(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return spawned(__file__, tiny, tmp_path_factory.mktemp("speculation") / "found.json")


@pytest.mark.parametrize("name", ["whole", "top_p", "resumed"])
def test_drafts_change_no_token_greedy_or_sampled(results: dict[str, Any], name: str) -> None:
    assert results["5"][name] == results["0"][name]
    resumed = results["5"]["resumed"]
    assert resumed == {key: tokens for key, tokens in results["5"]["whole"].items() if len(tokens) > 9}
    assert len(resumed) > 12, "most are longer than what was begun"


def test_log_probs_are_those_of_the_target(results: dict[str, Any]) -> None:
    for key, log_probs in results["5"]["whole log-probs"].items():
        assert log_probs == pytest.approx(results["5"]["expected"][key], abs=1e-4)
    for key, log_probs in results["5"]["top_p log-probs"].items():
        assert log_probs == pytest.approx(results["0"]["top_p log-probs"][key], abs=1e-4)


def test_the_probe_of_a_sync_is_computed_as_without_drafts(results: dict[str, Any]) -> None:
    assert results["5"]["probe"] == pytest.approx(results["0"]["probe"], abs=1e-5)


def test_drafted_tokens_follow_the_distribution_of_the_model(results: dict[str, Any]) -> None:
    (drafted, accepted), (drafted_then, accepted_then) = results["5"]["counts"]
    assert 0 < accepted < drafted
    assert drafted_then - drafted > DRAWS / 2, "most of the second tokens were drafted"
    assert accepted_then > accepted
    assert results["0"]["counts"] == [[0, 0], [0, 0]]
    counts, draws = Counter(results["5"]["second"]), len(results["5"]["second"])
    likely = [(token, draws * p) for token, p in enumerate(results["0"]["second_expected"]) if draws * p > 5]
    assert len(likely) > 20
    chi_square = sum((counts[token] - expected) ** 2 / expected for token, expected in likely)
    assert abs(chi_square - len(likely)) < 5 * math.sqrt(2 * len(likely))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # vLLM's engines in one process do not all end by themselves
