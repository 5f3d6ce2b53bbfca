"""The data of a row, shared by all its verifications: sent to a scoring process once, then named by an id."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b

from rlcli.types import VerifyRequest

OF_A_ROW = ("ground_truth", "prompt", "data_source", "extra_info")
"""Fields of a request that are the same for all responses to a prompt; they may contain test cases of megabytes."""

OF_A_RESPONSE = tuple(one.name for one in fields(VerifyRequest) if one.name not in OF_A_ROW)

HELD_BYTES = 64 << 20
"""Maximum size of the sources that one scoring process keeps: the most recently used."""


@dataclass(frozen=True, eq=False)
class Source:
    """The fields of a row, pickled. key: a hash of these, used as its id."""

    key: bytes
    data: bytes

    @classmethod
    def of(cls, request: VerifyRequest) -> Source:
        data = pickle.dumps([getattr(request, name) for name in OF_A_ROW])
        return cls(blake2b(data, digest_size=16).digest(), data)


def response(request: VerifyRequest) -> bytes:
    """The fields of a request that belong to its response, for `joined`."""
    return pickle.dumps({name: getattr(request, name) for name in OF_A_RESPONSE})


def completion_of(given: bytes) -> str:
    """The completion in what `response` has made, in this process."""
    text: str = pickle.loads(given)["completion"]
    return text


def joined(source: bytes, given: bytes) -> VerifyRequest:
    """A request from its source's data and its other fields; built anew, as a verifier may change its request."""
    row = dict(zip(OF_A_ROW, pickle.loads(source), strict=True))
    return VerifyRequest(**row, **pickle.loads(given))


class Held:
    """The owner's record of the sources that are held, here or in a scoring process, and which of them are dropped: the
    least recently used, once they have more bytes than `most`.

    >>> held, (a, b, c) = Held(most=10), (Source(name, bytes(4)) for name in (b"a", b"b", b"c"))
    >>> held.change([a, b]), held.change([a, c])
    (({b'a': b'\\x00\\x00\\x00\\x00', b'b': b'\\x00\\x00\\x00\\x00'}, []), ({b'c': b'\\x00\\x00\\x00\\x00'}, [b'b']))
    """

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0

    def change(self, wanted: Iterable[Source]) -> tuple[dict[bytes, bytes], list[bytes]]:
        """What to send for a message that needs these sources (key → data), and which keys to drop."""
        new: dict[bytes, bytes] = {}
        used = {source.key: source for source in wanted}
        for key, source in used.items():
            if key not in self._sizes:
                new[key] = source.data
                self._sizes[key] = len(source.data)
                self._bytes += len(source.data)
            self._sizes.move_to_end(key)
        gone = []
        while self._bytes > self._most and len(self._sizes) > len(used):
            key, size = self._sizes.popitem(last=False)  # never one in use: those are at the end
            self._bytes -= size
            gone.append(key)
        return new, gone

    def clear(self) -> None:
        """The process has been replaced: the new one holds nothing."""
        self._sizes.clear()
        self._bytes = 0
