"""Commands of packages: found through entry points, built-in ones included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli.command_group import COMMANDS, PUBLISHED, imported, published

PACKAGE = '''
def greet(name: str = "you") -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on the path with two distributions: one greets, one is broken."""
    for name, entries in {
        "greeter": "greet = greeter_commands:greet\nplan = greeter_commands:greet\n",
        "broken": "gone = no_such_module:command\n",
    }.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{PUBLISHED}]\n{entries}")
    (tmp_path / "greeter_commands.py").write_text(PACKAGE)
    return tmp_path


def rlcli(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main", *words],
        env=os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.target == PUBLISHED])
def test_a_built_in_command_has_an_entry_point(name: str) -> None:
    entry = published(name)
    assert entry is not None
    assert entry.dist is not None
    assert entry.dist.name == "rlcli"


def test_a_subcommand_comes_through_an_entry_point_too() -> None:
    assert {"compare", "signals"} <= set(imported("runs").commands)
    assert "audit" in imported("verifiers").commands


def test_a_command_of_another_package_runs(installed: Path) -> None:
    completed = rlcli(installed, "greet", "--name", "Ada")
    assert (completed.returncode, completed.stdout) == (0, "hello Ada\n"), completed.stderr


def test_a_package_cannot_replace_a_built_in_command(installed: Path) -> None:
    completed = rlcli(installed, "plan", "--help")
    assert completed.returncode == 0
    assert "Greet" not in completed.stdout


def test_a_command_that_cannot_be_imported_is_one_clear_line(installed: Path) -> None:
    completed = rlcli(installed, "gone")
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert "the command 'gone' (broken 1.0, no_such_module:command)" in line


def test_an_unknown_command_is_refused(installed: Path) -> None:
    completed = rlcli(installed, "grett")
    assert completed.returncode == 2
    assert "grett" in completed.stderr
