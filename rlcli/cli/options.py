"""Options that several commands share, and the parser of `--data PATH[:WEIGHT]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli import completion


def in_home(path: Path | None) -> Path | None:
    """The path with `~` expanded: a shell does not do so in `--out=~/folder`."""
    return path and path.expanduser()


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
JsonFigures = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]
JsonReport = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.", autocompletion=completion.keys
    ),
]
RayAddress = Annotated[str | None, typer.Option(help="A running Ray cluster (default: RAY_ADDRESS, else local).")]
ShowSamples = Annotated[int, typer.Option(min=0, help="Show this many samples of each step.")]
Steps = Annotated[int | None, typer.Option(help="Steps of the run.")]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes", help="Resume though files that the run reads have changed; marks the curve at that step."
    ),
]
WholePlan = Annotated[bool, typer.Option("--plan", help="Print the whole plan before the run, not five lines of it.")]
Endpoint = Annotated[str | None, typer.Option(help="Base URL of a served OpenAI-compatible model.")]
Omit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A sampling value, such as top_k, that is not sent to the endpoint, for one that refuses it: its own "
        "default applies then; repeatable.",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest response.")]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes, one a device.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
OnlySteps = Annotated[list[int] | None, typer.Option("--step", help="Only this step; repeatable.")]
OfEvaluations = Annotated[bool, typer.Option("--evaluations", help="The samples of evaluations instead.")]
MostChanged = Annotated[int, typer.Option(min=0, help="How many of the most changed prompts to list.")]
ModelOut = Annotated[Path, typer.Option(help="Folder to write the model to.", callback=in_home)]
Processes = Annotated[int | None, typer.Option(min=1, help="Scoring processes; unset: one a core.")]
Deadline = Annotated[float, typer.Option(min=0.01, max=86400, help="CPU seconds that one verification may take.")]
Sandbox = Annotated[str, typer.Option(help="Sandbox of verifiers that run programs.")]
RecipeChoice = Annotated[
    str | None,
    typer.Argument(
        help="A recipe's name (rlcli recipes list) or a path to a .toml file.", autocompletion=completion.recipes
    ),
]
RecipeName = Annotated[
    str, typer.Argument(help="A recipe's name, or a path to a .toml file.", autocompletion=completion.recipes)
]
RunName = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.", autocompletion=completion.runs)
]
VerifierName = Annotated[
    str,
    typer.Argument(
        help="Name, path/to/file.py:function, or an expression of these.", autocompletion=completion.verifiers
    ),
]


def data_sets(texts: Sequence[str] | None) -> object:
    """The value of `data.path` for `--data` options: a path, or several with their weights; None without any.

    A number after the last colon is a weight, unless a file or folder with that whole name exists.

    >>> data_sets(["data/math"]), data_sets(["data/math:2", "http:x", "b"])
    ('data/math', [{'path': 'data/math', 'weight': 2.0}, 'http:x', 'b'])
    """
    return one_or_all([_data_set(text) for text in texts or ()])


def one_or_all(values: Sequence[object] | None) -> object:
    """The only element itself; None if empty."""
    if not values:
        return None
    return values[0] if len(values) == 1 and isinstance(values[0], str) else list(values)


def _data_set(text: str) -> str | dict[str, object]:
    path, colon, weight = text.rpartition(":")
    if not colon or not path or Path(text).expanduser().exists():
        return text
    try:
        return {"path": path, "weight": float(weight)}
    except ValueError:
        return text
