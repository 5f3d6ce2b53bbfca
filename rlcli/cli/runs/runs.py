"""`rlcli runs`: lists runs, shows one, compares two, and resumes one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.group import Group
from rlcli.cli.options import Json, JsonResult, RayAddress, ShowSamples
from rlcli.cli.runs.compare import compare
from rlcli.cli.runs.signals import signals
from rlcli.cli.supervised import supervised
from rlcli.errors import ConfigError

# Only `resume` imports torch and Ray: the other commands answer at once.

app = typer.Typer(cls=Group, no_args_is_help=True, help="List runs, show one, compare two, resume one.")

app.command("compare")(compare)
app.command("signals")(signals)

RunName = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")]
LAST_EVENTS = 12


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="The folder that holds the runs' folders.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List runs, the latest first: alive, finished, stopped (by a signal), failed, or killed without a record.

    Examples:

      rlcli runs list

      rlcli runs list --json
    """
    from rlcli.runs.listing import runs_in

    found = runs_in(root)
    if json:
        console.emit_json([asdict(run) for run in found])
        return
    if not found:
        console.plain(f"no runs in {root}")
        return
    rows = [
        (
            run.name,
            run.recipe,
            run.state,
            f"{run.step}/{run.steps}",
            "" if run.reward is None else f"{run.reward:.3f}",
            "" if run.pass_at_1 is None else f"{run.pass_at_1:.1%}",
            "" if run.checkpoint is None else run.checkpoint,
            _time(run.time, "%m-%d %H:%M"),
        )
        for run in found
    ]
    # Short names: all must fit on one terminal line.
    columns = ["run", "recipe", "state", "step", "reward", "pass@1", "saved", "when"]
    console.show(console.table(columns, rows))


@app.command("show")
def show(run: RunName, json: Json = False) -> None:
    """Show one run: its changes to the recipe, checkpoints, evaluations and last events.

    Examples:

      rlcli runs show grpo-1

      rlcli runs show runs/grpo-1 --json
    """
    from rlcli.launch.resume import find_run
    from rlcli.runs.folder import events_of
    from rlcli.runs.listing import check_readable, checkpoints_of, run_at
    from rlcli.runs.records import evaluations_of

    folder = find_run(run)
    own = _own_settings(folder)
    check_readable(folder)
    summary, evaluations = run_at(folder), evaluations_of(folder)
    events = events_of(folder)[-LAST_EVENTS:]
    checkpoints = checkpoints_of(folder)
    if json:
        found = {"settings": own, "checkpoints": checkpoints, "evaluations": evaluations, "events": events}
        console.emit_json(asdict(summary) | found)
        return
    rows = [
        ("recipe", summary.recipe),
        ("state", summary.state),
        ("step", f"{summary.step} of {summary.steps}"),
        ("reward", "" if summary.reward is None else f"{summary.reward:.3f}"),
        ("checkpoints", ", ".join(map(str, checkpoints)) or "none"),
    ]
    console.show(console.table([summary.name, ""], rows))
    settings = [(key, setting["value"], setting["origin"]) for key, setting in own.items()]
    if settings:
        console.show(console.table(["setting", "value", "from"], settings))
    if evaluations:
        headlines = [(step, report.get("headline", "")) for step, report in sorted(evaluations.items())]
        console.show(console.table(["step", "evaluation"], headlines))
    if events:
        console.show(console.table(["when", "event", ""], [_event_row(event) for event in events]))


@app.command("resume")
@supervised
def resume(
    run: RunName,
    steps: Annotated[int | None, typer.Option(help="Total steps of the run, to make it longer.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key that may change; repeatable.")
    ] = None,
    ray_address: RayAddress = None,
    show_samples: ShowSamples = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change and exit.")] = False,
    as_json: JsonResult = False,
) -> None:
    """Resume a run from its newest intact checkpoint, in its folder. Same as: rlcli train --resume RUN

    Examples:

      rlcli runs resume grpo-1

      rlcli runs resume runs/grpo-1 --steps 400
    """
    from rlcli.cli.train.run import Call, resume_training
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    flags = {"train.steps": steps, "cluster.address": ray_address}
    resume_training(run, None, flags, sets or [], Call(show_samples, dry_run, as_json))


def _own_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings that come neither from the recipe nor from a default: key → value and origin."""
    from rlcli.config.changes import origins_in
    from rlcli.config.recipes import flatten
    from rlcli.runs.listing import config_of

    file = folder / "config.toml"
    try:
        text = file.read_text(encoding="utf-8")
        tomllib.loads(text)
        origins = origins_in(text)
    except (OSError, ValueError, RecursionError) as error:
        why = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"it is not TOML: {error}"
        why = getattr(error, "strerror", None) or why
        raise ConfigError(f"{file} cannot be read: {why}", "put a copy of the run's configuration there") from error
    values = flatten(config_of(folder))
    given = {key: origin for key, origin in origins.items() if not origin.startswith("recipe ")}
    return {key: {"value": values.get(key), "origin": origin} for key, origin in given.items()}


def _event_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    from rlcli.runs.listing import number

    facts = {name: value for name, value in event.items() if name not in ("time", "event", "path")}
    summary = facts.pop("message", None) or facts.pop("headline", None)
    rest = ", ".join(f"{name} {value}" for name, value in facts.items() if not isinstance(value, dict | list))
    return (
        _time(number(event.get("time"))),
        str(event.get("event")),
        f"{summary} ({rest})" if summary and rest else str(summary or rest),
    )


def _time(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime(form)
