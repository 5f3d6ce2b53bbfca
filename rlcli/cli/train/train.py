"""`rlcli train`: trains with a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion
from rlcli.cli.options import (
    AcceptChanges,
    JsonResult,
    RayAddress,
    RecipeChoice,
    Sets,
    ShowSamples,
    Steps,
    WholePlan,
    data_sets,
    in_home,
    one_or_all,
)
from rlcli.cli.supervised import supervised
from rlcli.cli.train.checked_run import Call, resume_training, run_training
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.config.load import Resolved

Model = Annotated[str | None, typer.Option(help="Folder or hub id of the model.", autocompletion=completion.models)]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH[:WEIGHT]",
        help="A parquet file, or a folder with train.parquet; repeatable, with weights (data/math:2) or without.",
        autocompletion=completion.datasets,
    ),
]
EvalData = Annotated[
    list[str] | None,
    typer.Option(
        help="Evaluate on this parquet file, or this folder's test.parquet, before and after; repeatable.",
        autocompletion=completion.datasets,
    ),
]
RunFolder = Annotated[Path | None, typer.Option(help="Run folder (default: runs/RECIPE-N).", callback=in_home)]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Resume the run in this folder from its newest checkpoint, in place.",
        autocompletion=completion.runs,
    ),
]
Workers = Annotated[int | None, typer.Option(help="Worker processes, one a device.")]
Seed = Annotated[int | None, typer.Option(help="Seed of prompt order, sampling and initialisation.")]
VerifierChoice = Annotated[
    str | None,
    typer.Option(
        help="Verifier of every row, such as 'math + 0.1 * format' or some/file.py:function.",
        autocompletion=completion.verifiers,
    ),
]
EnvironmentChoice = Annotated[
    str | None,
    typer.Option(
        help="Train on conversations with this environment (rlcli env list), a file.py:Class, or 'python …'.",
        autocompletion=completion.environments,
    ),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-identical results for the same seed; --dry-run shows the cost.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="auto", help="auto: the largest micro-batch and engine share of a GPU that fit.")
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Write a trace of one step, the third, for https://ui.perfetto.dev.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the derived plan and exit.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the run in the run folder and its checkpoints, unless it is alive.")
]
Continue = Annotated[
    bool,
    typer.Option(
        "--continue", help="Resume the run in --out if there is one, else start it: for jobs that are queued again."
    ),
]


@supervised
def train(
    recipe: RecipeChoice = None,
    model: Model = None,
    data: Data = None,
    eval_data: EvalData = None,
    out: RunFolder = None,
    resume: Resume = None,
    steps: Steps = None,
    workers: Workers = None,
    seed: Seed = None,
    verifier: VerifierChoice = None,
    environment: EnvironmentChoice = None,
    deterministic: Deterministic = False,
    sets: Sets = None,
    ray_address: RayAddress = None,
    show_samples: ShowSamples = 0,
    memory: Memory = None,
    profile: Profile = False,
    whole_plan: WholePlan = False,
    dry_run: DryRun = False,
    force: Force = False,
    go_on: Continue = False,
    accept_changes: AcceptChanges = False,
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
    from rlcli.support.extras import TRAINING, require

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
    if accept_changes and resume is None and not go_on:
        raise ConfigError(
            "--accept-changes is for a run that is resumed", "leave it out, or name the run: --resume RUN"
        )
    untried = ""
    if dry_run and recipe is not None:
        from rlcli.launch.recipe_code import refuse_code

        untried = refuse_code(recipe, flags, sets or [], "--dry-run", leaves_verifier=True)
    call = Call(
        show_samples=show_samples,
        dry_run=dry_run,
        as_json=as_json,
        profile=profile,
        plan=whole_plan,
        accept_changes=accept_changes,
        untried=untried,
    )
    if (run := _resumed(resume, memory, out, force, go_on)) is not None:
        return resume_training(run, recipe, flags, sets or [], call)
    resolved = _resolved(recipe, flags, sets or [], memory)
    run_training(resolved, call, out=out, force=force, auto_memory=bool(memory))


def _resumed(resume: Path | None, memory: str | None, out: Path | None, force: bool, go_on: bool) -> Path | None:
    """The run to resume, if there is one. Raises `ConfigError` for incompatible options."""
    existing = _run_in(out, resume, force) if go_on else None
    if memory not in (None, "auto"):
        raise ConfigError(f"--memory {memory} is not known", "give --memory auto, or leave it out")
    if resume is not None and memory:
        raise ConfigError(
            f"--memory auto is for new runs, and {resume} has already started", "leave it out: its sizes stay"
        )
    if resume is not None and (out is not None or force):
        raise ConfigError(
            f"--resume {resume} continues in that folder", f"leave {'--out' if out is not None else '--force'} out"
        )
    return existing or resume


def _run_in(out: Path | None, resume: Path | None, force: bool) -> Path | None:
    """The run folder of --out, for --continue, if it has a run."""
    from rlcli.runs.folder import has_results

    if out is None or resume is not None or force:
        raise ConfigError(
            "--continue resumes the run in --out" + ("" if out else ", and none is given"),
            "give --out" if out is None else f"leave {'--force' if force else '--resume'} out",
        )
    return out if has_results(out) else None


def _resolved(recipe: str | None, flags: Mapping[str, object], sets: Sequence[str], memory: str | None) -> Resolved:
    """The configuration of a new run; with `memory`, sizes that are not set may yet change."""
    if recipe is None:
        raise ConfigError(
            "no recipe is given", "name one (rlcli recipes list shows them), or resume a run: --resume runs/NAME"
        )
    if memory:
        from rlcli.launch.planner import planner

        return planner().resolve(recipe, flags, sets)
    from rlcli.config.load import resolve

    return resolve(recipe, flags, sets)
