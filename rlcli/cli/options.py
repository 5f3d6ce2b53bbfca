"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
JsonFigures = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]
JsonReport = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
]
RayAddress = Annotated[str | None, typer.Option(help="A running Ray cluster (default: RAY_ADDRESS, else local).")]
ShowSamples = Annotated[int, typer.Option(min=0, help="Show this many samples of each step.")]
Endpoint = Annotated[str | None, typer.Option(help="Base URL of a served OpenAI-compatible model.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest response.")]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes, one a device.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Scoring processes; unset: one a core.")]
Deadline = Annotated[float, typer.Option(min=0.01, max=86400, help="CPU seconds that one verification may take.")]
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, or a path to a .toml file.")]
VerifierName = Annotated[str, typer.Argument(help="Name, path/to/file.py:function, or an expression of these.")]
