"""Runs training commands under supervision: as a child process that is restarted if the machine fails."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import typer

from rlcli.cli.command_group import command_line
from rlcli.cli.console import note
from rlcli.cluster.supervisor.failure_record import resume_command
from rlcli.cluster.supervisor.supervise import supervise
from rlcli.support.attempt import INTERRUPTED, is_supervised

P = ParamSpec("P")
Options = Mapping[str, Any]


def supervised(command: Callable[P, None]) -> Callable[P, None]:
    """Run a training command under supervision if it comes from a shell."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        words = command_line.get()
        alone = words is None or is_supervised() or options.get("dry_run")
        if alone or not words or (folder := _folder(options)) is None:
            return command(*args, **options)
        resumes = "out" not in options or bool(options.get("resume")) or _is_there(options)
        debug = ["--debug"] if "--debug" in words else []
        name, *rest = (word for word in words if word != "--debug")
        out_option = [] if resumes or options["out"] else ["--out", str(folder)]
        first = _rlcli(name, *out_option, *rest, *debug)
        # Its changes may not be in the folder yet; applying them twice changes nothing. --accept-changes does not cover
        # files that change after this call.
        restart = [word for word in first if word != "--accept-changes"]
        if not resumes:
            restart = _rlcli("train", "--resume", str(folder), *_call_options(options), *debug)
        written_at = _configured(folder)
        code = supervise(folder, first, restart, resumes=resumes)
        if code == INTERRUPTED and (resumes or _configured(folder) not in (None, written_at)):
            note(resume_command(folder))
        raise typer.Exit(code)

    return run


def _configured(folder: Path) -> float | None:
    """Modification time of the configuration of the run in `folder`; None if there is no run."""
    try:
        return (folder / "config.toml").stat().st_mtime
    except OSError:
        return None


def _folder(options: Options) -> Path | None:
    """The folder of the run to resume, the folder of --out, or the next free one; None if no option names any, which
    the command then reports."""
    if resumed := options.get("run") or options.get("resume"):
        from rlcli.launch.resume import find_run

        return find_run(resumed)
    from rlcli.config.recipes import load
    from rlcli.runs.folder import default_out

    out: Path | None = options["out"]
    recipe: str | None = options["recipe"]
    return out or (default_out(load(recipe).header.name) if recipe else None)


def _is_there(options: Options) -> bool:
    """True if --continue finds a run."""
    from rlcli.runs.folder import has_results

    return bool(options.get("go_on") and options["out"]) and has_results(options["out"])


def _call_options(options: Options) -> list[str]:
    """The options that are not part of the configuration in the run folder."""
    valued = {"ray_address": "--ray-address", "show_samples": "--show-samples"}
    flags = {"profile": "--profile", "as_json": "--json", "whole_plan": "--plan"}
    words = [word for name, flag in valued.items() if options.get(name) for word in (flag, str(options[name]))]
    return words + [flag for name, flag in flags.items() if options.get(name)]


def _rlcli(*words: str) -> list[str]:
    # -P: files in the current folder must not shadow a library.
    return [sys.executable, "-P", "-m", "rlcli.cli.main", *words]
