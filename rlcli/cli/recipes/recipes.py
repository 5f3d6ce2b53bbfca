"""`rlcli recipes`: lists, shows, compares and copies recipes, and explains keys."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import completion, console
from rlcli.cli.command_group import Group
from rlcli.cli.options import Json, RecipeName
from rlcli.errors import ConfigError, RlcliError
from rlcli.support.files import replacing

if TYPE_CHECKING:
    from rlcli.config.load import Resolved

# The configuration and its schema are imported inside the commands: `rlcli --help` does not need them.

app = typer.Typer(cls=Group, no_args_is_help=True, help="List, show, compare, copy and explain training recipes.")


@app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes that are installed: algorithms for any model and data, and those for a task.

    Examples:

      rlcli recipes list
      rlcli recipes list --json
    """
    from rlcli.config import recipes

    headers, errors = [], recipes.broken()
    for name in recipes.names():
        try:
            headers.append(recipes.load(name).header)
        except RlcliError as error:  # One broken recipe must not hide the others.
            errors.append(error)
    for note in errors:
        console.note(f"note: {note}")
    if json:
        console.emit_json([asdict(header) for header in headers])
        return
    algorithms = [(h.name, h.base, h.summary, _first_word(h.reproduced)) for h in headers if not h.task]
    tasks = [(h.name, h.base, h.task, _first_word(h.reproduced)) for h in headers if h.task]
    console.show(console.table(["algorithm", "base", "what it does", "reproduced"], algorithms))
    console.show(console.table(["task", "base", "model and data", "reproduced"], tasks))


@app.command("show")
def show(
    recipe: RecipeName,
    resolved: Annotated[bool, typer.Option("--resolved", help="Every key with its value and its origin.")] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value first; implies --resolved.",
            autocompletion=completion.keys,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print a recipe as it was written, or as it is resolved.

    Examples:

      rlcli recipes show grpo
      rlcli recipes show mine.toml --resolved
      rlcli recipes show grpo --set lora.rank=16
    """
    from rlcli.config.load import dump_toml, resolve

    # Always resolved: an inconsistent recipe is an error here, not only when it is run.
    run = resolve(recipe, sets=sets or ())
    full = resolved or bool(sets)
    if json:
        values = run.values() if full else run.recipe.values
        origins = run.origins if full else run.recipe.origins
        header = asdict(run.recipe.header)
        console.emit_json({"recipe": header, "source": run.recipe.source, "values": values, "origins": origins})
    else:
        console.plain(dump_toml(run) if full else run.recipe.text.rstrip())


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A recipe's name, or a path to a .toml file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    json: Json = False,
) -> None:
    """Print every key whose value differs between two recipes, and where each value comes from.

    Examples:

      rlcli recipes diff grpo dapo
      rlcli recipes diff dapo mine.toml --json
    """
    from rlcli.config.load import resolve

    differences = _differences(resolve(first), resolve(second))
    if json:
        console.emit_json({"a": first, "b": second, "differences": differences})
    elif not differences:
        console.plain(f"no key differs between {first} and {second}")
    else:
        rows = [(each["key"], *(_valued(each[side]) for side in ("a", "b"))) for each in differences]
        console.show(console.table(["key", first, second], rows))


@app.command("copy")
def copy(
    recipe: RecipeName,
    out: Annotated[Path | None, typer.Option(help="File to write (default: NAME.toml here).")] = None,
    json: Json = False,
) -> None:
    """Copy a recipe, with its comments, into a file that you can change. Never overwrites a file.

    Examples:

      rlcli recipes copy dapo
      rlcli recipes copy dapo --out mine.toml
    """
    from rlcli.config.load import resolve
    from rlcli.config.recipes import copy_text

    resolve(recipe)  # An inconsistent recipe is an error.
    target = out or Path(f"{Path(recipe).stem if recipe.endswith('.toml') else recipe}.toml")
    check_new(target)
    write_new(target, copy_text(recipe, target.stem))
    if json:
        console.emit_json({"recipe": recipe, "file": target})
    else:
        console.plain(f"wrote {target}; train with it: rlcli train {target}")


@app.command("explain")
def explain(
    key: Annotated[
        str, typer.Argument(help="A key or a section; none: every key.", autocompletion=completion.key_names)
    ] = "",
    json: Json = False,
) -> None:
    """Explain what a key does, what it accepts and its default; for a named function, list the choices.

    Examples:

      rlcli recipes explain
      rlcli recipes explain rollout
      rlcli recipes explain train.lr
      rlcli recipes explain algorithm.loss
    """
    from rlcli.cli.recipes.algorithm_choices import choices
    from rlcli.config.keys import matching_keys
    from rlcli.config.load import to_toml

    keys, functions = matching_keys(key), choices(key)
    if json:
        console.emit_json([asdict(each) | ({"choices": functions} if functions else {}) for each in keys])
        return
    for each in keys:
        default = "" if each.default is None and not each.optional else f" = {to_toml(each.default)}"
        console.plain(f"{each.name}{default}  ({each.rule})\n    {each.description}")
    width = max((len(choice.name) for choice in functions), default=0)
    for choice in functions:
        console.plain(f"        {choice.name:<{width}}  {choice.text}")


def check_new(recipe: Path) -> None:
    """Raise `ConfigError` if this is not a valid name for a new recipe."""
    if recipe.suffix != ".toml":
        raise ConfigError(f"--out {recipe}: a recipe's file name must end in .toml", f"give {recipe}.toml")
    if os.path.lexists(recipe):
        raise ConfigError(f"{recipe} exists", "name another file with --out")


def write_new(recipe: Path, toml: str) -> None:
    """Write a recipe. Raises `ConfigError` if it cannot be written."""
    try:
        with replacing(recipe) as temporary:
            temporary.write_text(toml, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{recipe} cannot be written: {error.strerror}", "name another file with --out") from error


def _first_word(text: str) -> str:
    return text.partition(":")[0]


def _differences(a: Resolved, b: Resolved) -> list[dict[str, Any]]:
    """The keys whose values differ, in schema order. A number of `algorithm.options` that one side does not set is None
    on that side."""
    from rlcli.config.keys import keys

    sides = [
        {key: {"value": value, "origin": run.origins[key]} for key, value in run.values().items()} for run in (a, b)
    ]
    positions = {key: position for position, key in enumerate(keys())}

    def order(key: str) -> tuple[int, str]:
        return positions[key if key in positions else key.rpartition(".")[0]], key

    differences = []
    for key in sorted({*sides[0], *sides[1]}, key=order):
        first, second = (side.get(key) for side in sides)
        if first is None or second is None or first["value"] != second["value"]:
            differences.append({"key": key, "a": first, "b": second})
    return differences


def _valued(side: dict[str, Any] | None) -> str:
    from rlcli.config.load import to_toml

    return "not given" if side is None else f"{to_toml(side['value'])}  ({side['origin']})"
