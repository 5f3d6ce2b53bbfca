"""The blocks of a page have a language, their code runs, and their configuration is what rlcli reads."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from rlcli.algorithms.function_registry import GROUP as ALGORITHMS
from rlcli.config.load import resolve
from rlcli.runs.record_files import timeline_of
from tests.page_blocks import FILES, LANGUAGES, blocks_of, name_of, unknown_names
from tests.page_commands import FENCE, PAGES, ROOT

RUN_ELSEWHERE = {
    "docs/from_python.md": "trains: tests/integration/test_from_python.py",
    "docs/gateway.md": "asks a model: the commands of the page run it",
}
"""Pages whose code is not run here, and why."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = {*PROJECT["entry-points"], ALGORITHMS}


def pages_with(language: str) -> Any:
    pages = [page for page in PAGES if blocks_of(page, language)]
    return pytest.mark.parametrize("page", pages, ids=name_of)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_language(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {language for _, language, _ in FENCE.findall(text)} <= LANGUAGES
    assert text.count("```") == 2 * len(FENCE.findall(text))
    assert not re.search(r"^(rlcli|scripts/)", "\n".join(blocks_of(page, "text")), re.MULTILINE), "it is a bash block"


@pytest.mark.long
@pages_with("python")
@pytest.mark.usefixtures("forget_algorithms")
def test_the_code_of_a_page_runs(
    page: Path, enter_page_folder: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = enter_page_folder(page)
    monkeypatch.syspath_prepend(folder)
    names: dict[str, Any] = {"run": folder / "runs" / "gsm8k"}
    known = {*names}
    for file, code in zip_longest(FILES.get(name_of(page), ()), blocks_of(page, "python"), fillvalue="block.py"):
        assert unknown_names(code, known) == []
        if name_of(page) not in RUN_ELSEWHERE:
            exec(compile(code, folder / file, "exec"), names)
    for name in [name for name in names if name.startswith("test_")]:
        names[name]()


@pages_with("toml")
def test_the_configuration_of_a_page_is_read(page: Path, tmp_path: Path) -> None:
    for text in blocks_of(page, "toml"):
        tables = tomllib.loads(text)
        project = tables.pop("project", {})
        for group, entries in project.get("entry-points", {}).items():
            assert group in GROUPS
            assert all(EntryPoint(name, value, group).module for name, value in entries.items())
        if tables:
            base = "" if "recipe" in tables else '[recipe]\nbase = "grpo"\nsummary = "of a page"\n'
            (tmp_path / "mine.toml").write_text(base + text, encoding="utf-8")
            config = resolve(str(tmp_path / "mine.toml"), {}, []).config.model_dump()
            assert [section for section in tables if section != "recipe" and not config[section]] == []


@pages_with("json")
def test_the_json_of_a_page_is_a_line_of_a_run(page: Path, tmp_path: Path) -> None:
    for text in blocks_of(page, "json"):
        (tmp_path / "timeline.jsonl").write_text(json.dumps(json.loads(text)) + "\n", encoding="utf-8")
        (line,) = timeline_of(tmp_path)
        assert {"step", "start", "lanes"} == {*line}


def test_the_files_of_a_page_are_its_blocks() -> None:
    for name, files in FILES.items():
        assert len(blocks_of(ROOT / name, "python")) == len(files), name
    assert {*RUN_ELSEWHERE} <= {name_of(page) for page in PAGES}


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("import rlcli\nrlcli.trian('grpo')", ["rlcli.trian"]),
        ("from rlcli.types import Verdit", ["module 'rlcli.types' has no attribute 'Verdit'"]),
        ("import no_such_module", ["No module named 'no_such_module'"]),
        ("def verify(request):\n    return score", ["score"]),
        ("try:\n    print(run)\nexcept OSError as error:\n    print(error)", []),
    ],
)
def test_an_unknown_name_in_code_is_found(code: str, unknown: list[str]) -> None:
    assert unknown_names(code, {"run"}) == unknown
