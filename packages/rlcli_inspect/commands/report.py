"""`rlcli report`: writes pages about runs that open from disk."""

from __future__ import annotations

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
    folder: Annotated[Path, typer.Option("--out", help="Folder to write to; a report in it is replaced.")],
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

    check_out(folder)
    run_data = opened(runs)
    with console.progress() as on_progress:
        written = write_report(run_data, folder, max_mb * MB, on_progress)
    if as_json:
        coverage = {
            name: {kind: part.as_dict() for kind, part in kinds.items()} for name, kinds in written.coverage.items()
        }
        images = {name: {"shown": shown, "of": total} for name, (shown, total) in written.images.items()}
        facts = {"path": written.path, "bytes": written.bytes, "files": written.files, "kept": coverage}
        console.emit_json(facts | {"pictures": images})
        return
    for note in written.notes:
        console.note(f"warning: {note}")
    for name, kinds in written.coverage.items():
        for kind, part in kinds.items():
            if not part.all:
                groups = (
                    f", {part.groups:,} of their {part.total_groups:,} groups"
                    if part.groups < part.total_groups
                    else ""
                )
                console.plain(
                    f"{name}: {kind} of {part.steps:,} of {part.total_steps:,} steps{groups}; rlcli view shows all"
                )
    for name, (shown, total) in written.images.items():
        if shown < total:
            console.plain(f"{name}: {shown:,} of {total:,} images; the pages say why")
    console.plain(f"{written.path} ({written.bytes / MB:.1f} MB in {written.files} file{'s' * (written.files > 1)})")


def opened(runs: list[Path]) -> list[RunData]:
    """The runs, by path or by name below runs/. RlcliError for a folder that is no run."""
    from rlcli.launch.resume import find_record
    from rlcli.runs.run_data import RunData

    return [RunData(find_record(name)) for name in runs]
