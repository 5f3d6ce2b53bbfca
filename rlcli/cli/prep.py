"""`rlcli prep`: a dataset into the parquet files that training and evaluation read."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcli.errors import ConfigError, DataError, RlcliError
from rlcli.types import Converter, ConvertOptions, Prompt


def prep(
    name: Annotated[str, typer.Argument(help="Dataset to prepare, or `list` to see them all.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; unset: data/NAME.")] = None,
    source: Annotated[str | None, typer.Option(help="Local folder or file to read in place of the hub.")] = None,
    difficulty: Annotated[int | None, typer.Option(help="Difficulty of generated problems.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of generated problems.")] = None,
    count: Annotated[int | None, typer.Option(help="Rows of the train split.")] = None,
    test_count: Annotated[int | None, typer.Option(help="Rows of the test split.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make train.parquet and test.parquet from a dataset.

    Examples:

      rlcli prep list
      rlcli prep gsm8k
      rlcli prep gsm8k --source ~/downloads/gsm8k --out data/gsm8k
      rlcli prep arithmetic --difficulty 2 --seed 1
    """
    options = ConvertOptions(source=source, difficulty=difficulty, seed=seed, count=count, test_count=test_count)
    if name == "list":
        _list(as_json)
    else:
        _convert(name, out or Path("data") / name, options, as_json)


def _list(as_json: bool) -> None:
    from rlcli.data.converters import CONVERTERS

    converters = {}
    for name in CONVERTERS.names():
        try:
            converters[name] = _converter(name)
        except RlcliError as error:  # one broken package must not hide the others
            typer.echo(f"note: {error}", err=True)
    if as_json:
        typer.echo(json.dumps([_describe(name, converter) for name, converter in converters.items()]))
        return
    for name, converter in converters.items():
        typer.echo(f"{name}: {converter.summary} (from {converter.source}; verifier {converter.verifier})")
        for option, text in converter.options.items():
            typer.echo(f"  {_flag(option)}: {text}")


def _converter(name: str) -> Converter:
    from rlcli.data.converters import CONVERTERS

    found: object = CONVERTERS.get(name)
    if not isinstance(found, Converter):
        raise DataError(
            f"the dataset '{name}' ({CONVERTERS.origin(name)}, {CONVERTERS.target(name)}) is a {type(found).__name__}",
            "its package must publish an rlcli.types.Converter",
        )
    return found


def _describe(name: str, converter: Converter) -> dict[str, Any]:
    return {
        "name": name,
        "summary": converter.summary,
        "source": converter.source,
        "verifier": converter.verifier,
        "options": {_flag(option): text for option, text in converter.options.items()},
    }


def _convert(name: str, out: Path, options: ConvertOptions, as_json: bool) -> None:
    from rlcli.data.schema import write_prompts
    from rlcli.hub import offline_unless_reachable

    converter = _converter(name)
    _refuse_unread(name, converter, options)
    if options.source is None and "source" in converter.options:
        offline_unless_reachable(lambda note: typer.echo(note, err=True))
    splits = converter.convert(options)
    if not splits:
        raise DataError(f"{name}: the converter gave no split", "mend the converter, or give another --source")
    written = {}
    for split, prompts in splits.items():
        path = out / f"{split}.parquet"
        written[split] = {"path": str(path), "rows": write_prompts(path, prompts)}
    older = sorted(path.name for path in out.glob("*.parquet") if path.stem not in splits)
    example = next(iter(splits.values()))[0]
    if as_json:
        shown = {"messages": list(example.messages), "ground_truth": example.ground_truth, "verifier": example.verifier}
        typer.echo(json.dumps({"name": name, "out": str(out), "splits": written, "older": older, "example": shown}))
        return
    for split, file in written.items():
        typer.echo(f"{split}: {file['rows']} rows in {file['path']}")
    if older:
        typer.echo(f"left as before in {out}: {', '.join(older)}")
    _show(example)


def _refuse_unread(name: str, converter: Converter, options: ConvertOptions) -> None:
    for field in fields(options):
        if getattr(options, field.name) is not None and field.name not in converter.options:
            reads = ", ".join(map(_flag, converter.options)) or "none"
            raise ConfigError(f"{_flag(field.name)}: {name} does not read it", f"its options are: {reads}")


def _show(example: Prompt) -> None:
    typer.echo("example:")
    for message in example.messages:
        typer.echo(f"  {message['role']}: " + message["content"].replace("\n", "\n    "))
    typer.echo(f"  ground truth: {example.ground_truth} (verifier {example.verifier})")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
