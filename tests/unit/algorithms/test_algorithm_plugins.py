"""Algorithms of a user's own: from a file, from an installed package, and as the documentation has them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli.algorithms import advantages, aggregation, correction, kl, losses, selection
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.function_registry import FunctionRegistry, Rules, options_of
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.losses import selectors
from rlcli.algorithms.plugins import load_file
from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError, RlcliError, UnknownName
from rlcli.support import importing
from tests.pages import blocks, commands

PAGE = "your_own_algorithm.md"
KINDS = (advantages, aggregation, correction, kl, losses, selection)
TABLES: list[FunctionRegistry[Any]] = [kind.get.__self__ for kind in KINDS] + [selectors]


@pytest.fixture(autouse=True)
def trusted(forget_algorithms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/support/test_importing.py has what hangs or exits."""
    monkeypatch.setattr(importing, "_trusted", True)


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file that the documentation shows."""
    return written(tmp_path, blocks(PAGE, "python")[0])


def test_the_documented_file_is_short_and_its_functions_can_be_named(mine: Path) -> None:
    assert len(mine.read_text().splitlines()) <= 16
    algorithm = build_algorithm(code=str(mine), advantage="median", loss="anchored", options={"pull": 0.1})
    inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0, 0.0]), groups=torch.tensor([4, 4, 4]))
    assert algorithm.response_advantages(inputs).tolist() == [1.0, 0.0, 0.0]
    assert not algorithm.skips_zero_advantages
    assert {"median"} <= set(advantages.names())


def test_the_documented_tests_pass(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    namespace: dict[str, Any] = {}
    (code,) = (block for block in blocks(PAGE, "python") if "def test_" in block)
    exec(code, namespace)
    tests = [function for name, function in namespace.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_documented_inputs_are_those_that_there_are() -> None:

    text = (Path(__file__).parents[3] / "docs" / PAGE).read_text()
    table = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    rows = {cells[1].strip(): cells[2] for cells in table if ".register`" in cells[1]}
    declared = set(re.findall(r"^\| `(\w+)=", text, re.MULTILINE))
    assert declared == {field.name for field in fields(Rules)} | {"needs"}
    kinds = {kind.kind: kind for kind in TABLES}
    expected = {
        "`advantages.register`": kinds["advantage"].columns(Rules()),
        '`advantages.register`, `level="turn"`': kinds["advantage"].columns(Rules(level="turn")),
        '`advantages.register`, `level="token"`': kinds["advantage"].columns(Rules(level="token")),
        "`losses.register`": kinds["policy loss"].columns(Rules()),
        "`losses.selectors.register`, under the name of a loss that needs `selected`": set(selectors.arguments),
        "`kl.register`": kinds["KL estimator"].columns(Rules()),
        "`aggregation.register`": {"values", "denominators"} | kinds["aggregation"].columns(Rules()),
        "`correction.register`": kinds["rollout correction"].columns(Rules()),
        "`selection.register`": set(kinds["selection"].arguments),
    }
    assert set(rows) == set(expected)
    for kind, inputs in expected.items():
        documented = {word.strip("`") for word in rows[kind].replace(",", " ").split() if word.startswith("`")}
        assert {word for word in documented if "." not in word} == inputs, kind


def test_a_file_read_again_takes_its_own_place_as_it_is_now(tmp_path: Path) -> None:
    text = "from rlcli.algorithms import kl\n@kl.register('mine')\ndef mine(inputs, *, size={size}): ...\n"
    load_file(str(written(tmp_path, text.format(size=1))))
    first = kl.get("mine")
    load_file(str(written(tmp_path, text.format(size=22))))
    assert kl.get("mine") is not first
    assert options_of(kl.get("mine")) == {"size": 22}


def test_a_file_may_define_classes_and_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With annotations put off, dataclasses look their module up.
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    written(tmp_path, imports + "@dataclass\nclass A:\n    a: int\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_file("~/mine.py")
    assert sys.modules["rlcli_user_mine"].A(3).a == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def (", "fails: SyntaxError: invalid syntax (mine.py, line 1); fix the file"),
        ("import torch\n\nhelp_me()", "fails in line 3: NameError: name 'help_me' is not defined; fix the file"),
        ("import json\njson.loads('{')", "fails in line 2: JSONDecodeError: "),
        ("def half(x):\n    return x / 0\n\nhalf(1)", "fails in line 2: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "fails in line 1: SystemExit: 3; fix the file"),
        ("from rlcli.algorithms import advantage", "fails in line 1: ImportError: cannot import name 'advantage'"),
    ],
)
def test_a_file_that_fails_is_told_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_file(str(file))
    assert str(refused.value).startswith(f"algorithm.code = '{file}' {says}")


@pytest.mark.parametrize("name", ["nothing.py", "folder.py", "mine.txt", "mine"])
def test_what_is_no_python_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    written(tmp_path, "", "mine.txt")
    written(tmp_path, "", "mine")
    with pytest.raises(ConfigError, match=r"is not a Python file; give the path of a \.py file"):
        load_file(str(tmp_path / name))


def test_a_name_can_be_taken_once_and_both_places_are_named(tmp_path: Path) -> None:
    text = "from rlcli.algorithms.losses import register\n@register('ppo')\ndef mine(inputs): ...\n"
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_file(str(file))
    theirs = inspect.getfile(losses.clipped.ppo)
    assert f"the policy loss 'ppo' is registered twice: in {theirs} and {file}" in str(refused.value)
    assert losses.get("ppo") is losses.clipped.ppo


ENTRY_POINTS = "[rlcli.algorithms]\n{lines}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a distribution on the path, with those entry points of the group."""

    def install(**entries: str) -> None:
        info = tmp_path / "my_algorithms-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-algorithms\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
        (info / "entry_points.txt").write_text(ENTRY_POINTS.format(lines=lines))
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_the_documented_entry_point_is_of_the_group_that_is_loaded() -> None:
    import tomllib

    from rlcli.algorithms.function_registry import GROUP

    (project,) = blocks(PAGE, "toml")
    assert tomllib.loads(project)["project"]["entry-points"][GROUP] == {"mine": "mine"}


