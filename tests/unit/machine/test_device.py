"""Which GPUs a build of torch is for, and what other devices are told."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.errors import ConfigError
from rlcli.machine import device


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch for ROCm, on a machine without NVIDIA's tools. Returns where AMD's driver would be."""
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+rocm7.2")
    monkeypatch.setattr(device, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setenv("PATH", str(tmp_path))
    return device.AMD_DRIVER


def test_a_torch_for_rocm_looks_for_the_driver_of_amd(rocm: Path) -> None:
    assert (device.for_rocm(), device.has_gpu(), device.visible_variable()) == (True, False, "HIP_VISIBLE_DEVICES")
    rocm.touch()
    assert device.has_gpu()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu"])
def test_another_torch_looks_for_a_gpu_of_nvidia(
    version: str, rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm.touch()
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert (device.has_gpu(), device.visible_variable()) == (False, "CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert device.has_gpu()


@pytest.mark.parametrize("name", ["xpu", "mps", "npu", "rocm"])
def test_a_device_without_a_path_is_refused_with_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"one of auto, cpu, cuda; for others a process group, .* are missing"):
        resolve("grpo", {"cluster.device": name})
