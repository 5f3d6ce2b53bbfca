"""`rlcli plan`: the memory, time and disk of a run, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion
from rlcli.cli.console import emit_json, plain, show, table
from rlcli.cli.options import RecipeChoice, Sets, Steps, data_sets

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from rlcli_planner.asynchrony.advice import Advice
    from rlcli_planner.fitting.suggest import Suggestions
    from rlcli_planner.forecast import Forecast
    from rlcli_planner.phase_memory import PhaseMemory
    from rlcli_planner.plan_input import Keys

BAR = 40
"""Characters of a bar that is a whole device."""
GIB = 1 << 30
COLOURS = ("cyan", "blue", "magenta", "green", "yellow", "red", "bright_cyan", "bright_blue", "bright_magenta")

Model = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the model; a folder needs only config.json.", autocompletion=completion.models
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH[:WEIGHT]",
        help="A parquet file, or a folder with train.parquet, for prompt lengths; repeatable.",
        autocompletion=completion.datasets,
    ),
]
Devices = Annotated[
    str, typer.Option(metavar="DEVICES", help="h100:8, 8x80GB or cpu (default: what this machine has).")
]
Workers = Annotated[int | None, typer.Option(help="Workers that train (default: all of --gpus).")]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="A run whose responses are as long: says whether asynchrony pays.",
        autocompletion=completion.runs,
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure this machine again, in a few seconds, instead of using the cache.")
]
Suggest = Annotated[
    bool, typer.Option("--suggest", help="Propose the fastest layouts of these devices, and say what bounds each.")
]
JsonPlan = Annotated[bool, typer.Option("--json", help="Print one JSON object; memory in GiB.")]


def plan(
    recipe: RecipeChoice = None,
    model: Model = None,
    data: Data = None,
    gpus: Devices = "",
    workers: Workers = None,
    steps: Steps = None,
    sets: Sets = None,
    like: Like = None,
    suggest: Suggest = False,
    measure: Measure = False,
    as_json: JsonPlan = False,
) -> None:
    """Predict a run's memory by phase, time, disk and batches, without a GPU and without loading weights.

    Examples:

      rlcli plan grpo --model Qwen/Qwen2.5-7B-Instruct --gpus h100:8

      rlcli plan grpo --model ./my-model --data data/gsm8k --gpus 2x24GB --set lora.rank=32

      rlcli plan ppo --model ./my-model --gpus cpu --json

      rlcli plan grpo --model ./my-model --gpus h100:64 --suggest

      rlcli plan grpo --model ./my-model --gpus h100:8 --like runs/earlier

      rlcli plan grpo --model ./my-model --gpus cpu --measure
    """
    from rlcli.errors import ConfigError
    from rlcli.support.extras import TRAINING, require

    require(*TRAINING)
    if not recipe:
        raise ConfigError("rlcli plan needs a recipe", "for example: rlcli plan grpo --model ./my-model")
    from rlcli.launch.recipe_code import ALGORITHM, refuse_code
    from rlcli_planner.launch import memory_auto

    flags = {"model.path": model, "data.path": data_sets(data), "cluster.workers": workers, "train.steps": steps}
    refuse_code(recipe, flags, sets or [], "rlcli plan", only=ALGORITHM)
    notes: list[str] = []
    predicted, rows = memory_auto.planned(recipe, flags, sets or [], gpus, notes.append, like, remeasure=measure)
    layouts = memory_auto.suggest(predicted, recipe, flags, sets or []) if suggest else None
    if as_json:
        suggestions = {"suggested": layouts.as_dict()} if layouts else {}
        emit_json(predicted.as_dict() | {"plan": dict(rows), "notes": notes} | suggestions)
        return
    if layouts:
        _show_layouts(predicted, layouts)
        return
    show_plan(predicted, rows, notes)


def _show_layouts(predicted: Forecast, layouts: Suggestions) -> None:
    from rlcli.errors import ConfigError

    if predicted.setting.untimed:
        raise ConfigError("--suggest compares times, and none is predicted", predicted.setting.untimed)
    if not layouts.layouts:
        _verdict(predicted)
        return
    now = predicted.step_seconds if predicted.fits else 0.0
    rows = [
        (
            _seconds(layout.seconds),
            f"{now / layout.seconds:.2f} ×" if now else "",
            f"{layout.peak_gib:.0f}",
            layout.bound,
            _set(layout.keys),
        )
        for layout in layouts.layouts
    ]
    headings = ["a step at most", "faster" if now else "", "GiB", "bound by"]
    show(table([*headings, f"{predicted.setting.config.all_workers} × {predicted.setting.device.name}"], rows))
    if not now:
        plain("as asked it may not fit")
    if layouts.short_of:
        plain(layouts.short_of)
    plain("times are estimates, to be compared; rlcli plan without --suggest shows one layout in full")


def show_plan(predicted: Forecast, rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> None:
    """Print the plan, memory as bars and by part, time, disk, and which sizes could grow or must shrink."""
    show(table(["plan", ""], rows))
    show(_bars(predicted))
    show(_parts(predicted))
    if predicted.seconds:
        total = predicted.step_seconds
        times = [
            (phase.name, _seconds(phase.seconds), f"{phase.seconds / total:.0%}", phase.bound)
            for phase in predicted.seconds
        ]
        show(table(["a step at most", _seconds(total), "", "bound by"], times))
        plain(f"rates {predicted.setting.device.rates_from}; responses of full length, every one trained on\n")
    else:
        plain(f"a step's time is not predicted: {predicted.setting.untimed}\n")
    files = [(label, _bytes(size)) for label, size in predicted.disk.items()]
    show(table(["on disk", _bytes(sum(predicted.disk.values()))], files))
    if predicted.asynchrony:
        _asynchrony(predicted.asynchrony)
    _verdict(predicted)
    for note in notes:
        plain(f"note: {note}")


def _bars(predicted: Forecast) -> Table:
    """Each phase's peak as a bar, part by part, against the device's memory."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    device_memory, device = predicted.setting.device.memory, predicted.setting.device
    workers = predicted.setting.config.all_workers
    share = f"{device_memory / GIB:.1f} GiB" + (f" for {workers} workers" if device.is_cpu and workers > 1 else "")
    bars = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    bars.add_column("memory", no_wrap=True)
    bars.add_column(f"{device.name}: {share}", no_wrap=True)
    bars.add_column("GiB", justify="right", no_wrap=True)
    colours = _colours(predicted)
    full_bar = predicted.budget if device.is_cpu else device_memory
    for name, phase in _named(predicted):
        over = phase.total > predicted.budget
        bars.add_row(name, _bar(phase, full_bar, colours), Text(f"{phase.total / GIB:.2f}", "red" if over else ""))
    return bars


