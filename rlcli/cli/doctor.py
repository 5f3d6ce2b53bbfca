"""`rlcli doctor`: one line for each thing that a run needs from the machine, with a fix if it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.options import Json

if TYPE_CHECKING:
    from rlcli.launch.machine_checks import Finding

MARKS = {"pass": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="MODEL",
            help="Check the chat template of this model instead: does it append messages? A folder or hub id.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Check this machine: one line for each thing that rlcli needs, with a fix if it is missing.

    Exit code 1 if something that training needs fails; 0 with warnings only.

    Examples:

      rlcli doctor
      rlcli doctor --json
      rlcli doctor --template Qwen/Qwen3-0.6B
    """
    from rlcli.launch.machine_checks import Status, check_template, diagnose

    with console.stderr().status("checking; this takes half a minute…"):
        findings = check_template(template) if template else diagnose()
    failed = [finding.name for finding in findings if finding.status is Status.FAIL]
    if json:
        console.emit_json({"ok": not failed, "checks": findings})
    else:
        _show(findings)
    if failed:
        raise typer.Exit(1)


def _show(findings: Sequence[Finding]) -> None:
    from rich.markup import escape

    width = max(18, *(len(finding.name) for finding in findings))
    for finding in findings:
        hint = f"; [bold]{escape(finding.hint)}[/]" if finding.hint else ""
        line = f"{MARKS[finding.status]} {finding.status}  {finding.name:<{width}} {escape(finding.detail)}{hint}"
        console.stdout().print(line, markup=True, soft_wrap=True)
