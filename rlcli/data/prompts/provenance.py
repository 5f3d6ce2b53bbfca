"""The record in a parquet file's schema metadata of how rlcli made the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rlcli import __version__
from rlcli.support.files import described
from rlcli.support.reading import json_object

if TYPE_CHECKING:
    import pyarrow as pa

KEY = b"rlcli_provenance"


class Provenance(TypedDict):
    """The record of a file, as it is written. One that is read may be of another version of rlcli."""

    dataset: str
    """Name of the converter, such as `gsm8k`."""
    converter: str
    """Package of the converter."""
    rlcli: str
    """Version of rlcli."""
    sources: list[dict[str, str]]
    """Each file with its SHA-256, or id on the hub."""
    arguments: dict[str, object]
    """The converter's arguments that were given."""
    steps: Sequence[Mapping[str, object]]
    """Changes to the converter's rows, such as deduplication, with its counts."""
    date: str
    """Time of the record, in ISO format."""


def provenance(
    dataset: str,
    package: str,
    origins: Iterable[str],
    arguments: Mapping[str, object],
    steps: Sequence[Mapping[str, object]],
) -> Provenance:
    """The record of a file. package: the converter's package. arguments: those that were given."""
    return {
        "dataset": dataset,
        "converter": package,
        "rlcli": __version__,
        "sources": [_source(origin) for origin in origins],
        "arguments": dict(arguments),
        "steps": steps,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def stamped(table: pa.Table, record: Mapping[str, object]) -> pa.Table:
    """The pyarrow table with the record in its metadata."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: json.dumps(record).encode()})


def recorded(metadata: Mapping[bytes, bytes] | None) -> dict[str, object] | None:
    """The record in a schema's metadata; None if there is none that can be read."""
    text = (metadata or {}).get(KEY)
    return json_object(text) if text else None


def _source(origin: str) -> dict[str, str]:
    file = Path(origin)
    if not file.is_file():
        return {"hub": origin}
    return {"file": str(file.resolve()), "sha256": described(file)["sha256"]}
