"""Small copies of what environments showed in a step's conversations, beside its samples.

The pictures of prompts are in the data; these are nowhere else. A sample's messages name each by its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlcli.data.samples import write_table
from rlcli.images.rows import BadImage
from rlcli.images.thumbnails import thumbnail

NAME = "pictures-{rank}.parquet"
_ROWS = 64
"""Of a row group: a picture is read with its group."""


def write_pictures(path: Path, images: Mapping[str, bytes]) -> None:
    """Write small copies of encoded pictures, by digest. Raises `RunFailed` if the file cannot be written."""
    import pyarrow as pa

    copies = [(digest, copy) for digest, image in sorted(images.items()) if (copy := _copy(image))]
    if copies:
        digests, data = zip(*copies, strict=True)
        table = pa.table({"digest": pa.array(digests, pa.string()), "image": pa.array(data, pa.binary())})
        write_table(path, table, _ROWS)


def read_pictures(folder: Path, digests: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The copies with these digests in a step's folder, each once. Files that cannot be read have none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    left = set(digests)
    for file in sorted(folder.glob(NAME.replace("{rank}", "*"))):
        if not left:
            return
        try:
            rows = pq.read_table(file, filters=[("digest", "in", left)]).to_pylist()
        except (OSError, pa.ArrowException):
            continue
        for row in rows:
            if row["digest"] in left and row["image"]:
                left.discard(row["digest"])
                yield row["digest"], row["image"]


def _copy(image: bytes) -> bytes | None:
    try:
        return thumbnail(image)
    except BadImage:
        return None
