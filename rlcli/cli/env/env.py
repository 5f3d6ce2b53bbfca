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

    found = [{"name": name, "source": ENVIRONMENTS.origin(name), **_summary(name)} for name in ENVIRONMENTS.names()]
    if json:
        console.emit_json(found)
        return
    rows = [(one["name"], one["summary"], one["source"]) for one in found]
    console.show(console.table(["environment", "task", "from"], rows))


@app.command("show")
def show_environment(
    name: EnvironmentName, data: TaskData = None, row: RowNumber = 0, set: Sets = None, json: JsonObject = False
) -> None:
    """Show what an environment is, its options, and the first messages and tools of a row.

    It is asked in a process of its own, as in a run.

    Examples:

      rlcli env show guess_number

      rlcli env show countdown --data data/countdown --row 3

      rlcli env show path/to/file.py:Class --set environment.options.high=10 --json
    """
    from rlcli.environments.environment import ENVIRONMENTS

    with opened(name, data, row, set or []) as task:
        found: dict[str, Any] = {
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
            opening, found["problem"] = None, error.message
    found["tools"] = list(opening.tools) if opening else []
    found["messages"] = list(opening.messages) if opening else []
    if json:
        console.emit_json(found)
    else:
        _print(found)


def _summary(name: str) -> dict[str, Any]:
    """The first line of its docstring, or why loading failed: one broken package must not hide the others."""
    from rlcli.environments.environment import ENVIRONMENTS

    try:
        found: Any = ENVIRONMENTS.get(name)
    except RlcliError as error:
        return {"summary": str(error), "loads": False}
    if isinstance(found, list | tuple):
        return {"summary": f"tools: {', '.join(one.__name__ for one in found)}", "loads": True}
    return {"summary": (inspect.getdoc(found) or "").partition("\n")[0], "loads": True}


def _print(found: dict[str, Any]) -> None:
    console.plain(f"{found['name']} (from {found['source']}: {found['target']})\n")
    console.plain(found["doc"] or "It has no docstring.")
    if found["options"]:
        rows = [
            (one["name"], one["type"], "must be given" if one["required"] else one["default"])
            for one in found["options"]
        ]
        console.show(console.table(["environment.options.…", "type", "default"], rows))
    for tool in found["tools"]:
        console.plain(f"\ntool {json.dumps(tool.get('function', tool), ensure_ascii=False, indent=2)}")
    console.plain("")
    for message in found["messages"]:
        print_message(message)
    if "problem" in found:
        console.plain(f"no conversation without --data or options: {found['problem']}")


# Last: commands are listed in the order of use.
app.command("try")(play)
