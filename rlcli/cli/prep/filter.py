"""`rlcli prep filter`: keeps the prompts that a model solves sometimes, because it learns from those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.console import emit_json, plain
from rlcli.cli.options import Endpoint, JsonFigures, MaxTokens, Omit, Seed, Sets, Workers
from rlcli.errors import ConfigError, DataError, RunFailed
from rlcli.types import UNVERIFIED

if TYPE_CHECKING:
    from rlcli.evaluation.evaluation_report import EvalReport
    from rlcli.launch.evaluation.evaluation_run import Evaluation
    from rlcli.prep.difficulty import Keep

BAR = 40
"""Characters of the longest bar."""

Data = Annotated[Path, typer.Option(help="A parquet file, or a folder with SPLIT.parquet.")]
OutFolder = Annotated[Path, typer.Option(help="Folder to write SPLIT.parquet to.")]
Model = Annotated[str | None, typer.Option(help="Folder or hub id of the model; with --endpoint, its served name.")]
Samples = Annotated[int, typer.Option(min=1, help="Responses per prompt.")]
PassRates = Annotated[str, typer.Option(metavar="LOW:HIGH", help="Pass rates to keep, both ends included.")]
Split = Annotated[str, typer.Option(help="The split to filter.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of sampling.")]
VerifierChoice = Annotated[str, typer.Option(help="Verifier of every row; auto: what the row names.")]


def filter_prompts(
    data: Data,
    out: OutFolder,
    model: Model = None,
    endpoint: Endpoint = None,
    samples: Samples = 8,
    keep: PassRates = "0.1:0.9",
    split: Split = "train",
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 1.0,
    workers: Workers = 1,
    seed: Seed = 0,
    verifier: VerifierChoice = "auto",
    omit: Omit = None,
    sets: Sets = None,
    as_json: JsonFigures = False,
) -> None:
    """Score a dataset with a model, and keep the prompts that it solves sometimes.

    Examples:

      rlcli prep filter --data data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --out data/gsm8k-filtered

      rlcli prep filter --data data/math --model runs/grpo-1/checkpoints/latest --keep 0.2:0.8 --out data/math-hard

      rlcli prep filter --data data/gsm8k --endpoint http://127.0.0.1:8000/v1 --out data/gsm8k-filtered
    """
    from rlcli.cli.eval.eval import refuse_sampling, run_evaluation, sampling_config
    from rlcli.cli.eval.read_keys import refuse_omitted, refuse_unread
    from rlcli.prep.difficulty import Keep, histogram, write_kept

    wanted = Keep.parse(keep, samples)
    file = data if data.is_file() else data / f"{split}.parquet"
    target = out / f"{split}.parquet"
    refuse_sampling(model, endpoint, samples, temperature, " --keep 1:1")
    _refuse(file, target)
    config = sampling_config(
        model=model,
        data=str(file),
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        workers=workers,
        seed=seed,
        verifier=verifier,
        sets=sets,
    )
    refuse_unread("rlcli prep filter", sets, served=bool(endpoint))
    refuse_omitted(omit, endpoint)
    from rlcli.launch.evaluation.evaluation_run import Request

    evaluation = run_evaluation(Request(config, (str(file),), omit=tuple(omit or ())), endpoint)
    _refuse_crashes(evaluation.overall, config.verifier.max_crash_rate)
    rates = _rates(evaluation)
    counted = _counted(rates, wanted, file, config.evaluation.max_prompts)
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
        emit_json({"data": file, "out": target, **record, "evaluation": evaluation.overall.as_dict()})
        return
    _report(counted, target)


def _refuse(file: Path, target: Path) -> None:
    if not file.is_file():
        raise DataError(
            f"--data: no such file: {file}", "make it with: rlcli prep NAME, or name the split with --split"
        )
    if target.exists() and target.samefile(file):
        raise ConfigError(f"--out: {target} is the data itself", "give another folder")


def _refuse_crashes(report: EvalReport, max_rate: float) -> None:
    """Raise `RunFailed` for too many failed verifications: a prompt whose verifier fails would count as never
    solved."""
    share = sum(report.outcomes[outcome] for outcome in UNVERIFIED)
    if share > max_rate:
        first = f"; the first crash: «{report.crash}»" if report.crash else ""
        raise RunFailed(
            f"{share:.1%} of the verifications gave no verdict (timeout, crash, unparsed), more than "
            f"verifier.max_crash_rate = {max_rate:g}{first}",
            "fix the verifier or the rows, or raise verifier.max_crash_rate with --set",
        )


def _rates(evaluation: Evaluation) -> dict[int, float]:
    """Row of the file → its pass rate."""
    rows = [int(prompt.id.rpartition(":")[2]) for prompt in evaluation.prompts]
    return dict(zip(rows, evaluation.overall.pass_rates, strict=True))


def _counted(rates: Mapping[int, float], wanted: Keep, file: Path, limit: int) -> dict[str, int]:
    """Number of kept rows, and of others by reason. limit: the first rows of the file only; 0: all."""
    import pyarrow.parquet

    in_file = pyarrow.parquet.read_metadata(file).num_rows
    rows = min(in_file, limit or in_file)
    return {
        "rows": rows,
        "too_long": rows - len(rates),
        "below": sum(rate < wanted.low for rate in rates.values()),
        "above": sum(rate > wanted.high for rate in rates.values()),
        "kept": sum(rate in wanted for rate in rates.values()),
    }


def _draw(bins: dict[str, int], prompts: int) -> None:
    plain(f"pass rates of {prompts} prompts:")
    widest, largest = max(map(len, bins)), max(*bins.values(), 1)
    for name, count in bins.items():
        bar = "█" * round(BAR * count / largest) or ("▏" if count else "")
        plain(f"  {name:>{widest}} {count:6d} {bar}".rstrip())


def _report(counted: dict[str, int], target: Path) -> None:
    too_long = f", {counted['too_long']} too long" if counted["too_long"] else ""
    plain(
        f"kept {counted['kept']} of {counted['rows']} in {target} "
        f"({counted['below']} below, {counted['above']} above{too_long})"
    )
