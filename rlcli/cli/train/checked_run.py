"""The shared part of `rlcli train` and `rlcli runs resume`: the checks before a run, the run itself, and its result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlcli.cli.console import emit_json, plain, show, stderr, table
from rlcli.cli.next_commands import after_training, print_next
from rlcli.support.attempt import INTERRUPTED, is_restart, is_supervised

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.config.schema import RunConfig
    from rlcli.launch.prepared_run import Prepared
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.launch.resume import Resumption
    from rlcli.runs.tracking.run_console import View


@dataclass(frozen=True)
class Call:
    """Options of one call of the command, which are not part of the run."""

    show_samples: int = 0
    """Samples of each step to print."""
    dry_run: bool = False
    """Check everything, train nothing."""
    as_json: bool = False
    """Print the result as JSON."""
    profile: bool = False
    """Profile one step."""
    plan: bool = False
    """Print the whole plan."""
    accept_changes: bool = False
    """Resume though a file that the run reads by path has changed."""
    untried: str = ""
    """The verifier, if it is code that only a recipe's file names: a dry run does not run it."""


def run_training(resolved: Resolved, call: Call, *, out: Path | None, force: bool, auto_memory: bool) -> None:
    """Check, print the plan, run, print the result. Exits with 130 if the run was interrupted. auto_memory: use the
    largest sizes that fit in memory, unless they are set."""
    from rlcli.export.export_folder import with_model_folders
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.runs.folder import RunFolder, default_out
    from rlcli.runs.tracking.run_console import View

    target = out or default_out(resolved.recipe.header.name)
    with View(show_samples=call.show_samples) as view, EarlyStart() as early:
        view.phase("check the run folder")
        RunFolder.check(target, force)
        # Resolved now and recorded in the run: the newest checkpoint of another run may change.
        resolved = replace(resolved, config=with_model_folders(resolved.config, view.note))
        checked = _checked(resolved, target, call, view, early, list(resolved.notes), auto_memory=auto_memory)
        if isinstance(checked, CheckedRun):
            from rlcli.launch.launch import train_in_folder

            outcome = train_in_folder(
                checked.resolved, checked.prepared, target, view, force=force, profile=call.profile, early=early
            )
        else:
            outcome = checked
    print_result(outcome, call.as_json)


def resume_training(
    run: Path, recipe: str | None, flags: Mapping[str, object], sets: Sequence[str], call: Call
) -> None:
    """Continue a run in its folder, unless it is finished already."""
    from rlcli.cluster.supervisor.failure_record import noting_failure
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.launch.recipe_code import refuse_code
    from rlcli.launch.resume import find_run, resumption
    from rlcli.runs.tracking.run_console import View

    if call.dry_run:
        recorded_config = str(find_run(run) / "config.toml")
        call = replace(
            call, untried=refuse_code(recorded_config, flags, sets, "--dry-run", leaves_verifier=True) or call.untried
        )

    notes: list[str] = []
    with View(show_samples=call.show_samples) as view, EarlyStart() as early:
        view.phase("check the run")
        with noting_failure(find_run(run)) if is_restart() else nullcontext():
            resumed = resumption(run, recipe, flags, sets, notes.append, accept_changes=call.accept_changes)
        checked: CheckedRun | dict[str, Any]
        if resumed.nothing_to_do:
            checked = _finished(resumed)
        else:
            checked = _checked(resumed.resolved, resumed.run, call, view, early, notes, resumed)
        if isinstance(checked, CheckedRun):
            from rlcli.launch.launch import train_in_folder

            outcome = train_in_folder(
                checked.resolved,
                checked.prepared,
                resumed.run,
                view,
                resumed=checked.resumed,
                profile=call.profile,
                early=early,
            )
        else:
            outcome = checked
    print_result(outcome, call.as_json)


def _finished(resumed: Resumption) -> dict[str, Any]:
    """The result of a run without remaining steps."""
    from rlcli.launch.run_outcome import finished

    total = resumed.resolved.config.train.steps
    hint = f"all {total} steps of {resumed.run} are done: nothing to do; continue with --steps N"
    stderr().print(hint, soft_wrap=True)
    return finished(resumed)


@dataclass(frozen=True)
class CheckedRun:
    """A run that has passed all checks, and whose plan is printed."""

    resolved: Resolved
    """The configuration with its origins."""
    prepared: Prepared
    """The result of the checks."""
    resumed: Resumption | None
    """The checkpoint of a resumed run."""


