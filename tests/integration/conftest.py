"""The real stack on the CPU: Ray, FSDP2 on gloo, vLLM, through the command line, on a model that the project makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Cli, end_started, start


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A test that fails leaves no run behind, which would take the time of all others."""
    yield
    end_started()


@pytest.fixture(scope="session")
def cli() -> Cli:
    def run(*words: str | Path, expect: int = 0, timeout: float = 540) -> subprocess.CompletedProcess[str]:
        process = start(*words)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == expect, f"exit code {process.returncode}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    from rlcli.model.io.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic dataset, small."""
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    folder = tmp_path_factory.mktemp("data") / "sums"
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder
