"""Commands in a folder whose files are called json.py, torch.py and so on: none of them is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.support.importing import SET_HERE, keep_current_folder_out, python, without_safe_path
from tests.hostile_folder import environment, make, marks

RLCLI = str(Path(sys.executable).with_name("rlcli"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("work") / "hostile")
    make_tiny_model(folder / "tiny")
    return folder


def called(folder: Path, *command: str, expect: int = 0) -> str:
    settings = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    completed = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    assert completed.returncode == expect, completed.stderr
    assert marks(folder) == []
    return completed.stdout


def test_the_files_would_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "hostile")
    completed = subprocess.run([sys.executable, "-c", "import json"], cwd=folder, env=environment(), check=False)
    assert (completed.returncode, marks(folder)) == (1, ["json"])


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("recipes", "list"),
        ("recipes", "show", "grpo"),
        ("verifiers", "list"),
        ("env", "list"),
        ("runs", "list"),
        ("prep", "list"),
    ],
    ids=" ".join,
)
def test_cheap_commands(folder: Path, words: tuple[str, ...]) -> None:
    assert called(folder, RLCLI, *words) or words == ("runs", "list")


@pytest.mark.long
def test_data_plan_and_dry_run(folder: Path) -> None:
    """These commands start processes: to convert rows, import plug-ins, run verifiers and measure this machine."""
    called(folder, RLCLI, "prep", "arithmetic", "--out", "data", "--count", "8", "--test-count", "4")
    code = folder / "code"
    code.mkdir()
    (code / "neighbour.py").write_text("RIGHT = 1.0\n")
    (code / "mine.py").write_text(
        "import json\n"
        "from neighbour import RIGHT\n"
        "from rlcli.types import Outcome, Verdict\n"
        "assert json.loads('1') == 1\n"
        "def verify(request):\n"
        "    return Verdict(score=RIGHT, outcome=Outcome.OK)\n"
    )
    (code / "algorithm.py").write_text("import json\nimport torch\n")
    sizes = ("--set", "data.max_prompt_tokens=32", "--set", "rollout.max_response_tokens=8")
    plug_ins = ("--verifier", "code/mine.py:verify", "--set", "algorithm.code=code/algorithm.py")
    words = ("train", "grpo", "--model", "tiny", "--data", "data", "--out", "run", "--dry-run", *sizes, *plug_ins)
    assert "mine.py" in called(folder, RLCLI, *words)
    (folder / "rows.jsonl").write_text('{"completion": "2", "ground_truth": "2"}\n')
    scored = called(folder, RLCLI, "verifiers", "run", "code/mine.py:verify", "--input", "rows.jsonl", "--output", "-")
    assert '"score": 1.0' in scored


def test_own_processes_import_nothing_from_it(folder: Path) -> None:
    for module in ("rlcli.support.importing", "tests.hostile_folder"):
        command = python(module)
        assert command[1:3] == ["-P", "-c"]
    main = "def main(*arguments):\n    import json, sys\n    print(json.dumps(sys.path))\n"
    (folder.parent / "printing.py").write_text(main)
    command = python("printing")
    command[4] = f'["{folder.parent}"' + "".join(f', "{path}"' for path in sys.path if path) + "]"
    assert str(folder.parent) in called(folder, *command)


def test_programs_of_the_user_are_started_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # monkeypatch restores it, whatever the command sets
    monkeypatch.delenv("PYTHONSAFEPATH")
    keep_current_folder_out()
    assert os.environ["PYTHONSAFEPATH"] == SET_HERE
    assert "PYTHONSAFEPATH" not in without_safe_path(os.environ)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    keep_current_folder_out()
    assert without_safe_path(os.environ)["PYTHONSAFEPATH"] == "1", "as the user has set it"
