"""The commands, and the classes of their groups."""

from __future__ import annotations

from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from rlcli.errors import SetupError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from typer._click.core import Command as ClickCommand
    from typer._click.core import Context, Parameter

command_line: ContextVar[list[str] | None] = ContextVar("command_line", default=None)
"""The arguments after `rlcli` if they come from a shell; None if a program calls `main` with its own arguments."""


PUBLISHED = "rlcli.commands"
"""The entry-point group of commands: a function or a `Typer` each. `runs.compare` is a subcommand of `rlcli runs`."""


class Command(NamedTuple):
    """A command that `rlcli --help` lists."""

    panel: str
    """Heading under which `rlcli --help` lists it."""
    target: str
    """`module:function` or `module:Typer`; `PUBLISHED` if an entry point of this name has it."""
    help: str
    """First line of its help, which `rlcli --help` shows without importing the command."""


TRAIN, DATA, MACHINE = "Train", "Data & rewards", "Machine"
COMMANDS = {
    "quickstart": Command(
        TRAIN,
        PUBLISHED,
        "Make a tiny model, warm it up, train it with GRPO and show what it learned. Minutes on two CPU cores.",
    ),
    "train": Command(
        TRAIN, "rlcli.cli.train.train:train", "Train a model by reinforcement learning with verifiable rewards."
    ),
    "plan": Command(
        TRAIN,
        PUBLISHED,
        "Predict a run's memory by phase, time, disk and batches, without a GPU and without loading weights.",
    ),
    "runs": Command(TRAIN, "rlcli.cli.runs.runs:app", "List runs; show, watch, compare or resume them."),
    "view": Command(
        TRAIN,
        PUBLISHED,
        "Show in a browser what a run does: curves, samples, tokens, time. Follows a run in progress. Ctrl-C ends it.",
    ),
    "report": Command(
        TRAIN,
        PUBLISHED,
        "Write pages that show what a run did: curves, samples, tokens, time. They open from disk, without a server.",
    ),
    "eval": Command(
        TRAIN, "rlcli.cli.eval.eval:app", "Evaluate a model: pass@k, maj@k and mean@1 with 95% intervals over prompts."
    ),
    "chat": Command(
        TRAIN,
        "rlcli.cli.chat:chat",
        "Talk to a model, or to the newest checkpoint of a run, on transformers in this process.",
    ),
    "engines": Command(
        TRAIN, "rlcli.cli.runs.engines:app", "List the inference servers of a run; let others join it, or leave."
    ),
    "export": Command(
        TRAIN,
        "rlcli.cli.runs.export:export",
        "Write a checkpoint as a folder for transformers, vLLM and the hub, with a model card.",
    ),
    "rescore": Command(
        TRAIN,
        "rlcli.cli.runs.rescore:rescore",
        "Score the saved samples of a run again with another verifier, and compare old and new scores by step.",
    ),
    "prep": Command(DATA, "rlcli.cli.prep.prep:app", "Make train.parquet and test.parquet from a dataset."),
    "verifiers": Command(
        DATA, "rlcli.cli.verifiers.verifiers:app", "List, show, run and audit the verifiers that score responses."
    ),
    "env": Command(
        DATA, "rlcli.cli.env.env:app", "List, show and play the environments that hold conversations with a model."
    ),
    "recipes": Command(
        DATA, "rlcli.cli.recipes.recipes:app", "List, show, compare, copy and explain training recipes."
    ),
    "config": Command(DATA, PUBLISHED, "Import configurations of verl and TRL as recipes."),
    "doctor": Command(
        MACHINE,
        "rlcli.cli.doctor:doctor",
        "Check this machine: one line for each thing that rlcli needs, with a fix if it is missing.",
    ),
    "model": Command(MACHINE, PUBLISHED, "Check a model's files, without its weights."),
    "tiny-model": Command(
        MACHINE,
        PUBLISHED,
        "Make a tiny Qwen2 model with random weights, a character-level tokenizer and a chat template.",
    ),
    "real-model": Command(
        MACHINE,
        PUBLISHED,
        "Get SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), a pretrained model that two CPU cores can train.",
    ),
}


class Group(TyperGroup):
    """A group that parses its options only if there are any: to parse them, Typer imports pydantic, which takes longer
    than all the rest of a command's `--help`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        self._has_options = not args or args[0].startswith("-")
        try:
            return super().parse_args(ctx, args)
        finally:
            self._has_options = True

    def get_params(self, ctx: Context) -> list[Parameter]:
        return super().get_params(ctx) if getattr(self, "_has_options", True) else []


class Root(Group):
    """Lists `COMMANDS` and imports only the one that is called: importing all of them takes longer than the rest of
    `rlcli --help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (panel, _, help) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=help, rich_help_panel=panel)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, ClickCommand | None, list[str]]:
        # A name with a dot is that of a subcommand, such as runs.compare.
        if args and (args[0] in COMMANDS or ("." not in args[0] and published(args[0]))):
            self.commands[args[0]] = imported(args[0])
        return super().resolve_command(ctx, args)


def imported(name: str) -> ClickCommand:
    """The command `name` of COMMANDS or of a package, with its options and subcommands."""
    target = COMMANDS[name].target if name in COMMANDS else PUBLISHED
    if target == PUBLISHED:
        command = _loaded(name)
    else:
        module, _, attribute = target.partition(":")
        command = getattr(import_module(module), attribute)
    group = typer.Typer(cls=Group, rich_markup_mode="rich", pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        group.add_typer(command, name=name)
    else:
        group.command(name)(command)
    return typer.main.get_group(group).commands[name]


def published(name: str) -> EntryPoint | None:
    """The entry point of the command `name`, or None. Those of rlcli are looked up first: reading all installed
    packages takes longer than the rest of a command's `--help`."""
    from importlib.metadata import PackageNotFoundError, distribution, entry_points

    try:
        ours = tuple(distribution("rlcli").entry_points.select(group=PUBLISHED, name=name))
    except PackageNotFoundError:  # the source is on the path, and nothing is installed
        return None
    return next(iter(ours or entry_points(group=PUBLISHED, name=name)), None)


def add_published(app: typer.Typer, group: str, *names: str) -> None:
    """Add the subcommands `names` of `group`, which entry points of this package have."""
    for name in names:
        app.command(name)(_loaded(f"{group}.{name}"))


def _loaded(name: str) -> Any:
    from rlcli.registry import load_entry

    entry, shown = published(name), name.replace(".", " ")
    if entry is None:
        raise SetupError(f"the command '{shown}' is not installed", "install rlcli again (scripts/env)")
    origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "local"
    return load_entry(entry, f"the command '{shown}' ({origin}, {entry.value})")
