"""`rlcli view`: serves the pages about runs on this machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rlcli.cli import console
from rlcli_inspect.commands.report import Runs, opened


def view(
    runs: Runs,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on (default: the first free one from 8765).")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
) -> None:
    """Show in a browser what a run does: curves, samples, tokens, time. Follows a run in progress. Ctrl-C ends it.

    It listens on this machine alone, for those who have the printed address: it ends with a secret token. From another
    machine, forward the port, and open the same address there: ssh -L 8765:localhost:8765 MACHINE

    Examples:

      rlcli view gsm8k

      rlcli view runs/gsm8k runs/gsm8k-dapo --port 9000 --no-browser
    """
    from rlcli_inspect.report.page_api import Api
    from rlcli_inspect.report.page_server import Server, serve

    def on_start(server: Server) -> None:
        console.plain(server.url)
        if not no_browser:
            open_browser(server.once)

    api = Api(opened(runs))
    try:
        serve(api, port, on_start)
    except KeyboardInterrupt:
        console.note("ended")


def open_browser(url: str) -> bool:
    """Open the page if there is a desktop: without one, a browser for terminals would take this terminal."""
    import webbrowser

    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
