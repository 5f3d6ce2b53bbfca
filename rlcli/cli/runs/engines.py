"""`rlcli engines`: lists the inference servers of a run, and lets servers join it or leave."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlcli.cli import console
from rlcli.cli.command_group import Group
from rlcli.cli.options import Json, RunName

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="List the inference servers of a run; let others join it, or leave."
)

Url = Annotated[str, typer.Argument(metavar="URL", help="A server of vLLM or SGLang, such as http://host:8000.")]
COLUMNS: tuple[Literal["kind", "state", "running", "finished", "lost", "weights"], ...]
COLUMNS = ("kind", "state", "running", "finished", "lost", "weights")


@app.command("list")
def list_engines(run: RunName, json: Json = False) -> None:
    """List the servers of a run with rollout.engine = server: starting, ready, lost or gone, and why.

    running and finished: responses. lost: how often. weights: the version
    that it has. Of a run that has ended it is the last state.

    Examples:

      rlcli engines list grpo-1

      rlcli engines list runs/gsm8k --json
    """
    from rlcli.launch.resume import find_record
    from rlcli.rollout.servers.server_record import states
    from rlcli.support.redact import printable

    workers = states(find_record(run))
    if json:
        console.emit_json(workers)
        return
    servers = [(_name(state["worker"], server["server"]), server) for state in workers for server in state["servers"]]
    rows = [[name, *(printable(str(server[column])) for column in COLUMNS)] for name, server in servers]
    console.show(console.table(("server", *COLUMNS), rows))
    for name, server in servers:
        if server["why"]:
            console.plain(printable(f"{name}: {server['why']}"))


def _name(worker: int, address: str) -> str:
    """A server's name: one that the run started is named by worker and number, as the path of its socket is long."""
    return f"worker {worker}, {Path(address).stem}" if address.startswith("unix:") else address


@app.command("add")
def add(run: RunName, url: Url) -> None:
    """Let a server join a run: it gets the current weights, then responses to generate.

    Examples:

      rlcli engines add grpo-1 http://node7:8000
    """
    from rlcli.launch.resume import find_record
    from rlcli.rollout.servers.server_record import request_change
    from rlcli.support.json_link import checked_url

    request_change(find_record(run), "add", checked_url(url))
    console.plain(f"{url} joins within seconds: rlcli engines list {run}")


@app.command("remove")
def remove(run: RunName, url: Url) -> None:
    """Drain a server and detach it from a run. The run continues with the others.

    Examples:

      rlcli engines remove grpo-1 http://node7:8000
    """
    from rlcli.errors import DataError
    from rlcli.launch.resume import find_record
    from rlcli.rollout.servers.server_record import request_change, states

    folder = find_record(run)
    known = [server["server"] for state in states(folder) for server in state["servers"] if server["state"] != "gone"]
    if url not in known:
        raise DataError(f"{run}: no server {url}", f"its servers: {', '.join(known)}")
    if url.startswith("unix:"):
        raise DataError(f"{url} is a server that the run starts itself", "lower rollout.servers with --resume")
    request_change(folder, "remove", url)
    console.plain(f"{url} leaves once it has finished what it generates")
