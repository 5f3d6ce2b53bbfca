"""`rlcli verifiers`: what can score a response."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from rlcli.cli import console
from rlcli.cli.group import Group

app = typer.Typer(cls=Group, no_args_is_help=True, help="List the verifiers that score responses.")


@app.command("list")
def list_verifiers(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the verifiers that are installed, built in or from other packages.

    Examples:

      rlcli verifiers list
      rlcli verifiers list --json
    """
    from rlcli.scoring.registry import VERIFIERS

    found = [{"name": name, "source": VERIFIERS.origin(name), "summary": _summary(name)} for name in VERIFIERS.names()]
    if json:
        console.emit_json(found)
        return
    rows = [(verifier["name"], verifier["summary"], verifier["source"]) for verifier in found]
    console.show(console.table(["verifier", "what scores 1", "from"], rows))


def _summary(name: str) -> str:
    """The first line of its docstring, or why it does not load: one broken package must not hide the others."""
    from rlcli.errors import RlcliError
    from rlcli.scoring.registry import VERIFIERS

    try:
        documentation = inspect.getdoc(VERIFIERS.get(name)) or ""
    except RlcliError as error:
        return str(error)
    return documentation.partition("\n")[0]
