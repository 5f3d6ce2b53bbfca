"""A checkpoint of somebody else, each file of it changed in turn, its manifest made to agree: no command runs what the
files name; those that read the changed file name it in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.model.io.checkpoint_files import read_metadata
from rlcli.support.files import described
from tests.export_fixtures import save_run
from tests.hostile_pickles import Runs, code_in_metadata, legacy
from tests.model_fixtures import save_tiny

SHORT = ("--data", "data.parquet", "--out", "next", "--dry-run")
SMALL = ("--set", "rollout.max_response_tokens=8", "--set", "data.max_prompt_tokens=64")
COMMANDS = {
    "export": ("export", "{run}", "--out", "out"),
    "chat": ("chat", "{run}", "--prompt", "1+1=", "--max-tokens", "2"),
    "eval": ("eval", "--model", "{run}", "--data", "data.parquet"),
    "prep filter": ("prep", "filter", "--model", "{run}", "--data", "data.parquet", "--out", "kept"),
    "train": ("train", "grpo", "--model", "{run}", *SHORT, *SMALL),
    "critic": ("train", "ppo", "--model", "{base}", *SHORT, *SMALL, "--set", "critic.path={run}"),
}
"""All that read the weights of a checkpoint, apart from `train --resume`: tests/integration/test_hostile_folders.py."""
ONLY_LOOK = {
    "runs show": ("runs", "show", "{run}"),
    "runs list": ("runs", "list", "{parent}"),
    "report": ("report", "{run}", "--out", "pages"),
}
"""They never read the files of a checkpoint."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh: Any) -> Path:
    """A run with one checkpoint, and beside it its base model."""
    root = tmp_path_factory.mktemp("saved")
    save_run(root / "run", save_tiny(root / "base"))
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, below the current folder, with data beside it."""
    monkeypatch.chdir(tmp_path)
    rows = [row(data_source="sums", messages=[{"role": "user", "content": "1+1="}], verifier="exact", ground_truth="2")]
    write_rows(tmp_path / "data.parquet", rows * 4)
    return Path(shutil.copytree(saved / "run", tmp_path / "run", symlinks=True))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A folder that comes into being when code of a file runs."""
    return tmp_path / "marker"


def agree(checkpoint: Path) -> None:
    """Make the manifest list the files as they are now."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: described(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def called(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], run: Path, base: Path) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    code = main([word.format(run=run, base=base, parent=run.parent) for word in words])
    return code, capsys.readouterr().err


def bytes_in_metadata(checkpoint: Path, marker: Path) -> None:
    """An entry that DCP would unpickle, in place of a tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    file = checkpoint / "policy" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))] = BytesStorageMetadata()
    file.write_bytes(pickle.dumps(metadata))


def code_in_shard(checkpoint: Path, marker: Path) -> None:
    file = checkpoint / "policy" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    for part in read_metadata(file.parent).storage_data.values():
        content[part.offset : part.offset + part.length] = legacy("torch", marker).ljust(part.length, b"\0")
    file.write_bytes(content)


def state_of(**changes: Any) -> Callable[[Path, Path], None]:
    def edit(checkpoint: Path, marker: Path) -> None:
        file = checkpoint / "state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def other_config(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "config.toml").write_text('[model]\npath = ["a", "list"]\n')


def outside(checkpoint: Path, marker: Path) -> None:
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["../../../data.parquet"] = described(Path("data.parquet"))
    file.write_text(json.dumps(manifest))


def pipe(name: str) -> Callable[[Path, Path], None]:
    """Reading it would wait for ever."""

    def edit(checkpoint: Path, marker: Path) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][name]["size"] = 0
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    return edit


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code in .metadata": (code_in_metadata, "policy/.metadata names posix.mkdir, which no checkpoint of this program"),
    "entry of bytes": (bytes_in_metadata, "policy/.metadata names torch.distributed.checkpoint.metadata.BytesStorage"),
    "code in a shard": (code_in_shard, "policy/__0_0.distcp names posix.mkdir, which no checkpoint of this program"),
    "other dtype": (state_of(dtype="load"), "state.json is not what this program writes"),
    "dtype of another type": (state_of(dtype=[]), "state.json is not what this program writes"),
    "other config": (other_config, "config.toml"),
    "file outside": (outside, "manifest.json names a file outside the folder"),
    "pipe": (pipe("policy/.metadata"), "policy/.metadata is not a file"),
    "pipe as the state": (pipe("state.json"), "state.json is not a file"),
}
MANIFEST_STAYS = ("file outside", "pipe", "pipe as the state")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("change", REFUSED)
def test_a_changed_file_is_named_and_runs_nothing(
    run: Path, saved: Path, marker: Path, change: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = (run / "checkpoints" / "latest").resolve()
    edit, message = REFUSED[change]
    edit(checkpoint, marker)
    if change not in MANIFEST_STAYS:
        agree(checkpoint)
    code, error = called(capsys, COMMANDS[command], run, saved / "base")
    assert (code, message in error) == (2, True), error
    assert "Traceback" not in error
    assert sum("error: " in line for line in error.splitlines()) == 1
    assert not marker.exists()


def code_in_rank(checkpoint: Path, marker: Path) -> None:
    torch.save(Runs(marker), checkpoint / "policy" / "rank-0.pt")


def config_of_code(checkpoint: Path, marker: Path) -> None:
    """Names Python files of its own, as a recipe may, and another place for what a run loads."""
    code = checkpoint / "code.py"
    code.write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    file = checkpoint / "config.toml"
    settings = {"verifier": f'name = "{code}:verify"', "environment": f'name = "{code}:Environment"'}
    settings |= {"algorithm": f'code = "{code}"', "rollout": f'engine = "{code}:Engine"'}
    text = file.read_text()
    for section, line in settings.items():
        key = line.partition(" ")[0]
        head, tail = text.split(f"[{section}]\n", 1)
        body, *rest = tail.split("\n[", 1)
        other_lines = [each for each in body.splitlines() if not each.startswith(f"{key} =")]
        text = "\n[".join(["\n".join([f"{head}[{section}]", line, *other_lines]), *rest])
    file.write_text(text)


HARMLESS: dict[str, Callable[[Path, Path], None]] = {
    "random state": code_in_rank,
    "configuration": config_of_code,
    "figures": state_of(version=7, warnings={"x": 1}, cursor=None),
}
"""Export and what is built on it never read them, or use nothing of them that runs."""


@pytest.mark.parametrize("change", HARMLESS)
def test_other_changed_files_run_nothing(
    run: Path, saved: Path, marker: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = (run / "checkpoints" / "latest").resolve()
    HARMLESS[change](checkpoint, marker)
    agree(checkpoint)
    code, error = called(capsys, COMMANDS["export"], run, saved / "base")
    assert code == 0, error
    assert "Traceback" not in error
    assert not marker.exists()


@pytest.mark.parametrize("command", ONLY_LOOK)
def test_what_only_looks_at_a_run_reads_no_checkpoint(
    run: Path, saved: Path, marker: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = (run / "checkpoints" / "latest").resolve()
    for edit in (code_in_shard, code_in_metadata, code_in_rank, config_of_code):
        edit(checkpoint, marker)
    agree(checkpoint)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    shutil.copy(checkpoint / "config.toml", run / "config.toml")
    code, error = called(capsys, ONLY_LOOK[command], run, saved / "base")
    assert code == 0, error
    assert not marker.exists()
