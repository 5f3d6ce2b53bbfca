"""`rlcli model check`: whether a model can be trained here, from its files without the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.command_group import Group
from rlcli.cli.options import Json
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from rlcli_planner.model_check import ModelReport

GIB = 1 << 30

app = typer.Typer(cls=Group, no_args_is_help=True, help="Check a model's files, without its weights.")


@app.callback()
def group() -> None:
    """Check a model's files, without its weights."""


@app.command("check")
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, which needs only config.json, or a hub id.",
            autocompletion=completion.models,
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Say whether a model can be trained: layers, kernels, chat template, stop tokens and memory, without its weights.

    Exit code 2, with the reason, if it cannot, or if its files do not fit together.

    Examples:

      rlcli model check Qwen/Qwen3-8B
      rlcli model check models/qwen3.5 --json
    """
    from rlcli_planner.model_check import check_model_files

    try:
        report = check_model_files(model)
    except ModelError as error:
        if json:
            console.emit_json({"path": model, "supported": False, "reason": error.message, "hint": error.hint})
        raise
    if json:
        console.emit_json(report)
        return
    for name, text in rows(report):
        console.plain(f"{name:<14}{text}")


def rows(report: ModelReport) -> list[tuple[str, str]]:
    """Output, line by line."""
    size, memory = f"{report.parameters / 1e9:.2f}B parameters", report.memory
    if report.active != report.parameters:
        size += f", {report.active / 1e9:.2f}B of them active"
    lines = [("supported", f"{report.kind}, {size}, {report.positions} positions")]
    lines += [("layers", f"{count} × {kind}") for kind, count in report.layers.items()]
    for kernel in report.kernels:
        state = kernel.version or f"not installed: {kernel.without}"
        lines.append(("kernels", f"{kernel.package} for {kernel.purpose}: {state}"))
    if report.template is not None:
        lines.append(("template", report.template.conversations))
        lines.append(("thinking", report.template.thinking))
        if report.template.variables:
            lines.append(("variables", f"chat_template_kwargs: {', '.join(report.template.variables)}"))
    if report.stop_tokens:
        lines.append(("stop tokens", ", ".join(f"{token} {text}" for token, text in report.stop_tokens.items())))
    lines += [
        ("memory", f"{gib(memory.weights)} weights in 16 bits"),
        ("", f"{gib(memory.adamw)} to train all weights with AdamW, {gib(memory.muon)} with Muon"),
        ("", f"{gib(memory.adapter)} to train an adapter of rank 32"),
        ("", f"{memory.cache_per_token / 1024:.1f} KiB of an engine's cache for each token"),
    ]
    if memory.state_per_request:
        lines.append(("", f"{memory.state_per_request / (1 << 20):.1f} MiB of states for each request"))
    return [*lines, *(("note", note) for note in report.notes)]


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
