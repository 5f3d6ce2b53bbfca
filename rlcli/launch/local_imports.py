"""The modules beside a user's Python file that it imports, read from its import statements. Nothing is executed."""

from __future__ import annotations

import ast
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from rlcli.errors import RlcliError
from rlcli.support.reading import read_bytes

MOST_FILES = 200
"""Files of one program; further ones are left out."""
MOST_BYTES = 4 << 20
"""Largest Python file whose imports are read."""


def with_local_imports(file: Path, package: str = "") -> list[Path]:
    """`file`, the modules in its folder that it imports, and those that they import, as `import x`, `from x import y`
    or `from .x import y`, at the top or within functions.

    package: follow only imports of this package, which lies in the folder above `file`'s topmost package.

    An import that is computed (`importlib.import_module(name)`) and a file that the code opens are not found. Modules
    of the standard library come before those beside a file, as Python finds them.
    """
    root = _root_of(file) if package else file.parent
    files, queue = {file: None}, deque([file])
    while queue:
        for module in _imports_of(queue.popleft(), root):
            if package and module.partition(".")[0] != package:
                continue
            for path in _files_of(module, root):
                if path not in files and len(files) < MOST_FILES:
                    files[path] = None
                    queue.append(path)
    return list(files)


def module_file(module: str) -> Path | None:
    """The file of an installed module; None if there is none, or no Python file. Imports nothing: a parent package
    would run code."""
    spec: ModuleSpec | None = None
    search_paths: Sequence[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, search_paths)) is not None), None)
        if spec is None:
            return None
        search_paths = spec.submodule_search_locations
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _root_of(file: Path) -> Path:
    """The folder that holds the topmost package of a file."""
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _imports_of(file: Path, root: Path) -> Iterator[str]:
    """The dotted names that a file imports; of `from a import b` both `a` and `a.b`, which may be a module."""
    try:
        tree = ast.parse(read_bytes(file, MOST_BYTES, links=True))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, RlcliError):
        return  # whoever runs the file reports it
    package = file.relative_to(root).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name and name.partition(".")[0] not in sys.stdlib_module_names)


def _files_of(module: str, root: Path) -> Iterator[Path]:
    """The files below `root` that the import of a module runs: of its packages and of itself."""
    folder = root
    for part in module.split("."):
        package, file = folder / part / "__init__.py", folder / f"{part}.py"
        if os.path.isfile(package):  # False also in a folder that cannot be read
            yield package
        elif os.path.isfile(file):
            yield file
            return
        folder = folder / part
