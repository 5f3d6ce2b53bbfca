"""`rlcli env`: lists, shows and plays environments."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import typer

from rlcli.cli import console
from rlcli.cli.command_group import Group
from rlcli.cli.env.environment_task import EnvironmentName, RowNumber, TaskData, opened
from rlcli.cli.env.play import play
from rlcli.cli.env.print_messages import print_message
from rlcli.cli.options import Json, JsonObject, Sets
from rlcli.errors import RlcliError

if TYPE_CHECKING:
    from rlcli.environments.environment import Opening

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="List, show and play the environments that hold conversations with a model."
)


@app.command("list")
def list_environments(json: Json = False) -> None:
    """List the environments that are installed, built in or from other packages.

    Examples:

      rlcli env list

      rlcli env list --json
    """
    from rlcli.environments.environment import ENVIRONMENTS

    environments = [
        {"name": name, "source": ENVIRONMENTS.origin(name), **_summary(name)} for name in ENVIRONMENTS.names()
    ]
    if json:
        console.emit_json(environments)
        return
    rows = [(environment["name"], environment["summary"], environment["source"]) for environment in environments]
    console.show(console.table(["environment", "task", "from"], rows))


@app.command("show")
def show_environment(
    name: EnvironmentName, data: TaskData = None, row: RowNumber = 0, set: Sets = None, json: JsonObject = False
) -> None:
    """Show an environment's description, its options, and the first messages and tools of a row.

    It runs in a separate process, as in a run.

    Examples:

      rlcli env show guess_number

      rlcli env show countdown --data data/countdown --row 3

      rlcli env show path/to/file.py:Class --set environment.options.high=10 --json
    """
    from rlcli.environments.environment import ENVIRONMENTS

    with opened(name, data, row, set or []) as task:
        description: dict[str, Any] = {
            "name": name,
            "source": ENVIRONMENTS.origin(name) if ":" not in name else "local",
            "target": task.host.spec.target,
            **task.host.describe(),
        }
        try:
            opening: Opening | None = task.reset()[1]
        except RlcliError as error:  # most need an option, or rows of their own
            if data or set:
                raise
            opening, description["problem"] = None, error.message
    description["tools"] = list(opening.tools) if opening else []
    description["messages"] = list(opening.messages) if opening else []
    if json:
        console.emit_json(description)
    else:
        _print(description)


def _summary(name: str) -> dict[str, Any]:
    """The first line of its docstring, or the error on loading: one broken package must not hide the others."""
    from rlcli.environments.environment import ENVIRONMENTS

    try:
        target: Any = ENVIRONMENTS.get(name)
    except RlcliError as error:
        return {"summary": str(error), "loads": False}
    if isinstance(target, list | tuple):
        return {"summary": f"tools: {', '.join(function.__name__ for function in target)}", "loads": True}
    return {"summary": (inspect.getdoc(target) or "").partition("\n")[0], "loads": True}


def _print(description: dict[str, Any]) -> None:
    console.plain(f"{description['name']} (from {description['source']}: {description['target']})\n")
    console.plain(description["doc"] or "It has no docstring.")
    if description["options"]:
        rows = [
            (option["name"], option["type"], "must be given" if option["required"] else option["default"])
            for option in description["options"]
        ]
        console.show(console.table(["environment.options.…", "type", "default"], rows))
    for tool in description["tools"]:
        console.plain(f"\ntool {json.dumps(tool.get('function', tool), ensure_ascii=False, indent=2)}")
    console.plain("")
    for message in description["messages"]:
        print_message(message)
    if "problem" in description:
        console.plain(f"no conversation without --data or options: {description['problem']}")


# Last: commands are listed in the order of use.
app.command("try")(play)
