"""The blocks of code in the documentation: their languages, their files, and the names in them."""

from __future__ import annotations

import ast
import builtins
import importlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.page_commands import FENCE, ROOT

LANGUAGES = {"bash", "json", "mermaid", "python", "text", "toml"}
FILES = {
    "docs/environments.md": ("guess.py", "shop.py", "dots.py"),
    "docs/gateway.md": ("agent.py",),
    "docs/your_own_algorithm.md": ("mine.py", "bounded.py", "test_mine.py"),
    "docs/your_own_task.md": ("make_rows.py", "roman.py"),
    "docs/your_own_verifier.md": ("last_word.py",),
    "README.md": ("last_word.py",),
    "data_prep/README.md": ("capitals.py",),
}
"""The files in which the commands of a page expect its `python` blocks, in order."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path, language: str) -> list[str]:
    """The blocks of a page in that language, without the indentation of a list."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(body) for _, block_language, body in fences if block_language == language]


def write_files(page: Path, folder: Path) -> None:
    for file, text in zip(FILES.get(name_of(page), ()), blocks_of(page, "python"), strict=False):
        (folder / file).write_text(text, encoding="utf-8")


def unknown_names(code: str, known: set[str]) -> list[str]:
    """Names that nothing gives: not the code, not `known`, not Python; and what an import does not find. Adds to
    `known` what the code gives."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    modules: dict[str, Any] = {}
    missing = list(_imports(nodes, modules))
    known.update(modules)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if isinstance(module, type(ast)) and not hasattr(module, node.attr):
                missing.append(f"{node.value.id}.{node.attr}")
    return [*missing, *sorted(used - known - {*dir(builtins)})]


def _imports(nodes: list[ast.AST], namespace: dict[str, Any]) -> Iterator[str]:
    """Fill `namespace` with what the imports give, by name; yields those that fail."""
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            try:
                if isinstance(node, ast.Import):
                    namespace[name] = importlib.import_module(alias.name)
                else:
                    namespace[name] = getattr(importlib.import_module(node.module or ""), alias.name)
            except (ImportError, AttributeError) as error:
                yield str(error)
