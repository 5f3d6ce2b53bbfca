"""The shape of the package: folders that state their job, and no import circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlcli"
PACKAGES = ROOT / "packages"
PAGE = ROOT / "docs" / "architecture.md"
LONGEST_TEST_NAME = 70
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root, folder in ((ROOT, PACKAGE), (PACKAGES, PACKAGES))
    for path in folder.rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports: at its top, within functions, and for annotations alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name and name != "rlcli":
                yield name


@pytest.mark.long
def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_graph_sees_imports_of_every_kind() -> None:
    assert "rlcli.cli.app" in set(imported(MODULES["rlcli.cli.main"]))  # within a function
    assert "rlcli.model.value_model" in set(imported(MODULES["rlcli.training.worker.backend"]))  # annotations


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_folder_states_its_job(folder: Path) -> None:
    job = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert job, "the docstring of __init__.py states the package's one job"


@pytest.mark.long
def test_no_test_has_a_long_name() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {len(node.name)} characters"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > LONGEST_TEST_NAME
    ]
    assert not long


def test_no_two_files_of_tests_share_a_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]  # pytest imports them by these names
    assert sorted(names) == sorted(set(names))


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    defined: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return defined


def test_the_page_names_what_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:rlcli|packages)/[\w/]+(?:\.py)?)`", text):
        assert (ROOT / path).exists(), path
    rows = re.findall(r"^\|.*?`([\w.]+)`.*`(rlcli/[\w/]+\.py)` \|$", text, re.MULTILINE)
    rows += re.findall(r"`([\w.]+)`\s\(`(rlcli/[\w/]+\.py)`\)", text)
    assert len(rows) >= 18
    for name, path in rows:
        assert name in names_in(ROOT / path), f"{path} has no {name}"


def test_each_call_of_the_path_is_made_by_an_earlier_one() -> None:
    rows = re.findall(
        r"^\| (\d+) \| `([\w.]+)`.*`(rlcli/[\w/]+\.py)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [int(number) for number, _, _ in rows[:11]] == list(range(1, 12))
    called = names_read(ROOT / rows[0][2], rows[0][1])
    for _, name, path in rows[1:11]:
        assert name.rpartition(".")[2] in called, f"no row before it calls {name}"
        called |= names_read(ROOT / path, name)


def names_read(path: Path, name: str) -> set[str]:
    """Names and attributes in the body of a function, or of a class's method."""
    scope: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        scope = next(node for node in ast.walk(scope) if getattr(node, "name", "") == part)
    read = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(scope))
    return set(filter(None, read))


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:rlcli|packages|recipes|verifiers|environments|data_prep|tests|scripts)/[\w/.]+)`", text)
    assert len(paths) >= 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_only_one_module_has_names_of_cuda() -> None:
    names = r"torch\.cuda|cuda:nccl|ProcessGroupNCCL|[A-Z]+_VISIBLE_DEVICES"
    users = [module for module, path in MODULES.items() if re.search(names, path.read_text(encoding="utf-8"))]
    assert users == ["rlcli.support.machine.gpus"]


def test_the_page_lists_every_package() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = {"/".join(path.relative_to(ROOT).parts[:2]) for path in MODULES.values()}
    assert [part for part in sorted(parts) if f"`{part}`" not in text] == ["rlcli/__init__.py"]
