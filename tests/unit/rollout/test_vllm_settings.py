"""Arguments of vLLM, by device; and settings that are refused beside a trainer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.errors import RunFailed, SetupError
from rlcli.images.qwen_patches import PatchRule
from rlcli.rollout.engine import Described, EngineSpec, Sleep
from rlcli.rollout.sampling import draws_by_position
from rlcli.rollout.vllm import vllm_arguments
from rlcli.rollout.vllm.hooks import expert_kernels, process_state, resident_weights
from rlcli.rollout.vllm.vllm_engine import VllmEngine, check_head, sleep_level


def spec(device: str, *, max_concurrent: int = 256, tensor_parallel: int = 1, max_length: int = 512) -> EngineSpec:
    return EngineSpec(
        model="m",
        dtype="float32",
        device=device,
        max_length=max_length,
        max_concurrent=max_concurrent,
        tensor_parallel=tensor_parallel,
        lora_rank=0,
        weights_follow=True,
        kv_cache_bytes=None,
        gpu_memory_utilization=0.5,
        enforce_eager=False,
        stop_token_ids=(),
        group_id="g",
    )


def test_a_cache_of_a_given_size_asks_for_no_share_of_the_gpu() -> None:
    engine_spec = spec("cuda")
    assert vllm_arguments._on_gpu(engine_spec)["gpu_memory_utilization"] == 0.5
    assert vllm_arguments._on_gpu(replace(engine_spec, kv_cache_bytes=1 << 30))["gpu_memory_utilization"] < 0.02


@pytest.mark.parametrize(
    ("engine_spec", "tokens"),
    [
        (spec("cpu"), 4096),
        (spec("cpu", max_length=9000), 9000),
        (spec("cpu", max_concurrent=5000), 5000),
        (spec("cuda"), 8192),
        (spec("cuda", max_length=9000), 8192),
        (spec("cuda", max_concurrent=9000), 9000),
    ],
)
def test_a_prefill_holds_whole_prompts_on_cpus_and_a_token_per_request(engine_spec: EngineSpec, tokens: int) -> None:
    settings = (
        vllm_arguments._on_cpu(engine_spec) if engine_spec.device == "cpu" else vllm_arguments._on_gpu(engine_spec)
    )
    assert settings["max_num_batched_tokens"] == tokens


def test_gpus_that_do_not_see_each_other_reduce_through_nccl() -> None:
    alone, shared = spec("cuda"), spec("cuda", tensor_parallel=2)
    assert not vllm_arguments.engine_arguments(alone)["disable_custom_all_reduce"]
    assert vllm_arguments.environment_variables(alone) == {}
    assert vllm_arguments.engine_arguments(shared)["disable_custom_all_reduce"]
    assert "compilation_config" not in vllm_arguments.engine_arguments(alone)
    fused = vllm_arguments.engine_arguments(shared)["compilation_config"]
    assert fused == {"pass_config": {"fuse_allreduce_rms": False}}
    names = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER")
    assert vllm_arguments.environment_variables(shared) == dict.fromkeys(names, "0")


def test_experts_that_are_not_quantized_are_computed_as_they_are_sent() -> None:
    assert vllm_arguments.engine_arguments(spec("cuda"))["moe_backend"] == "triton"
    assert "moe_backend" not in vllm_arguments.engine_arguments(replace(spec("cuda"), quantization="fp8"))
    assert "moe_backend" not in vllm_arguments.engine_arguments(spec("cpu"))


@pytest.mark.long
def test_experts_beside_an_adapter_are_computed_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    monkeypatch.setattr(unquantized, "_trtllm_bf16_lora_supported", lambda config: True)  # as on Blackwell
    config = SimpleNamespace(is_lora_enabled=True, moe_backend="triton")
    backends = unquantized.UnquantizedMoeBackend
    assert unquantized.select_unquantized_moe_backend(config)[0] == backends.FLASHINFER_TRTLLM
    assert expert_kernels.install()
    assert unquantized.select_unquantized_moe_backend(config)[0] == backends.TRITON


def test_drafts_are_verified_by_the_first_model_runner_on_gpus() -> None:
    drafting = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert vllm_arguments.environment_variables(replace(spec("cuda"), speculate=4)) == drafting
    assert vllm_arguments.environment_variables(replace(spec("cuda", tensor_parallel=2), speculate=4)).keys() > {
        *drafting
    }
    assert vllm_arguments.environment_variables(replace(spec("cpu"), speculate=4)) == {}


@pytest.mark.parametrize(
    ("by_place", "by_counter", "described"),
    [
        (True, False, "second model runner, with its own draws"),
        (False, True, "first model runner, with rlcli's draws"),
    ],
)
def test_an_engine_says_which_model_runner_it_has(by_place: bool, by_counter: bool, described: str) -> None:
    import vllm

    engine = object.__new__(VllmEngine)
    engine._draws_by_position, engine._draws_by_counter = by_place, by_counter
    assert isinstance(engine, Described)
    assert engine.describe() == f"vLLM {vllm.__version__}, {described}"


def test_only_weights_that_every_sync_sends_are_dropped_in_sleep() -> None:
    assert sleep_level(spec("cuda")) == 2
    assert sleep_level(replace(spec("cuda"), weights_follow=False, lora_rank=8)) == 1
    assert sleep_level(replace(spec("cuda"), image_rule=PatchRule)) == 1  # type: ignore[arg-type]


def test_an_engine_that_never_sleeps_has_no_pool_for_it() -> None:
    awake = replace(spec("cuda"), sleep="none")
    assert vllm_arguments.engine_arguments(spec("cuda"))["enable_sleep_mode"]
    assert not vllm_arguments.engine_arguments(awake)["enable_sleep_mode"]
    assert "--no-enable-sleep-mode" in vllm_arguments.server_arguments(awake)


class Llm:
    """In the place of vLLM's. used: another process takes memory while this one sleeps."""

    def __init__(self, used: bool = False) -> None:
        self.used = used
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))
        assert not self.used, "Memory usage increased after sleeping."

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", tags))

    def is_sleeping(self) -> bool:
        return len(self.calls) % 3 > 0


