"""`rlcli prep list` and `rlcli prep show`: describe datasets and prepared files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import completion, console
from rlcli.cli.options import Json, JsonObject
from rlcli.errors import DataError, RlcliError

if TYPE_CHECKING:
    from rlcli.types import Converter

CELL = 400
"""Characters of a value of the first row that are shown."""


def describe_all(as_json: Json = False) -> None:
    """List the datasets that can be prepared, built in or from other packages.

    Examples:

      rlcli prep list

      rlcli prep list --json
    """
    from rlcli.prep.pipeline import CONVERTERS, converter_named

    descriptions = {}
    for name in CONVERTERS.names():
        try:
            descriptions[name] = _describe(name, converter_named(name))
        except RlcliError as error:  # one broken package must not hide the others
            console.note(f"note: {error}")
    if as_json:
        console.emit_json(list(descriptions.values()))
        return
    rows = [
        (description["name"], description["summary"], description["source"], description["verifier"])
        for description in descriptions.values()
    ]
    console.show(console.table(["dataset", "what", "from", "verifier"], rows))
    console.plain("rlcli prep show NAME describes one, rlcli prep NAME makes it")


def show_one(
    name: Annotated[str, typer.Argument(help="A dataset, or a parquet file.", autocompletion=completion.converters)],
    as_json: JsonObject = False,
) -> None:
    """Show what a dataset is and which options it reads; or a parquet file's columns, origin and first row.

    Examples:

      rlcli prep show gsm8k

      rlcli prep show data/gsm8k/train.parquet --json
    """
    from rlcli.prep.pipeline import converter_named

    if name.endswith(".parquet") or Path(name).exists():
        shown, report = _file(Path(name)), _report_file
    else:
        shown, report = _describe(name, converter_named(name)), _report_dataset
    if as_json:
        console.emit_json(shown)
    else:
        report(shown)


def _describe(name: str, converter: Converter) -> dict[str, Any]:
    from rlcli.prep.pipeline import CONVERTERS

    return {
        "name": name,
        "summary": converter.summary,
        "source": converter.source,
        "verifier": converter.verifier,
        "reference": converter.reference,
        "package": CONVERTERS.origin(name),
        "options": {"--" + option.replace("_", "-"): text for option, text in converter.options.items()},
    }


def _report_dataset(shown: dict[str, Any]) -> None:
    console.plain(f"{shown['name']}: {shown['summary']}")
    rows = [(key, shown[key]) for key in ("source", "verifier", "reference", "package") if shown[key]]
    console.show(console.table(["", "what"], rows))
    if shown["options"]:
        console.show(console.table(["option", "what it does"], shown["options"].items()))
    console.plain(f"Options that every dataset takes: rlcli prep {shown['name']} --help")


def _file(path: Path) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    from rlcli.data.prompts.provenance import recorded

    if not path.is_file():
        names = sorted(file.name for file in path.glob("*.parquet")) if path.is_dir() else []
        kind = f"a folder with {', '.join(names)}" if names else "not a file"
        raise DataError(f"{path} is {kind}", "give one parquet file, or the name of a dataset (rlcli prep list)")
    try:
        parquet = pyarrow.parquet.ParquetFile(path)
        first = next(parquet.iter_batches(batch_size=1), None)
        schema = parquet.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error!s:.200}", "check that the file is whole") from error
    return {
        "path": path,
        "rows": parquet.metadata.num_rows,
        "columns": {field.name: str(field.type) for field in schema},
        "provenance": recorded(schema.metadata),
        "first": _readable(first.to_pylist()[0]) if first is not None and first.num_rows else None,
    }


def _readable(value: Any) -> Any:
    """The value with the number of bytes in place of bytes, and with the description of an image in place of its bytes
    and path."""
    if isinstance(value, bytes):
        return _image(value) or f"{len(value)} bytes"
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
            return _readable(value["bytes"])
        return {name: _readable(item) for name, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _image(value: bytes) -> dict[str, Any] | None:
    """Digest and size of an encoded image, also in bytes; None if it is no image."""
    from rlcli.images.image_descriptions import described

    (description,) = described([value])
    return {**description, "bytes": len(value)} if description["width"] else None


def _worded(value: Any) -> Any:
    """The result of `_readable` with the names of images in place of their descriptions."""
    from rlcli.images.image_descriptions import in_words

    if isinstance(value, dict):
        return in_words(value) if value.keys() == {"digest", "width", "height", "bytes"} else value
    return [_worded(item) for item in value] if isinstance(value, list) else value


def _report_file(shown: dict[str, Any]) -> None:
    from rlcli.support.redact import printable

    def cell(value: object) -> str:
        value = _worded(value)
        text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        return text if len(text) <= CELL else f"{text[:CELL]}… ({len(text) - CELL} characters more)"

    console.plain(f"{shown['path']}: {shown['rows']} rows")
    first = shown["first"] or {}
    rows = [(name, kind, cell(first.get(name))) for name, kind in shown["columns"].items()]
    console.show(console.table(["column", "type", "first row"], rows))
    record = shown["provenance"]
    if record is None:
        console.plain("It has no record of how it was made.")
        return
    console.show(console.table(["made", "how"], [(key, cell(value)) for key, value in record.items()]))
