"""What every engine of `rlcli.engines` must do, installed plugins included: log-probs of the weights that it was given,
each response by its own seed, top-p, greedy, stops, abort and continue, checksums; and what vLLM does besides.

Everything runs in one spawned process (vLLM wants its environment before its import, and changes much of a process);
the tests read what it found.
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
BROKEN_OFF = 9
PREFERRED = {"do_sample": True, "temperature": 0.3, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "repetition_penalty": 2.0}
"""Sampling values in the model's generation config."""
STEPPING = [name for name in ENGINES.names() if name != "server"]
"""A server generates between two steps too: test_servers.py compares it with vLLM."""


def break_off(engine: Any, requests: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Break the responses off after so many steps, and go on with them: what there was of each, and what it became.
    Those that were finished by then are as they were."""
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    def told(one: Any) -> dict[str, Any]:
        return {"tokens": one.tokens.tolist(), "log_probs": one.log_probs.tolist(), "finish": one.finish_reason}

    engine.begin(Sampling(1.0, LIMIT))
    for request in requests:
        engine.add(request)
    whole = [one for _ in range(BROKEN_OFF) for one in engine.step()]
    rest = engine.abort()
    assert engine.unfinished == 0
    begun = {one.key: one for one in rest}
    going_on = [
        GenerationRequest(r.key, r.prompt, r.seed, response_prefix=begun[r.key].tokens)
        for r in requests
        if r.key in begun
    ]
    gone_on = {one.key: told(one) for one in finished(engine, going_on, Sampling(1.0, LIMIT))}
    return {one.key: told(one) for one in [*whole, *rest]}, gone_on


def cached_tokens(engine: Any, prompt: Any) -> list[int]:
    """Of two samples of one prompt: how many of its tokens were not computed again."""
    from rlcli.rollout.engine import GenerationRequest, Sampling

    engine.begin(Sampling(1.0, 1))
    for key in (0, 1):
        engine.add(GenerationRequest(key, prompt, seed=key))
    found = [output.num_cached_tokens for output in engine._engine.step() if output.finished]
    engine._keys.clear()
    return found


def with_a_wrong_bit(layer: Any, differences: Any) -> list[str]:
    """What the check finds once the packed copy of a layer's matrix has one wrong bit, with its weight as it was."""
    import torch

    from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

    matrix = layer.cpu_linear
    wrong = matrix.read()
    wrong[-1:, -1:].view(torch.int32).bitwise_xor_(1)
    layer.cpu_linear = PackedMatrix(wrong)
    found: list[str] = differences()
    layer.cpu_linear = matrix
    return found


def checks(engine: Any, lm: Any, prompt: Any) -> dict[str, Any]:
    """What the checks of a sync find of the engine, which has the weights of `lm`: as it is, and in each of several
    ways in which a sync may fail."""
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

    found: dict[str, Any] = {"sound": differences()}
    packed = getattr(engine, "_model", None)  # of vLLM
    head = packed and packed.lm_head.cpu_linear
    with torch.no_grad():
        for parameter in lm.parameters():  # what one bit of one number in each tensor is
            parameter.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    found["nothing"], found["names"] = differences(), [f"{name} differs" for name, _ in lm.named_parameters()]
    found["up left out"] = differences(without("model.layers.1.mlp.up_proj.weight"))
    found["all"] = differences(engine.load_weights)
    if packed:
        found["packed"] = type(packed.model.layers[0].mlp.down_proj.cpu_linear).__name__
        for name in ("down_proj", "gate_up_proj"):
            found[f"a bit of {name}"] = with_a_wrong_bit(getattr(packed.model.layers[0].mlp, name), differences)
        packed.lm_head.cpu_linear = head
        found["old head"] = differences()
    found["not cached"], found["cached"] = engine.cached_tokens(prompt), engine.probe(prompt)[0]
    found["again"] = differences(engine.load_weights)
    found["reset"], log_probs = engine.probe(prompt)
    found["probe"], found["alone"] = log_probs.tolist(), engine.prompt_log_probs(prompt).tolist()
    if isinstance(engine, Colocated):
        engine.sleep()
        engine.wake_weights()
        found["slept"] = differences(engine.load_weights)
        engine.wake_cache()
        found["awake"] = engine.prompt_log_probs(prompt).tolist()
    return found


def main(model: str, out: str, *names: str) -> None:
    """In the spawned process: drive the engines and write what they give."""
    import torch.distributed as dist

    from rlcli.rollout.vllm.hooks import packed_matrices

    packed_matrices.MIN_ELEMENTS = 1 << 15  # of this model only matrices of its feed-forward part have as many
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    Path(out).write_text(json.dumps({name: driven(name, model) for name in names}))


def driven(name: str, model: str) -> dict[str, Any]:
    """What the engine `name` gives."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, finished

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = np.random.default_rng(0)
    printable: np.ndarray = np.arange(10, lm.config.vocab_size, dtype=np.int32)
    prompts = [random.choice(printable, n) for n in LENGTHS]
    # Some characters beside the model's own end token, so that random weights are sure to draw one now and then.
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
        chosen = torch.tensor(response, dtype=torch.int64)[:, None]
        return [float(x) for x in distributions(prompt, response).gather(-1, chosen)[:, 0]]

    def nucleus(prompt: Any, response: Any) -> list[list[float]]:
        """For each token: the probability of those that are likelier, and its log-prob among the fewest likeliest that
        hold TOP_P."""
        found = []
        for row, token in zip(distributions(prompt, response).exp().double().tolist(), response, strict=True):
            likelier = sum(p for p in row if p > row[token])
            held = 0.0
            for p in sorted(row, reverse=True):
                held += p
                if held >= TOP_P:
                    break
            found.append([likelier, math.log(row[token] / held)])
        return found

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
        made = generate(requests)
        return {
            "probe": engine.prompt_log_probs(prompts[3]).tolist(),
            "probe_expected": log_probs(prompts[3][:1], prompts[3][1:]),
            "made": made,
            "expected": {
                key: log_probs(requests[key].prompt, np.array(one["tokens"], np.int32)) for key, one in made.items()
            },
        }

    found: dict[str, Any] = {"stops": stops, "first": load()}
    with torch.no_grad():
        for parameter in lm.parameters():  # the tied embedding, which is the head, among them
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    found["second"] = load()
    found["checks"] = checks(engine, lm, prompts[2])

    requests = [GenerationRequest(key, prompt, seed=1000 + key) for key, prompt in enumerate(prompts * 8)]
    found["alone"] = {key: generate([requests[key]])[key] for key in (0, 5, 30)}
    found["reversed"] = generate(requests[::-1])
    many = [GenerationRequest(key, prompts[1], seed=key) for key in range(DRAWS)]
    found["drawn"] = [one["tokens"][0] for one in generate(many, 1).values()]
    found["drawn_expected"] = distributions(prompts[1], prompts[1][:1])[0].double().exp().tolist()
    found["resumed"] = {}
    for key in (0, 5, 30):  # from their first 7 tokens on, or fewer where they have ended by then
        begun = found["second"]["made"][key]["tokens"][:7]
        prompt = np.concatenate([requests[key].prompt, np.array(begun, np.int32)])
        found["resumed"][key] = begun + generate([GenerationRequest(key, prompt, requests[key].seed)])[key]["tokens"]
    found["broken_off"], found["gone_on"] = break_off(engine, requests)
    # Three prompts of 2,000 tokens are more than the scheduler takes in one step.
    long = [GenerationRequest(key, random.choice(printable, 2000), seed=2000 + key) for key in range(5)]
    found["long"], found["long_alone"] = generate(long, 8), {4: generate([long[4]], 8)[4]}
    found["long_expected"] = {
        key: log_probs(long[key].prompt, np.array(one["tokens"], np.int32)) for key, one in found["long"].items()
    }
    found["top_p"] = generate(requests, top_p=TOP_P)
    found["top_p_expected"] = {key: nucleus(requests[key].prompt, one["tokens"]) for key, one in found["top_p"].items()}
    greedy = [GenerationRequest(100 + key, prompt, seed=0, greedy=True) for key, prompt in enumerate(prompts)]
    found["mixed"] = generate([*greedy[:2], *requests, *greedy[2:]], top_p=TOP_P)
    found["greedy_expected"] = {
        one.key: [
            [float(row.max()), float(row[token])]
            for row, token in zip(
                distributions(one.prompt, found["mixed"][one.key]["tokens"]),
                found["mixed"][one.key]["tokens"],
                strict=True,
            )
        ]
        for one in greedy
    }
    found["updates"] = {
        how: through_update(engine, lm, prompts * 2, keep=how == "keep", limit=LIMIT) for how in ("recompute", "keep")
    }
    if name == "vllm":
        found |= of_vllm(engine, prompts[2])
        found["layers"] = lm.config.num_hidden_layers
    engine.close()
    return found


def of_vllm(engine: Any, prompt: Any) -> dict[str, Any]:
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
def every(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each engine gives, by its name. The generation config of the model prefers another sampling than any test
    asks for: whatever is compared with the model's own distribution shows that nothing of it is used."""
    engines, folder = sorted(STEPPING, key="vllm".__ne__), tmp_path_factory.mktemp("engine")
    model = shutil.copytree(tiny, folder / "model")
    config = model / "generation_config.json"
    given = json.loads(config.read_text()) if config.is_file() else {}
    config.write_text(json.dumps(given | PREFERRED))
    return spawned(__file__, model, folder / "found.json", *engines)


@pytest.fixture(params=STEPPING)
def found(request: Any, every: dict[str, Any]) -> dict[str, Any]:
    """What one engine gives."""
    mine: dict[str, Any] = every[request.param]
    return mine


@pytest.mark.parametrize("how", ["recompute", "keep"])
def test_each_token_is_of_the_weights_that_drew_it(found: dict[str, Any], how: str) -> None:
    """Also of responses that were being generated when the weights changed, with the keys and values that they have."""
    one = found["updates"][how]
    counts = [count for key, count in one["counts"].items() if int(key) < 8]
    assert sum(before > 0 and after > 0 for before, after in counts) > 3
    assert len(one["after"]) == sum(after > 0 for _, after in counts)
    for when in ("before", "after", "begun_after"):
        assert len(one[when]) > 0
        assert max(one[when].values()) < 1e-4, when
    assert one["cached"] == 0, "no block of the old weights is used for what is added later"


@pytest.fixture
def vllm(every: dict[str, Any]) -> dict[str, Any]:
    mine: dict[str, Any] = every["vllm"]
    return mine


def test_engines_take_the_same_greedy_tokens(every: dict[str, Any]) -> None:
    for other in every.values():
        for key in other["greedy_expected"]:
            assert other["mixed"][key]["tokens"] == every["vllm"]["mixed"][key]["tokens"]


def test_vllm_knows_the_sampling_that_the_model_prefers(vllm: dict[str, Any]) -> None:
    assert vllm["preferred"] == PREFERRED["top_k"]


def test_vllm_knows_what_quantizations_are_called(vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import QUANTIZED

    assert set(QUANTIZED.values()) <= set(vllm["quantizations"])


def test_the_samples_of_a_prompt_share_its_whole_blocks(vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import CPU_BLOCK

    assert CPU_BLOCK < LENGTHS[2] < 2 * CPU_BLOCK
    assert vllm["cached"] == [0, CPU_BLOCK]


def test_one_bit_of_a_weight_that_the_engine_does_not_have_is_found(found: dict[str, Any]) -> None:
    checks = found["checks"]
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


def test_an_engine_that_slept_has_the_weights_of_the_next_load(found: dict[str, Any]) -> None:
    checks = found["checks"]
    assert checks.get("slept", []) == []
    assert checks.get("awake", checks["alone"]) == checks["alone"]


def test_a_prompt_is_not_cached_after_a_load(found: dict[str, Any], vllm: dict[str, Any]) -> None:
    from rlcli.rollout.vllm.vllm_arguments import CPU_BLOCK

    checks = found["checks"]
    assert (checks["not cached"], checks["reset"]) == (0, 0)
    assert vllm["checks"]["cached"] == CPU_BLOCK
    assert checks["probe"] == pytest.approx(checks["alone"], abs=1e-5)


def test_an_embedding_that_is_only_looked_up_is_not_packed(vllm: dict[str, Any]) -> None:
    assert vllm["packed"] == []


def test_norms_and_gated_units_are_not_left_to_a_compiler(vllm: dict[str, Any]) -> None:
    assert vllm["own_kernels"] == [3 * vllm["layers"] + 1]


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


def test_seeds_that_differ_by_one_draw_from_the_distribution_of_the_model(found: dict[str, Any]) -> None:
    counts = Counter(found["drawn"])
    likely = [(token, DRAWS * p) for token, p in enumerate(found["drawn_expected"]) if DRAWS * p > 5]
    assert len(likely) > 50
    chi_square = sum((counts[token] - expected) ** 2 / expected for token, expected in likely)
    assert abs(chi_square - len(likely)) < 5 * math.sqrt(2 * len(likely))


def test_a_response_resumed_from_its_tokens_draws_the_same_tokens(found: dict[str, Any]) -> None:
    whole = {key: found["second"]["made"][key] for key in found["resumed"]}
    going_on = [key for key, one in whole.items() if len(one["tokens"]) > 7]
    assert going_on
    for key in going_on:
        assert found["resumed"][key][: len(whole[key]["tokens"])] == whole[key]["tokens"]


def test_aborted_responses_resume_as_if_never_aborted(found: dict[str, Any]) -> None:
    broken_off, gone_on = found["broken_off"], found["gone_on"]
    assert len(broken_off) == 32
    assert {key for key, one in broken_off.items() if one["finish"] is None} == set(gone_on) != set(broken_off)
    for key, whole in found["second"]["made"].items():
        begun, rest = broken_off[key], gone_on.get(key, {"tokens": [], "log_probs": [], "finish": None})
        assert begun["tokens"] + rest["tokens"] == whole["tokens"]
        assert begun["log_probs"] + rest["log_probs"] == pytest.approx(whole["log_probs"], abs=1e-4)
        assert (begun["finish"] or rest["finish"]) == whole["finish"]


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


def test_prompts_longer_than_one_prefill_are_sampled_by_their_seeds(found: dict[str, Any]) -> None:
    assert len(found["long"]) == 5
    assert found["long_alone"]["4"]["tokens"] == found["long"]["4"]["tokens"]
    for key, one in found["long"].items():
        assert one["log_probs"] == pytest.approx(found["long_expected"][key], abs=1e-4)


def test_top_p_draws_only_the_likeliest_tokens_with_their_log_probs(found: dict[str, Any]) -> None:
    pairs = [
        (log_prob, likelier, expected)
        for key, one in found["top_p"].items()
        for log_prob, (likelier, expected) in zip(one["log_probs"], found["top_p_expected"][key], strict=True)
    ]
    assert len(found["top_p"]) == 32
    assert len(pairs) > 100
    assert max(likelier for _, likelier, _ in pairs) < TOP_P + 1e-4
    # Where a token's place at the edge hangs on the last bit, all log-probs of that place are others.
    assert sum(abs(log_prob - expected) > 1e-4 for log_prob, _, expected in pairs) <= 0.01 * len(pairs)
    # Without top-p, seeds and weights the same, tokens beyond that edge are drawn.
    assert {key: one["tokens"] for key, one in found["top_p"].items()} != {
        key: one["tokens"] for key, one in found["second"]["made"].items()
    }


def test_a_greedy_request_beside_sampled_ones_changes_none_of_them(
    found: dict[str, Any],
) -> None:
    mixed = found["mixed"]
    assert {key: one["tokens"] for key, one in mixed.items() if int(key) < 100} == {
        key: one["tokens"] for key, one in found["top_p"].items()
    }
    assert len(found["greedy_expected"]) == len(LENGTHS)
    for key, expected in found["greedy_expected"].items():
        assert all(taken > best - 1e-4 for best, taken in expected)
        assert mixed[key]["log_probs"] == pytest.approx([taken for _, taken in expected], abs=1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
