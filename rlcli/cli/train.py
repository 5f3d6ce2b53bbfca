"""`rlcli train`: one run of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.datasets import data_sets, one_or_all
from rlcli.cli.supervise import supervised, train_folder
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.config.load import Resolved


@supervised(train_folder)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name (rlcli recipes list) or a path to a .toml file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[:WEIGHT]",
            help="A parquet file, or a folder with train.parquet; repeatable, with weights (data/math:2) or without.",
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluate on this parquet file, or this folder's test.parquet, before and after; repeatable."
        ),
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
    memory: Annotated[
        str | None,
        typer.Option(metavar="auto", help="auto: the largest micro-batch, and engine's share of a GPU, that fit."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of one step, the third, for https://ui.perfetto.dev.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the derived plan and leave.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the run in the run folder, with its checkpoints, unless it is alive."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a model by reinforcement learning with verifiable rewards.

    Examples:

      rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k

      rlcli train grpo --model ./my-model --data data/gsm8k --workers 8 --set lora.rank=16

      rlcli train grpo --model ./my-model --data data/gsm8k:2 --data data/math:1 --eval-data data/gsm8k

      rlcli train grpo --model ./my-model --data data/gsm8k --memory auto --dry-run

      rlcli train --resume runs/grpo-1
    """
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    flags: dict[str, object] = {
        "model.path": model,
        "data.path": data_sets(data),
        "evaluation.data": one_or_all(eval_data),
        "train.steps": steps,
        "train.seed": seed,
        "train.deterministic": deterministic or None,
        "verifier.name": verifier,
        "cluster.workers": workers,
        "cluster.address": ray_address,
    }
    if memory not in (None, "auto"):
        raise ConfigError(f"--memory {memory} is not known", "give --memory auto, or leave it out")
    if resume is not None:
        if memory:
            raise ConfigError(
                f"--memory auto chooses when a run begins, and {resume} has begun", "leave it out: what it chose stays"
            )
        if out is not None or force:
            raise ConfigError(
                f"--resume {resume} goes on in that folder", f"leave {'--out' if out is not None else '--force'} out"
            )
        resume_training(
            *(resume, recipe, flags, sets or []),
            show_samples=show_samples,
            dry_run=dry_run,
            as_json=as_json,
            profile=profile,
        )
        return
    if recipe is None:
        raise ConfigError(
            "no recipe is given", "name one (rlcli recipes list shows them), or go on with a run: --resume runs/NAME"
        )
    resolved = _resolved(recipe, flags, sets or [], auto_memory=memory == "auto")
    run_training(
        resolved,
        out=out,
        show_samples=show_samples,
        dry_run=dry_run,
        force=force,
        as_json=as_json,
        profile=profile,
        auto_memory=memory == "auto",
    )


def _resolved(recipe: str, flags: Mapping[str, object], sets: Sequence[str], *, auto_memory: bool) -> Resolved:
    if auto_memory:
        from rlcli.trainer.planning import resolve_auto

        return resolve_auto(recipe, flags, sets)
    from rlcli.config.load import resolve

    return resolve(recipe, flags, sets)


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
    """Check, print the plan, run, print the result. Exits with 130 where the run was interrupted."""
    from rlcli.cli.running import checked_run, tell
    from rlcli.trainer.exporting import with_model_folders
    from rlcli.trainer.run_folder import RunFolder, default_out
    from rlcli.trainer.view import View

    target = out or default_out(resolved.recipe.header.name)
    with View(show_samples=show_samples) as view:
        view.phase("check the run folder")
        RunFolder.check(target, force)
        # Noted in the run as they are found now: the newest checkpoint of another run may soon be another.
        resolved = replace(resolved, config=with_model_folders(resolved.config, view.note))
        outcome = checked_run(
            *(resolved, target, view, []), dry_run=dry_run, force=force, profile=profile, auto_memory=auto_memory
        )
    tell(outcome, as_json)


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
    """Go on with a run in its folder, which a run that is finished already does not need."""
    from rlcli.cli.running import checked_run, finished, tell
    from rlcli.trainer.resume import resumption
    from rlcli.trainer.view import View

    notes: list[str] = []
    with View(show_samples=show_samples) as view:
        view.phase("check the run")
        resumed = resumption(run, recipe, flags, sets, notes.append)
        if resumed.nothing_to_do:
            outcome = finished(resumed)
        else:
            outcome = checked_run(
                *(resumed.resolved, resumed.run, view, notes), dry_run=dry_run, resumed=resumed, profile=profile
            )
    tell(outcome, as_json)
