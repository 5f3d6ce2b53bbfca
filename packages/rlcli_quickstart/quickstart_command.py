"""`rlcli quickstart`: trains a small model on a small task, with the code that trains large ones."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlcli.cli.console import emit_json, note, plain, progress, show, stderr, table
from rlcli.cli.env.print_messages import print_message
from rlcli.cli.next_commands import activation, after_training, print_next
from rlcli.cli.options import JsonFigures
from rlcli.cluster.supervisor.failure_record import resume_command
from rlcli.support.files import cache_folder

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.types import Prompt
    from rlcli_quickstart.warm_start import Lessons

CURVE_WIDTH, CURVE_HEIGHT = 64, 10
MAX_SEED = (1 << 32) - 1

TaskName = Literal["sums", "tools", "guess", "shapes", "words"]
TaskOption = Annotated[
    TaskName,
    typer.Option(
        help="A tiny model learns to work sums, use a tool, guess a number by asking, or count shapes in an image; "
        "words: a pretrained model learns to solve word problems."
    ),
]


@dataclass(frozen=True)
class Task:
    """A task of the quickstart; texts are printed."""

    recipe: str
    """Name of the recipe."""
    data: str
    """Description of the train split."""
    start: str
    """Description of the model: the demonstrations of its warm start, or its origin."""
    held_out: str
    """Description of the test split."""
    next: str
    """Next commands; {run}, {model} and {data} stand for the run, its model and its data."""
    converter: str = ""
    """Converter of the data, if its defaults are used."""
    warm: bool = True
    """True if the run starts with a warm start of a tiny model."""
    workers: int = 2
    """Maximum default of worker processes; each has a copy of the engine's weights."""


TASKS: dict[str, Task] = {
    "sums": Task(
        "quickstart",
        "sums of two numbers below 100",
        "worked and guessed answers",
        "held-out sums",
        """\
  rlcli eval --model {model} --data {data} --samples 8 --max-tokens 40
  rlcli recipes show quickstart                  what this run was made of
  rlcli prep gsm8k                               a real dataset
  rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --dry-run""",
        converter="arithmetic",
    ),
    "tools": Task(
        "quickstart-tools",
        "products of two numbers of three digits, and a calculator",
        "some conversations call the calculator, most guess the answer",
        "held-out products",
        """\
  rlcli env try calculator --model {model} --data {data} --row 3
  rlcli recipes show quickstart-tools            what this run was made of
  rlcli prep gsm8k                               a real dataset
  rlcli train tools-calculator --dry-run         a real model with the same tool""",
    ),
    "shapes": Task(
        "quickstart-shapes",
        "images of shapes, to be counted by colour and form",
        "some answers name what each cell of the image holds, most are guesses",
        "held-out images",
        """\
  rlcli report {run} --out report                the images, and what the model answered
  rlcli eval --model {model} --data {data} --samples 8 --max-tokens 20
  rlcli recipes show quickstart-shapes           what this run was made of
  rlcli prep geometry3k                          a real dataset with images""",
    ),
    "words": Task(
        "quickstart-words",
        "word problems of one sentence, in three forms",
        "SmolLM2-135M-Instruct, a pretrained model of 135M parameters (Apache-2.0)",
        "held-out problems",
        """\
  rlcli chat {run}
  rlcli runs samples {run} --limit 5
  rlcli recipes show quickstart-words            what this run was made of
  rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k --dry-run""",
        converter="words",
        warm=False,
        workers=1,
    ),
    "guess": Task(
        "quickstart-guess",
        "none: the environment chooses a number from 1 to 16, to be found with five guesses",
        "some guesses halve what is left, most count up",
        "held-out games",
        """\
  rlcli env try guess_number --set environment.options.high=16       play it yourself
  rlcli env try guess_number --set environment.options.high=16 --model {model}
  rlcli recipes show quickstart-guess            what this run was made of
  rlcli train guess-number --dry-run             a real model, numbers up to 100""",
    ),
}


