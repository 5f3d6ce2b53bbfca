"""`rlcli plan`: the memory, time and disk of a run, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import completion
from rlcli.cli.console import emit_json, plain, show, table
from rlcli.cli.options import RecipeChoice, Sets, Steps, data_sets

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from rlcli_planner.asynchrony.advice import Advice
    from rlcli_planner.fitting.suggest import Suggested
    from rlcli_planner.forecast import Forecast
    from rlcli_planner.phase_memory import PhaseMemory

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
    found, rows = memory_auto.planned(recipe, flags, sets or [], gpus, notes.append, like, again=measure)
    layouts = memory_auto.suggest(found, recipe, flags, sets or []) if suggest else None
    if as_json:
        more = {"suggested": layouts.as_dict()} if layouts else {}
        emit_json(found.as_dict() | {"plan": dict(rows), "notes": notes} | more)
        return
    if layouts:
        _show_layouts(found, layouts)
        return
    show_plan(found, rows, notes)


def _show_layouts(found: Forecast, layouts: Suggested) -> None:
    from rlcli.errors import ConfigError

    if found.setting.untimed:
        raise ConfigError("--suggest compares times, and none is predicted", found.setting.untimed)
    if not layouts.layouts:
        _verdict(found)
        return
    now = found.step_seconds if found.fits else 0.0
    rows = [
        (
            _seconds(one.seconds),
            f"{now / one.seconds:.2f} ×" if now else "",
            f"{one.peak_gib:.0f}",
            one.bound,
            _set(one.keys),
        )
        for one in layouts.layouts
    ]
    headings = ["a step at most", "faster" if now else "", "GiB", "bound by"]
    show(table([*headings, f"{found.setting.config.all_workers} × {found.setting.device.name}"], rows))
    if not now:
        plain("as asked it may not fit")
    if layouts.short_of:
        plain(layouts.short_of)
    plain("times are estimates, to be compared; rlcli plan without --suggest shows one layout in full")


def show_plan(found: Forecast, rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> None:
    """Print the plan, memory as bars and by part, time, disk, and which sizes could grow or must shrink."""
    show(table(["plan", ""], rows))
    show(_bars(found))
    show(_parts(found))
    if found.seconds:
        total = found.step_seconds
        times = [
            (phase.name, _seconds(phase.seconds), f"{phase.seconds / total:.0%}", phase.bound)
            for phase in found.seconds
        ]
        show(table(["a step at most", _seconds(total), "", "bound by"], times))
        plain(f"rates {found.setting.device.rates_from}; responses of full length, every one trained on\n")
    else:
        plain(f"a step's time is not predicted: {found.setting.untimed}\n")
    files = [(what, _bytes(size)) for what, size in found.disk.items()]
    show(table(["on disk", _bytes(sum(found.disk.values()))], files))
    if found.asynchrony:
        _asynchrony(found.asynchrony)
    _verdict(found)
    for note in notes:
        plain(f"note: {note}")


def _bars(found: Forecast) -> Table:
    """Each phase's peak as a bar, part by part, against the device's memory."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    whole, device = found.setting.device.memory, found.setting.device
    workers = found.setting.config.all_workers
    share = f"{whole / GIB:.1f} GiB" + (f" for {workers} workers" if device.is_cpu and workers > 1 else "")
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("memory", no_wrap=True)
    made.add_column(f"{device.name}: {share}", no_wrap=True)
    made.add_column("GiB", justify="right", no_wrap=True)
    colours = _colours(found)
    most = found.budget if device.is_cpu else whole
    for name, phase in _named(found):
        over = phase.total > found.budget
        made.add_row(name, _bar(phase, most, colours), Text(f"{phase.total / GIB:.2f}", "red" if over else ""))
    return made


def _bar(phase: PhaseMemory, whole: float, colours: dict[str, str]) -> Text:
    from rich.text import Text

    bar, drawn, size = Text(), 0, 0.0
    for part, taken in phase.parts.items():
        size += taken
        until = min(round(BAR * size / whole), BAR)
        bar.append("█" * (until - drawn), colours[part])
        drawn = until
    bar.append("░" * (BAR - drawn), "dim")
    return bar.append("▶", "red") if size > whole else bar


def _parts(found: Forecast) -> Table:
    """A table of memory in GiB, by part and phase."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    phases, colours = _named(found), _colours(found)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("GiB of a worker", no_wrap=True)
    for name, _ in phases:
        made.add_column(name, justify="right")
    for part, colour in colours.items():
        label = Text.assemble(("█ ", colour), part)
        made.add_row(label, *(f"{phase.parts[part] / GIB:.2f}" if part in phase.parts else "" for _, phase in phases))
    made.add_row("total", *(f"{phase.total / GIB:.2f}" for _, phase in phases), style="bold")
    return made


def _named(found: Forecast) -> list[tuple[str, PhaseMemory]]:
    apart = {"engine apart": found.apart, "critic apart": found.critic_apart, "teacher apart": found.teacher_apart}
    return [*((phase.name, phase) for phase in found.memory), *((name, own) for name, own in apart.items() if own)]


def _colours(found: Forecast) -> dict[str, str]:
    """Part → colour, in order of first appearance."""
    parts = dict.fromkeys(part for _, phase in _named(found) for part in phase.parts)
    return {part: COLOURS[number % len(COLOURS)] for number, part in enumerate(parts)}


def _asynchrony(found: Advice) -> None:
    """The fastest division of the devices for each staleness, and what to do."""
    fastest = {one.staleness: one for one in sorted(found.options, key=lambda one: one.gain)}
    rows = [("0", "shared", _seconds(found.synchronous.step_s), "1.00 ×", f"{found.synchronous.trainer_idle:.0%}", "")]
    for staleness, one in sorted(fastest.items()):
        each, apart = one.simulated, one.generate > 0
        devices = f"{one.train} + {one.generate}" if apart else "shared"
        idle = f"{each.trainer_idle:.0%}", f"{each.engine_idle:.0%}" if apart else ""
        rows.append((str(staleness), devices, _seconds(each.step_s), f"{one.gain:.2f} ×", *idle))
    headings = ["async.staleness, simulated", "devices", "a step", "faster", "trainer idle", "engines idle"]
    show(table(headings, rows))
    plain(found.told)
    plain(f"responses {found.lengths}" + "; --like RUN takes a run's" * found.assumed)


def _verdict(found: Forecast) -> None:
    from rlcli_planner.fitting.solve import shortfall, verdict
    from rlcli_planner.launch.engine_sleep import SAYS

    fit = verdict(found.setting)
    plain(fit if found.fits else f"{fit}: {shortfall(found.setting)}")
    if sleep := found.sleep:
        plain(f"rollout.sleep = {sleep}: {SAYS[sleep]}")
    if found.largest:
        plain(f"the largest sizes that fit: {_set(found.largest)}  (rlcli train … --memory auto takes them)")
        return
    if not found.fixes:
        plain("nothing tried makes it fit: choose a smaller model, shorter responses or larger devices")
        return
    plain("what would fit, the cheapest first:")
    for hint in found.fixes:
        plain(f"  {_set(hint.keys)}  ({hint.cost}{f'; {_seconds(hint.seconds)} a step' if hint.seconds else ''})")


def _set(keys: dict[str, Any]) -> str:
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
