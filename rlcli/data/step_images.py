"""Thumbnails of the images that environments sent in a step's conversations, next to its samples.

The images of prompts are in the dataset; these would be lost. A sample's messages name each by its digest. The
thumbnails of `rank-0.parquet` are in `pictures-0.parquet`, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlcli.data.sample_files import write_table
from rlcli.support.reading import check_regular

MOST = 1000
"""Maximum number of thumbnails in a file; some tens of kilobytes each."""
_ROWS = 64
"""Rows of a row group: an image is read with its group."""


def images_path(samples: Path) -> Path:
    """Path of the thumbnails of a file of samples.

    >>> images_path(Path("step-000001/rank-0.round-2.parquet")).name
    'pictures-0.round-2.parquet'
    """
    return samples.with_name(samples.name.replace("rank-", "pictures-", 1))


def write_images(path: Path, copies: Mapping[str, bytes]) -> None:
    """Write thumbnails, by digest. Raises `RunFailed` if the file cannot be written."""
    import pyarrow as pa

    columns = {"digest": pa.array(copies.keys(), pa.string()), "image": pa.array(copies.values(), pa.binary())}
    write_table(path, pa.table(columns), _ROWS)


def read_images(folder: Path, digests: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the thumbnails with these digests in a step's folder, each once. Unreadable files are skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    missing = set(digests)
    for file in sorted(folder.glob("pictures-*.parquet")):
        if not missing:
            return
        try:
            check_regular(file)
            rows = pq.read_table(file, columns=["digest", "image"], filters=[("digest", "in", missing)]).to_pylist()
        except (OSError, ValueError, pa.ArrowException):
            continue
        for row in rows:
            if row.get("digest") in missing and isinstance(row.get("image"), bytes):
                missing.discard(row["digest"])
                yield row["digest"], row["image"]
