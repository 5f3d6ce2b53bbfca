"""`rlcli prep filter`: keeps the prompts that a model solves sometimes, because it learns from those."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.errors import ConfigError, DataError, RunFailed
from rlcli.types import Outcome

if TYPE_CHECKING:
    from rlcli.evaluation.report import EvalReport

RECIPE = "grpo"
"""The source of values that no option sets."""
BAR = 40
"""Characters of the longest bar."""


Data = Annotated[Path, typer.Option(help="A parquet file, or a folder with SPLIT.parquet.")]
Out = Annotated[Path, typer.Option(help="Folder to write SPLIT.parquet to.")]
Model = Annotated[str | None, typer.Option(help="Folder or hub id of the model; with --endpoint, its served name.")]
Endpoint = Annotated[str | None, typer.Option(help="Base URL of a served OpenAI-compatible model.")]
Samples = Annotated[int, typer.Option(min=1, help="Responses per prompt.")]
Keep = Annotated[str, typer.Option(metavar="LOW:HIGH", help="Pass rates to keep, both ends included.")]
Split = Annotated[str, typer.Option(help="The split to filter.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest response.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of sampling.")]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes, one a device.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Verifier = Annotated[str, typer.Option(help="Verifier of every row; auto: what the row names.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]


def filter_prompts(
    data: Data,
    out: Out,
    model: Model = None,
    endpoint: Endpoint = None,
    samples: Samples = 8,
    keep: Keep = "0.1:0.9",
    split: Split = "train",
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 1.0,
    workers: Workers = 1,
    seed: Seed = 0,
    verifier: Verifier = "auto",
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Score a dataset with a model, and keep the prompts that it solves sometimes.

    Examples:

      rlcli prep filter --data data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --out data/gsm8k-filtered

      rlcli prep filter --data data/math --model runs/grpo-1/checkpoints/latest --keep 0.2:0.8 --out data/math-hard

      rlcli prep filter --data data/gsm8k --endpoint http://127.0.0.1:8000/v1 --out data/gsm8k-filtered
    """
    from rlcli.config.load import resolve
    from rlcli.prep.difficulty import Keep, histogram, write_kept

    wanted = Keep.parse(keep, samples)
    file = data if data.is_file() else data / f"{split}.parquet"
    target = out / f"{split}.parquet"
    _refuse(model, endpoint, samples, temperature, file, target)
    flags: dict[str, object] = {
        "model.path": model,
        "evaluation.data": str(file),
        "evaluation.samples": samples,
        "evaluation.temperature": temperature,
        "rollout.max_response_tokens": max_tokens,
        "cluster.workers": workers,
        "train.seed": seed,
        "train.tokens_per_microbatch": 1 << 30,  # Nothing is trained: no bound on a micro-batch.
        "verifier.name": verifier,
    }
    config = resolve(RECIPE, flags, sets or []).config
    report, rates, all_rows = _served(config, endpoint) if endpoint else _local(config)
    _refuse_crashes(report, config.verifier.max_crash_rate)
    counted = {
        "rows": all_rows,
        "too_long": all_rows - len(rates),
        "below": sum(rate < wanted.low for rate in rates.values()),
        "above": sum(rate > wanted.high for rate in rates.values()),
        "kept": sum(rate in wanted for rate in rates.values()),
    }
    record: dict[str, Any] = {
        "model": config.model.path or endpoint,
        "samples": samples,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "verifier": verifier,
        "keep": [wanted.low, wanted.high],
        "counts": counted,
        "histogram": histogram(rates, samples),
    }
    if not as_json:
        _draw(record["histogram"], len(rates))
    write_kept(file, target, rates, wanted, record)
    if as_json:
        from rlcli.cli.console import emit_json

        emit_json({"data": file, "out": target, **record, "evaluation": report.as_dict()})
        return
    _tell(counted, target)


def _refuse(
    model: str | None, endpoint: str | None, samples: int, temperature: float, file: Path, target: Path
) -> None:
    if model is None and endpoint is None:
        raise ConfigError("no model is given", "name a folder or hub id with --model, or a served one with --endpoint")
    if temperature == 0.0 and samples > 1:
        raise ConfigError(
            f"--temperature = 0 gives the same response {samples} times", "raise it, or give --samples 1 --keep 1:1"
        )
    if not file.is_file():
        raise DataError(
            f"--data: no such file: {file}", "make it with: rlcli prep NAME, or name the split with --split"
        )
    if target.exists() and target.samefile(file):
        raise ConfigError(f"--out: {target} is the data itself", "give another folder")


def _refuse_crashes(report: EvalReport, most: float) -> None:
    """Otherwise a prompt whose verifier fails would count as one that the model never solves."""
    share = report.outcomes[Outcome.CRASH] + report.outcomes[Outcome.TIMEOUT]
    if share > most:
        first = f"; the first crash: «{report.crash}»" if report.crash else ""
        raise RunFailed(
            f"{share:.1%} of the verifications crashed or timed out, more than verifier.max_crash_rate = {most:g}"
            + first,
            "fix the verifier or the rows, or raise verifier.max_crash_rate with --set",
        )


def _local(config: Any) -> tuple[EvalReport, dict[int, float], int]:
    """The report, the pass rate of each row that is not too long, and how many rows there are."""
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    from rlcli.launch.evaluation.chat_template import day_of_run
    from rlcli.launch.preflight import prepare
    from rlcli.tracking.console import View

    # Workers write their logs here; the logs are deleted with this folder.
    with tempfile.TemporaryDirectory(prefix="rlcli-filter-") as scratch, View() as view:
        view.phase("check model and data")
        prepared = prepare(config, train=False, on_note=view.note, day=day_of_run(config.model.path))
        view.phase("load torch and vLLM")  # done by the next import, takes seconds
        from rlcli.launch.launch import launch_evaluation

        report = launch_evaluation(prepared, logs=Path(scratch) / "logs", save_as="", view=view)
    rows = [int(prompt.id.rpartition(":")[2]) for prompt in prepared.prompts.prompts]
    rates = dict(zip(rows, report.pass_rates, strict=True))
    return report, rates, len(rates) + prepared.prompts.too_long


def _served(config: Any, endpoint: str) -> tuple[EvalReport, dict[int, float], int]:
    from rlcli.launch.evaluation.endpoint import evaluate_served
    from rlcli.tracking.console import View

    with View() as view:
        view.phase(f"ask {endpoint}")
        report = evaluate_served(endpoint, config, on_progress=view.progress)
    return report, dict(enumerate(report.pass_rates)), len(report.pass_rates)


def _draw(bins: dict[str, int], prompts: int) -> None:
    from rlcli.cli.console import plain

    plain(f"pass rates of {prompts} prompts:")
    widest, most = max(map(len, bins)), max(*bins.values(), 1)
    for name, count in bins.items():
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        plain(f"  {name:>{widest}} {count:6d} {bar}".rstrip())


def _tell(counted: dict[str, int], target: Path) -> None:
    from rlcli.cli.console import plain

    too_long = f", {counted['too_long']} too long" if counted["too_long"] else ""
    plain(
        f"kept {counted['kept']} of {counted['rows']} in {target} "
        f"({counted['below']} below, {counted['above']} above{too_long})"
    )
