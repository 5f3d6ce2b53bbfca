"""The planner's peaks against the live tensors of real passes, through FSDP2 on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rlcli_planner import pass_memory
from rlcli_planner.known_devices import Device
from rlcli_planner.model_shape import shape_of
from rlcli_planner.plan_input import PromptStats, RunPlanInput, setting_of
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.config.schema import RunConfig
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.optim import build_optimizer, clip_grad_norm
from rlcli.model.packed import pack
from rlcli.model.parallel import fsdp_sharding
from rlcli.model.parallel.fsdp_sharding import shard
from rlcli.model.policy import PolicyModel
from tests.live_bytes import LiveBytes

CLOSE = 0.06
PROMPT, RESPONSE = 8, 120
QUICK = [
    (300, 6, "float32", False, 0),
    (300, 1, "bfloat16", True, 0),
    (300, 6, "float32", False, 8),
    (6000, 6, "bfloat16", False, 0),
    (6000, 6, "float32", False, 0),
]
"""Where each of the things that can be the highest is."""


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config_of(vocabulary: int) -> Any:
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        tie_word_embeddings=True,
    )


def setting_of_test(config: Any, samples: int, dtype: str, checkpointing: bool, rank: int) -> RunPlanInput:
    run = RunConfig.model_validate(
        {
            "model": {"dtype": dtype, "gradient_checkpointing": checkpointing},
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {"max_response_tokens": RESPONSE, "prompts_per_step": samples, "samples_per_prompt": 1},
            "algorithm": {"advantage": "one"},
            "lora": {"rank": rank},
        }
    )
    shape = shape_of(config)
    return setting_of(run, Device("cpu", 1e12), prompts=PromptStats(PROMPT), kv_cache_bytes=0, read=lambda *_: shape)


def peak(model: PolicyModel, states: Any, work: Callable[[], object]) -> int:
    """Bytes above the parameters and the optimizer's states."""
    live = LiveBytes()
    live.mark([*model.parameters(), *states])
    live_before = live.live
    live.mark([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    with live:
        work()
    return live.peak - live_before


CASES = [
    pytest.param(
        vocabulary,
        samples,
        dtype,
        checkpointing,
        rank,
        gathered,
        marks=() if (vocabulary, samples, dtype, checkpointing, rank) in QUICK else pytest.mark.exhaustive,
    )
    for gathered in (False, True)
    for vocabulary, samples in ((300, 6), (300, 1), (6000, 6))
    for dtype in ("float32", "bfloat16")
    for checkpointing in (False, True)
    for rank in (0, 8)
    if not (gathered and dtype == "float32")
]


@pytest.mark.long
@pytest.mark.parametrize(("vocabulary", "samples", "dtype", "checkpointing", "rank", "gathered"), CASES)
def test_passes_and_the_optimizer_s_step_take_what_is_predicted(
    vocabulary: int,
    samples: int,
    dtype: str,
    checkpointing: bool,
    rank: int,
    gathered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gathered: the model is gathered as a whole, not layer by layer. One rank in float32 is not sharded at all."""
    assert_predicted(config_of(vocabulary), samples, dtype, checkpointing, rank, gathered, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "rank"),
    [
        ("float32", False, 0),
        ("float32", True, 0),
        ("bfloat16", False, 0),
        pytest.param("bfloat16", True, 0, marks=pytest.mark.exhaustive),
        pytest.param("float32", False, 8, marks=pytest.mark.exhaustive),
    ],
)
def test_states_and_what_is_computed_again_of_them_are_predicted(
    dtype: str, checkpointing: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **{name: getattr(config_of(300), name) for name in SAME},
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert_predicted(config, 6, dtype, checkpointing, rank, False, monkeypatch)


SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "pad_token_id", "tie_word_embeddings"),
)


def assert_predicted(
    config: Any,
    samples: int,
    dtype: str,
    checkpointing: bool,
    rank: int,
    gathered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not gathered:
        monkeypatch.setattr(pass_memory, "WHOLE_BYTES", 0)
        monkeypatch.setattr(fsdp_sharding, "WHOLE_BYTES", 0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if rank:
        add_lora(lm, LoraSpec(rank, 8.0), "base", meta=False)
        if dtype == "bfloat16":
            for parameter in lm.parameters():
                parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    model = PolicyModel(lm, dtype=getattr(torch, dtype), source="base")
    model.train()
    if checkpointing:
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if dtype != "float32":
        shard(model, init_device_mesh("cpu", (1,)))
    optimizer = build_optimizer(model, 1e-3, (0.9, 0.999), 0.0)
    length = PROMPT + RESPONSE
    batch = pack([(np.arange(length) % 200 + 3 + i, PROMPT) for i in range(samples)], torch.device("cpu"))
    setting = setting_of_test(config, samples, dtype, checkpointing, rank)
    assert setting.pack.tokens == batch.tokens

    def infer() -> None:
        with torch.no_grad():
            model(batch, want_entropy=False)

    def learn() -> None:
        outputs = model(batch)
        outputs.log_probs.sum().backward()

    def step() -> None:
        clip_grad_norm(model, 1.0)
        optimizer.step()

    predicted = {
        infer: pass_memory.without_gradient(setting, setting.policy),
        learn: pass_memory.with_gradient(setting, setting.policy),
        step: pass_memory.stepping(setting, setting.policy),
    }
    learn()
    step()  # now there are moments
    optimizer.zero_grad(set_to_none=True)
    for work, parts in predicted.items():
        states = [value for state in optimizer.state.values() for value in state.values()]
        measured = peak(model, states, work)
        assert sum(parts.values()) == pytest.approx(measured, rel=CLOSE), (work.__name__, parts)


def test_what_is_copied_from_other_modules_is_what_they_say() -> None:
    from rlcli_planner import activations, engine_memory
    from rlcli_planner import plan_input as setting

    from rlcli.model import packed
    from rlcli.model.mixture import expert_adapters
    from rlcli.model.parallel import buckets
    from rlcli.rollout.vllm import vllm_arguments

    assert (pass_memory.BUCKET_BYTES, pass_memory.WHOLE_BYTES) == (buckets.BUCKET_BYTES, fsdp_sharding.WHOLE_BYTES)
    assert activations.ALIGNED == expert_adapters.ALIGNED
    assert setting.SHARED_FROM == packed.WORTH_SHARING
    assert engine_memory.CPU_BATCHED_TOKENS == vllm_arguments.CPU_BATCHED_TOKENS
    assert engine_memory.GPU_BATCHED_TOKENS == vllm_arguments.GPU_BATCHED_TOKENS