def _bar(phase: PhaseMemory, full_bar: float, colours: dict[str, str]) -> Text:
    from rich.text import Text

    bar, filled, size = Text(), 0, 0.0
    for part, part_bytes in phase.parts.items():
        size += part_bytes
        until = min(round(BAR * size / full_bar), BAR)
        bar.append("█" * (until - filled), colours[part])
        filled = until
    bar.append("░" * (BAR - filled), "dim")
    return bar.append("▶", "red") if size > full_bar else bar


def _parts(predicted: Forecast) -> Table:
    """A table of memory in GiB, by part and phase."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    phases, colours = _named(predicted), _colours(predicted)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("GiB of a worker", no_wrap=True)
    for name, _ in phases:
        grid.add_column(name, justify="right")
    for part, colour in colours.items():
        label = Text.assemble(("█ ", colour), part)
        grid.add_row(label, *(f"{phase.parts[part] / GIB:.2f}" if part in phase.parts else "" for _, phase in phases))
    grid.add_row("total", *(f"{phase.total / GIB:.2f}" for _, phase in phases), style="bold")
    return grid


def _named(predicted: Forecast) -> list[tuple[str, PhaseMemory]]:
    dedicated = {
        "dedicated engine": predicted.engine_worker,
        "dedicated critic": predicted.critic_worker,
        "dedicated teacher": predicted.teacher_worker,
    }
    return [
        *((phase.name, phase) for phase in predicted.memory),
        *((name, worker) for name, worker in dedicated.items() if worker),
    ]


def _colours(predicted: Forecast) -> dict[str, str]:
    """Part → colour, in order of first appearance."""
    parts = dict.fromkeys(part for _, phase in _named(predicted) for part in phase.parts)
    return {part: COLOURS[number % len(COLOURS)] for number, part in enumerate(parts)}


def _asynchrony(advice: Advice) -> None:
    """Print the fastest division of the devices for each staleness, and the advice."""
    fastest = {option.staleness: option for option in sorted(advice.options, key=lambda option: option.gain)}
    rows = [
        ("0", "shared", _seconds(advice.synchronous.step_s), "1.00 ×", f"{advice.synchronous.trainer_idle:.0%}", "")
    ]
    for staleness, option in sorted(fastest.items()):
        result, dedicated = option.simulated, option.generate > 0
        devices = f"{option.train} + {option.generate}" if dedicated else "shared"
        idle = f"{result.trainer_idle:.0%}", f"{result.engine_idle:.0%}" if dedicated else ""
        rows.append((str(staleness), devices, _seconds(result.step_s), f"{option.gain:.2f} ×", *idle))
    headings = ["async.staleness, simulated", "devices", "a step", "faster", "trainer idle", "engines idle"]
    show(table(headings, rows))
    plain(advice.summary)
    plain(f"responses {advice.lengths}" + "; --like RUN takes a run's" * advice.assumed)


def _verdict(predicted: Forecast) -> None:
    from rlcli_planner.fitting.solve import shortfall, verdict
    from rlcli_planner.launch.engine_sleep import DESCRIPTIONS

    fit = verdict(predicted.setting)
    plain(fit if predicted.fits else f"{fit}: {shortfall(predicted.setting)}")
    if sleep := predicted.sleep:
        plain(f"rollout.sleep = {sleep}: {DESCRIPTIONS[sleep]}")
    if predicted.largest:
        plain(f"the largest sizes that fit: {_set(predicted.largest)}  (rlcli train … --memory auto takes them)")
        return
    if not predicted.fixes:
        plain("nothing tried makes it fit: choose a smaller model, shorter responses or larger devices")
        return
    plain("what would fit, the cheapest first:")
    for hint in predicted.fixes:
        plain(f"  {_set(hint.keys)}  ({hint.cost}{f'; {_seconds(hint.seconds)} a step' if hint.seconds else ''})")


def _set(keys: Keys) -> str:
    return " ".join(f"--set {key}={str(value).lower()}" for key, value in keys.items())


def _seconds(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.0f} kB"
