"""`rlcli recipes`: what recipes there are, what is in one, what each key means."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from rlcli.cli import console
from rlcli.cli.group import Group

# The configuration and its schema are imported by the commands: `rlcli --help` does without them.

app = typer.Typer(cls=Group, no_args_is_help=True, help="List, show and explain training recipes.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes that are installed.

    Examples:

      rlcli recipes list
      rlcli recipes list --json
    """
    from rlcli.config import recipes

    headers = [recipes.load(name).header for name in recipes.names()]
    for error in recipes.broken():
        print(f"note: {error}", file=sys.stderr)
    if json:
        console.emit_json([asdict(header) for header in headers])
        return
    rows = [(header.name, header.summary, header.reproduced) for header in headers]
    console.show(console.table(["recipe", "what it does", "reproduced"], rows))


@app.command("show")
def show(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a path to a .toml file.")],
    resolved: Annotated[bool, typer.Option("--resolved", help="Every key with its value and its origin.")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value first; implies --resolved.")
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

    # Resolved in any case: a recipe that does not hold together is an error here, not first when it is run.
    run = resolve(recipe, sets=sets or ())
    full = resolved or bool(sets)
    if json:
        values = run.values() if full else run.recipe.values
        origins = run.origins if full else run.recipe.origins
        header = asdict(run.recipe.header)
        console.emit_json({"recipe": header, "source": run.recipe.source, "values": values, "origins": origins})
    else:
        console.plain(dump_toml(run) if full else run.recipe.text.rstrip())


@app.command("explain")
def explain(
    key: Annotated[str, typer.Argument(help="A key or a section; none: every key.")] = "",
    json: Json = False,
) -> None:
    """Say what a key does, what it accepts and what its default is.

    Examples:

      rlcli recipes explain
      rlcli recipes explain rollout
      rlcli recipes explain train.lr
    """
    from rlcli.config.load import describe, to_toml

    keys = describe(key)
    if json:
        console.emit_json([asdict(each) for each in keys])
        return
    for each in keys:
        console.plain(f"{each.name} = {to_toml(each.default)}  ({each.rule})\n    {each.description}")