def test_an_installed_package_is_imported_for_a_name_that_is_not_built_in(
    mine: Path, install: Callable[..., None]
) -> None:
    install(mine="mine")
    advantages.get("grpo")
    assert "mine" not in sys.modules
    algorithm = build_algorithm(advantage="median", loss="anchored")
    assert algorithm.loss.function.__module__ == "mine"
    assert "anchored" in losses.names()


def test_names_are_listed_with_those_of_installed_packages(mine: Path, install: Callable[..., None]) -> None:
    install(mine="mine")
    assert {"grpo", "median"} <= set(advantages.names())
    with pytest.raises(UnknownName, match="did you mean median"):
        advantages.get("medium")


@pytest.mark.parametrize(
    ("value", "why"), [("no_such_module", "ModuleNotFoundError"), ("leaving_algorithms", r"SystemExit\(3\)")]
)
def test_a_package_that_does_not_load_is_named(
    value: str, why: str, tmp_path: Path, install: Callable[..., None]
) -> None:
    written(tmp_path, "raise SystemExit(3)", "leaving_algorithms.py")
    install(gone=value)
    advantages.get("grpo")  # it stands in the way of no built-in
    for ask in (lambda: advantages.get("median"), advantages.names):
        with pytest.raises(RlcliError, match=rf"of algorithms 'gone' \({value}\) does not load: {why}.*; reinstall"):
            ask()


def test_the_command_line_lists_what_a_package_brings(
    mine: Path, install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(mine="mine")
    assert main(["recipes", "explain", "algorithm.loss"]) == 0
    assert "anchored" in capsys.readouterr().out


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The documented command, with a model and data that are here, up to the check of everything."""
    from rlcli.model.io.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("own")
    make_tiny_model(folder / "tiny")
    messages = [{"role": "user", "content": "1+1="}]
    prompts = [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="2")] * 4
    write_rows(folder / "train.parquet", prompts)
    ((program, *arguments),) = commands(PAGE)
    assert program == "rlcli"
    arguments[arguments.index("--model") + 1] = str(folder / "tiny")
    arguments[arguments.index("--data") + 1] = str(folder)
    arguments += ["--set", "cluster.device=cpu", "--set", "rollout.prompts_per_step=4", "--set", "cluster.workers=1"]
    return [*arguments, "--out", str(folder / "run"), "--dry-run"]


@pytest.mark.long
def test_the_documented_command_accepts_the_documented_file(
    words: list[str], mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(mine.parent)
    code = main(words)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "median" in printed.out
    assert "anchored (pull 0.1)" in printed.out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "is not a Python file; give the path of a .py file"),
        (("import torch", "import torhc"), "fails in line 1: ModuleNotFoundError: No module named 'torhc'"),
        (('"anchored"', '"ppo"'), "the policy loss 'ppo' is registered twice"),
        (
            ('needs=("rewards", "groups")', 'needs=("rewards", "group")'),
            "the advantage 'median' needs 'group', which is",
        ),
        (('needs=("rewards", "groups")', 'needs=("rewards",)'), "the advantage 'median' reads 'groups', which it does"),
        (
            ("anchored(inputs", "anchored(log_probs, advantages"),
            "'anchored' takes (log_probs, advantages), and is called",
        ),
        (("pull=0.5", "pul=0.5"), "algorithm.options.pull: none of the chosen functions takes it; did you mean pul?"),
        (('"median"', '"middle"'), "no advantage is called 'median'; known: dr_grpo, gae"),
    ],
)
def test_a_file_that_will_not_do_is_refused_in_one_line_with_exit_code_2(
    change: tuple[str, str] | None,
    says: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if change:
        text = blocks(PAGE, "python")[0]
        assert change[0] in text
        written(tmp_path, text.replace(*change))
    assert main(words) == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error:")]
    assert line == printed.err.splitlines()[-1]
    assert says in line