def _checked(
    resolved: Resolved,
    target: Path,
    call: Call,
    view: View,
    early: EarlyStart,
    notes: list[str],
    resumed: Resumption | None = None,
    *,
    auto_memory: bool = False,
) -> CheckedRun | dict[str, Any]:
    """Run all checks that need no worker, while `early` starts Ray, and print the plan. If there is nothing to train,
    returns the result: the report of `--dry-run` on verifiers and weights, or that of a finished run."""
    from rlcli.cluster.process import startup_times
    from rlcli.config.rules import without_effect
    from rlcli.launch.planner import planner
    from rlcli.launch.preflight import prepare, with_epochs_counted
    from rlcli.launch.resume import check_data, with_downloads, with_length_known
    from rlcli.launch.run_plan import derived_plan
    from rlcli.runs.tracking import check_trackers

    startup_times.done("command")
    view.phase("check model and data")
    check_trackers(resolved.config.tracking.trackers)
    if not call.dry_run:
        early.import_ray()
    with startup_times.few_collections():
        prepared = prepare(
            resolved.config,
            on_note=notes.append,
            on_checked=partial(_start_early, early=None if call.dry_run else early, view=view),
            on_progress=view.progress,
            day=resumed.day if resumed else None,
            loads_verifiers=not call.untried,
        )
    if call.untried:
        notes.append(
            f"verifier.name = {call.untried}: a dry run does not run code that only a recipe's file names, a run does; "
            f"to try it on the first rows: --verifier {shlex.quote(call.untried)}"
        )
    notes += without_effect(prepared.config)
    startup_times.done("prepared")
    if resolved.config.train.epochs is not None:
        noted = len(resolved.notes)
        resolved, prepared = with_epochs_counted(resolved, prepared)
        notes += resolved.notes[noted:]
        if resumed is not None:
            resumed = with_length_known(resumed, resolved, notes.append)
    if resumed is not None:
        resumed = check_data(with_downloads(resumed, notes.append), prepared.prompts.fingerprint())
        if resumed.nothing_to_do:  # known now, if the length was given in epochs
            return _finished(resumed)
    notes += without_effect(prepared.config)
    derived: list[tuple[str, str]] = []
    if resumed is None:
        resolved, prepared, derived = planner().with_sizes(resolved, prepared, largest=auto_memory)
    prepared, sleep_level = planner().with_least_sleep(prepared)
    derived += sleep_level
    plan = derived_plan(prepared) + derived
    if call.dry_run:
        from rlcli.launch.dry_run import try_out

        plan += planner().estimates(prepared, prepared.config.train.steps - (resumed.step if resumed else 0))

        view.phase("try verifiers and weights")
        try_out(prepared, notes.append, verifies=not call.untried)
        return {"plan": dict(plan), "notes": notes, "config": resolved.config.model_dump(mode="json")}
    if not call.plan:
        plan = planner().summary(prepared, plan, target, resumed.step if resumed else 0) + derived
    for line in [f"{name}: {value}" for name, value in plan] + notes:
        view.note(line)
    view.phase("load torch and the engine")  # done by the next import, takes seconds
    with startup_times.few_collections():
        import rlcli.launch.launch  # noqa: F401

    return CheckedRun(resolved, prepared, resumed)


def _start_early(config: RunConfig, device: str, early: EarlyStart | None, view: View) -> None:
    """After the fast checks: measure the machine unless its rates are known, while nothing else runs on it; then start
    Ray."""
    from rlcli.launch.planner import planner

    if not planner().rates_are_known(config, device):
        view.phase("measure this machine, once")
        planner().measure_rates(config, device)
        view.phase("check model and data")
    if early is not None:
        early.begin(config, device)


def _result_rows(outcome: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the result table: the main figures, rounded. `--json` has all of them."""
    name = "loss" if "losses" in outcome else "reward"
    first, last = (outcome[f"{name}_{position}"] for position in ("first", "last"))
    rows = [("folder", outcome["out"]), ("steps", f"{outcome['steps']}" + ", stopped" * outcome["stopped"])]
    if first is not None and last is not None:
        rows.append((name, f"{first:.3f} → {last:.3f} (first → last step)"))
    rows += [(f"evaluation at step {step}", report["headline"]) for step, report in outcome["evaluations"].items()]
    return rows + ([("checkpoint", outcome["checkpoint"])] if outcome["checkpoint"] else [])


def print_result(outcome: dict[str, Any], as_json: bool) -> None:
    """Print the result of a run or dry run. Exits with 130 if the run was interrupted."""
    if as_json:
        emit_json(outcome)
    elif "plan" in outcome:
        show(table(["plan", ""], outcome["plan"].items()))
        for note in outcome["notes"]:
            plain(f"note: {note}")
    else:
        show(table(["run", ""], _result_rows(outcome)))
        if not (outcome["stopped"] and is_supervised()):  # the supervisor prints how to continue
            print_next(after_training(Path(outcome["out"]), outcome["stopped"]))
    if outcome.get("stopped"):
        raise typer.Exit(INTERRUPTED)
