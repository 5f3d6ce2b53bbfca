"""The GPUs that a build of torch supports, and the message for other devices."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from rlcli_planner.launch.local_machine import own_device

from rlcli.cluster import ray_session
from rlcli.config.load import resolve
from rlcli.errors import ConfigError, SetupError
from rlcli.launch.device_checks import check_nvml
from rlcli.support.machine import gpus


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch for ROCm, on a machine without NVIDIA's tools. Returns where AMD's driver would be."""
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+rocm7.2")
    monkeypatch.setattr(gpus, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(gpus, "NVIDIA_DRIVERS", (tmp_path / "nvidiactl",))
    monkeypatch.setenv("PATH", str(tmp_path))
    return gpus.AMD_DRIVER


def test_a_torch_for_rocm_looks_for_the_driver_of_amd(rocm: Path) -> None:
    assert (gpus.for_rocm(), gpus.has_gpu(), gpus.visible_variable()) == (True, False, "HIP_VISIBLE_DEVICES")
    rocm.touch()
    assert gpus.has_gpu()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu"])
def test_another_torch_looks_for_a_gpu_of_nvidia(
    version: str, rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm.touch()
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert (gpus.has_gpu(), gpus.visible_variable()) == (False, "CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.has_gpu()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A driver of NVIDIA's without its tools and its library, and a torch that sees two GPUs."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "cuda = SimpleNamespace(device_count=lambda: 2, get_device_name=lambda i: 'NVIDIA H100 80GB HBM3',\n"
        "    get_device_properties=lambda i: SimpleNamespace(total_memory=85 << 30))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "NVIDIA_DRIVERS", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(gpus, "NVML", "libnone-such.so.1")
    gpus._query_torch.cache_clear()
    yield tmp_path / "nvidiactl"
    gpus._query_torch.cache_clear()


def test_gpus_are_counted_by_torch_where_the_driver_has_no_nvml(two_gpus: Path) -> None:
    assert (gpus.has_gpu(), gpus.seen_by_torch(), ray_session._gpu_count_argument()) == (False, (), {})
    two_gpus.touch()
    assert gpus.has_gpu()
    assert not gpus.has_nvml()
    assert gpus.seen_by_torch() == (("NVIDIA H100 80GB HBM3", 85 << 30),) * 2
    assert ray_session._gpu_count_argument() == {"num_gpus": 2}


def test_ray_counts_gpus_itself_where_nvml_works(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus.touch()
    monkeypatch.setattr(ray_session, "has_nvml", lambda: True)
    assert ray_session._gpu_count_argument() == {}


def test_the_memory_of_a_gpu_is_asked_of_torch_where_nothing_else_says_it(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.touch()
    monkeypatch.setattr(ray_session, "_built_for", lambda: "cuda")
    device = own_device(resolve("grpo").config)
    assert (device.name, device.memory) == ("h100", 85 << 30)


@pytest.mark.parametrize("engine", ["vllm", "server"])
def test_vllm_is_refused_where_it_would_find_no_gpu(engine: str, two_gpus: Path) -> None:
    two_gpus.touch()
    with pytest.raises(
        SetupError, match=r"management library .* does not work, .*; give .*NVIDIA_DRIVER_CAPABILITIES="
    ):
        check_nvml(resolve("grpo", {"rollout.engine": engine}).config)
    check_nvml(resolve("grpo", {"rollout.engine": "transformers"}).config)
    check_nvml(resolve("grpo", {"rollout.engine": "server", "rollout.servers": "http://other:8000"}).config)


@pytest.mark.parametrize("name", ["xpu", "mps", "npu", "rocm"])
def test_a_device_without_a_path_is_refused_with_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"one of auto, cpu, cuda; for others a process group, .* are missing"):
        resolve("grpo", {"cluster.device": name})
