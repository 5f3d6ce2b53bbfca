"""What `rlcli train` and `rlcli runs resume` share: the checks before a run, the run itself, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlcli.attempt import INTERRUPTED
from rlcli.cli.console import emit_json, plain, show, stderr, table

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.launch.preflight import Prepared
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.launch.resume import Resumption
    from rlcli.tracking.console import View


def run_training(
    resolved: Resolved,
    *,
    out: Path | None,
    show_samples: int,
    dry_run: bool,
    force: bool,
    as_json: bool,
    profile: bool = False,
    auto_memory: bool = False,
) -> None:
    """Check, print the plan, run, print the result. Exits with 130 if the run was interrupted. profile: profile one
    step. auto_memory: use the largest sizes that fit in memory, unless they are set."""
    from rlcli.export.export import with_model_folders
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.runs.folder import RunFolder, default_out
    from rlcli.tracking.console import View

    target, notes = out or default_out(resolved.recipe.header.name), list[str]()
    with View(show_samples=show_samples) as view, EarlyStart() as early:
        view.phase("check the run folder")
        RunFolder.check(target, force)
        # Resolved now and recorded in the run: the newest checkpoint of another run may change.
        resolved = replace(resolved, config=with_model_folders(resolved.config, view.note))
        resolved, prepared, plan = check_run(resolved, view, notes, None if dry_run else early, auto_memory=auto_memory)
        if dry_run:
            outcome = try_run(resolved, prepared, plan, view, notes)
        else:
            view.phase("load torch and the engine")  # done by the next import, takes seconds
            from rlcli.launch.launch import train_in_folder

            outcome = train_in_folder(resolved, prepared, target, view, force=force, profile=profile, early=early)
    print_result(outcome, as_json)


def resume_training(
    run: Path,
    recipe: str | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    *,
    show_samples: int = 0,
    dry_run: bool = False,
    as_json: bool = False,
    profile: bool = False,
) -> None:
    """Continue a run in its folder, unless it is finished already."""
    from rlcli.launch.outcome import finished
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.launch.resume import resumption
    from rlcli.tracking.console import View

    notes: list[str] = []
    with View(show_samples=show_samples) as view, EarlyStart() as early:
        view.phase("check the run")
        resumed = resumption(run, recipe, flags, sets, notes.append)
        resolved, target = resumed.resolved, resumed.run
        if resumed.nothing_to_do:
            total = resolved.config.train.steps
            hint = f"all {total} steps of {target} are done: nothing to do; continue with --steps N"
            stderr().print(hint, soft_wrap=True)
            outcome = finished(resumed)
        else:
            resolved, prepared, plan = check_run(resolved, view, notes, None if dry_run else early, resumed)
            if dry_run:
                outcome = try_run(resolved, prepared, plan, view, notes)
            else:
                view.phase("load torch and the engine")
                from rlcli.launch.launch import train_in_folder

                outcome = train_in_folder(
                    resolved, prepared, target, view, resumed=resumed, profile=profile, early=early
                )
    print_result(outcome, as_json)


def check_run(
    resolved: Resolved,
    view: View,
    notes: list[str],
    early: EarlyStart | None,
    resumed: Resumption | None = None,
    *,
    auto_memory: bool = False,
) -> tuple[Resolved, Prepared, list[tuple[str, str]]]:
    """Run all checks that need no worker. Returns the resolved run and its plan, which is printed here unless early is
    None. early: starts Ray in the meantime; None: nothing will start."""
    from rlcli.cluster.process import startup
    from rlcli.launch.derived_plan import derived_plan
    from rlcli.launch.preflight import prepare
    from rlcli.launch.resume import check_data
    from rlcli.tracking import check_trackers

    startup.done("command")
    view.phase("check model and data")
    check_trackers(resolved.config.tracking.trackers)
    prepared = prepare(
        resolved.config,
        on_note=notes.append,
        on_checked=early.begin if early else lambda config, device: None,
        on_progress=view.progress,
        day=resumed.day if resumed else None,
    )
    startup.done("prepared")
    if resumed is not None:
        check_data(resumed, prepared.prompts.fingerprint())
    chosen: list[tuple[str, str]] = []
    if auto_memory:
        from rlcli.launch.planning.memory_auto import with_auto_memory

        resolved, prepared, chosen = with_auto_memory(resolved, prepared)
    plan = derived_plan(prepared) + chosen
    for line in [f"{what}: {how}" for what, how in plan] + notes if early else ():
        view.note(line)
    return resolved, prepared, plan


def try_run(
    resolved: Resolved, prepared: Prepared, plan: list[tuple[str, str]], view: View, notes: list[str]
) -> dict[str, Any]:
    """Try verifiers and weights, and return what `--dry-run` reports."""
    from rlcli.launch.dry_run import try_out

    view.phase("try verifiers and weights")
    try_out(prepared, notes.append)
    return {"plan": dict(plan), "notes": notes, "config": resolved.config.model_dump(mode="json")}


def print_result(outcome: dict[str, Any], as_json: bool) -> None:
    """Print the result of a run or dry run. Exits with 130 if the run was interrupted."""
    if as_json:
        emit_json(outcome)
    elif "plan" in outcome:
        show(table(["plan", ""], outcome["plan"].items()))
        for note in outcome["notes"]:
            plain(f"note: {note}")
    else:
        rows = [(name, value) for name, value in outcome.items() if isinstance(value, str | int | float)]
        rows += [(f"evaluation at step {step}", report["headline"]) for step, report in outcome["evaluations"].items()]
        show(table(["run", ""], rows))
    if outcome.get("stopped"):
        raise typer.Exit(INTERRUPTED)
