"""`rlcli export`: writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlcli.cli import completion
from rlcli.cli.console import emit_json, plain, show, table
from rlcli.cli.next_commands import after_export, print_next
from rlcli.cli.options import JsonObject, ModelOut
from rlcli.errors import RlcliError
from rlcli.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlcli.export.export_types import Export

Source = Annotated[
    Path, typer.Argument(help="A run's folder, or one of its checkpoints.", autocompletion=completion.runs)
]
Step = Annotated[
    str, typer.Option(metavar="N|best", help="Which checkpoint of the run: a step, or best (default: the newest).")
]
Merge = Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base's weights.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        help="Dtype of the weights (default: as in training; adapters: float32). Whole models of a run in 16 bits are "
        "rounded as in training first."
    ),
]
Critic = Annotated[
    bool, typer.Option("--critic", help="Export the value model or process reward model instead of the policy.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an export in the folder.")]
Push = Annotated[
    str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this hub repository, created as private.")
]
WithReport = Annotated[
    bool,
    typer.Option(
        "--report",
        help="Add the report of the run (rlcli report) in the folder report, without names, addresses and folders "
        "of this machine. It shows samples of the training data.",
    ),
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Skip the comparisons with the base and with the trainer.")]


def export(
    source: Source,
    out: ModelOut,
    step: Step = "",
    merge: Merge = False,
    dtype: Dtype = None,
    critic: Critic = False,
    force: Force = False,
    push: Push = None,
    with_report: WithReport = False,
    no_check: NoCheck = False,
    as_json: JsonObject = False,
) -> None:
    """Write a checkpoint as a folder for transformers, vLLM and the hub, with a model card.

    Before the folder gets its name, it is loaded and compared with the base model, from which it must differ, and with
    the trainer's log-probs.

    Examples:

      rlcli export runs/grpo-1 --out my-model

      rlcli export runs/grpo-1 --step best --out my-model --report --push me/my-model

      rlcli export runs/lora-1/checkpoints/step-000050 --merge --dtype bfloat16 --out merged
    """
    from rlcli.support.extras import require

    require("torch", "transformers", "peft")
    from rlcli.export import export_folder as exporting
    from rlcli.export.checkpoint_source import find_origin
    from rlcli.export.export_types import Options
    from rlcli.runs.tracking.run_console import View
    from rlcli.support.hub import check_push, push_folder

    with View() as view:
        view.phase(f"verify {source}")
        exporting.check_out(out, force)
        if push:
            check_push(push)
        origin = find_origin(source, step, view.note)
        if with_report and origin.run is None:
            raise RlcliError(f"--report: {source} is not in the folder of a run", "leave it out")
        options = Options(merge, dtype or "", critic, not no_check)
        result = exporting.export(
            origin,
            out,
            options,
            force=force,
            on_phase=view.phase,
            on_note=view.note,
            report=_write_report if with_report else None,
        )
        url = ""
        if push:
            if result.kind == "adapter" and Path(result.base).is_dir():
                view.note(f"adapter_config.json names the base by its path here, {result.base}: others need its hub id")
            view.phase(f"push to {push}")
            url = push_folder(out, push)
    _print(result, url, as_json)


def _write_report(run: Path, out: Path) -> None:
    """Write pages about the run, as the entry point `pages` of `rlcli.reports` does."""
    from rlcli.runs.run_data import RunData

    reports: Registry[Callable[[Sequence[RunData], Path], object]] = Registry("report", "rlcli.reports")
    reports.get("pages")([RunData(run)], out)


def _print(result: Export, url: str, as_json: bool) -> None:
    if as_json:
        emit_json({**asdict(result), "pushed": url or None})
        return
    rows = [
        ("weights", str(result.change or "not compared with the base")),
        ("log-probs", str(result.log_probs or "not compared with the trainer's")),
        *([("pushed", url)] if url else []),
    ]
    plain(f"{result.path}: {result.kind}, {result.dtype}, step {result.step} from {result.base}")
    show(table(["check", ""], rows))
    print_next(after_export(result.path, result.kind))
