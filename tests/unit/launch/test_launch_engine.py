"""Settings that an engine does not implement, and engines that do not fit a run, are refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError, SetupError
from rlcli.launch import engine as engine_checks
from rlcli.launch.engine import check_adapter, check_engine
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
    ],
)
def test_a_setting_that_an_engine_does_not_implement_is_refused(key: str, value: object) -> None:
    given = {"rollout": {key: value}}
    check_engine(config("vllm", **given), train=True)
    if key == "tensor_parallel":  # one worker an engine is what every engine does
        check_engine(config(**given), train=True)
        given = {"rollout": {key: 2}, "cluster": {"workers": 2}}
    with pytest.raises(ConfigError, match=f"rollout.{key} = .*, but rollout.engine = transformers has no such setting"):
        check_engine(config(**given), train=True)


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
    monkeypatch.setattr(engine_checks, "missing", lambda *modules: [one for one in modules if one == "vllm"])
    check_engine(config(), train=True)
    with pytest.raises(SetupError, match=r"rollout.engine = vllm: not installed: vllm; .* another rollout.engine"):
        check_engine(config("vllm"), train=True)
    given = {"rollout": {"samples_per_prompt": 1}, "algorithm": {"advantage": "one", "correction": "none"}}
    check_engine(config("vllm", data={"response": "answer"}, **given), train=True)


def test_adapters_are_refused_by_an_engine_that_needs_them_merged() -> None:
    lora = {"rank": 8}
    check_adapter(config(lora=lora), "float32", "")
    check_adapter(config("vllm", lora=lora), "bfloat16", "")
    check_adapter(config(), "bfloat16", "")
    with pytest.raises(ConfigError, match=r"lora.rank = 8 in bfloat16: .*; give model.dtype = float32"):
        check_adapter(config(lora=lora), "bfloat16", "")
    with pytest.raises(ConfigError, match=r"does not load LoRA adapters, and folder is one; merge it"):
        check_adapter(config(lora=lora), "float32", "folder")
