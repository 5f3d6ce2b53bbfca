"""`rlcli doctor`: a line for each thing that a run needs of the machine: it is there, or this is the mend."""

from __future__ import annotations

from typing import Annotated

import typer

from rlcli.cli import console

MARKS = {"pass": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine: a line for each thing that rlcli needs, with its mend where it is missing.

    Exit code 1 when something fails that training needs; warnings leave it at 0.

    Examples:

      rlcli doctor
      rlcli doctor --json
    """
    from rich.markup import escape

    from rlcli.doctor import Status, diagnose

    with console.stderr().status("looking around, which takes half a minute…"):
        findings = diagnose()
    failed = [finding.name for finding in findings if finding.status is Status.FAIL]
    if json:
        console.emit_json({"ok": not failed, "checks": findings})
    else:
        for finding in findings:
            mend = f"; [bold]{escape(finding.mend)}[/]" if finding.mend else ""
            line = f"{MARKS[finding.status]} {finding.status}  {finding.name:<18} {escape(finding.detail)}{mend}"
            console.stdout().print(line, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
