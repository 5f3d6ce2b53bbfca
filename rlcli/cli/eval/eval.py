"""`rlcli eval`: pass@k, maj@k and mean@k of a model, with intervals; `rlcli eval compare`: their differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.group import Group
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.launch.evaluation.run import Evaluation, Request

RECIPE = "grpo"
"""The source of values that no option sets."""

app = typer.Typer(cls=Group)


Data = Annotated[
    list[str], typer.Option(help="A parquet file, or a folder with test.parquet; repeatable, for several datasets.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the model, a LoRA adapter, a run or its checkpoint; with --endpoint, its served name."
    ),
]
Endpoint = Annotated[str | None, typer.Option(help="Base URL of a served OpenAI-compatible model.")]
Samples = Annotated[int, typer.Option(min=1, help="Responses per prompt; pass@k and maj@k up to this k.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Default: 0 (greedy) for one sample, else 1.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="One greedy response to each prompt besides the samples.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest response.")]
MaxPrompts = Annotated[int, typer.Option(min=0, help="The first N prompts of each dataset only; 0: all.")]
By = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Also report results by this field of extra_info; repeatable."),
]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes, one a device.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Verifier = Annotated[
    str,
    typer.Option(help="Verifier of every row, such as math or some/file.py:function; auto: what the row names."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the samples (parquet), saved as they finish; the same command again generates only the "
        "missing ones (default: none)."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Discard samples in --out that were made with other settings.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]


@app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    data: Data = ...,  # type: ignore[assignment]
    model: Model = None,
    endpoint: Endpoint = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    greedy: Greedy = False,
    max_tokens: MaxTokens = 1024,
    max_prompts: MaxPrompts = 0,
    by: By = None,
    workers: Workers = 1,
    seed: Seed = 0,
    verifier: Verifier = "auto",
    out: Out = None,
    force: Force = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: pass@k, maj@k and mean@k with 95% intervals over prompts.

    Examples:

      rlcli eval --model runs/grpo-1 --data data/gsm8k

      rlcli eval --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --data data/math --samples 8 --greedy

      rlcli eval --model runs/grpo-1/checkpoints/latest --data data/math --by level --samples 4 --out evals/grpo-1

      rlcli eval --endpoint http://127.0.0.1:8000/v1 --data data/gsm8k

      rlcli eval compare evals/base evals/grpo-1
    """
    if context.invoked_subcommand:
        return
    from rlcli.config.load import resolve

    if temperature is None:
        temperature = 0.0 if samples == 1 and not greedy else 1.0
    _refuse(model, endpoint, samples, temperature, greedy)
    if endpoint and workers > 1:
        raise ConfigError(f"--workers = {workers}: a served model needs none", "leave it out")
    flags: dict[str, object] = {
        "model.path": model,
        "evaluation.data": data[0],
        "evaluation.samples": samples,
        "evaluation.temperature": temperature,
        "evaluation.max_prompts": max_prompts,
        "rollout.max_response_tokens": max_tokens,
        "cluster.workers": workers,
        "train.seed": seed,
        "train.tokens_per_microbatch": 1 << 30,  # Nothing is trained: no bound on a micro-batch.
        "verifier.name": verifier,
    }
    config = resolve(RECIPE, flags, sets or []).config
    from rlcli.launch.evaluation.run import Request

    request = Request(config, tuple(data), greedy, tuple(by or ()), out, force)
    evaluation = _served(request, endpoint) if endpoint else _local(request)
    if as_json:
        from rlcli.cli.console import emit_json

        emit_json(evaluation.as_dict())
        return
    from rlcli.cli.eval.show import show_evaluation

    show_evaluation(evaluation)


def _refuse(model: str | None, endpoint: str | None, samples: int, temperature: float, greedy: bool) -> None:
    if model is None and endpoint is None:
        raise ConfigError("no model is given", "name a folder or hub id with --model, or a served one with --endpoint")
    if temperature == 0.0 and samples > 1:
        raise ConfigError(f"--temperature = 0 gives the same response {samples} times", "raise it, or give --samples 1")
    if temperature == 0.0 and greedy:
        raise ConfigError("--greedy: at --temperature = 0 the samples are greedy already", "leave one of them out")


def _local(request: Request) -> Evaluation:
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    from rlcli.launch.evaluation.run import evaluate_model
    from rlcli.tracking.console import View

    with View() as view:
        view.phase("check model and data")
        return evaluate_model(request, view)


def _served(request: Request, endpoint: str) -> Evaluation:
    from rlcli.launch.evaluation.run import evaluate_endpoint
    from rlcli.tracking.console import View

    with View() as view:
        view.phase(f"ask {endpoint}")
        return evaluate_endpoint(request, endpoint, view)


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of rlcli eval --out, or a parquet file of samples.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; positive differences: B is better.")],
    changed: Annotated[int, typer.Option(min=0, help="How many of the most changed prompts to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON object.")] = False,
) -> None:
    """Compare two evaluations of the same prompts: B minus A, with paired 95% intervals.

    A and B may also be the evaluations of a training run at a step: runs/grpo-1/evaluations/step-000050.

    Examples:

      rlcli eval compare evals/base evals/grpo-1

      rlcli eval compare runs/grpo-1/evaluations/step-000000 runs/grpo-1/evaluations/step-000100 --changed 20
    """
    from rlcli.evaluation.compare import compare as compared

    found = compared(a, b, changed)
    if as_json:
        from rlcli.cli.console import emit_json

        emit_json(found.as_dict())
        return
    from rlcli.cli.eval.show import show_comparison

    show_comparison(found)
