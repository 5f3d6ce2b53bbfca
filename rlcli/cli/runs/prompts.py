"""`rlcli runs prompts`: what became of each prompt of a run."""

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
    "tokens": lambda one: -one.tokens,
    "rate": lambda one: (one.pass_rate is None, one.pass_rate),
    "last": lambda one: (one.last is None, one.last),
    "groups": lambda one: -one.groups,
    "step": lambda one: -one.step,
    "id": lambda one: one.prompt_id,
}
"""By which value prompts are listed: the most tokens, the lowest rate, the most groups or the latest step first."""


def prompts(
    run: RunName,
    sort: Annotated[
        SortName,
        typer.Option(help="Most tokens, lowest pass rate (overall or last), most groups, latest step, or by id."),
    ] = "tokens",
    reverse: Annotated[bool, typer.Option("--reverse", help="In the opposite order.")] = False,
    min_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Only last pass rates of at least this.")] = 0.0,
    max_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Only last pass rates of at most this.")] = 1.0,
    min_groups: Annotated[int, typer.Option(min=1, help="Only prompts drawn at least so often.")] = 1,
    wasted: Annotated[bool, typer.Option("--wasted", help="Only prompts of which no group was kept.")] = False,
    retired: Annotated[bool, typer.Option("--retired", help="Only solved prompts (data.retire).")] = False,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Only prompts with this text in their id.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="List at most so many; 0: all.")] = 20,
    json: Json = False,
) -> None:
    """List the prompts that a run has drawn, with their pass rates and what they cost.

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
    found = [
        one
        for one in every
        if one.groups >= min_groups
        and prompt in one.prompt_id
        and not (wasted and one.kept)
        and (one.retired or not retired)
        and (not limited or (one.last is not None and min_rate <= one.last <= max_rate))
    ]
    found = sorted(found, key=SORTS[sort], reverse=reverse)
    shown = found[: limit or None]
    if json:
        console.emit_json([one.as_dict() for one in shown])
        return
    console.plain(_summary(every))
    _print(shown)
    if len(shown) < len(found):
        console.note(f"{len(found) - len(shown)} more: --limit 0 lists all")


def _summary(every: Sequence[PromptHistory]) -> str:
    groups, kept = sum(one.groups for one in every), sum(one.kept for one in every)
    tokens, retired = sum(one.tokens for one in every), sum(one.retired for one in every)
    text = f"{len(every)} prompts in {groups} groups, {groups - kept} of them dropped; {tokens:,} tokens"
    return text + (f"; retired: {retired}" if retired else "")


def _print(found: Sequence[PromptHistory]) -> None:
    from rlcli.support.redact import printable

    any_retired = any(one.retired for one in found)
    rows = [
        (
            printable(one.prompt_id),
            one.groups,
            one.kept,
            _rate(one.pass_rate),
            _rate(one.first),
            _rate(one.last),
            f"{one.tokens:,}",
            one.step,
            *(["yes" if one.retired else ""] if any_retired else []),
        )
        for one in found
    ]
    # Short names: all must fit on one terminal line.
    columns = ["prompt", "groups", "kept", "rate", "first", "last", "tokens", "step"]
    columns += ["retired"] if any_retired else []
    console.show(console.table(columns, rows))


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
