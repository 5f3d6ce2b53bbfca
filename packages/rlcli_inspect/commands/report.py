"""`rlcli report`: writes pages about runs that open from disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.options import JsonObject

if TYPE_CHECKING:
    from rlcli.runs.run_data import RunData

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs' folders, or their names below runs/.")]


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="Folder to write to; a report in it is replaced.")],
    max_mb: Annotated[int, typer.Option(min=2, help="Size limit. Fewer samples are kept to stay below it.")] = 50,
    as_json: JsonObject = False,
) -> None:
    """Write pages that show what a run did: curves, samples, tokens, time. They open from disk, without a server.

    Two runs are also compared. Of a run with more samples than fit, whole
    groups of evenly spaced steps are kept; rlcli view shows all.

    Examples:

      rlcli report gsm8k --out report

      rlcli report runs/gsm8k runs/gsm8k-dapo --out compared --max-mb 20
    """
    from rlcli_inspect.report.static_report import MB, check_out, write_report

    check_out(out)
    found = opened(runs)
    with console.progress() as on_progress:
        written = write_report(found, out, max_mb * MB, on_progress)
    if as_json:
        kept = {name: {kind: asdict(one) for kind, one in kinds.items()} for name, kinds in written.kept.items()}
        pictures = {name: {"shown": one, "of": of} for name, (one, of) in written.pictures.items()}
        facts = {"path": written.path, "bytes": written.bytes, "files": written.files, "kept": kept}
        console.emit_json(facts | {"pictures": pictures})
        return
    for note in written.notes:
        console.note(f"warning: {note}")
    for name, kinds in written.kept.items():
        for kind, one in kinds.items():
            if not one.all:
                groups = f", {one.groups:,} of their {one.of_groups:,} groups" if one.groups < one.of_groups else ""
                console.plain(f"{name}: {kind} of {one.steps:,} of {one.of:,} steps{groups}; rlcli view shows all")
    for name, (shown, of) in written.pictures.items():
        if shown < of:
            console.plain(f"{name}: {shown:,} of {of:,} pictures; the pages say why")
    console.plain(f"{written.path} ({written.bytes / MB:.1f} MB in {written.files} file{'s' * (written.files > 1)})")


def opened(runs: list[Path]) -> list[RunData]:
    """The runs, by path or by name below runs/. RlcliError for a folder that is no run."""
    from rlcli.launch.resume import find_record
    from rlcli.runs.run_data import RunData

    return [RunData(find_record(name)) for name in runs]
