"""`rlcli train`: one run of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.trainer.preflight import Prepared
    from rlcli.trainer.view import View

INTERRUPTED = 130


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (rlcli recipes list) or a path to a .toml file.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model.")] = None,
    data: Annotated[str | None, typer.Option(help="A parquet file, or a folder with train.parquet.")] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluate on this parquet file, or this folder's test.parquet, before and after.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/RECIPE-N).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes, one a device.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompt order, sampling and initialisation.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="Verifier of every row, such as 'math + 0.1 * format' or some/file.py:function.")
    ] = None,
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
    """
    from rlcli.config.load import resolve
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    resolved = resolve(
        recipe,
        {
            "model.path": model,
            "data.path": data,
            "evaluation.data": eval_data,
            "train.steps": steps,
            "train.seed": seed,
            "verifier.name": verifier,
            "cluster.workers": workers,
            "cluster.address": ray_address,
        },
        sets or [],
    )
    run_training(resolved, out=out, show_samples=show_samples, dry_run=dry_run, force=force, as_json=as_json)


def run_training(
    resolved: Resolved, *, out: Path | None, show_samples: int, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Check, print the plan, run, print the result. Exits with 130 where the run was interrupted."""
    from rlcli.cli.console import emit_json, plain, show, table
    from rlcli.trainer.plan import derived_plan
    from rlcli.trainer.preflight import prepare
    from rlcli.trainer.run_folder import RunFolder, default_out
    from rlcli.trainer.view import View

    notes: list[str] = []
    target = out or default_out(resolved.recipe.header.name)
    with View(show_samples=show_samples) as view:
        view.phase("check model and data")
        RunFolder.check(target, force)
        prepared = prepare(resolved.config, on_note=notes.append)
        plan = derived_plan(prepared)
        if not dry_run:
            for line in [f"{what}: {how}" for what, how in plan] + notes:
                view.note(line)
            result = train_in_folder(resolved, prepared, target, view, force=force)
    if dry_run and as_json:
        emit_json({"plan": dict(plan), "notes": notes, "config": resolved.config.model_dump(mode="json")})
    elif dry_run:
        show(table(["plan", ""], plan))
        for note in notes:
            plain(f"note: {note}")
    elif as_json:
        emit_json(result)
    else:
        rows = [(name, value) for name, value in result.items() if isinstance(value, str | int | float)]
        rows += [(f"evaluation at step {step}", report["headline"]) for step, report in result["evaluations"].items()]
        show(table(["run", ""], rows))
    if not dry_run and result["stopped"]:
        raise typer.Exit(INTERRUPTED)


def train_in_folder(
    resolved: Resolved, prepared: Prepared, target: Path, view: View, *, force: bool = False
) -> dict[str, Any]:
    """Run in the folder `target` and return what there is to say of it, as plain values."""
    from rlcli.config.load import dump_toml

    view.phase("load torch and vLLM")  # which the next import does, and takes seconds
    from rlcli.trainer.launch import launch
    from rlcli.trainer.plots import reward_curve_png
    from rlcli.trainer.run_folder import RunFolder
    from rlcli.trainer.tracking import open_trackers

    facts = {"sandbox": prepared.sandbox} if prepared.sandbox else {}
    with RunFolder.create(target, force=force, facts=facts) as folder:
        folder.write_config(dump_toml(resolved))
        tracking = resolved.config.tracking
        trackers = open_trackers(
            tracking.trackers, folder, tracking.project, resolved.config.model_dump(mode="json"), view.note
        )
        try:
            result = launch(prepared, folder, trackers, view)
        finally:
            trackers.close()
        evaluations = {step: report.passes.passed[1] for step, report in result.evaluations.items()}
        if result.rewards:
            reward_curve_png(
                folder.path / "reward.png",
                range(1, len(result.rewards) + 1),
                result.rewards,
                {step: (e.mean, e.low, e.high) for step, e in evaluations.items()},
            )
    return {
        "out": str(target),
        "steps": result.steps,
        "stopped": result.stopped,
        "checkpoint": result.checkpoint,
        "reward_first": result.rewards[0] if result.rewards else None,
        "reward_last": result.rewards[-1] if result.rewards else None,
        "rewards": result.rewards,
        "evaluations": {
            step: {**report.as_dict(), "headline": report.headline()} for step, report in result.evaluations.items()
        },
    }
