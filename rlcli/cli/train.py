"""`rlcli train`: one run of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.trainer.preflight import Prepared
    from rlcli.trainer.resume import Resumption
    from rlcli.trainer.view import View

INTERRUPTED = 130


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name (rlcli recipes list) or a path to a .toml file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model.")] = None,
    data: Annotated[str | None, typer.Option(help="A parquet file, or a folder with train.parquet.")] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluate on this parquet file, or this folder's test.parquet, before and after.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/RECIPE-N).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with the run in this folder from its newest checkpoint, in place."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes, one a device.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompt order, sampling and initialisation.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="Verifier of every row, such as 'math + 0.1 * format' or some/file.py:function.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits from the same seed; --dry-run tells what it costs.")
    ] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster (default: RAY_ADDRESS, else local).")
    ] = None,
    show_samples: Annotated[int, typer.Option(min=0, help="Show this many samples of each step.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the derived plan and leave.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run in the run folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a model by reinforcement learning with verifiable rewards.

    Examples:

      rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k

      rlcli train grpo --model ./my-model --data data/gsm8k --workers 8 --set lora.rank=16

      rlcli train grpo --model ./my-model --data data/gsm8k --dry-run

      rlcli train --resume runs/grpo-1
    """
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    flags: dict[str, object] = {
        "model.path": model,
        "data.path": data,
        "evaluation.data": eval_data,
        "train.steps": steps,
        "train.seed": seed,
        "train.deterministic": deterministic or None,
        "verifier.name": verifier,
        "cluster.workers": workers,
        "cluster.address": ray_address,
    }
    if resume is not None:
        if out is not None or force:
            raise ConfigError(
                f"--resume {resume} goes on in that folder", f"leave {'--out' if out is not None else '--force'} out"
            )
        resume_training(resume, recipe, flags, sets or [], show_samples=show_samples, dry_run=dry_run, as_json=as_json)
        return
    if recipe is None:
        raise ConfigError(
            "no recipe is given", "name one (rlcli recipes list shows them), or go on with a run: --resume runs/NAME"
        )
    from rlcli.config.load import resolve

    resolved = resolve(recipe, flags, sets or [])
    run_training(resolved, out=out, show_samples=show_samples, dry_run=dry_run, force=force, as_json=as_json)


def run_training(
    resolved: Resolved, *, out: Path | None, show_samples: int, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Check, print the plan, run, print the result. Exits with 130 where the run was interrupted."""
    from rlcli.trainer.exporting import with_model_folders
    from rlcli.trainer.run_folder import RunFolder, default_out
    from rlcli.trainer.view import View

    target = out or default_out(resolved.recipe.header.name)
    with View(show_samples=show_samples) as view:
        view.phase("check model and data")
        RunFolder.check(target, force)
        # Noted in the run as they are found now: the newest checkpoint of another run may soon be another.
        resolved = replace(resolved, config=with_model_folders(resolved.config, view.note))
        outcome = _checked_run(resolved, target, view, [], dry_run=dry_run, force=force)
    _tell(outcome, as_json)


def resume_training(
    run: Path,
    recipe: str | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    *,
    show_samples: int = 0,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Go on with a run in its folder, which a run that is finished already does not need."""
    from rlcli.trainer.resume import resumption
    from rlcli.trainer.view import View

    notes: list[str] = []
    with View(show_samples=show_samples) as view:
        view.phase("check the run")
        resumed = resumption(run, recipe, flags, sets, notes.append)
        if resumed.nothing_to_do:
            outcome = _finished(resumed)
        else:
            outcome = _checked_run(resumed.resolved, resumed.run, view, notes, dry_run=dry_run, resumed=resumed)
    _tell(outcome, as_json)


def _checked_run(
    resolved: Resolved,
    target: Path,
    view: View,
    notes: list[str],
    *,
    dry_run: bool,
    force: bool = False,
    resumed: Resumption | None = None,
) -> dict[str, Any]:
    """What `_tell` prints: of a run that has ended, or with `dry_run` of one that could begin."""
    from rlcli.trainer.plan import derived_plan
    from rlcli.trainer.preflight import prepare
    from rlcli.trainer.resume import check_data

    view.phase("check model and data")
    prepared = prepare(resolved.config, on_note=notes.append)
    if resumed is not None:
        check_data(resumed, prepared.prompts.fingerprint())
    plan = derived_plan(prepared)
    if dry_run:
        return {"plan": dict(plan), "notes": notes, "config": resolved.config.model_dump(mode="json")}
    for line in [f"{what}: {how}" for what, how in plan] + notes:
        view.note(line)
    return train_in_folder(resolved, prepared, target, view, force=force, resumed=resumed)


def _tell(outcome: dict[str, Any], as_json: bool) -> None:
    """Print what `_checked_run` returned."""
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

    facts = {"sandbox": prepared.sandbox} if prepared.sandbox else {}
    with RunFolder.resume(target) if resumed else RunFolder.create(target, force=force, facts=facts) as folder:
        resumed_at = None
        if resumed is not None:
            resumed_at = resumed.step if resumed.checkpoint else -1
            rewind(folder.path, resumed_at)
        if resumed is None or resumed.changed:
            folder.write_config(dump_toml(resolved))
        tracking = resolved.config.tracking
        config = resolved.config.model_dump(mode="json")
        with (
            open_trackers(tracking.trackers, folder, tracking.project, config, view.note, resumed_at) as trackers,
            noting_failure(folder.path),
        ):
            result = launch(prepared, folder, trackers, view, resumed.checkpoint if resumed else None)
        at_one = {step: report["pass"]["pass@1"] for step, report in result.evaluations.items()}
        if result.rewards:
            reward_curve_png(
                folder.path / "reward.png",
                range(1, len(result.rewards) + 1),
                result.rewards,
                {step: (e["mean"], e["low"], e["high"]) for step, e in at_one.items()},
            )
    return _outcome(target, result.steps, result.stopped, result.checkpoint, result.rewards, result.evaluations)


def _finished(resumed: Resumption) -> dict[str, Any]:
    """What there is to say of a run that has nothing left to do."""
    from rlcli.cli.console import stderr
    from rlcli.trainer.record import evaluations_of, metrics_of

    total = resumed.resolved.config.train.steps
    stderr().print(f"all {total} steps of {resumed.run} are done: nothing to do; go on with --steps N", soft_wrap=True)
    assert resumed.checkpoint is not None, "a run without a checkpoint has steps to do"
    rewards = [line["reward/mean"] for line in metrics_of(resumed.run) if line["step"]]
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
    return {
        "out": str(target),
        "steps": steps,
        "stopped": stopped,
        "checkpoint": checkpoint,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "rewards": rewards,
        "evaluations": dict(evaluations),
    }
