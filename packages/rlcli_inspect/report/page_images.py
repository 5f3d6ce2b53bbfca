"""Images of samples on the pages: thumbnails that are encoded here, never the bytes of the data."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlcli.images.row_images import BadImage
from rlcli.images.thumbnails import LARGE_SIDE, SIDE, data_url, thumbnail
from rlcli.runs.run_images import RunImages

CACHED = 256
"""Thumbnails that a server caches: tens of kilobytes each."""
AT_ONCE = 256
"""Images that a report reads at once."""
PIECE = 1_000_000
"""Bytes after which a report starts another file of images."""
NO_ROOM = "it is not in this report, whose size is limited: rlcli view shows it"


class Thumbnails:
    """Thumbnails of a run, for `rlcli view`; thread-safe."""

    def __init__(self, run: Path) -> None:
        self._images = RunImages(run)
        self._cache: OrderedDict[tuple[str, bool], str] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, digest: str, where: str, large: bool) -> dict[str, str]:
        """`src`, the image as a data URL, or the `problem` that prevents it. where: as for `RunImages.find`."""
        key = digest, large
        with self._lock:  # one at a time: decoding may take 16 bytes a pixel
            if key in self._cache:
                self._cache.move_to_end(key)
                return {"src": self._cache[key]}
            ((_, image),) = self._images.find({digest: where})
            try:
                src = image if isinstance(image, str) else data_url(thumbnail(image, LARGE_SIDE if large else SIDE))
            except BadImage as error:
                return {"problem": str(error)}
            if isinstance(image, str):
                return {"problem": image}
            self._cache[key] = src
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
            return {"src": src}


@dataclass
class Album:
    """The images of a run in a report."""

    wanted: dict[str, str] = field(default_factory=dict)
    """Digest → location of the image, as for `RunImages.find`."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Digest → number of the piece with its thumbnail."""
    problems: dict[str, str] = field(default_factory=dict)
    """Digest → reason that it is not shown."""

    def add(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Add the images of these groups, as `static_report.groups_of` returns them."""
        for group in groups:
            every = [
                group["messages"],
                *(row[name] for row in group["rows"] for name in ("asked", "said") if name in row),
            ]
            for image in (x for messages in every for message in messages for x in message.get("images", ())):
                if image["digest"]:
                    self.wanted.setdefault(image["digest"], image["where"])

    def write(self, run: Path, budget: int, add_piece: Callable[[int, dict[str, str]], None]) -> None:
        """Add pieces, digest → data URL, until `budget` bytes are used up. The rest have no piece."""
        number, piece, size = 0, dict[str, str](), 0
        for digest, image in self._thumbnails(run):
            if isinstance(image, BadImage):
                self.problems[digest] = str(image)
                continue
            budget -= len(image) + 3 * len(digest)  # which is in the index too
            if budget < 0:
                break
            piece[digest], self.pieces[digest] = image, number
            size += len(image)
            if size >= PIECE:
                add_piece(number, piece)
                number, piece, size = number + 1, {}, 0
        if piece:
            add_piece(number, piece)

    def _thumbnails(self, run: Path) -> Iterator[tuple[str, str | BadImage]]:
        images = RunImages(run)
        wanted = iter(self.wanted.items())
        while some := dict(islice(wanted, AT_ONCE)):
            for digest, image in images.find(some):
                try:
                    if isinstance(image, str):
                        raise BadImage(image)
                    yield digest, data_url(thumbnail(image))
                except BadImage as error:
                    yield digest, error

    def as_dict(self) -> dict[str, object]:
        """For the page. unshown: how many images are not shown. problems: digest → place in `reasons`, of those of
        them whose reason is not the first, the most frequent one: a run whose data is gone has the same for all."""
        unshown = self.wanted.keys() - self.pieces.keys()
        why = {digest: self.problems.get(digest, NO_ROOM) for digest in unshown}
        reasons = [reason for reason, _ in Counter(why.values()).most_common()] or [NO_ROOM]
        reason_index = {digest: reasons.index(reason) for digest, reason in why.items()}
        return {
            "pieces": self.pieces,
            "unshown": len(unshown),
            "problems": {digest: index for digest, index in reason_index.items() if index},
            "reasons": reasons,
        }
