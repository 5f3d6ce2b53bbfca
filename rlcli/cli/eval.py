"""`rlcli eval`: pass@k of a model, with intervals."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.trainer.evaluate import EvalReport

RECIPE = "grpo"
"""Where values that no option names come from."""


def evaluate(
    data: Annotated[str, typer.Option(help="A parquet file, or a folder with test.parquet.")],
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model; with --endpoint, its served name.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of a served OpenAI-compatible model.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt; pass@k up to this k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Default: 0 (greedy) for one sample, else 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 1024,
    max_prompts: Annotated[int, typer.Option(min=0, help="The first N prompts only; 0: all.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, one a device.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    verifier: Annotated[
        str,
        typer.Option(help="Verifier of every row, such as math or some/file.py:function; auto: what the row names."),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the samples (parquet) and logs (default: none kept).")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Evaluate a model: pass@1 and pass@k with 95% intervals over prompts.

    Examples:

      rlcli eval --model runs/grpo-1/checkpoints/latest --data data/gsm8k

      rlcli eval --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --samples 8

      rlcli eval --endpoint http://127.0.0.1:8000/v1 --data data/gsm8k
    """
    from rlcli.config.load import resolve

    flags: dict[str, object] = {
        "model.path": model,
        "evaluation.data": data,
        "evaluation.samples": samples,
        "evaluation.temperature": (0.0 if samples == 1 else 1.0) if temperature is None else temperature,
        "evaluation.max_prompts": max_prompts,
        "rollout.max_response_tokens": max_tokens,
        "cluster.workers": workers,
        "train.seed": seed,
        "train.tokens_per_microbatch": 1 << 30,  # Nothing is trained: no bound on a micro-batch.
        "verifier.name": verifier,
    }
    from rlcli.trainer.run_folder import evaluation_folder

    config = resolve(RECIPE, flags, sets or []).config
    if model is None and endpoint is None:
        raise ConfigError("no model is given", "name a folder or hub id with --model, or a served one with --endpoint")
    out = evaluation_folder(out) if out else None
    # Workers write their logs as they go; where nothing is to be kept, they go with this folder.
    with tempfile.TemporaryDirectory(prefix="rlcli-eval-") as scratch:
        folder = out or Path(scratch)
        report = _served(config, endpoint, out) if endpoint else _local(config, folder, out)
    _print(report, config.model.path or str(endpoint), data, as_json)


def _local(config: Any, folder: Path, out: Path | None) -> EvalReport:
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    from rlcli.trainer.preflight import prepare
    from rlcli.trainer.view import View

    with View() as view:
        view.phase("check model and data")
        prepared = prepare(config, train=False, on_note=view.note)
        view.phase("load torch and vLLM")  # which the next import does, and takes seconds
        from rlcli.trainer.launch import launch_evaluation

        return launch_evaluation(
            prepared,
            logs=folder / "logs",
            save_as=str(out / "samples-rank-{rank}.parquet") if out else "",
            view=view,
        )


def _served(config: Any, endpoint: str, out: Path | None) -> EvalReport:
    from rlcli.trainer.served import evaluate_served
    from rlcli.trainer.view import View

    with View() as view:
        view.phase(f"ask {endpoint}")
        return evaluate_served(
            endpoint,
            config,
            save_as=out / "samples.parquet" if out else None,
            on_progress=view.progress,
        )


def _print(report: EvalReport, model: str, data: str, as_json: bool) -> None:
    from rlcli.cli.console import emit_json, plain, show, table

    if as_json:
        emit_json({"model": model, "data": data, **report.as_dict()})
        return
    rows = [(f"pass@{k}", str(estimate)) for k, estimate in sorted(report.passes.passed.items())]
    rows += [(name, f"{100 * share:.1f}%") for name, share in report.outcomes.items() if share]
    rows += [
        ("response tokens", f"{report.mean_response_tokens:.0f} (mean)"),
        ("truncated", f"{100 * report.truncated:.1f}%"),
    ]
    title = f"{model} on {data}: {report.passes.prompts} prompts × {report.passes.samples // report.passes.prompts}"
    plain(title)
    show(table(["measure", "value"], rows))
