"""`rlcli eval`: pass@k, maj@k and mean@1 of a model, with intervals; `rlcli eval compare`: their differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion
from rlcli.cli.command_group import Group
from rlcli.cli.console import emit_json
from rlcli.cli.eval.eval_tables import show_comparison, show_evaluation
from rlcli.cli.eval.read_keys import refuse_omitted, refuse_unread
from rlcli.cli.next_commands import after_evaluation, print_next
from rlcli.cli.options import Endpoint, JsonReport, MaxTokens, MostChanged, Omit, Seed, Sets, Workers
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.launch.evaluation.evaluation_run import Evaluation, Request

RECIPE = "grpo"
"""The source of values that no option sets."""
NUMBERED_ROWS = 256
"""Rows of an environment, if there is no data and `environment.eval_rows` is not set."""

app = typer.Typer(cls=Group)

Data = Annotated[
    list[str] | None,
    typer.Option(
        help="A parquet file, or a folder with test.parquet; repeatable, for several datasets. With --environment "
        f"it may be left out: {NUMBERED_ROWS} rows that differ in their seed (environment.eval_rows).",
        autocompletion=completion.datasets,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the model, a LoRA adapter, a run or its checkpoint; with --endpoint, its served "
        "name.",
        autocompletion=completion.models,
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Responses per prompt; pass@k and maj@k up to this k.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Default: 0 (greedy) for one sample, else 1.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this total probability.")
]
Greedy = Annotated[bool, typer.Option("--greedy", help="One greedy response to each prompt besides the samples.")]
MaxPrompts = Annotated[int, typer.Option(min=0, help="The first N prompts of each dataset only; 0: all.")]
ByFields = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Also report results by this field of extra_info; repeatable."),
]
VerifierChoice = Annotated[
    str,
    typer.Option(
        help="Verifier of every row, such as math or some/file.py:function; auto: what the row names.",
        autocompletion=completion.verifiers,
    ),
]
EnvironmentChoice = Annotated[
    str | None,
    typer.Option(
        help="Let the model converse with this environment (rlcli env list), or answer a program.",
        autocompletion=completion.environments,
    ),
]
SamplesFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the samples (parquet), saved as they finish; the same command again generates only the "
        "missing ones (default: none)."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Discard samples in --out that were made with other settings.")]


@app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    endpoint: Endpoint = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    greedy: Greedy = False,
    max_tokens: MaxTokens = 1024,
    max_prompts: MaxPrompts = 0,
    by: ByFields = None,
    workers: Workers = 1,
    seed: Seed = 0,
    verifier: VerifierChoice = "auto",
    environment: EnvironmentChoice = None,
    out: SamplesFolder = None,
    force: Force = False,
    omit: Omit = None,
    sets: Sets = None,
    as_json: JsonReport = False,
) -> None:
    """Evaluate a model: pass@k, maj@k and mean@1 with 95% intervals over prompts.

    Rows with equal prompt and ground truth count as samples of one prompt.

    Examples:

      rlcli eval --model runs/grpo-1 --data data/gsm8k

      rlcli eval --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --data data/math --samples 8 --greedy

      rlcli eval --model runs/grpo-1/checkpoints/latest --data data/math --by level --samples 4 --out evals/grpo-1

      rlcli eval --model runs/grpo-1 --data data/countdown --environment countdown

      rlcli eval --model runs/grpo-1 --environment guess_number

      rlcli eval --endpoint http://127.0.0.1:8000/v1 --data data/gsm8k

      rlcli eval compare evals/base evals/grpo-1
    """
    if context.invoked_subcommand:
        return
    if temperature is None:
        temperature = 0.0 if samples == 1 and not greedy else 1.0
    refuse_sampling(model, endpoint, samples, temperature)
    if temperature == 0.0 and greedy:
        raise ConfigError("--greedy: at --temperature = 0 the samples are greedy already", "leave one of them out")
    if not data and not environment:
        raise ConfigError("no data is given", "name a parquet file or folder with --data, or an --environment")
    config = sampling_config(
        model=model,
        data=data[0] if data else None,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        workers=workers,
        seed=seed,
        verifier=verifier,
        sets=sets,
        max_prompts=max_prompts,
        environment=environment,
        top_p=top_p,
    )
    refuse_unread("rlcli eval", sets, served=bool(endpoint))
    refuse_omitted(omit, endpoint)
    if config.evaluation.top_p < 1 and config.evaluation.temperature == 0:
        raise ConfigError(
            f"--top-p = {config.evaluation.top_p:g} has no effect at temperature 0, which is greedy",
            "give --temperature, or leave it out",
        )
    from rlcli.launch.evaluation.evaluation_run import Request

    paths, fields = tuple(data or ()), tuple(by or ())
    evaluation = run_evaluation(Request(config, paths, greedy, fields, out, force, tuple(omit or ())), endpoint)
    if as_json:
        emit_json(evaluation.as_dict())
        return
    show_evaluation(evaluation)
    print_next(after_evaluation(out))


def refuse_sampling(model: str | None, endpoint: str | None, samples: int, temperature: float, also: str = "") -> None:
    """Raise `ConfigError` if there is no model, or if all samples would be equal. also: a further option for one
    sample."""
    if model is None and endpoint is None:
        raise ConfigError("no model is given", "name a folder or hub id with --model, or a served one with --endpoint")
    if temperature == 0.0 and samples > 1:
        raise ConfigError(
            f"--temperature = 0 gives the same response {samples} times", f"raise it, or give --samples 1{also}"
        )


def _refuse_for_served(config: RunConfig) -> None:
    """Raise `ConfigError` for options that only a model that is loaded here supports."""
    if config.cluster.workers > 1:
        raise ConfigError(f"--workers = {config.cluster.workers}: a served model needs none", "leave it out")
    if config.environment.name:
        raise ConfigError(
            f"environment.name = {config.environment.name}: conversations are held with a model that is loaded here",
            "name it with --model, or leave the environment out",
        )


def sampling_config(
    *,
    model: str | None,
    data: str | None,
    samples: int,
    temperature: float,
    max_tokens: int,
    workers: int,
    seed: int,
    verifier: str,
    sets: list[str] | None,
    max_prompts: int | None = None,
    environment: str | None = None,
    top_p: float = 1.0,
) -> RunConfig:
    """The configuration of an evaluation. data: None for numbered rows of the environment."""
    from rlcli.config.load import resolve

    rows_are_set = any(text.partition("=")[0].strip() == "environment.eval_rows" for text in sets or ())

    flags: dict[str, object] = {
        "model.path": model,
        "evaluation.data": data,
        "evaluation.samples": samples,
        "evaluation.temperature": temperature,
        "evaluation.top_p": top_p,
        "evaluation.max_prompts": max_prompts,
        "rollout.max_response_tokens": max_tokens,
        "cluster.workers": workers,
        "train.seed": seed,
        "train.tokens_per_microbatch": 1 << 30,  # Nothing is trained: no bound on a micro-batch.
        "verifier.name": verifier,
        "environment.name": environment,
        "environment.eval_rows": None if data or rows_are_set else NUMBERED_ROWS,
    }
    return resolve(RECIPE, flags, sets or []).config


def run_evaluation(request: Request, endpoint: str | None) -> Evaluation:
    """Evaluate the model that `endpoint` serves, or a local one."""
    from rlcli.support.extras import TRAINING, require

    if endpoint:
        _refuse_for_served(request.config)
    else:
        require(*TRAINING)
    from rlcli.launch.evaluation.evaluation_run import evaluate_endpoint, evaluate_model
    from rlcli.runs.tracking.run_console import View

    with View() as view:
        view.phase(f"ask {endpoint}" if endpoint else "check model and data")
        return evaluate_endpoint(request, endpoint, view) if endpoint else evaluate_model(request, view)


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of rlcli eval --out, or a parquet file of samples.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; positive differences: B is better.")],
    changed: MostChanged = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON object.")] = False,
) -> None:
    """Compare two evaluations of the same prompts: B minus A, with paired 95% intervals.

    A and B may also be the evaluations of a training run at a step: runs/grpo-1/evaluations/step-000050.

    Examples:

      rlcli eval compare evals/base evals/grpo-1

      rlcli eval compare runs/grpo-1/evaluations/step-000000 runs/grpo-1/evaluations/step-000100 --changed 20
    """
    from rlcli.evaluation.paired_comparison import compare as compared

    comparison = compared(a, b, changed)
    emit_json(comparison.as_dict()) if as_json else show_comparison(comparison)
