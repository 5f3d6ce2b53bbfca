"""Sizes follow the memory of a machine with CPUs, and what fits is not said not to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rlcli_planner.engine_memory import kv_per_token, smallest_cache, workload_cache
from rlcli_planner.fitting.solve import budget, cannot_fit, fits, sizes_on_cpu, verdict
from rlcli_planner.known_devices import GIB
from rlcli_planner.model_shape import ModelShape, read_shape
from rlcli_planner.phase_memory import checkpoint_bytes, phases
from rlcli_planner.plan_input import RunPlanInput

from tests.planner_settings import setting, totals

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
WORDS = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=32")
"""Word problems: prompts of 28 tokens, at most 48."""


@pytest.fixture
def smollm(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    return read_shape(str(tmp_path))


def on_laptop(shape: ModelShape, free_gib: float, *sets: str) -> RunPlanInput:
    """A run on a machine with so much free memory."""
    run = setting(shape, "cpu", *WORDS, *sets)
    run = replace(run, prompt_tokens=28.0, longest_prompt=48)
    cache = workload_cache(run.config, shape, run.bytes_each, run.longest)
    return replace(run, device=replace(run.device, memory=free_gib * GIB), kv_cache_bytes=cache)


def lowered(run: RunPlanInput) -> tuple[RunPlanInput, bool]:
    """The run with the sizes that it would choose, and whether it fits with them."""
    sizes = sizes_on_cpu(run, tokens=True, cache=True, recompute=True)
    changed = run.with_keys(
        train={"tokens_per_microbatch": sizes.tokens},
        model={"gradient_checkpointing": sizes.recompute or run.config.model.gradient_checkpointing},
    )
    changed = replace(changed, kv_cache_bytes=sizes.kv_cache_bytes)
    assert fits(changed) == sizes.fits
    return changed, sizes.fits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_trains_on_a_laptop_of_8_gb(smollm: ModelShape, dtype: str) -> None:
    """1 GiB is the system's."""
    run = on_laptop(smollm, 8e9 / GIB - 1, f"model.dtype={dtype}")
    assert not fits(run)
    assert verdict(run) == "may not fit"
    fitted, enough = lowered(run)
    assert enough
    assert max(totals(fitted).values()) <= budget(fitted) < 5 * GIB
    assert fitted.config.train.tokens_per_microbatch >= 1056, "a sample of the length that the configuration allows"


def test_nothing_changes_where_there_is_room(smollm: ModelShape) -> None:
    run = on_laptop(smollm, 40)
    assert lowered(run) == (run, True)


def test_sizes_shrink_step_by_step(smollm: ModelShape) -> None:
    """First the micro-batch, then the cache, and recomputing last."""
    runs = [lowered(on_laptop(smollm, free, "model.dtype=bfloat16"))[0] for free in (12, 10.5, 9, 8, 6.5)]
    tokens = [run.config.train.tokens_per_microbatch for run in runs if not run.config.model.gradient_checkpointing]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] == 8192 > tokens[-1]
    assert [run.config.model.gradient_checkpointing for run in runs] == [False, False, False, False, True]


def test_set_sizes_stay(smollm: ModelShape) -> None:
    run = on_laptop(smollm, 7)
    sizes = sizes_on_cpu(run, tokens=False, cache=False, recompute=False)
    assert (sizes.tokens, sizes.kv_cache_bytes, sizes.recompute, sizes.fits) == (8192, run.kv_cache_bytes, False, False)


def test_the_cache_holds_the_samples_that_the_prompts_allow(smollm: ModelShape) -> None:
    run = on_laptop(smollm, 20, "model.dtype=bfloat16")
    assert run.longest == 80, "48 tokens of a prompt and 32 of a response, not 1,056"
    held = run.kv_cache_bytes or 0
    blocks = 128 * 96  # whole blocks of 32 tokens
    assert blocks * kv_per_token(run) <= held < 1.3 * blocks * kv_per_token(run)
    few = on_laptop(smollm, 20, "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", "model.dtype=bfloat16")
    assert few.kv_cache_bytes == 64 << 20
    long = on_laptop(smollm, 20, "rollout.prompts_per_step=1", "rollout.max_response_tokens=7000")
    assert (long.kv_cache_bytes or 0) >= smallest_cache(long.config, smollm, 4) > 8024 * kv_per_token(long)


def test_only_what_every_run_holds_rules_a_run_out(smollm: ModelShape) -> None:
    run = on_laptop(smollm, 20)
    assert verdict(run) == "fits"
    for free, expected in ((6, "may not fit"), (3.5, "may not fit"), (2, "does not fit")):
        less = replace(run, device=replace(run.device, memory=free * GIB))
        assert (verdict(less), cannot_fit(less)) == (expected, expected == "does not fit")
    small = replace(run, kv_cache_bytes=1 << 20)
    assert verdict(small) == "does not fit", "the engine would not start"


def test_a_limit_of_a_process_counts(smollm: ModelShape) -> None:
    run = on_laptop(smollm, 40, "model.dtype=bfloat16")
    limited = replace(run, device=replace(run.device, process_limit=6 * GIB))
    assert not fits(limited)
    fitted, enough = lowered(limited)
    assert enough
    assert max(totals(fitted).values()) <= 0.9 * 6 * GIB


def test_a_checkpoint_is_copied_only_where_there_is_room(smollm: ModelShape) -> None:
    keys = ("train.tokens_per_microbatch=1056", "model.gradient_checkpointing=true", "checkpoint.every=1")
    runs = [on_laptop(smollm, free, "model.dtype=bfloat16", *keys) for free in (20, 6.5)]
    roomy, short = ({phase.name: phase.parts for phase in phases(run)}["checkpoint"] for run in runs)
    assert roomy["checkpoint's copy"] == checkpoint_bytes(runs[0])
    assert "checkpoint's copy" not in short
    assert all(totals(runs[0])[name] > total for name, total in totals(runs[1]).items())
