"""`rlcli runs`: lists runs, shows one with its samples, follows one, compares two, and resumes one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.command_group import Group, add_published
from rlcli.cli.options import AcceptChanges, Json, JsonResult, RayAddress, RunName, ShowSamples, WholePlan
from rlcli.cli.runs.prompts import prompts
from rlcli.cli.runs.samples import samples
from rlcli.cli.runs.show_run import show, time_text
from rlcli.cli.runs.watch import watch
from rlcli.cli.supervised import supervised

if TYPE_CHECKING:
    from rlcli.runs.listing import Run

# Only `resume` imports torch and Ray: the other commands answer at once.

app = typer.Typer(cls=Group, no_args_is_help=True, help="List runs; show, watch, compare or resume them.")
app.command("show")(show)
app.command("samples")(samples)
app.command("prompts")(prompts)
app.command("watch")(watch)
add_published(app, "runs", "compare", "signals")


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="The folder that holds the runs' folders.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List runs, the latest first: alive, finished, stopped (by a signal), failed, or killed without a record.

    A run with a file that no run writes, such as a pipe, is listed as unreadable, with the file, and not read.

    Examples:

      rlcli runs list

      rlcli runs list --json
    """
    from rlcli.runs.listing import runs_in

    runs = runs_in(root)
    if json:
        console.emit_json([asdict(run) for run in runs])
        return
    if not runs:
        console.plain(f"no runs in {root}")
        return
    # Where scores are not just 0 and 1, passing says little; --json has both.
    graded = any(run.mean_at_1 is not None and run.mean_at_1 != run.pass_at_1 for run in runs)
    rows = [
        (
            run.name,
            run.recipe,
            run.state,
            "" if run.problem else f"{run.step}/{run.steps}",
            _measured(run),
            _evaluated(run, graded=graded),
            "" if run.checkpoint is None else run.checkpoint,
            time_text(run.time, "%m-%d %H:%M"),
        )
        for run in runs
    ]
    # Short names: all must fit on one terminal line.
    columns = ["run", "recipe", "state", "step", "reward", "mean@1" if graded else "pass@1", "saved", "when"]
    console.show(console.table(columns, rows))
    for run in runs:
        if run.problem:
            console.note(f"{run.name}: {run.problem}")


@app.command("resume")
@supervised
def resume(
    run: RunName,
    steps: Annotated[int | None, typer.Option(help="Total steps of the run, to make it longer.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A key that may change; repeatable.", autocompletion=completion.keys
        ),
    ] = None,
    accept_changes: AcceptChanges = False,
    ray_address: RayAddress = None,
    show_samples: ShowSamples = 0,
    whole_plan: WholePlan = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change and exit.")] = False,
    as_json: JsonResult = False,
) -> None:
    """Resume a run from its newest intact checkpoint, in its folder. Same as: rlcli train --resume RUN

    Examples:

      rlcli runs resume grpo-1

      rlcli runs resume runs/grpo-1 --steps 400
    """
    from rlcli.cli.train.checked_run import Call, resume_training
    from rlcli.support.extras import TRAINING, require

    require(*TRAINING)
    flags = {"train.steps": steps, "cluster.address": ray_address}
    call = Call(show_samples, dry_run, as_json, plan=whole_plan, accept_changes=accept_changes)
    resume_training(run, None, flags, sets or [], call)


def _measured(run: Run) -> str:
    """The last reward, or the loss if the dataset has the responses."""
    if run.loss is not None:
        return f"loss {run.loss:.3g}"
    return "" if run.reward is None else f"{run.reward:.3f}"


def _evaluated(run: Run, *, graded: bool) -> str:
    """The last evaluation: the mean score if scores are graded, else the share that passed."""
    if graded:
        return "" if run.mean_at_1 is None else f"{run.mean_at_1:.3f}"
    return "" if run.pass_at_1 is None else f"{run.pass_at_1:.1%}"
