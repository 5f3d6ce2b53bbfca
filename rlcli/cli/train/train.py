"""`rlcli train`: trains with a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli import completion
from rlcli.cli.options import JsonResult, RayAddress, Sets, ShowSamples, WholePlan, data_sets, one_or_all
from rlcli.cli.supervised import supervised
from rlcli.cli.train.run import Call, resume_training, run_training
from rlcli.errors import ConfigError


@supervised
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe's name (rlcli recipes list) or a path to a .toml file.", autocompletion=completion.recipes
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model.", autocompletion=completion.models)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[:WEIGHT]",
            help="A parquet file, or a folder with train.parquet; repeatable, with weights (data/math:2) or without.",
            autocompletion=completion.datasets,
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluate on this parquet file, or this folder's test.parquet, before and after; repeatable.",
            autocompletion=completion.datasets,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/RECIPE-N).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Resume the run in this folder from its newest checkpoint, in place.",
            autocompletion=completion.runs,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes, one a device.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompt order, sampling and initialisation.")] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="Verifier of every row, such as 'math + 0.1 * format' or some/file.py:function.",
            autocompletion=completion.verifiers,
        ),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            help="Train on conversations with this environment (rlcli env list), a file.py:Class, or 'python …'.",
            autocompletion=completion.environments,
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-identical results for the same seed; --dry-run shows the cost.")
    ] = False,
    sets: Sets = None,
    ray_address: RayAddress = None,
    show_samples: ShowSamples = 0,
    memory: Annotated[
        str | None,
        typer.Option(metavar="auto", help="auto: the largest micro-batch and engine share of a GPU that fit."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of one step, the third, for https://ui.perfetto.dev.")
    ] = False,
    whole_plan: WholePlan = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the derived plan and exit.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the run in the run folder and its checkpoints, unless it is alive."),
    ] = False,
    as_json: JsonResult = False,
) -> None:
    """Train a model by reinforcement learning with verifiable rewards.

    Examples:

      rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k

      rlcli train grpo --model ./my-model --data data/gsm8k --workers 8 --set lora.rank=16

      rlcli train grpo --model ./my-model --data data/gsm8k:2 --data data/math:1 --eval-data data/gsm8k

      rlcli train grpo --model ./my-model --environment guess_number

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
        "environment.name": environment,
        "cluster.workers": workers,
        "cluster.address": ray_address,
    }
    call = Call(show_samples, dry_run, as_json, profile, whole_plan)
    if memory not in (None, "auto"):
        raise ConfigError(f"--memory {memory} is not known", "give --memory auto, or leave it out")
    if resume is not None:
        if memory:
            raise ConfigError(
                f"--memory auto is for new runs, and {resume} has already started", "leave it out: its sizes stay"
            )
        if out is not None or force:
            raise ConfigError(
                f"--resume {resume} continues in that folder", f"leave {'--out' if out is not None else '--force'} out"
            )
        return resume_training(resume, recipe, flags, sets or [], call)
    if recipe is None:
        raise ConfigError(
            "no recipe is given", "name one (rlcli recipes list shows them), or resume a run: --resume runs/NAME"
        )
    if memory:
        from rlcli.launch.planning.memory_auto import resolve_auto as resolve
    else:
        from rlcli.config.load import resolve
    run_training(resolve(recipe, flags, sets or []), call, out=out, force=force, auto_memory=bool(memory))
