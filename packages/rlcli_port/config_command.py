"""`rlcli config`: imports configurations of other frameworks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.command_group import Group
from rlcli.cli.options import Json
from rlcli.cli.recipes.recipes import check_new, write_new
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli_port.configs.convert import Imported
    from rlcli_port.configs.key_report import Line

app = typer.Typer(cls=Group, no_args_is_help=True, help="Import configurations of verl and TRL as recipes.")

HEADINGS = {
    "mapped": "in the recipe",
    "same": "the same without a key",
    "unresolved": "give these yourself",
    "missing": "no counterpart",
}


@app.callback()
def group() -> None:
    """Import configurations of verl and TRL as recipes."""


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(help="A script, notebook, YAML or JSON of verl or TRL.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of a script, after --.")] = None,
    out: Annotated[Path | None, typer.Option(help="Recipe to write (.toml); default: print it.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Processes that TRL runs with (default: the script's, or 1).")
    ] = None,
    variable: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment variable of a script; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a configuration of verl or TRL into a recipe, and list what has no counterpart.

    A script runs in the sandbox, without network and files, among programs that only record how they are called: no
    training starts. Its reward functions are copied into a file beside the recipe.

    Examples:

      rlcli config import run_qwen2-7b.sh --out mine.toml
      rlcli config import train.sh --variable NNODES=2 -- 8 --lr 1e-6
      rlcli config import grpo.py --processes 8 --out mine.toml
      rlcli train mine.toml --data data/gsm8k --dry-run
    """
    from rlcli_port.configs.convert import import_file

    variables = _variables(variable or [])
    if out is not None:
        check_new(out)
    imported = import_file(file, processes, out=out, variables=variables, arguments=arguments or [])
    if out is not None:
        if imported.rewards and os.path.lexists(imported.rewards_file):
            raise ConfigError(f"{imported.rewards_file} exists", "name another file with --out")
        write_new(out, imported.toml)
        if imported.rewards:
            write_new(imported.rewards_file, imported.rewards)
    if json:
        console.emit_json({"file": file, "out": out, **_json(imported)})
        return
    for warning in imported.warnings:
        console.note(warning)
    for kind, heading in HEADINGS.items():
        lines = [line for line in imported.lines if line.kind == kind]
        if lines:
            console.plain(f"{heading}:")
            console.plain("".join(f"  {_described(line, imported)}\n" for line in lines))
    if out is None:
        console.plain(imported.toml.rstrip())
        return
    if imported.rewards:
        console.plain(f"wrote {imported.rewards_file}: the script's reward functions; read it before you train with it")
    console.plain(f"wrote {out}; try it: rlcli train {out} --dry-run")


def _variables(pairs: list[str]) -> dict[str, str]:
    """NAME → VALUE. Raises `ConfigError` for a word of another form."""
    for pair in pairs:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", pair, re.DOTALL | re.ASCII):
            raise ConfigError(f"--variable {pair!r:.100} is not NAME=VALUE", "as in --variable NNODES=2")
    return dict(pair.split("=", 1) for pair in pairs)


def _json(imported: Imported) -> dict[str, object]:
    lines = {
        kind: [
            {"source": line.source, "given": line.foreign_value, "note": line.note}
            | ({"key": line.key, "value": line.value} if kind == "mapped" else {})
            for line in imported.lines
            if line.kind == kind
        ]
        for kind in HEADINGS
    }
    about = {
        "framework": imported.framework,
        "version": imported.version,
        "method": imported.method,
        "warnings": imported.warnings,
    }
    recipe = {"recipe": imported.settings, "toml": imported.toml, "rewards": imported.rewards}
    return about | lines | recipe | {"rewards_file": imported.rewards_file if imported.rewards else None}


def _described(line: Line, imported: Imported) -> str:
    from rlcli.config.load import to_toml
    from rlcli_port.configs.convert import NAMES

    foreign_value = f"{NAMES[imported.framework]}'s default" if line.foreign_value is None else line.foreign_value
    source = (
        f"{line.source} = {foreign_value}" if line.foreign_value is not None or line.kind == "mapped" else line.source
    )
    note = f" ({line.note})" if line.note else ""
    return f"{line.key} = {to_toml(line.value)}  ← {source}{note}" if line.kind == "mapped" else f"{source}{note}"
