"""Whole runs beside files of somebody else: Python files of the current folder, and a changed checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import ENVIRONMENT, SMALL

from rlcli.support.files import described
from tests.hostile_folder import environment, make, marks
from tests.hostile_pickles import Runs, code_in_metadata

RLCLI = Path(sys.executable).with_name("rlcli")
STARTED = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("PYTHON")}


def called(folder: Path, *words: str | Path, expect: int = 0) -> str:
    """Standard error of `rlcli WORDS` in `folder`, as the installed command."""
    done = subprocess.run(
        [RLCLI, *map(str, words)],
        cwd=folder,
        env=environment(**STARTED),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("work") / "hostile")


@pytest.fixture(scope="module")
def run(folder: Path, tiny: Path, sums: Path) -> Path:
    """A run with vLLM, of two steps, in a folder of files that are called json.py, torch.py and so on."""
    words = ("train", "grpo", "--model", tiny, "--data", sums, "--out", "run", "--steps", "2", *SMALL)
    called(folder, *words, "--verifier", "gsm8k + 0.1 * format", "--set", "checkpoint.every=1")
    return folder / "run"


@pytest.mark.long
def test_no_process_of_a_run_imports_from_the_current_folder(run: Path, folder: Path) -> None:
    assert marks(folder) == []


@pytest.mark.exhaustive  # tests/unit/test_deserialisers.py reads how each process is started
def test_nor_does_what_comes_after_it(run: Path, folder: Path, sums: Path) -> None:
    sizes = ("--set", "rollout.engine=transformers", "--set", "data.max_prompt_tokens=32")
    called(folder, "eval", "--model", run, "--data", sums, "--max-tokens", "8", "--max-prompts", "4", *sizes)
    called(folder, "export", run, "--out", "exported", "--no-check")
    called(folder, "report", run, "--out", "pages")
    called(folder, "doctor")
    assert marks(folder) == []


def code_in_rank(checkpoint: Path, marker: Path) -> None:
    torch.save(Runs(marker), checkpoint / "policy" / "rank-0.pt")


def other_random_state(checkpoint: Path, marker: Path) -> None:
    torch.save({"torch": [1, 2]}, checkpoint / "policy" / "rank-0.pt")


def other_state(checkpoint: Path, marker: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"cursor": 7}))


CHANGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code in .metadata": (code_in_metadata, "policy/.metadata names posix.mkdir, which no checkpoint of this program"),
    "code in a rank's file": (code_in_rank, "policy/rank-0.pt names posix.mkdir, which no checkpoint of this program"),
    "other random state": (other_random_state, "policy/rank-0.pt is not a file of a checkpoint"),
    "other state": (other_state, "state.json is not what this program writes"),
}


OFTEN = "code in .metadata"


@pytest.mark.parametrize(
    "change",
    [pytest.param(change, marks=pytest.mark.long if change == OFTEN else pytest.mark.exhaustive) for change in CHANGES],
)
def test_a_changed_checkpoint_is_not_resumed_and_runs_nothing(
    run: Path, folder: Path, change: str, tmp_path: Path
) -> None:
    checkpoint = (run / "checkpoints" / "latest").resolve()
    contents = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    marker = tmp_path / "marker"
    edit, why = CHANGES[change]
    edit(checkpoint, marker)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: described(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    try:
        error = called(folder, "train", "--resume", run, "--steps", "3", expect=2)
    finally:
        for path, content in contents.items():
            path.write_bytes(content)
    assert why in error
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in error
    assert not os.path.lexists(marker)


@pytest.mark.exhaustive  # test_resume.py
def test_as_it_was_it_is_resumed(run: Path, folder: Path) -> None:
    called(folder, "train", "--resume", run, "--steps", "3")
    assert (run / "checkpoints" / "latest").resolve().name == "step-000003"
    assert marks(folder) == []
