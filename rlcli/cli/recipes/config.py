"""`rlcli config`: imports configurations of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.group import Group
from rlcli.cli.options import Json
from rlcli.cli.recipes.recipes import check_new, write_new

if TYPE_CHECKING:
    from rlcli.config.importing.convert import Imported
    from rlcli.config.importing.reading import Line

app = typer.Typer(cls=Group, no_args_is_help=True, help="Import configurations of verl and TRL as recipes.")

HEADINGS = {
    "mapped": "in the recipe",
    "same": "the same without a key",
    "unresolved": "not in the file: give these yourself",
    "missing": "no counterpart",
}


@app.callback()
def group() -> None:
    """Import configurations of verl and TRL as recipes."""


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(help="A verl script or YAML, or a TRL YAML, JSON or Python file.")],
    out: Annotated[Path | None, typer.Option(help="Recipe to write (.toml); default: print it.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=100_000, help="Processes that TRL runs with.")] = 1,
    json: Json = False,
) -> None:
    """Turn a configuration of verl or TRL into a recipe, and list what has no counterpart. Nothing in it is executed.

    Examples:

      rlcli config import run_qwen2-7b.sh --out mine.toml
      rlcli config import grpo.py --processes 8
      rlcli train mine.toml --data data/gsm8k --dry-run
    """
    from rlcli.config.importing.convert import import_file

    if out is not None:
        check_new(out)
    found = import_file(file, processes)
    if out is not None:
        write_new(out, found.toml)
    if json:
        console.emit_json({"file": file, "out": out, **_json(found)})
        return
    for kind, heading in HEADINGS.items():
        lines = [line for line in found.lines if line.kind == kind]
        if lines:
            console.plain(f"{heading}:")
            console.plain("".join(f"  {_described(line, found)}\n" for line in lines))
    console.plain(f"wrote {out}; try it: rlcli train {out} --dry-run" if out else found.toml.rstrip())


def _json(found: Imported) -> dict[str, object]:
    lines = {
        kind: [
            {"source": line.source, "given": line.given, "note": line.note}
            | ({"key": line.key, "value": line.value} if kind == "mapped" else {})
            for line in found.lines
            if line.kind == kind
        ]
        for kind in HEADINGS
    }
    about = {"framework": found.framework, "version": found.version}
    return about | lines | {"recipe": found.settings, "toml": found.toml}


def _described(line: Line, found: Imported) -> str:
    from rlcli.config.importing.convert import NAMES
    from rlcli.config.load import to_toml

    given = f"{NAMES[found.framework]}'s default" if line.given is None else line.given
    source = f"{line.source} = {given}" if line.given is not None or line.kind == "mapped" else line.source
    note = f" ({line.note})" if line.note else ""
    return f"{line.key} = {to_toml(line.value)}  ← {source}{note}" if line.kind == "mapped" else f"{source}{note}"
