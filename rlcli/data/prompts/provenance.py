"""The record in a parquet file's schema metadata of how rlcli made the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcli import __version__
from rlcli.support.files import described
from rlcli.support.reading import json_object

KEY = b"rlcli_provenance"


def provenance(
    dataset: str, package: str, origins: Iterable[str], arguments: Mapping[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
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


def stamped(table: Any, record: Mapping[str, Any]) -> Any:
    """The pyarrow table with the record in its metadata."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: json.dumps(record).encode()})


def recorded(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any] | None:
    """The record in a schema's metadata; None if there is none that can be read."""
    text = (metadata or {}).get(KEY)
    return json_object(text) if text else None


def _source(origin: str) -> dict[str, str]:
    file = Path(origin)
    if not file.is_file():
        return {"hub": origin}
    return {"file": str(file.resolve()), "sha256": described(file)["sha256"]}
