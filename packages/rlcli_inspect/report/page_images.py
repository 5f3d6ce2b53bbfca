"""The pictures of samples on the pages: thumbnails that are made here, never the bytes of the data."""

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

KEPT = 256
"""Thumbnails that a server keeps: tens of kilobytes each."""
AT_ONCE = 256
"""Pictures that a report looks for at once."""
PIECE = 1_000_000
"""Bytes after which a report begins another file of pictures."""
NO_ROOM = "it is not in this report, whose size is limited: rlcli view shows it"


class Thumbnails:
    """Those of a run, for `rlcli view`; may be called from several threads."""

    def __init__(self, run: Path) -> None:
        self._pictures = RunImages(run)
        self._kept: OrderedDict[tuple[str, bool], str] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, digest: str, where: str, large: bool) -> dict[str, str]:
        """`src`, the picture as a data URL, or the `problem` that prevents it. where: as for `RunImages.find`."""
        key = digest, large
        with self._lock:  # one at a time: decoding may take 16 bytes a pixel
            if key in self._kept:
                self._kept.move_to_end(key)
                return {"src": self._kept[key]}
            ((_, found),) = self._pictures.find({digest: where})
            try:
                src = found if isinstance(found, str) else data_url(thumbnail(found, LARGE_SIDE if large else SIDE))
            except BadImage as error:
                return {"problem": str(error)}
            if isinstance(found, str):
                return {"problem": found}
            self._kept[key] = src
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return {"src": src}


@dataclass
class Album:
    """The pictures of a run in a report. wanted: digest → where it is, as for `RunImages.find`. pieces: digest →
    number of the piece. problems: digest → why it is not shown."""

    wanted: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Want the pictures in these groups, as `static.groups_of` makes them."""
        for group in groups:
            every = [
                group["messages"],
                *(row[name] for row in group["rows"] for name in ("asked", "said") if name in row),
            ]
            for image in [one for messages in every for message in messages for one in message.get("images", ())]:
                if image["digest"]:
                    self.wanted.setdefault(image["digest"], image["where"])

    def write(self, run: Path, room: int, add_piece: Callable[[int, dict[str, str]], None]) -> None:
        """Add pieces, digest → data URL, until `room` bytes are used up. The rest are without a piece."""
        number, piece, size = 0, dict[str, str](), 0
        for digest, found in self._thumbnails(run):
            if isinstance(found, BadImage):
                self.problems[digest] = str(found)
                continue
            room -= len(found) + 3 * len(digest)  # which is in the index too
            if room < 0:
                break
            piece[digest], self.pieces[digest] = found, number
            size += len(found)
            if size >= PIECE:
                add_piece(number, piece)
                number, piece, size = number + 1, {}, 0
        if piece:
            add_piece(number, piece)

    def _thumbnails(self, run: Path) -> Iterator[tuple[str, str | BadImage]]:
        pictures = RunImages(run)
        wanted = iter(self.wanted.items())
        while some := dict(islice(wanted, AT_ONCE)):
            for digest, found in pictures.find(some):
                try:
                    if isinstance(found, str):
                        raise BadImage(found)
                    yield digest, data_url(thumbnail(found))
                except BadImage as error:
                    yield digest, error

    def as_dict(self) -> dict[str, Any]:
        """For the page. unshown: how many pictures are not shown. problems: digest → place in `reasons`, of those of
        them whose reason is not the first, the most frequent one: a run whose data is gone has the same for all."""
        unshown = self.wanted.keys() - self.pieces.keys()
        why = {digest: self.problems.get(digest, NO_ROOM) for digest in unshown}
        reasons = [reason for reason, _ in Counter(why.values()).most_common()] or [NO_ROOM]
        places = {digest: reasons.index(reason) for digest, reason in why.items()}
        return {
            "pieces": self.pieces,
            "unshown": len(unshown),
            "problems": {digest: place for digest, place in places.items() if place},
            "reasons": reasons,
        }
