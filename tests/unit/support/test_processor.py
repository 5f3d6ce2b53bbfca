from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.errors import SetupError
from rlcli.launch.device_checks import check_device
from rlcli.launch.machine_checks import Status, check_processor
from rlcli.support.machine import processor

OLD = "processor\t: 0\nmodel name\t: Old CPU\nflags\t\t: fpu sse4_2 avx\n\nprocessor\t: 1\nmodel name\t: Other\n"
NEW = "processor\t: 0\nmodel name\t: New CPU: fast\nflags\t\t: avx2 avx512f avx512_bf16\n"


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    processor.name.cache_clear()
    processor.instructions.cache_clear()
    yield
    processor.name.cache_clear()
    processor.instructions.cache_clear()


def pretend(cpuinfo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_a_processor_without_avx2_is_refused_for_vllm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(OLD, tmp_path, monkeypatch)
    with pytest.raises(SetupError, match=r"\(Old CPU\) has no AVX2.*--set rollout.engine=transformers"):
        check_device(resolve("grpo", {}).config, "cpu")
    check_device(resolve("grpo", {"rollout.engine": "transformers"}).config, "cpu")
    check_device(resolve("grpo", {}).config, "cuda")
    finding = check_processor()
    assert (finding.status, "no AVX2" in finding.detail) == (Status.WARN, True)


def test_a_new_processor_and_an_unknown_one_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(NEW, tmp_path, monkeypatch)
    check_device(resolve("grpo", {}).config, "cpu")
    finding = check_processor()
    assert finding.status is Status.PASS
    assert finding.detail.startswith("New CPU: fast, ")
    assert finding.detail.endswith("cores, avx512f, avx512_bf16")
    processor.instructions.cache_clear()
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "absent")
    assert processor.runs_vllm()
