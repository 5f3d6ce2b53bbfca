"""Prompts about the images of a row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlcli.errors import DataError
from rlcli.images.row_images import load_images, marked
from rlcli.types import ConvertOptions, Message
from rlcli_data_prep.sources import first


def images_of(row: Mapping[str, Any], options: ConvertOptions, *columns: str) -> tuple[bytes, ...]:
    """The images in the first of `columns` that is not None, one or a list.

    Paths are relative to the local source's folder and lead to files in it; those of a hub dataset lead to what was
    downloaded. Raises `DataError` if there is none, and `BadImage`.
    """
    column, value = first(row, *columns)
    source = Path(options.source or "").expanduser()
    if options.source and source.exists():
        images = load_images(value, source if source.is_dir() else source.parent)
    else:
        downloads, *further_folders = _downloads()
        images = load_images(value, downloads, further_folders)
    if not images:
        raise DataError(f"no image in column '{column}'", "fix that row, or give a source with that column")
    return images


@cache
def _downloads() -> tuple[Path, ...]:
    """The folders in which files of hub datasets lie."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    caches = (datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
    return tuple(map(Path, caches))


def asked(question: str, images: tuple[bytes, ...]) -> tuple[Message, ...]:
    """A user's question about the images, which come first if it has no markers."""
    return marked(({"role": "user", "content": question},), len(images))