def colocated(engine_spec: EngineSpec, llm: Llm, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    import torch

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    engine = object.__new__(VllmEngine)
    engine.spec, engine._llm, engine._engine = engine_spec, llm, llm
    return engine


@pytest.mark.parametrize(("sleep", "level"), [("all", 2), ("cache", 1), ("none", None)])
def test_an_engine_releases_what_the_run_asks_for(
    sleep: Sleep, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Llm()
    engine = colocated(replace(spec("cuda"), sleep=sleep), llm, monkeypatch)
    engine.sleep()
    engine.wake_weights()
    engine.wake_cache()
    there_and_back = [("sleep", level), ("wake", ["weights"]), ("wake", ["kv_cache"])]
    assert llm.calls == (there_and_back if level else [])


def test_memory_that_another_process_takes_meanwhile_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = colocated(spec("cuda"), Llm(used=True), monkeypatch)
    with pytest.raises(
        RunFailed, match=r"another process took memory of this GPU while .*; give the run its GPUs alone"
    ) as failed:
        engine.sleep()
    assert failed.value.retry


def test_resident_weights_are_not_in_the_memory_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    tags: list[str] = []

    def pooled(worker: object, tag: str) -> nullcontext[str]:
        tags.append(tag)
        return nullcontext("pool")

    assert hasattr(Worker, resident_weights.POOLED), "vLLM has it under this name"
    monkeypatch.setattr(Worker, resident_weights.POOLED, pooled)
    with resident_weights.kept():
        for tag in ("weights", "kv_cache"):
            with getattr(Worker, resident_weights.POOLED)(None, tag) as memory:
                assert memory == ("pool" if tag == "kv_cache" else None)
    assert tags == ["kv_cache"]
    assert getattr(Worker, resident_weights.POOLED) is pooled


@pytest.mark.parametrize("threads", [True, False])
def test_the_trainers_threads_are_given_back_where_both_are_on_a_gpu(threads: bool) -> None:
    import torch

    initial_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with process_state.kept(threads=threads):
            torch.set_num_threads(1)
        assert torch.get_num_threads() == (3 if threads else 1)
    finally:
        torch.set_num_threads(initial_threads)


def test_a_head_in_another_precision_than_asked_for_is_refused() -> None:
    import torch

    wide = replace(spec("cuda"), dtype="bfloat16", float_head=True)
    check_head(wide, SimpleNamespace(head_dtype=torch.float32))
    check_head(spec("cuda"), SimpleNamespace(head_dtype=torch.bfloat16))
    with pytest.raises(SetupError, match=r"head_dtype = float32: .* in torch.bfloat16 all the same; .*vllm==0.32"):
        check_head(wide, SimpleNamespace(head_dtype=torch.bfloat16))


def test_a_server_gets_a_table_of_settings_as_json() -> None:
    words = vllm_arguments.server_arguments(spec("cuda", tensor_parallel=2))
    value = words[words.index("--compilation-config") + 1]
    assert json.loads(value) == {"pass_config": {"fuse_allreduce_rms": False}}
    assert "--compilation-config" not in vllm_arguments.server_arguments(spec("cuda"))


def test_batch_invariant_kernels_without_a_derivative_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    VllmEngine.check_beside_trainer((8, 0))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    VllmEngine.check_beside_trainer((9, 0))
    with pytest.raises(SetupError, match="no derivative"):
        VllmEngine.check_beside_trainer((8, 9))


def test_the_second_model_runner_of_vllm_is_known_by_where_it_lives() -> None:
    second, first = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"
    assert find_spec(second)
    assert find_spec(first)
    assert draws_by_position(SimpleNamespace(model_runner=type("Runner", (), {"__module__": second})()))
    assert not draws_by_position(SimpleNamespace(model_runner=type("Runner", (), {"__module__": first})()))
    assert not draws_by_position(SimpleNamespace())


@pytest.mark.parametrize(
    ("device", "config", "cached"),
    [
        ("cpu", {"model_type": "qwen2"}, True),
        ("cpu", {"model_type": "qwen3_next"}, False),
        ("cpu", {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, False),
        ("cpu", {"model_type": "qwen3_5_moe", "text_config": {}}, False),
        ("cuda", {"model_type": "qwen3_next"}, True),
    ],
)
def test_on_cpus_prefixes_with_states_are_not_cached(
    device: str, config: dict[str, Any], cached: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine_spec = replace(spec(device), model=str(tmp_path))
    assert vllm_arguments._shared_arguments(engine_spec)["enable_prefix_caching"] == cached
