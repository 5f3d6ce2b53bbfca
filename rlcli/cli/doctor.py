"""`rlcli doctor`: one line for each thing that a run needs from the machine, with a fix if it is missing."""

from __future__ import annotations

import typer

from rlcli.cli import console
from rlcli.cli.options import Json

MARKS = {"pass": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(json: Json = False) -> None:
    """Check this machine: one line for each thing that rlcli needs, with a fix if it is missing.

    Exit code 1 if something that training needs fails; 0 with warnings only.

    Examples:

      rlcli doctor
      rlcli doctor --json
    """
    from rich.markup import escape

    from rlcli.doctor import Status, diagnose

    with console.stderr().status("checking; this takes half a minute…"):
        findings = diagnose()
    failed = [finding.name for finding in findings if finding.status is Status.FAIL]
    if json:
        console.emit_json({"ok": not failed, "checks": findings})
    else:
        for finding in findings:
            hint = f"; [bold]{escape(finding.hint)}[/]" if finding.hint else ""
            line = f"{MARKS[finding.status]} {finding.status}  {finding.name:<18} {escape(finding.detail)}{hint}"
            console.stdout().print(line, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
