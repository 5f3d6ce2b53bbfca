"""`rlcli.evaluate`: the command `rlcli eval` as a function."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli.api.run import Run
from rlcli.api.train import Rows

StrPath = str | Path


def evaluate(
    model: StrPath | Run | None = None,
    data: StrPath | Sequence[StrPath] | Rows | None = None,
    *,
    endpoint: str | None = None,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    max_tokens: int | None = None,
    max_prompts: int | None = None,
    by: str | Sequence[str] | None = None,
    verifier: str | Callable[..., Any] | None = None,
    environment: str | None = None,
    workers: int | None = None,
    seed: int | None = None,
    out: StrPath | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
    omit: str | Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate a model, as `rlcli eval` does, and return its report: the output of `rlcli eval --json`.

        report = rlcli.evaluate("runs/grpo-1", "data/gsm8k", samples=4)
        report["pass"]["pass@4"]["mean"]

    model: a folder or hub id, a run or its folder. data: a path, or several, or rows as for `rlcli.train`. Each
    parameter is the command's option of that name; `rlcli eval -h` describes them. verifier: an expression as for the
    command, or a function as for `rlcli.train`. settings: dotted key → value. The samples are kept only with `out`:
    parquet files there. Raises an `RlcliError` that names the fix.
    """
    from rlcli.api.command import call, option, settings_words

    with _paths(data, out) as paths, _expression(verifier, out) as text:
        options: dict[str, object] = {
            "model": model.path if isinstance(model, Run) else model,
            "data": paths,
            "endpoint": endpoint,
            "samples": samples,
            "temperature": temperature,
            "top_p": top_p,
            "greedy": greedy,
            "max_tokens": max_tokens,
            "max_prompts": max_prompts,
            "by": by,
            "verifier": text,
            "environment": environment,
            "workers": workers,
            "seed": seed,
            "out": out,
            "force": force,
            "omit": omit,
        }
        words = [word for name, value in options.items() for word in option(name, value)]
        return call("eval", [*words, *settings_words(settings)])


@contextmanager
def _paths(data: Any, out: StrPath | None) -> Iterator[Any]:
    """The data as the command takes them; rows are stored with the samples, or for the time of this call."""
    from rlcli.api.stored_rows import is_rows, stored_evaluation_rows

    if not is_rows(data):
        yield data
        return
    with (
        tempfile.TemporaryDirectory(prefix="rlcli-eval-") as folder,
        stored_evaluation_rows(data, Path(out or folder)) as path,
    ):
        yield path


@contextmanager
def _expression(verifier: str | Callable[..., Any] | None, out: StrPath | None) -> Iterator[str | None]:
    """The verifier as the command takes it; a function is stored with the samples, or for the time of this call."""
    if not callable(verifier):
        yield verifier
        return
    from rlcli.api.function_verifier import stored_in_evaluation

    with (
        tempfile.TemporaryDirectory(prefix="rlcli-eval-") as folder,
        stored_in_evaluation(verifier, Path(out or folder)) as text,
    ):
        yield text