def quickstart(
    task: TaskOption = "sums",
    out: Annotated[Path | None, typer.Option(help="Folder for data and run (default: runs/quickstart-N).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the data, the warm start and the run.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes (default: up to 2, one a core).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of reinforcement learning.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where the model is kept (default: ~/.cache/rlcli).")] = None,
    as_json: JsonFigures = False,
) -> None:
    """Make a tiny model, warm it up, train it with GRPO and show what it learned. Minutes on two CPU cores.

    With --task words the model is SmolLM2-135M-Instruct, pretrained, and it takes ten minutes.

    Examples:

      rlcli quickstart

      rlcli quickstart --task tools

      rlcli quickstart --task words

      rlcli quickstart --seed 1 --json
    """
    from rlcli.config.load import resolve
    from rlcli.support.extras import TRAINING, require

    require(*TRAINING)
    from rlcli.launch.device_checks import check_machine
    from rlcli.runs.folder import RunFolder, default_out

    started = time.monotonic()
    report = stderr().print
    target = out or default_out("quickstart")
    flags: dict[str, object] = {
        "train.steps": steps,
        "train.seed": seed,
        "cluster.workers": workers or min(TASKS[task].workers, len(os.sched_getaffinity(0))),
    }
    resolved = resolve(TASKS[task].recipe, flags)
    config = resolved.config
    check_machine(config)
    RunFolder.check(target)
    report(f"[1/4] data: {TASKS[task].data}")
    data = _prepare_data(task, target.with_name(f"{target.name}-data"), seed)
    report(f"[2/4] {'warm start: supervised learning; ' if TASKS[task].warm else 'model: '}{TASKS[task].start}")
    model, facts = _model(task, cache or cache_folder(), config, data, seed)
    flags |= {"model.path": str(model)}
    flags |= {"data.path": str(data), "evaluation.data": str(data)} if data else {}
    for text in resolved.notes:
        report(f"      {text}")
    report(f"[3/4] reinforcement learning: GRPO on Ray, FSDP2 and {config.rollout.engine}")
    try:
        result = _train(TASKS[task].recipe, flags, target)
    except KeyboardInterrupt:
        if (target / "config.toml").is_file():
            note(resume_command(target))
        raise
    result |= {"task": task, "seed": seed, **facts}
    result["total_s"] = round(time.monotonic() - started, 1)
    if config.environment.name:
        result["conversations"] = _conversations(target, result["evaluations"])
    report("[4/4] result")
    _show(result, TASKS[task], target, data, as_json)
    if result["stopped"]:
        raise typer.Exit(130)


def _train(recipe: str, flags: dict[str, object], target: Path) -> dict[str, Any]:
    from rlcli_planner.launch.local_machine import rates_of
    from rlcli_planner.launch.memory_auto import with_sizes_for_cpus

    from rlcli.config.load import resolve
    from rlcli.launch.preflight import prepare
    from rlcli.launch.prewarm import EarlyStart
    from rlcli.runs.tracking.run_console import View

    resolved = resolve(recipe, flags)
    with View() as view, EarlyStart() as early:
        view.phase("check model and data")

        def checked(config: RunConfig, device: str) -> None:
            rates_of(config, device, "unless known")  # before Ray starts, which would slow the measurement down
            early.begin(config, device)

        prepared = prepare(resolved.config, on_checked=checked)
        resolved, prepared, lowered = with_sizes_for_cpus(resolved, prepared)
        for label, text in lowered:
            view.note(f"{label}: {text}")
        view.phase("load torch and the engine")
        from rlcli.launch.launch import train_in_folder

        return train_in_folder(resolved, prepared, target, view, early=early)


def _prepare_data(task: TaskName, folder: Path, seed: int) -> Path | None:
    """Write the data of a task; None for a task whose environment needs none."""
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions
    from rlcli_quickstart.conversation_tasks import products

    if task == "guess":
        return None
    splits: Mapping[str, Sequence[Prompt]]
    if task == "tools":
        splits = products(seed)
    elif task == "shapes":
        splits = prepare(converter_named("shapes"), ConvertOptions(seed=seed, kinds="count", cells=2, cell=32)).splits
    else:
        splits = prepare(
            converter_named({"sums": "arithmetic", "words": "words"}[task]), ConvertOptions(seed=seed)
        ).splits
    for split, prompts in splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def _lessons(task: TaskName, config: RunConfig, data: Path | None) -> Lessons:
    from rlcli.data.prompts.prompt_table import read_prompts
    from rlcli.launch.environment_checks import numbered_rows
    from rlcli_quickstart.conversation_lessons import Conversations
    from rlcli_quickstart.conversation_tasks import Calculating, Guessing
    from rlcli_quickstart.shape_lessons import Shapes
    from rlcli_quickstart.sum_lessons import Sums

    if data is None:
        return Conversations(config, numbered_rows(config), Guessing(1, int(config.environment.options["high"])))
    if task == "tools":
        return Conversations(config, read_prompts(data, "train"), Calculating())
    return Shapes(data) if task == "shapes" else Sums(data)


