"""The entry point: output, import cost and exit codes of `rlcli`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rlcli import __version__
from rlcli.cli import app as cli_app
from rlcli.cli.command_group import COMMANDS, imported
from rlcli.errors import ConfigError, RunFailed
from rlcli.support.attempt import REPORTED
from rlcli.support.extras import INSTALL, require

PANELS = {
    "Train": ["train", "eval", "chat", "export", "quickstart"],
    "Data & rewards": ["prep", "verifiers", "env", "recipes"],
    "Machine": ["doctor", "model", "tiny-model"],
}
HEAVY = ["torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "sympy", "math_verify", "pydantic", "numpy"]


@pytest.fixture
def boom() -> Iterator[Callable[[BaseException], None]]:
    """A function that adds a command `boom`, which raises the given exception."""

    def add(error: BaseException) -> None:
        @cli_app.app.command("boom", hidden=True)
        def command() -> None:
            raise error

    registered = len(cli_app.app.registered_commands)
    yield add
    del cli_app.app.registered_commands[registered:]


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["eval", "--help"], ["recipes", "list", "-h"], ["env", "try", "-h"]]
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        f"import sys, json; from rlcli.cli.main import main; code = main({words}); "
        f"print(json.dumps([code, [m for m in {HEAVY} if m in sys.modules], len(sys.modules)]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    exit_code, imported, modules = json.loads(printed.splitlines()[-1])
    assert (exit_code, imported) == (0, [])
    assert modules < 500  # imports are nearly all of the time of --help


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run(["--help"]) == 0
    printed = capsys.readouterr().out
    starts = [printed.index(f"─ {panel} ─") for panel in PANELS]
    assert starts == sorted(starts)
    ends = [*starts[1:], len(printed)]
    for (_, commands), start, end in zip(PANELS.items(), starts, ends, strict=True):
        for command in commands:
            assert f"│ {command} " in printed[start:end]


@pytest.mark.parametrize(
    "command",
    [
        *(name for names in PANELS.values() for name in names if name not in ("verifiers", "env", "recipes", "model")),
        "eval compare",
        "model check",
        "runs list",
        "runs show",
        "runs samples",
        "runs watch",
        "runs resume",
        "prep list",
        "prep show",
        "prep filter",
        "verifiers list",
        "env list",
        "env show",
        "env try",
        "recipes list",
        "recipes show",
        "recipes explain",
    ],
)
def test_the_help_of_a_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run([*command.split(), "--help"]) == 0
    examples = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith(f"rlcli {command}")]
    assert examples


def test_the_help_lists_each_command_as_the_command_itself_does() -> None:
    listed = {name: " ".join(command.help.split()) for name, command in COMMANDS.items()}
    documented = {name: " ".join((imported(name).help or "").split("\n\n")[0].split()) for name in COMMANDS}
    assert listed == documented
    assert {name: imported(name).name for name in COMMANDS} == {name: name for name in COMMANDS}


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli_app.run([])
    assert "Usage: rlcli" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"rlcli {__version__}\n"


@pytest.mark.parametrize(
    ("words", "meant"), [(["trian"], "'train'"), (["docter"], "'doctor'"), (["recipes", "shwo"], "'show'")]
)
def test_an_unknown_command_names_the_near_one(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_app.run(words) == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "--foo"], "No such option: --foo (Possible options: --force, --out); see rlcli train -h"),
        (["eval", "--model", "m"], "no data is given; name a parquet file or folder with --data, or an --environment"),
        (["recipes", "explain", "a", "b"], "Got unexpected extra argument(s) (b); see rlcli recipes explain -h"),
        (["--foo"], "No such option: --foo; see rlcli -h"),
        (
            ["train", "grpo", "--learning-rate", "1"],
            "No such option: --learning-rate; give it as a key: --set train.lr=…; see rlcli train -h",
        ),
        (
            ["train", "grpo", "--lr=1"],
            "No such option: --lr (Possible options: --help, --plan); give it as a key: --set train.lr=… or --set "
            "critic.lr=…; see rlcli train -h",
        ),
        (["--debug", "prep", "show"], "Missing argument 'name'; see rlcli prep show -h"),
    ],
)
def test_a_wrong_line_is_refused_in_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run(words) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {line}\n"
    assert captured.out == ""


def test_a_wrong_type_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.run(["train", "grpo", "--steps", "many"]) == 2
    assert capsys.readouterr().err.startswith("error: Invalid value for '--steps': ")


@pytest.mark.parametrize("words", [[], ["recipes"], ["verifiers"]])
def test_a_group_without_a_command_prints_its_help_and_no_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_app.run(words) == 2
    captured = capsys.readouterr()
    assert " ".join(["Usage: rlcli", *words]) in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ConfigError("train.lr = -1", "raise it"), 2, "error: train.lr = -1; raise it\n"),
        (ConfigError("two\nlines", "one\nmend"), 2, "error: two lines; one mend\n"),
        (RunFailed("worker 1 died"), 1, "error: worker 1 died\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'; run again with --debug for the traceback\n"),
        (ValueError(), 1, "error: ValueError; run again with --debug for the traceback\n"),
        (
            ModuleNotFoundError("No module named 'vllm.lora'", name="vllm.lora"),
            2,
            f"error: not installed: vllm; {INSTALL}\n",
        ),
        (
            ModuleNotFoundError("No module named 'mine'", name="mine"),
            1,
            "error: ModuleNotFoundError: No module named 'mine'; run again with --debug for the traceback\n",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception,
    exit_code: int,
    line: str,
    boom: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    boom(error)
    assert cli_app.run(["boom"]) == exit_code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--debug", "boom"], ["boom", "--debug"]])
def test_debug_lets_the_traceback_through(words: list[str], boom: Callable[[BaseException], None]) -> None:
    boom(ConfigError("train.lr = -1"))
    with pytest.raises(ConfigError, match=r"train\.lr = -1"):
        cli_app.run(words)


def test_debug_of_a_supervised_run_prints_the_traceback_and_its_exit(
    boom: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    boom(ConfigError("train.lr = -1"))
    monkeypatch.setattr(cli_app, "is_supervised", lambda: True)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    with pytest.raises(SystemExit):  # os._exit is patched, so it returns
        cli_app.leave(cli_app.run(["boom", "--debug"]))
    assert ends == [REPORTED]
    assert "ConfigError: train.lr = -1" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(
    boom: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    boom(KeyboardInterrupt())
    assert cli_app.run(["boom"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_installed_script_leaves_with_the_exit_code() -> None:
    script = os.path.join(os.path.dirname(sys.executable), "rlcli")
    completed = subprocess.run([script, "recipes", "show", "nope"], capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: no recipe is called 'nope'")
    assert completed.stderr.count("\n") == 1


def test_require_names_only_what_is_absent() -> None:
    require("json", "typer")
    with pytest.raises(Exception, match=r"not installed: absent_a, absent_b; .*'rlcli\[cpu\]'"):
        require("json", "absent_a", "absent_b")
