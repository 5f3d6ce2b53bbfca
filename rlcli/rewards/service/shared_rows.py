"""The data of a row, shared by all its verifications: sent to a scoring process once, then named by an id."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b

from rlcli.types import VerifyRequest

ROW_FIELDS = ("ground_truth", "prompt", "data_source", "extra_info")
"""Fields of a request that are the same for all responses to a prompt; they may contain test cases of megabytes."""

RESPONSE_FIELDS = tuple(f.name for f in fields(VerifyRequest) if f.name not in ROW_FIELDS)

CACHED_BYTES = 64 << 20
"""Maximum size of the sources that one scoring process keeps: the most recently used."""


@dataclass(frozen=True, eq=False)
class Source:
    """The fields of a row, pickled."""

    key: bytes
    """Hash of `data` (16 bytes), its id."""
    data: bytes
    """The pickled values of `ROW_FIELDS`."""

    @classmethod
    def of(cls, request: VerifyRequest) -> Source:
        """Pickle the row's fields of a request."""
        data = pickle.dumps([getattr(request, name) for name in ROW_FIELDS])
        return cls(blake2b(data, digest_size=16).digest(), data)


def pack_response(request: VerifyRequest) -> bytes:
    """Pickle the fields of a request that belong to its response, for `unpack_request`."""
    return pickle.dumps({name: getattr(request, name) for name in RESPONSE_FIELDS})


def completion_of(packed: bytes) -> str:
    """The completion in a result of `pack_response` of this process."""
    text: str = pickle.loads(packed)["completion"]
    return text


def unpack_request(source: bytes, packed: bytes) -> VerifyRequest:
    """A request from its source's data and its other fields; a new object, as a verifier may change its request."""
    row = dict(zip(ROW_FIELDS, pickle.loads(source), strict=True))
    return VerifyRequest(**row, **pickle.loads(packed))


class SourceCache:
    """The owner's record of the sources that are cached, here or in a scoring process. The least recently used are
    dropped once they have more than `max_bytes`.

    >>> cache, (a, b, c) = SourceCache(max_bytes=10), (Source(name, bytes(4)) for name in (b"a", b"b", b"c"))
    >>> cache.change([a, b]), cache.change([a, c])
    (({b'a': b'\\x00\\x00\\x00\\x00', b'b': b'\\x00\\x00\\x00\\x00'}, []), ({b'c': b'\\x00\\x00\\x00\\x00'}, [b'b']))
    """

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0

    def change(self, wanted: Iterable[Source]) -> tuple[dict[bytes, bytes], list[bytes]]:
        """The sources to send for a message that needs `wanted` (key → data), and the keys to drop."""
        new: dict[bytes, bytes] = {}
        used = {source.key: source for source in wanted}
        for key, source in used.items():
            if key not in self._sizes:
                new[key] = source.data
                self._sizes[key] = len(source.data)
                self._bytes += len(source.data)
            self._sizes.move_to_end(key)
        gone = []
        while self._bytes > self._max_bytes and len(self._sizes) > len(used):
            key, size = self._sizes.popitem(last=False)  # never one in use: those are at the end
            self._bytes -= size
            gone.append(key)
        return new, gone

    def clear(self) -> None:
        """Forget all sources: the process has been replaced."""
        self._sizes.clear()
        self._bytes = 0