def _model(
    task: TaskName, cache: Path, config: RunConfig, data: Path | None, seed: int
) -> tuple[Path, dict[str, object]]:
    """The folder of the initial model, and the facts that `--json` reports of it."""
    if not TASKS[task].warm:
        from rlcli_quickstart.smollm2 import NAME, real_model

        model = real_model(cache / NAME, on_note=lambda text: stderr().print(f"      {text}"))
        stderr().print(f"      {'cached' if model.cached else 'made'}: {model.path}")
        return model.path, {"model": model.origin, "model_cached": model.cached}
    from rlcli_quickstart.warm_start import warm_start

    with progress() as update:
        warm = warm_start(
            cache,
            _lessons(task, config, data),
            seed,
            on_progress=lambda done, steps: update("      warming up", done, steps),
        )
    stderr().print(f"      {'cached' if warm.cached else f'took {warm.seconds:.0f} s'}: {warm.path}")
    return warm.path, {"warm_start_s": warm.seconds, "warm_start_cached": warm.cached}


def _conversations(target: Path, evaluations: Collection[int]) -> list[dict[str, object]]:
    """The conversation of one held-out row in the first and in the last evaluation: a row that only the last one
    solved, if there is any."""
    import json

    from rlcli.data.sample_files import is_conversation, sample_files
    from rlcli.evaluation.evaluation_folder import prompt_order, read_samples

    steps = (min(evaluations, key=int), max(evaluations, key=int)) if evaluations else ()
    by_prompt: list[dict[str, dict[str, Any]]] = []
    for step in steps:
        rows = [
            row for file in sample_files(target / "evaluations", int(step)) for row in read_samples(file).to_pylist()
        ]
        by_prompt.append({row["prompt_id"]: row for row in rows if is_conversation(row)})
    if not by_prompt:
        return []
    common = sorted(by_prompt[0].keys() & by_prompt[1].keys(), key=prompt_order)
    learned = [name for name in common if by_prompt[0][name]["score"] < by_prompt[1][name]["score"]]
    return [
        {
            "step": int(step),
            "prompt_id": name,
            "score": row[name]["score"],
            "messages": json.loads(row[name]["messages"]),
        }
        for name in (learned or common)[:1]
        for step, row in zip(steps, by_prompt, strict=True)
    ]


def _show(result: dict[str, Any], task: Task, target: Path, data: Path | None, as_json: bool) -> None:
    from rlcli.runs.tracking.plots import reward_curve_text

    if as_json:
        emit_json(result)
        return
    for conversation in result.get("conversations", ()):
        plain(f"{_after(conversation['step'])}: reward {conversation['score']:g}")
        for message in conversation["messages"]:
            print_message(message)
        plain("")
    plain(reward_curve_text(result["rewards"], CURVE_WIDTH, CURVE_HEIGHT))
    rows = []
    for step, report in sorted(result["evaluations"].items()):
        at_one = report["pass"]["pass@1"]
        interval = f"[{100 * at_one['low']:.1f}, {100 * at_one['high']:.1f}]"
        tokens = f"{report['mean_response_tokens']:.1f}"
        rows.append((_after(step), f"{100 * at_one['mean']:.1f}%", interval, tokens))
    show(table([task.held_out, "pass@1 (greedy)", "95% interval", "tokens a response"], rows))
    plain(f"{result['total_s']:.0f} s in all. The curve as an image: {target / 'reward.png'}")
    if result["stopped"]:
        print_next(after_training(target, stopped=True))
        return
    following = task.next.format(
        run=quote(str(target)), model=quote(f"{target}/checkpoints/latest"), data=quote(str(data))
    )
    first = [f"  {command:<46} {does}\n" for command, does in activation()]
    plain(f"\nNext:\n{''.join(first)}{following}")


def _after(step: int) -> str:
    return f"after {step} steps" if step else "before"
