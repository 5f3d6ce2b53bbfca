"""The commands, and the classes of the groups that hold them."""

from __future__ import annotations

from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

command_line: ContextVar[list[str] | None] = ContextVar("command_line", default=None)
"""The arguments after `rlcli` if they come from a shell; None if a program calls `main` with its own arguments."""


class Command(NamedTuple):
    """A command of `rlcli`. place: `module:function` or `module:Typer`, below `rlcli.cli`. help: the first line of its
    help, which `rlcli --help` shows without importing the command."""

    panel: str
    place: str
    help: str


TRAIN, DATA, MACHINE = "Train", "Data & rewards", "Machine"
COMMANDS = {
    "quickstart": Command(
        TRAIN,
        "train.quickstart:quickstart",
        "Make a tiny model, warm it up, train it with GRPO and show what it learned. Minutes on two CPU cores.",
    ),
    "train": Command(TRAIN, "train.train:train", "Train a model by reinforcement learning with verifiable rewards."),
    "plan": Command(
        TRAIN,
        "train.plan:plan",
        "Predict a run's memory by phase, time, disk and batches, without a GPU and without loading weights.",
    ),
    "runs": Command(TRAIN, "runs.runs:app", "List runs; show, watch, compare or resume them."),
    "view": Command(
        TRAIN,
        "report.view:view",
        "Show in a browser what a run does: curves, samples, tokens, time. Follows a run in progress. Ctrl-C ends it.",
    ),
    "report": Command(
        TRAIN,
        "report.report:report",
        "Write pages that show what a run did: curves, samples, tokens, time. They open from disk, without a server.",
    ),
    "eval": Command(
        TRAIN, "eval.eval:app", "Evaluate a model: pass@k, maj@k and mean@1 with 95% intervals over prompts."
    ),
    "chat": Command(
        TRAIN,
        "chat:chat",
        "Talk to a model, or to the newest checkpoint of a run, on transformers in this process.",
    ),
    "engines": Command(TRAIN, "runs.engines:app", "List the inference servers of a run; let others join it, or leave."),
    "export": Command(
        TRAIN,
        "runs.export:export",
        "Write a checkpoint as a folder for transformers, vLLM and the hub, with a model card.",
    ),
    "rescore": Command(
        TRAIN,
        "runs.rescore:rescore",
        "Score the saved samples of a run again with another verifier, and compare old and new scores by step.",
    ),
    "prep": Command(DATA, "prep.prep:app", "Make train.parquet and test.parquet from a dataset."),
    "verifiers": Command(
        DATA, "verifiers.verifiers:app", "List, show, run and audit the verifiers that score responses."
    ),
    "env": Command(DATA, "env.env:app", "List, show and play the environments that hold conversations with a model."),
    "recipes": Command(DATA, "recipes.recipes:app", "List, show, compare, copy and explain training recipes."),
    "config": Command(DATA, "recipes.config:app", "Import configurations of verl and TRL as recipes."),
    "doctor": Command(
        MACHINE,
        "doctor:doctor",
        "Check this machine: one line for each thing that rlcli needs, with a fix if it is missing.",
    ),
    "tiny-model": Command(
        MACHINE,
        "tiny_model:tiny_model",
        "Make a tiny Qwen2 model with random weights, a character-level tokenizer and a chat template.",
    ),
    "real-model": Command(
        MACHINE,
        "real_model:real_model",
        "Get SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), a pretrained model that two CPU cores can train.",
    ),
}


class Group(TyperGroup):
    """A group that reads its own options only if some are given: to read them, Typer imports pydantic, which takes
    longer than all the rest of a command's `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._has_options = not args or args[0].startswith("-")
        try:
            return super().parse_args(ctx, args)
        finally:
            self._has_options = True

    def get_params(self, ctx: Any) -> list[Any]:
        return super().get_params(ctx) if getattr(self, "_has_options", True) else []


class Root(Group):
    """Lists `COMMANDS` and imports only the one that is called: importing all of them takes longer than the rest of
    `rlcli --help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (panel, _, help) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=help, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = imported(args[0])
        return super().resolve_command(ctx, args)


def imported(name: str) -> Any:
    """The command `name` of COMMANDS, with its options and subcommands."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    found = getattr(import_module(f"rlcli.cli.{module}"), attribute)
    holder = typer.Typer(cls=Group, rich_markup_mode="rich", pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return typer.main.get_group(holder).commands[name]
