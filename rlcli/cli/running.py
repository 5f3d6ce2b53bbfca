"""A run from the command line: checked, planned, run in its folder, and told of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlcli.attempt import INTERRUPTED

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.trainer.preflight import Prepared
    from rlcli.trainer.resume import Resumption
    from rlcli.trainer.view import View
    from rlcli.workers.early import EarlyStart


def checked_run(
    resolved: Resolved,
    target: Path,
    view: View,
    notes: list[str],
    *,
    dry_run: bool,
    force: bool = False,
    resumed: Resumption | None = None,
    profile: bool = False,
    auto_memory: bool = False,
) -> dict[str, Any]:
    """What `tell` prints: of a run that has ended, or with `dry_run` of one that could begin. profile: one step.
    auto_memory: the sizes that memory decides on, as far as they are not set, are the largest that fit."""
    from rlcli.trainer.plan import derived_plan
    from rlcli.trainer.preflight import prepare
    from rlcli.trainer.resume import check_data
    from rlcli.trainer.tracking import check_trackers
    from rlcli.workers import startup
    from rlcli.workers.early import EarlyStart

    startup.done("command")
    view.phase("check model and data")
    check_trackers(resolved.config.tracking.trackers)
    with EarlyStart() as early:
        prepared = prepare(
            resolved.config,
            on_note=notes.append,
            on_checked=early.begin if not dry_run else lambda config, device: None,
            on_progress=view.progress,
            day=resumed.day if resumed else None,
        )
        startup.done("prepared")
        if resumed is not None:
            check_data(resumed, prepared.prompts.fingerprint())
        chosen: list[tuple[str, str]] = []
        if auto_memory:
            from rlcli.trainer.planning import with_auto_memory

            resolved, prepared, chosen = with_auto_memory(resolved, prepared)
        plan = derived_plan(prepared) + chosen
        if dry_run:
            from rlcli.trainer.trying import try_out

            view.phase("try verifiers and weights")
            try_out(prepared, notes.append)
            return {"plan": dict(plan), "notes": notes, "config": resolved.config.model_dump(mode="json")}
        for line in [f"{what}: {how}" for what, how in plan] + notes:
            view.note(line)
        return train_in_folder(
            resolved, prepared, target, view, force=force, resumed=resumed, profile=profile, early=early
        )


def tell(outcome: dict[str, Any], as_json: bool) -> None:
    """Print what `checked_run` returned."""
    from rlcli.cli.console import emit_json, plain, show, table

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


def train_in_folder(
    resolved: Resolved,
    prepared: Prepared,
    target: Path,
    view: View,
    *,
    force: bool = False,
    resumed: Resumption | None = None,
    profile: bool = False,
    early: EarlyStart | None = None,
) -> dict[str, Any]:
    """Run in the folder `target`, or go on there, and return what there is to say of it, as plain values."""
    from rlcli.config.load import dump_toml

    view.phase("load torch and vLLM")  # which the next import does, and takes seconds
    from rlcli.trainer.failing import noting_failure
    from rlcli.trainer.launch import launch
    from rlcli.trainer.plots import reward_curve_png
    from rlcli.trainer.record import rewind
    from rlcli.trainer.run_folder import RunFolder
    from rlcli.trainer.tracking import open_trackers
    from rlcli.workers import startup

    startup.done("imported")

    facts = {"sandbox": prepared.sandbox} if prepared.sandbox else {}
    facts |= {"day": prepared.day.isoformat()} if prepared.day else {}
    with RunFolder.resume(target) if resumed else RunFolder.create(target, force=force, facts=facts) as folder:
        resumed_at = None
        if resumed is not None:
            resumed_at = resumed.step if resumed.checkpoint else -1
        if resumed_at == -1:  # else the record is cut back once the workers have loaded the checkpoint
            rewind(folder.path, -1)
        if resumed is None or resumed.changed:
            folder.write_config(dump_toml(resolved))
        tracking = resolved.config.tracking
        config = resolved.config.model_dump(mode="json")
        with (
            open_trackers(tracking.trackers, folder, tracking.project, config, view.note, resumed_at) as trackers,
            noting_failure(folder.path),
        ):
            checkpoint = resumed.checkpoint if resumed else None
            result = launch(prepared, folder, trackers, view, checkpoint, profile=profile, early=early)
        at_one = {step: report["pass"]["pass@1"] for step, report in result.evaluations.items()}
        try:
            if any(map(math.isfinite, result.rewards)):
                reward_curve_png(
                    folder.path / "reward.png",
                    [step for step, reward in enumerate(result.rewards, 1) if math.isfinite(reward)],
                    [reward for reward in result.rewards if math.isfinite(reward)],
                    {step: (e["mean"], e["low"], e["high"]) for step, e in at_one.items()},
                )
        except OSError as error:  # a picture of what is on record
            view.note(f"{folder.path / 'reward.png'} cannot be written: {error.strerror}")
    return _outcome(target, result.steps, result.stopped, result.checkpoint, result.rewards, result.evaluations)


def finished(resumed: Resumption) -> dict[str, Any]:
    """What there is to say of a run that has nothing left to do."""
    from rlcli.cli.console import stderr
    from rlcli.trainer.record import evaluations_of, rewards_of

    total = resumed.resolved.config.train.steps
    stderr().print(f"all {total} steps of {resumed.run} are done: nothing to do; go on with --steps N", soft_wrap=True)
    assert resumed.checkpoint is not None, "a run without a checkpoint has steps to do"
    rewards = rewards_of(resumed.run)
    newest = str(resumed.checkpoint.path)
    return _outcome(resumed.run, resumed.step, False, newest, rewards, evaluations_of(resumed.run))


def _outcome(
    target: Path,
    steps: int,
    stopped: bool,
    checkpoint: str,
    rewards: list[float],
    evaluations: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    found = [reward if math.isfinite(reward) else None for reward in rewards]
    return {
        "out": str(target),
        "steps": steps,
        "stopped": stopped,
        "checkpoint": checkpoint,
        "reward_first": found[0] if found else None,
        "reward_last": found[-1] if found else None,
        "rewards": found,
        "evaluations": dict(evaluations),
    }
