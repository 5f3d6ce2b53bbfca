"""Suggests follow-up commands at the end of a command, below `next:`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rlcli.cli.console import plain

COLUMN, WIDTH = 44, 80
"""Column of the explanation, and the longest line: an explanation that does not fit goes on a separate line."""
DEFAULT_TOKENS = 1024
"""The longest response of `rlcli eval` without --max-tokens."""


def activation() -> list[tuple[str, str]]:
    """The command that puts `rlcli` on the shell's path; none if it is there, or if this Python has no such command."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("rlcli") or not script.is_file():
        return []
    current = Path.cwd()
    shown = script.relative_to(current) if script.is_relative_to(current) else script
    return [(f"source {quote(str(shown))}", "once a shell, to find rlcli")]


def print_next(commands: Sequence[tuple[str, str]]) -> None:
    """Print pairs of a command and its purpose, after the one that puts `rlcli` on the shell's path, if needed."""
    commands = [*activation(), *commands] if commands else []
    lines = [line for command, does in commands for line in _lines(command, does)]
    if lines:
        plain("next:\n" + "\n".join(lines))


def _lines(command: str, does: str) -> list[str]:
    line = f"  {command:<{COLUMN}}  {does}".rstrip()
    return [line] if len(line) <= WIDTH else [f"  {command}", f"      {does}"]


def after_training(run: Path, stopped: bool) -> list[tuple[str, str]]:
    """Commands for the run in the folder `run`, by its configuration."""
    from rlcli.runs.listing import config_of

    name, config = quote(str(run)), config_of(run)
    if stopped:
        return [
            (f"rlcli train --resume {name}", "continue the run"),
            (f"rlcli runs show {name}", "its curve so far, and samples"),
        ]
    commands = [(f"rlcli view {name}", "its curves, samples and tokens, in a browser")]
    if evaluation := _evaluation(name, config):
        commands.append((evaluation, "how good the model is, with intervals"))
    commands.append((f"rlcli export {name} --out my-model", "a folder for transformers and vLLM"))
    if config.get("data", {}).get("response") and (data := _data(config)):
        further = f"rlcli train grpo --model {name} {data}{_verifier(config)} --dry-run"
        commands.append((further, "reinforcement learning from this model"))
    return commands


def after_export(model: str, kind: str) -> list[tuple[str, str]]:
    """Commands for an exported policy, a folder; none for a critic."""
    name = quote(model)
    evaluate = (f"rlcli eval --model {name} --data …", "how good it is, with intervals")
    return {"model": [(f"rlcli chat {name}", "talk to it"), evaluate], "adapter": [evaluate]}.get(kind, [])


def after_evaluation(out: Path | None) -> list[tuple[str, str]]:
    """The command to compare an evaluation with another one. out: the folder of its samples."""
    if out is None:
        return [("the same command with --out evals/NAME", "keep the samples, to compare two evaluations")]
    return [(f"rlcli eval compare evals/OTHER {quote(str(out))}", "the difference to another one, in pairs")]


def after_prep(out: Path, verifier: str, *, trains: bool) -> list[tuple[str, str]]:
    """The command to train on a dataset, or to evaluate if it has no rows for training. verifier: of its rows; empty:
    the command line names it."""
    scored = "" if verifier else " --verifier FILE.py:FUNCTION"
    if not trains:
        return [(f"rlcli eval --model MODEL --data {quote(str(out))}{scored}", "how good a model is, with intervals")]
    return [(f"rlcli train grpo --model MODEL --data {quote(str(out))}{scored} --dry-run", "check all, train nothing")]


def _evaluation(run: str, config: Mapping[str, Any]) -> str:
    """The command that evaluates a run on its held-out data; empty if it has none."""
    rollout = config.get("rollout", {})
    section = config.get("environment", {})
    environment = section.get("name", "")
    held_out = config.get("evaluation", {}).get("data") or ()
    sets = [held_out] if isinstance(held_out, str) else held_out
    if not sets and not environment:
        return ""
    words = [f"rlcli eval --model {run}", *(f"--data {quote(str(path))}" for path in sets)]
    if environment:
        words.append(f"--environment {quote(str(environment))}")
        options = section.get("options", {}).items()
        words += [f"--set {quote(f'environment.options.{option}={value}')}" for option, value in options]
    tokens = rollout.get("max_response_tokens", DEFAULT_TOKENS)
    limit = f" --max-tokens {tokens}" if tokens != DEFAULT_TOKENS else ""
    return " ".join(words) + _verifier(config) + limit


def _verifier(config: Mapping[str, Any]) -> str:
    """The `--verifier` option of a run, after a space; empty if its rows name theirs."""
    name = config.get("verifier", {}).get("name", "auto")
    return "" if name == "auto" else f" --verifier {quote(str(name))}"


def _data(config: Mapping[str, Any]) -> str:
    """The `--data` options of a run; empty if its datasets have weights."""
    path = config.get("data", {}).get("path") or ()
    sets = [path] if isinstance(path, str) else path
    if not all(isinstance(each, str) for each in sets):
        return ""
    return " ".join(f"--data {quote(each)}" for each in sets)
