"""`rlcli runs signals`: whether a run's reward rises for the wrong reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import console
from rlcli.cli.options import JsonObject

if TYPE_CHECKING:
    from rlcli_inspect.signals.signal import Signal

WIDTH = 100


def signals(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")],
    everything: Annotated[bool, typer.Option("--all", help="Explain all signals, not only those that warn.")] = False,
    as_json: JsonObject = False,
) -> None:
    """Show signals of reward hacking: what should rise with the reward and does not, or should not and does.

    They compare the start of the run with its last steps, on a part of the saved samples. For one more signal, let
    another verifier judge them: rlcli rescore RUN --verifier … --keep

    Examples:

      rlcli runs signals grpo-1

      rlcli runs signals runs/grpo-1 --json
    """
    from rlcli.launch.resume import find_record
    from rlcli.runs.run_data import RunData
    from rlcli_inspect.signals.panel import panel_of

    folder = find_record(run)
    for note in RunData(folder).damage():
        console.note(f"warning: {note}")
    panel = panel_of(folder)
    if as_json:
        console.emit_json({"run": folder, "signals": [signal.as_dict() for signal in panel]})
        return
    rows = [
        (signal.name, signal.state, _value(signal.value), f"{signal.threshold:g}", _text(signal.title))
        for signal in panel
    ]
    console.show(console.table(["signal", "state", "value", "threshold", ""], rows))
    _explain(panel if everything else [signal for signal in panel if signal.state == "warning"])


def _explain(signals_to_explain: Sequence[Signal]) -> None:
    for signal in signals_to_explain:
        console.plain(f"\n{signal.name}: {signal.state}")
        for line in wrap(_text(signal.explanation), WIDTH):
            console.plain(f"  {line}")
        for example in signal.examples:
            location = f"step {example.step}, {example.prompt_id}, sample {example.sample}"
            console.plain(_text(f"  {location} ({example.note}):"))
            for line in wrap(_text(example.excerpt), WIDTH - 4, replace_whitespace=False):
                console.plain(f"    {line}")


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _text(text: str) -> str:
    from rlcli.support.redact import printable

    return printable(text)
