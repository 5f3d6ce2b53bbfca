"""The pictures of the rows that an audit's page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rlcli.data.prompts.prompt_table import find_file
from rlcli.errors import DataError
from rlcli.images.image_descriptions import in_words
from rlcli.images.row_images import BadImage
from rlcli.images.thumbnails import data_url, thumbnail
from rlcli.runs.run_images import read_pictures
from rlcli.types import image_digest
from rlcli_audit.audit_report import Report, Surprise


def split_of(data: Path) -> str:
    """The split that is audited: `train` if there is one."""
    return "train" if (data / "train.parquet").is_file() or not data.is_dir() else "test"


def shown_pictures(report: Report, shown: Sequence[Surprise]) -> Mapping[int, str]:
    """Row → its pictures as HTML, of those rows of `shown` that have any: thumbnails, or why there are none."""
    rows = {one.row: one for one in shown if one.images}
    if not rows:
        return {}
    data, found = Path(report.data), dict[int, str]()
    why = "the data has changed"
    try:
        for row, images in read_pictures(find_file(data, split_of(data)), set(rows)):
            by_digest = {image_digest(image): image for image in images}
            found[row] = "".join(_html(one, by_digest.get(one["digest"])) for one in rows[row].images)
    except DataError as error:
        why = error.message
    return {row: found.get(row) or escape(f"not shown: {why}") for row in rows}


def _html(described: Mapping[str, object], image: bytes | None) -> str:
    name = in_words(described)
    try:
        if image is None:
            raise BadImage("the data has changed")
        return f'<img src="{data_url(thumbnail(image))}" alt="{name}" title="{name}">'
    except BadImage as error:
        return f"<span>{name} not shown: {escape(str(error))}</span>"
