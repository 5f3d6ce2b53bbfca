"""`rlcli runs prompts`: the history of each prompt of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlcli.cli import console
from rlcli.cli.options import Json, RunName
from rlcli.errors import DataError

if TYPE_CHECKING:
    from rlcli.runs.prompt_history import PromptHistory

SortName = Literal["tokens", "rate", "last", "groups", "step", "id"]
SORTS: dict[SortName, Callable[[PromptHistory], Any]] = {
    "tokens": lambda history: -history.tokens,
    "rate": lambda history: (history.pass_rate is None, history.pass_rate),
    "last": lambda history: (history.last is None, history.last),
    "groups": lambda history: -history.groups,
    "step": lambda history: -history.step,
    "id": lambda history: history.prompt_id,
}
"""Sort keys: the most tokens, the lowest rate, the most groups or the latest step first."""


def prompts(
    run: RunName,
    sort: Annotated[
        SortName,
        typer.Option(help="Most tokens, lowest pass rate (overall or last), most groups, latest step, or by id."),
    ] = "tokens",
    reverse: Annotated[bool, typer.Option("--reverse", help="In the opposite order.")] = False,
    min_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Only last pass rates of at least this.")] = 0.0,
    max_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Only last pass rates of at most this.")] = 1.0,
    min_groups: Annotated[int, typer.Option(min=1, help="Only prompts with at least this many groups.")] = 1,
    wasted: Annotated[bool, typer.Option("--wasted", help="Only prompts of which no group was kept.")] = False,
    retired: Annotated[bool, typer.Option("--retired", help="Only solved prompts (data.retire).")] = False,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Only prompts with this text in their id.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="List at most this many; 0: all.")] = 20,
    json: Json = False,
) -> None:
    """List the prompts that a run has sampled, with their pass rates and tokens.

    Examples:

      rlcli runs prompts grpo-1

      rlcli runs prompts grpo-1 --sort groups --wasted

      rlcli runs prompts grpo-1 --max-rate 0 --min-groups 3 --limit 0 --json
    """
    from rlcli.launch.resume import find_record
    from rlcli.runs.folder import PROMPTS
    from rlcli.runs.prompt_history import histories

    folder = find_record(run)
    every = histories(folder, console.note)
    if not every:
        raise DataError(
            f"{folder / PROMPTS} has no prompts", "it is written once a step is done; supervised runs have none"
        )
    limited = min_rate > 0 or max_rate < 1
    selected = [
        history
        for history in every
        if history.groups >= min_groups
        and prompt in history.prompt_id
        and not (wasted and history.kept)
        and (history.retired or not retired)
        and (not limited or (history.last is not None and min_rate <= history.last <= max_rate))
    ]
    selected = sorted(selected, key=SORTS[sort], reverse=reverse)
    shown = selected[: limit or None]
    if json:
        console.emit_json([history.as_dict() for history in shown])
        return
    console.plain(_summary(every))
    _print(shown)
    if len(shown) < len(selected):
        console.note(f"{len(selected) - len(shown)} more: --limit 0 lists all")


def _summary(every: Sequence[PromptHistory]) -> str:
    groups, kept_groups = sum(history.groups for history in every), sum(history.kept for history in every)
    tokens, retired = sum(history.tokens for history in every), sum(history.retired for history in every)
    text = f"{len(every)} prompts in {groups} groups, {groups - kept_groups} of them dropped; {tokens:,} tokens"
    return text + (f"; retired: {retired}" if retired else "")


def _print(shown: Sequence[PromptHistory]) -> None:
    from rlcli.support.redact import printable

    any_retired = any(history.retired for history in shown)
    rows = [
        (
            printable(history.prompt_id),
            history.groups,
            history.kept,
            _rate(history.pass_rate),
            _rate(history.first),
            _rate(history.last),
            f"{history.tokens:,}",
            history.step,
            *(["yes" if history.retired else ""] if any_retired else []),
        )
        for history in shown
    ]
    # Short names: all must fit on one terminal line.
    columns = ["prompt", "groups", "kept", "rate", "first", "last", "tokens", "step"]
    columns += ["retired"] if any_retired else []
    console.show(console.table(columns, rows))


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
