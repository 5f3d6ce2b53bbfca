"""Proof of `rlcli config import` on public scripts: key by key, against what plain bash passes and what a reader of
literals finds.

    python scripts/proofs/imports.py FOLDER… [--keys] [--refused]

FOLDER: a checkout of verl, TRL or open-r1, or any folder of scripts, notebooks and YAML files. A shell script also runs
unchanged in the sandbox, with programs that only record their words and nothing else in its way; the values that bash
passes there are the truth. Hydra reads them if hydra-core is importable, else our own reader of its values does. Of a
Python file, the arguments that a syntax tree holds as literals are the truth. A YAML file is its own.

Columns: files that were imported and refused; keys that they give; keys whose truth is known, and of these equal and
different; then what became of all keys: mapped, same without a key, not known, named (no counterpart), without a line.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcli_port.configs import config_files, parsed_python, shell_run
from rlcli_port.configs.convert import import_file
from rlcli_port.configs.hydra_values import hydra_value
from rlcli_port.configs.key_report import Unresolved
from rlcli_port.configs.launches import OVERRIDE, flattened
from rlcli_port.configs.sandboxed_script import PROCESSES, files_beside, run_confined, text_of
from rlcli_sandbox import open_sandbox

from rlcli.errors import RlcliError

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
KINDS = (*SHELL, ".py", ".ipynb", ".yaml", ".yml")
RECORDER = """#!/bin/bash -p
printf '%s\\0' CALL "${0##*/}" "$@" "CWD=$PWD" END >> "$RLCLI_RECORD"
"""
COLUMNS = ("files", "imported", "refused", "keys", "known", "equal", "different", "uncompared")
OUTCOMES = ("mapped", "same", "unresolved", "missing", "no line")


def words_of_bash(path: Path, text: str) -> list[str]:
    """The words of the call with the most overrides that the script makes under plain bash; empty if it makes none."""
    folder = path.resolve().parent
    names = {*shell_run.RECORDED, *shell_run.WRAPPERS, *shell_run.SILENT, *shell_run.ANSWERING}
    order = {
        "files": {f"{folder}/{name}": content for name, content in files_beside(path).items()}
        | {f"{folder}/{path.name}": text},
        "folders": [],
        "script": f"{folder}/{path.name}",
        "started_in": str(folder),
        "arguments": [],
        "variables": {"HOME": str(Path.home())},
        "stub": RECORDER,
        "prelude": "",
        "stubs": sorted(names),
        "tools": list(shell_run.TOOLS),
    }
    printed = run_confined(open_sandbox("bwrap"), text_of("inside_shell.py"), order, path, processes=PROCESSES)
    calls: list[list[str]] = [[]]
    for word in str(printed["record"]).replace(str(printed["root"]), "").split("\0"):
        calls[-1].append(word)
        if word == "END":
            calls.append([])
    return max(calls, key=lambda call: sum(is_override(word) for word in call))


def is_override(word: str) -> bool:
    match = OVERRIDE.fullmatch(word)
    return match is not None and "." in match["key"] and match["value"] is not None


def keys_of(words: list[str]) -> dict[str, Any]:
    """Dotted key → value of Hydra's overrides."""
    try:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parser = OverridesParser.create()
    except ImportError:
        parser = None
    values: dict[str, Any] = {}
    for word in filter(is_override, words):
        key, _, text = word.lstrip("+~").partition("=")
        try:
            value = plain(parser.parse_override(word).value()) if parser else hydra_value(text)
        except Exception:  # what Hydra refuses, in many ways
            value = Unresolved(text)
        values |= flattened(key, value)
    return values


def plain(value: Any) -> Any:
    """Hydra's quoted texts as texts."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(name): plain(item) for name, item in value.items()}
    return getattr(value, "text", value)


def truth(path: Path) -> dict[str, Any]:
    """Key → value, as far as it is known in another way than by the import."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in SHELL:
        return keys_of(words_of_bash(path, text))
    if path.suffix == ".py":
        values, _ = parsed_python.arguments(text, path)
        return {key: value for key, value in values.items() if not isinstance(value, Unresolved)}
    return {}


def examine(path: Path, show_keys: bool) -> Counter[str]:
    """The counts of one file that can be imported."""
    counts = Counter({"files": 1})
    values = config_files.read(path).values
    imported = import_file(path)
    counts["imported"] += 1
    counts["keys"] += len(values)
    try:
        known = truth(path)
    except RlcliError:
        known = {}
    for key, expected in known.items():
        imported_value = values.get(key)
        if isinstance(expected, Unresolved) or isinstance(imported_value, Unresolved):
            counts["uncompared"] += 1  # unresolved on either side: nothing is compared
            continue
        equal = key in values and imported_value == expected
        counts["known"] += 1
        counts["equal" if equal else "different"] += 1
        if not equal:
            print(f"{path}: {key} is {expected!r}, imported as {imported_value!r}")
    kinds: dict[str, str] = {}
    for line in imported.lines:
        kinds[line.source] = "mapped" if "mapped" in (line.kind, kinds.get(line.source)) else line.kind
    for key in values:
        if key.endswith("._target_"):  # names a class of verl's, and sets nothing
            continue
        counts[kinds.get(key, "no line")] += 1
        if show_keys:
            print(f"{path.name}\t{key}\t{kinds.get(key, 'no line')}")
    return counts


def scripts_of(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.suffix in KINDS and path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--keys", action="store_true", help="print what became of each key")
    parser.add_argument("--refused", action="store_true", help="print why files are refused")
    arguments = parser.parse_args()
    totals: dict[str, Counter[str]] = {}
    for folder in arguments.folders:
        for path in scripts_of(folder):
            kind = "shell" if path.suffix in SHELL else path.suffix.removeprefix(".")
            row = totals.setdefault(f"{folder.name} {kind}", Counter())
            try:
                row += examine(path, arguments.keys)
            except RlcliError as error:
                row += Counter({"files": 1, "refused": 1})
                if arguments.refused:
                    print(error)
    names = [*COLUMNS, *OUTCOMES]
    print(f"{'':24}" + "".join(f"{name:>11}" for name in names))
    for name, row in totals.items():
        print(f"{name:24.24}" + "".join(f"{row[column]:>11,}" for column in names))
    if any(row["different"] or row["no line"] for row in totals.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
