"""Tests of every engine of `rlcli.engines`, installed plugins included: log-probs of the loaded weights, a seed for
each response, top-p, greedy sampling, stop tokens, abort and resume, checksums; and tests of vLLM alone.

All engines run in one spawned process (vLLM needs its environment set before it is imported, and changes global state);
the tests read its results.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import spawned
from updates import through_update

from rlcli.rollout.engine import ENGINES, engine_named

LENGTHS = (3, 17, 40, 64)
LIMIT = 24
TOP_P = 0.5
DRAWS = 2000
ABORT_AFTER = 9
PREFERRED = {"do_sample": True, "temperature": 0.3, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "repetition_penalty": 2.0}
"""Sampling values in the model's generation config."""
STEPPING = [name for name in ENGINES.names() if name != "server"]
"""A server generates between two steps too: test_servers.py compares it with vLLM."""


def abort_and_resume(engine: Any, requests: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Abort the responses after ABORT_AFTER steps and resume them: `(aborted or finished by then, resumed)`, by key."""
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    def as_dict(response: Any) -> dict[str, Any]:
        return {
            "tokens": response.tokens.tolist(),
            "log_probs": response.log_probs.tolist(),
            "finish": response.finish_reason,
        }

    engine.begin(Sampling(1.0, LIMIT))
    for request in requests:
        engine.add(request)
    completed = [response for _ in range(ABORT_AFTER) for response in engine.step()]
    aborted = engine.abort()
    assert engine.unfinished == 0
    partial = {response.key: response for response in aborted}
    continuations = [
        GenerationRequest(r.key, r.prompt, r.seed, response_prefix=partial[r.key].tokens)
        for r in requests
        if r.key in partial
    ]
    resumed = {response.key: as_dict(response) for response in finished(engine, continuations, Sampling(1.0, LIMIT))}
    return {response.key: as_dict(response) for response in [*completed, *aborted]}, resumed


def cached_tokens(engine: Any, prompt: Any) -> list[int]:
    """Number of prompt tokens found in the prefix cache, for each of two samples of one prompt."""
    from rlcli.rollout.engine import GenerationRequest, Sampling

    engine.begin(Sampling(1.0, 1))
    for key in (0, 1):
        engine.add(GenerationRequest(key, prompt, seed=key))
    counts = [output.num_cached_tokens for output in engine._engine.step() if output.finished]
    engine._keys.clear()
    return counts


def with_a_wrong_bit(layer: Any, differences: Any) -> list[str]:
    """Mismatches that the check reports after a bit flip in the packed copy of a layer's matrix (not its weight)."""
    import torch

    from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

    matrix = layer.cpu_linear
    wrong = matrix.read()
    wrong[-1:, -1:].view(torch.int32).bitwise_xor_(1)
    layer.cpu_linear = PackedMatrix(wrong)
    mismatches: list[str] = differences()
    layer.cpu_linear = matrix
    return mismatches


def checks(engine: Any, lm: Any, prompt: Any) -> dict[str, Any]:
    """Results of the checks of a sync on the engine, which has the weights of `lm`: of a sound sync and of several
    failures."""
    import torch

    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import Colocated

    def differences(load: Any = None) -> list[str]:
        sums = Checksums()
        weights = sums.of((name, p.detach()) for name, p in lm.named_parameters())
        if load is not None:
            load(weights)
        for _ in weights:
            pass
        verified = engine.verify(sums.sent())
        assert verified.unchecked == 0
        assert verified.tensors + len(verified.differences) == len(list(lm.named_parameters()))
        return list(verified.differences)

    def without(name: str) -> Any:
        return lambda weights: engine.load_weights([pair for pair in weights if pair[0] != name])

    results: dict[str, Any] = {"sound": differences()}
    packed = getattr(engine, "_model", None)  # of vLLM
    head = packed and packed.lm_head.cpu_linear
    with torch.no_grad():
        for parameter in lm.parameters():  # flips one bit of one number in each tensor
            parameter.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    results["nothing"], results["names"] = differences(), [f"{name} differs" for name, _ in lm.named_parameters()]
    results["up left out"] = differences(without("model.layers.1.mlp.up_proj.weight"))
    results["all"] = differences(engine.load_weights)
    if packed:
        results["packed"] = type(packed.model.layers[0].mlp.down_proj.cpu_linear).__name__
        for name in ("down_proj", "gate_up_proj"):
            results[f"a bit of {name}"] = with_a_wrong_bit(getattr(packed.model.layers[0].mlp, name), differences)
        packed.lm_head.cpu_linear = head
        results["old head"] = differences()
    results["not cached"], results["cached"] = engine.cached_tokens(prompt), engine.probe(prompt)[0]
    results["again"] = differences(engine.load_weights)
    results["reset"], log_probs = engine.probe(prompt)
    results["probe"], results["alone"] = log_probs.tolist(), engine.prompt_log_probs(prompt).tolist()
    if isinstance(engine, Colocated):
        engine.sleep()
        engine.wake_weights()
        results["slept"] = differences(engine.load_weights)
        engine.wake_cache()
        results["awake"] = engine.prompt_log_probs(prompt).tolist()
    return results


def main(model: str, output_path: str, *names: str) -> None:
    """In the spawned process: run the engines and write their results."""
    import torch.distributed as dist

    from rlcli.rollout.vllm.hooks import packed_matrices

    packed_matrices.MIN_ELEMENTS = 1 << 15  # of this model only matrices of its feed-forward part have as many
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{output_path}.store", rank=0, world_size=1)
    Path(output_path).write_text(json.dumps({name: run_engine(name, model) for name in names}))


def run_engine(name: str, model: str) -> dict[str, Any]:
    """Results of the engine `name`."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, finished

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = np.random.default_rng(0)
    printable: np.ndarray = np.arange(10, lm.config.vocab_size, dtype=np.int32)
    prompts = [random.choice(printable, n) for n in LENGTHS]
    # Some characters beside the model's own end token, so that random weights generate one now and then.
    stops = (*(int(token) for token in printable[::32]), lm.config.eos_token_id)
    engine: Any = engine_named(name)(
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
            exact_steps=True,
        )
    )

    def distributions(prompt: Any, response: Any) -> Any:
        """Log-probs `[response, vocabulary]` before each token of it, by the model's own forward pass at temperature
        1."""
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
        with torch.no_grad():
            return lm(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]

    def log_probs(prompt: Any, response: Any) -> list[float]:
        token_ids = torch.tensor(response, dtype=torch.int64)[:, None]
        return [float(x) for x in distributions(prompt, response).gather(-1, token_ids)[:, 0]]

    def nucleus(prompt: Any, response: Any) -> list[list[float]]:
        """For each token: the total probability of the likelier tokens, and its log-prob within the top-p nucleus of
        TOP_P."""
        pairs = []
        for row, token in zip(distributions(prompt, response).exp().double().tolist(), response, strict=True):
            likelier = sum(p for p in row if p > row[token])
            held = 0.0
            for p in sorted(row, reverse=True):
                held += p
                if held >= TOP_P:
                    break
            pairs.append([likelier, math.log(row[token] / held)])
        return pairs

    def generate(
        requests: list[GenerationRequest], limit: int = LIMIT, top_p: float = 1.0
    ) -> dict[int, dict[str, Any]]:
        return {
            g.key: {"tokens": g.tokens.tolist(), "log_probs": g.log_probs.tolist(), "finish": g.finish_reason}
            for g in finished(engine, requests, Sampling(1.0, limit, top_p))
        }

    def load() -> dict[str, Any]:
        engine.load_weights((name, p.detach()) for name, p in lm.named_parameters())
        requests = [GenerationRequest(key, prompt, seed=1000 + key) for key, prompt in enumerate(prompts * 8)]
        responses = generate(requests)
        return {
            "probe": engine.prompt_log_probs(prompts[3]).tolist(),
            "probe_expected": log_probs(prompts[3][:1], prompts[3][1:]),
            "made": responses,
            "expected": {
                key: log_probs(requests[key].prompt, np.array(sample["tokens"], np.int32))
                for key, sample in responses.items()
            },
        }

    results: dict[str, Any] = {"stops": stops, "first": load()}
    with torch.no_grad():
        for parameter in lm.parameters():  # the tied embedding, which is the head, among them
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    results["second"] = load()
    results["checks"] = checks(engine, lm, prompts[2])

    requests = [GenerationRequest(key, prompt, seed=1000 + key) for key, prompt in enumerate(prompts * 8)]
    results["alone"] = {key: generate([requests[key]])[key] for key in (0, 5, 30)}
    results["reversed"] = generate(requests[::-1])
    many = [GenerationRequest(key, prompts[1], seed=key) for key in range(DRAWS)]
    results["drawn"] = [sample["tokens"][0] for sample in generate(many, 1).values()]
    results["drawn_expected"] = distributions(prompts[1], prompts[1][:1])[0].double().exp().tolist()
    results["resumed"] = {}
    for key in (0, 5, 30):  # from their first 7 tokens on, or fewer where they have ended by then
        prefix = results["second"]["made"][key]["tokens"][:7]
        prompt = np.concatenate([requests[key].prompt, np.array(prefix, np.int32)])
        results["resumed"][key] = prefix + generate([GenerationRequest(key, prompt, requests[key].seed)])[key]["tokens"]
    results["broken_off"], results["gone_on"] = abort_and_resume(engine, requests)
    # Three prompts of 2,000 tokens are more than the scheduler takes in one step.
    long = [GenerationRequest(key, random.choice(printable, 2000), seed=2000 + key) for key in range(5)]
    results["long"], results["long_alone"] = generate(long, 8), {4: generate([long[4]], 8)[4]}
    results["long_expected"] = {
        key: log_probs(long[key].prompt, np.array(sample["tokens"], np.int32))
        for key, sample in results["long"].items()
    }
    results["top_p"] = generate(requests, top_p=TOP_P)
    results["top_p_expected"] = {
        key: nucleus(requests[key].prompt, sample["tokens"]) for key, sample in results["top_p"].items()
    }
    greedy = [GenerationRequest(100 + key, prompt, seed=0, greedy=True) for key, prompt in enumerate(prompts)]
    results["mixed"] = generate([*greedy[:2], *requests, *greedy[2:]], top_p=TOP_P)
    results["greedy_expected"] = {
        request.key: [
            [float(row.max()), float(row[token])]
            for row, token in zip(
                distributions(request.prompt, results["mixed"][request.key]["tokens"]),
                results["mixed"][request.key]["tokens"],
                strict=True,
            )
        ]
        for request in greedy
    }
    results["updates"] = {
        mode: through_update(engine, lm, prompts * 2, keep=mode == "keep", limit=LIMIT)
        for mode in ("recompute", "keep")
    }
    if name == "vllm":
        results |= vllm_only_results(engine, prompts[2])
        results["layers"] = lm.config.num_hidden_layers
    engine.close()
    return results


def vllm_only_results(engine: Any, prompt: Any) -> dict[str, Any]:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    from rlcli.rollout.vllm.hooks import cpu_kernels

    return {
        "quantizations": list(QUANTIZATION_METHODS),
        "own_kernels": engine._llm.apply_model(cpu_kernels.install),
        "cached": cached_tokens(engine, prompt),
        "preferred": engine._llm.get_default_sampling_params().top_k,
        "packed": [
            name for name, module in engine._model.named_modules() if "cpu_linear" in vars(module) and "embed" in name
        ],
    }


@pytest.fixture(scope="module")
def engine_results(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of each engine, by its name. The model's generation config sets other sampling values than any test
    requests: comparisons with the model's own distribution show that the engine ignores them."""
    engines, folder = sorted(STEPPING, key="vllm".__ne__), tmp_path_factory.mktemp("engine")
    model = shutil.copytree(tiny, folder / "model")
    config_path = model / "generation_config.json"
    values = json.loads(config_path.read_text()) if config_path.is_file() else {}
    config_path.write_text(json.dumps(values | PREFERRED))
    return spawned(__file__, model, folder / "found.json", *engines)


@pytest.fixture(params=STEPPING)
def results(request: Any, engine_results: dict[str, Any]) -> dict[str, Any]:
    """Results of one engine."""
    results: dict[str, Any] = engine_results[request.param]
    return results


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_each_token_is_of_the_weights_that_drew_it(results: dict[str, Any], mode: str) -> None:
    """Also of responses that were being generated when the weights changed, with their keys and values."""
    update = results["updates"][mode]
    counts = [count for key, count in update["counts"].items() if int(key) < 8]
    assert sum(old_count > 0 and new_count > 0 for old_count, new_count in counts) > 3
    assert len(update["after"]) == sum(new_count > 0 for _, new_count in counts)
    for category in ("before", "after", "begun_after"):
        assert len(update[category]) > 0
        assert max(update[category].values()) < 1e-4, category
    assert update["cached"] == 0, "no block of the old weights is used for what is added later"


@pytest.fixture
def vllm(engine_results: dict[str, Any]) -> dict[str, Any]:
    vllm_results: dict[str, Any] = engine_results["vllm"]
    return vllm_results


def test_engines_take_the_same_greedy_tokens(engine_results: dict[str, Any]) -> None:
    for other in engine_results.values():
        for key in other["greedy_expected"]:
            assert other["mixed"][key]["tokens"] == engine_results["vllm"]["mixed"][key]["tokens"]


def test_vllm_knows_the_sampling_that_the_model_prefers(vllm: dict[str, Any]) -> None:
    assert vllm["preferred"] == PREFERRED["top_k"]


def test_vllm_knows_what_quantizations_are_called(vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import QUANTIZED

    assert set(QUANTIZED.values()) <= set(vllm["quantizations"])


def test_the_samples_of_a_prompt_share_its_whole_blocks(vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import CPU_BLOCK

    assert CPU_BLOCK < LENGTHS[2] < 2 * CPU_BLOCK
    assert vllm["cached"] == [0, CPU_BLOCK]


def test_one_bit_of_a_weight_that_the_engine_does_not_have_is_found(results: dict[str, Any]) -> None:
    checks = results["checks"]
    assert checks["sound"] == checks["all"] == checks["again"] == []
    assert checks["nothing"] == checks["names"]
    # The rest of the fused layer is not loaded either, since vLLM waits for all of it.
    assert "model.layers.1.mlp.up_proj.weight differs" in checks["up left out"]
    assert {name.split(" ")[0].rpartition(".")[0] for name in checks["up left out"]} <= {
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")
    }


def test_one_bit_of_a_packed_copy_that_is_read_back_is_found(vllm: dict[str, Any]) -> None:
    assert vllm["checks"]["packed"] == "PackedMatrix"
    for layer, last in (("down_proj", "down_proj"), ("gate_up_proj", "up_proj")):
        assert vllm["checks"][f"a bit of {layer}"] == [f"model.layers.0.mlp.{last}.weight differs"]


def test_the_head_that_vllm_has_packed_is_compared_too(vllm: dict[str, Any]) -> None:
    assert vllm["checks"]["old head"] == ["model.embed_tokens.weight differs"]


def test_an_engine_that_slept_has_the_weights_of_the_next_load(results: dict[str, Any]) -> None:
    checks = results["checks"]
    assert checks.get("slept", []) == []
    assert checks.get("awake", checks["alone"]) == checks["alone"]


def test_a_prompt_is_not_cached_after_a_load(results: dict[str, Any], vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import CPU_BLOCK

    checks = results["checks"]
    assert (checks["not cached"], checks["reset"]) == (0, 0)
    assert vllm["checks"]["cached"] == CPU_BLOCK
    assert checks["probe"] == pytest.approx(checks["alone"], abs=1e-5)


def test_an_embedding_that_is_only_looked_up_is_not_packed(vllm: dict[str, Any]) -> None:
    assert vllm["packed"] == []


def test_norms_and_gated_units_are_not_left_to_a_compiler(vllm: dict[str, Any]) -> None:
    assert vllm["own_kernels"] == [3 * vllm["layers"] + 1]


@pytest.mark.parametrize("load", ["first", "second"])
def test_log_probs_are_those_of_the_weights_last_given(results: dict[str, Any], load: str) -> None:
    loaded = results[load]
    assert loaded["probe"] == pytest.approx(loaded["probe_expected"], abs=1e-4)
    assert len(loaded["made"]) == 32
    for key, response in loaded["made"].items():
        assert response["log_probs"] == pytest.approx(loaded["expected"][key], abs=1e-4), key


def test_the_second_weights_are_others(results: dict[str, Any]) -> None:
    first, second = results["first"]["probe"], results["second"]["probe"]
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.1


def test_a_sample_depends_on_its_own_seed_alone(results: dict[str, Any]) -> None:
    batch = results["second"]["made"]
    for key, response in results["alone"].items():
        assert response["tokens"] == batch[key]["tokens"]
    assert {key: response["tokens"] for key, response in results["reversed"].items()} == {
        key: response["tokens"] for key, response in batch.items()
    }
    # Eight seeds for each prompt, and no two responses alike.
    assert len({tuple(response["tokens"]) for response in batch.values()}) == 32


def test_seeds_that_differ_by_one_draw_from_the_distribution_of_the_model(results: dict[str, Any]) -> None:
    counts = Counter(results["drawn"])
    likely = [(token, DRAWS * p) for token, p in enumerate(results["drawn_expected"]) if DRAWS * p > 5]
    assert len(likely) > 50
    chi_square = sum((counts[token] - expected) ** 2 / expected for token, expected in likely)
    assert abs(chi_square - len(likely)) < 5 * math.sqrt(2 * len(likely))


def test_a_response_resumed_from_its_tokens_draws_the_same_tokens(results: dict[str, Any]) -> None:
    complete = {key: results["second"]["made"][key] for key in results["resumed"]}
    unfinished = [key for key, response in complete.items() if len(response["tokens"]) > 7]
    assert unfinished
    for key in unfinished:
        assert results["resumed"][key][: len(complete[key]["tokens"])] == complete[key]["tokens"]


def test_aborted_responses_resume_as_if_never_aborted(results: dict[str, Any]) -> None:
    aborted, resumed = results["broken_off"], results["gone_on"]
    assert len(aborted) == 32
    assert {key for key, response in aborted.items() if response["finish"] is None} == set(resumed) != set(aborted)
    for key, complete in results["second"]["made"].items():
        partial, continuation = aborted[key], resumed.get(key, {"tokens": [], "log_probs": [], "finish": None})
        assert partial["tokens"] + continuation["tokens"] == complete["tokens"]
        assert partial["log_probs"] + continuation["log_probs"] == pytest.approx(complete["log_probs"], abs=1e-4)
        assert (partial["finish"] or continuation["finish"]) == complete["finish"]


def test_responses_end_with_the_stop_token_or_at_the_limit(results: dict[str, Any]) -> None:
    responses = [response for load in ("first", "second") for response in results[load]["made"].values()]
    assert {response["finish"] for response in responses} == {"stop", "length"}
    assert len({response["tokens"][-1] for response in responses if response["finish"] == "stop"}) > 2
    for response in responses:
        assert len(response["tokens"]) == len(response["log_probs"]) <= LIMIT
        if response["finish"] == "stop":
            assert [i for i, token in enumerate(response["tokens"]) if token in results["stops"]] == [
                len(response["tokens"]) - 1
            ]
        else:
            assert len(response["tokens"]) == LIMIT
            assert not set(response["tokens"]) & set(results["stops"])


def test_prompts_longer_than_one_prefill_are_sampled_by_their_seeds(results: dict[str, Any]) -> None:
    assert len(results["long"]) == 5
    assert results["long_alone"]["4"]["tokens"] == results["long"]["4"]["tokens"]
    for key, response in results["long"].items():
        assert response["log_probs"] == pytest.approx(results["long_expected"][key], abs=1e-4)


def test_top_p_draws_only_the_likeliest_tokens_with_their_log_probs(results: dict[str, Any]) -> None:
    pairs = [
        (log_prob, likelier, expected)
        for key, response in results["top_p"].items()
        for log_prob, (likelier, expected) in zip(response["log_probs"], results["top_p_expected"][key], strict=True)
    ]
    assert len(results["top_p"]) == 32
    assert len(pairs) > 100
    assert max(likelier for _, likelier, _ in pairs) < TOP_P + 1e-4
    # Where rounding decides whether a token is in the nucleus, all log-probs at that position differ.
    assert sum(abs(log_prob - expected) > 1e-4 for log_prob, _, expected in pairs) <= 0.01 * len(pairs)
    # Without top-p, the same seeds and weights also sample tokens outside the nucleus.
    assert {key: response["tokens"] for key, response in results["top_p"].items()} != {
        key: response["tokens"] for key, response in results["second"]["made"].items()
    }


def test_a_greedy_request_beside_sampled_ones_changes_none_of_them(
    results: dict[str, Any],
) -> None:
    mixed = results["mixed"]
    assert {key: response["tokens"] for key, response in mixed.items() if int(key) < 100} == {
        key: response["tokens"] for key, response in results["top_p"].items()
    }
    assert len(results["greedy_expected"]) == len(LENGTHS)
    for key, expected in results["greedy_expected"].items():
        assert all(log_prob > best - 1e-4 for best, log_prob in expected)
        assert mixed[key]["log_probs"] == pytest.approx([log_prob for _, log_prob in expected], abs=1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
