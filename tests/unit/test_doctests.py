"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "rlcli": ROOT,
    "packages/rlcli_audit": ROOT / "packages",
    "packages/rlcli_inspect": ROOT / "packages",
    "packages/rlcli_planner": ROOT / "packages",
    "packages/rlcli_port": ROOT / "packages",
    "packages/rlcli_quickstart": ROOT / "packages",
    "packages/rlcli_sandbox": ROOT / "packages",
    "verifiers/rlcli_verifiers": ROOT / "verifiers",
    "environments/rlcli_environments": ROOT / "environments",
    "data_prep/rlcli_data_prep": ROOT / "data_prep",
    "scripts/_docs": ROOT,
}


def modules_with_examples() -> list[str]:
    module_names = []
    for folder, root in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            if ">>>" in file.read_text():
                module_names.append(".".join(file.relative_to(root).with_suffix("").parts))
    return sorted(module_names)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
