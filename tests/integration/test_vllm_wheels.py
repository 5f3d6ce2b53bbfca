"""vLLM's wheels for CUDA, of each supported minor release, take what the engine passes, on every generation of GPU.

They are downloaded, unpacked and imported without a GPU: `wheel_stubs` stands in for the driver and for compiled code.
Nothing computes, so this shows that a configuration is accepted and what vLLM makes of it, not that a kernel works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcli.rollout.vllm.vllm_engine import SUPPORTED
from tests.model_fixtures import save_tiny

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
WHEELS = ("0.24.0", "0.32.0")
GPUS = {"8.0": "NVIDIA A100-SXM4-80GB", "9.0": "NVIDIA H100 80GB HBM3", "10.0": "NVIDIA B200"}
"""Compute capability → a GPU of it: Ampere, Hopper, Blackwell."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A dense model, a mixture of experts, and one that takes images."""
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model

    folder = tmp_path_factory.mktemp("models")
    dense, mixture = make_tiny_model(folder / "dense"), save_tiny(folder / "mixture", "qwen3_moe")
    save_vision_model(vision_model("qwen2_5_vl"), folder / "vision")
    return [str(dense), str(mixture), str(folder / "vision")]


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of vLLM's wheel of this version, without what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*words, f"vllm=={request.param}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"vllm {request.param} cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, wheel: Path, models: list[str]) -> dict[str, Any]:
    """Kind of run → the configuration that this vLLM resolves for it on this GPU, or why it refuses or fails."""
    capability: str = request.param
    inherited = ("VLLM_", "TORCH_COMPILE_")  # without compilation vLLM captures no graphs
    environment = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests" / "wheel_stubs", wheel, ROOT))),
        "VLLM_CACHE_ROOT": str(wheel / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "WHEEL": str(wheel),
        "CAPABILITY": capability,
        "GPU": GPUS[capability],
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    program = str(ROOT / "tests" / "wheel_configurations.py")
    done = subprocess.run(
        [sys.executable, program, *models], env=environment, capture_output=True, text=True, cwd=wheel
    )
    assert done.returncode == 0, done.stderr[-4000:]
    resolved: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return resolved


every = pytest.mark.parametrize(
    ("wheel", "outcomes"),
    [(version, capability) for version in WHEELS for capability in GPUS],
    indirect=True,
    ids=[f"{version} {name.split()[1]}" for version in WHEELS for name in GPUS.values()],
)


@every
def test_what_the_engine_passes_is_accepted(outcomes: dict[str, Any], request: pytest.FixtureRequest) -> None:
    version = outcomes.pop("version")
    assert outcomes.pop("platform") == "NvmlCudaPlatform", "the stubs are those of a GPU"
    capability = request.node.callspec.params["outcomes"]
    old = version.startswith("0.24")
    assert {kind: outcome["failed"] for kind, outcome in outcomes.items() if "failed" in outcome} == {}
    refused = {kind for kind, outcome in outcomes.items() if "refused" in outcome}
    assert refused == ({"drafts"} if old else set())
    accepted = {kind: facts for kind, facts in outcomes.items() if kind not in refused}
    assert {kind for kind, facts in accepted.items() if facts["fused all-reduce"]} == set()
    by_default = {kind for kind, facts in accepted.items() if facts["fused by default"]}
    assert by_default == ({"tensor parallel"} if capability != "8.0" else set()), "so it has to be turned off"
    assert {kind for kind, facts in accepted.items() if facts["experts"] != "triton"} == {"fp8", "experts in fp8"}
    assert {kind for kind, facts in accepted.items() if facts["quantization"]} == {"fp8", "experts in fp8"}
    assert {kind for kind, facts in accepted.items() if not facts["graphs"]} == {"eager", "experts in fp8"}
    assert {kind for kind, facts in accepted.items() if not facts["sleeps"]} == {"awake"}
    assert {kind for kind, facts in accepted.items() if not facts["async"]} == {"exact steps", "drafts"} - refused
    assert {kind for kind, facts in accepted.items() if facts["routes"]} == {"routes"}
    assert {kind for kind, facts in accepted.items() if facts["drafts"]} == {"drafts"} - refused
    wide = {kind for kind, facts in accepted.items() if "float32" in facts["head"]}
    assert wide == ({"float32"} if old else {"float32", "float head"}), "the engine refuses the former"
    assert {facts["tokens"] for facts in accepted.values()} == {8192}
    first = {kind for kind, facts in accepted.items() if not facts["second runner"]}
    if old:
        assert {"plain", "experts", "vision"} <= first, "Qwen2, Qwen3-MoE and Qwen2.5-VL are not among its own"
    else:
        assert first == {"drafts"}


def test_the_wheels_are_those_of_the_supported_releases() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in WHEELS]
    assert minors[0] == SUPPORTED[0]
    assert minors[-1] == (SUPPORTED[1][0], SUPPORTED[1][1] - 1)
