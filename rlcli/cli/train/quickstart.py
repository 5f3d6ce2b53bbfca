"""`rlcli quickstart`: trains a tiny model on arithmetic, with the code that trains large ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from rlcli.cli.console import emit_json, plain, progress, show, stderr, table
from rlcli.cli.options import JsonFigures
from rlcli.files import cache_folder

CURVE_WIDTH, CURVE_HEIGHT = 64, 10
WARMUP_STEPS = 10
MAX_SEED = (1 << 32) - 1


def quickstart(
    out: Annotated[Path | None, typer.Option(help="Folder for data and run (default: runs/quickstart-N).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the data, the warm start and the run.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes (default: up to 2, one a core).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of reinforcement learning.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where the warm start is kept (default: ~/.cache/rlcli).")] = None,
    as_json: JsonFigures = False,
) -> None:
    """Make a tiny model, warm it up, train it with GRPO and show what it learned. Minutes on two CPU cores.

    Examples:

      rlcli quickstart

      rlcli quickstart --seed 1 --json
    """
    from rlcli.config.load import resolve
    from rlcli.extras import TRAINING, require

    require(*TRAINING)
    from rlcli.launch.preflight import check_machine, prepare
    from rlcli.runs.folder import RunFolder, default_out
    from rlcli.tracking.console import View

    started = time.monotonic()
    report = stderr().print
    target = out or default_out("quickstart")
    flags: dict[str, object] = {
        "train.steps": steps,
        # A trial run of a few steps consists of warm-up only.
        "train.warmup_steps": None if steps is None else min(steps, WARMUP_STEPS),
        "train.seed": seed,
        "cluster.workers": workers or min(2, len(os.sched_getaffinity(0))),
    }
    check_machine(resolve("quickstart", flags).config)
    RunFolder.check(target)
    report("[1/4] data: sums of two numbers below 100")
    data = _prepare_data(target.with_name(f"{target.name}-data"), seed)
    report("[2/4] warm start: supervised learning on worked and on guessed answers")
    warm = _warm_start(cache or cache_folder(), data, seed)
    report(f"      {'cached' if warm.cached else f'took {warm.seconds:.0f} s'}: {warm.path}")
    flags |= {"model.path": str(warm.path), "data.path": str(data), "evaluation.data": str(data)}
    report("[3/4] reinforcement learning: GRPO on Ray, FSDP2 and vLLM")
    resolved = resolve("quickstart", flags)
    with View() as view:
        view.phase("check model and data")
        prepared = prepare(resolved.config)
        view.phase("load torch and the engine")
        from rlcli.launch.launch import train_in_folder

        result = train_in_folder(resolved, prepared, target, view)
    result |= {"seed": seed, "warm_start_s": warm.seconds, "warm_start_cached": warm.cached}
    result["total_s"] = round(time.monotonic() - started, 1)
    report("[4/4] result")
    _show(result, target, data, as_json)
    if result["stopped"]:
        raise typer.Exit(130)


def _prepare_data(folder: Path, seed: int) -> Path:
    from rlcli.data.prompts.schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(seed=seed)).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def _warm_start(cache: Path, data: Path, seed: int) -> Any:
    from rlcli.quickstart.warm_start import warm_start

    with progress() as update:
        return warm_start(cache, data, seed, on_progress=lambda done, steps: update("      warming up", done, steps))


def _show(result: dict[str, Any], target: Path, data: Path, as_json: bool) -> None:
    from rlcli.tracking.plots import reward_curve_text

    if as_json:
        emit_json(result)
        return
    plain(reward_curve_text(result["rewards"], CURVE_WIDTH, CURVE_HEIGHT))
    rows = []
    for step, report in sorted(result["evaluations"].items()):
        at_one = report["pass"]["pass@1"]
        interval = f"[{100 * at_one['low']:.1f}, {100 * at_one['high']:.1f}]"
        tokens = f"{report['mean_response_tokens']:.1f}"
        rows.append((f"after {step} steps" if step else "before", f"{100 * at_one['mean']:.1f}%", interval, tokens))
    show(table(["held-out sums", "pass@1 (greedy)", "95% interval", "tokens a response"], rows))
    plain(f"{result['total_s']:.0f} s in all. The curve as a picture: {target / 'reward.png'}")
    plain(
        f"""
Next:
  rlcli eval --model {quote(f"{target}/checkpoints/latest")} --data {quote(str(data))} --samples 8 --max-tokens 40
  rlcli recipes show quickstart                  what this run was made of
  rlcli prep gsm8k                               a real dataset
  rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --dry-run"""
    )
