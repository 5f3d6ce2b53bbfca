"""Images of the rows that an audit's page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rlcli.data.prompts.prompt_table import find_file
from rlcli.errors import DataError
from rlcli.images.image_descriptions import in_words
from rlcli.images.row_images import BadImage
from rlcli.images.thumbnails import data_url, thumbnail
from rlcli.runs.run_images import read_images
from rlcli.types import image_digest
from rlcli_audit.audit_report import Report, UnexpectedVerdict


def split_of(data: Path) -> str:
    """The audited split: `train` if there is one."""
    return "train" if (data / "train.parquet").is_file() or not data.is_dir() else "test"


def html_images(report: Report, shown: Sequence[UnexpectedVerdict]) -> Mapping[int, str]:
    """Row → its images as HTML, for the rows of `shown` with images: thumbnails, or the reason that there are none."""
    rows = {surprise.row: surprise for surprise in shown if surprise.images}
    if not rows:
        return {}
    data, html_of_row = Path(report.data), dict[int, str]()
    reason = "the data has changed"
    try:
        for row, images in read_images(find_file(data, split_of(data)), set(rows)):
            by_digest = {image_digest(image): image for image in images}
            html_of_row[row] = "".join(_html(image, by_digest.get(str(image["digest"]))) for image in rows[row].images)
    except DataError as error:
        reason = error.message
    return {row: html_of_row.get(row) or escape(f"not shown: {reason}") for row in rows}


def _html(description: Mapping[str, object], image: bytes | None) -> str:
    name = in_words(description)
    try:
        if image is None:
            raise BadImage("the data has changed")
        return f'<img src="{data_url(thumbnail(image))}" alt="{name}" title="{name}">'
    except BadImage as error:
        return f"<span>{name} not shown: {escape(str(error))}</span>"
