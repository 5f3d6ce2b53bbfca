"""`rlcli.train`: the command `rlcli train` as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlcli.api.run import Run
from rlcli.errors import ConfigError

StrPath = str | Path
Data = StrPath | Mapping[StrPath, float] | Sequence[StrPath]
Rows = Any
"""Rows in memory: a `datasets.Dataset`, a pandas frame, or a list of dicts."""


def train(
    recipe: str | Path | None = None,
    *,
    model: StrPath | Run | None = None,
    data: Data | Rows | None = None,
    eval_data: StrPath | Sequence[StrPath] | Rows | None = None,
    verifier: str | Callable[..., Any] | None = None,
    environment: str | None = None,
    out: StrPath | None = None,
    resume: StrPath | Run | None = None,
    accept_changes: bool = False,
    steps: int | None = None,
    workers: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    deterministic: bool = False,
    memory: str | None = None,
    ray_address: str | None = None,
    show_samples: int = 0,
    profile: bool = False,
    force: bool = False,
) -> Run:
    """Train a model by reinforcement learning with verifiable rewards, as `rlcli train` does, and return the run.

        run = rlcli.train("grpo", model="tiny", data="sums", steps=20, settings={"train.lr": 1e-4})

    Each parameter is the command's option of that name; `rlcli train -h` describes them. data: a path, several, path →
    weight, or rows: a `datasets.Dataset`, a pandas frame or a list of dicts, with a column `prompt` and, if there is
    one, `answer`; they are stored in the run's folder, with all their columns. eval_data: the same, without weights.
    verifier: an expression as for the command, or a function from a request to a `Verdict`, a number, True or False;
    its source is stored in the run's folder, so it may use only its local names, builtins and imported modules.
    settings: dotted key → value, for any key of the configuration.

    The command runs as a child process and prints its progress here. Ctrl-C stops the run after its current step, and
    then raises KeyboardInterrupt; `rlcli.train(resume=…)` continues. Raises an `RlcliError` that names the fix:
    `RunFailed` for a run that failed after it had started.
    """
    from rlcli.api.command import call, option, settings_words
    from rlcli.api.stored_rows import is_rows

    options: dict[str, object] = {
        "model": _path(model),
        "environment": environment,
        "resume": _path(resume),
        "accept_changes": accept_changes,
        "steps": steps,
        "workers": workers,
        "seed": seed,
        "deterministic": deterministic,
        "memory": memory,
        "ray_address": ray_address,
        "show_samples": show_samples or None,
        "profile": profile,
        "force": force,
    }
    if callable(verifier) and resume is not None:
        raise ConfigError(f"resume = {resume}: the run has its verifier", "leave verifier out")
    rows = {name: values for name, values in {"train": data, "test": eval_data}.items() if is_rows(values)}
    if rows and resume is not None:
        raise ConfigError(f"resume = {resume}: the run has its data", "leave data and eval_data out")
    if (callable(verifier) or rows) and out is None:
        out = _free_folder(recipe)
    with _stored(rows, out, force) as paths, _expression(verifier, out, force) as text:
        words = [*([str(recipe)] if recipe is not None else []), *_data(paths.get("train", data))]
        words += settings_words(settings)
        options |= {"out": out, "verifier": text, "eval_data": paths.get("test", eval_data)}
        result = call("train", [*words, *(word for name, value in options.items() for word in option(name, value))])
    return Run(result["out"])


def _stored(rows: Mapping[str, Rows], out: StrPath | None, force: bool) -> AbstractContextManager[dict[str, str]]:
    """The paths of rows in memory, which are stored in the run's folder `out`."""
    if not rows:
        return nullcontext({})
    from rlcli.api.stored_rows import stored_rows

    assert out is not None, "the folder of stored rows is known"
    return stored_rows(rows, Path(out), force)


def _expression(
    verifier: str | Callable[..., Any] | None, out: StrPath | None, force: bool
) -> AbstractContextManager[str | None]:
    """The verifier as the command takes it; a function is stored in the run's folder `out`."""
    if not callable(verifier):
        return nullcontext(verifier)
    from rlcli.api.function_verifier import stored_in_run

    assert out is not None, "the folder of a stored function is known"
    return stored_in_run(verifier, Path(out), force)


def _free_folder(recipe: str | Path | None) -> Path:
    """The folder that the command uses for a run without --out."""
    from rlcli.config.recipes import load
    from rlcli.runs.folder import default_out

    if recipe is None:
        raise ConfigError("no recipe is given", "name one: rlcli recipes list shows them")
    return default_out(load(str(recipe)).header.name)


def _data(data: Data | None) -> list[str]:
    from rlcli.api.command import option

    if isinstance(data, Mapping):
        return option("data", [f"{path}:{weight:g}" for path, weight in data.items()])
    return option("data", data)


def _path(location: StrPath | Run | None) -> StrPath | None:
    return location.path if isinstance(location, Run) else location
