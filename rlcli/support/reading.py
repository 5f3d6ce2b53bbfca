"""Reads files that others may have written: regular files alone, up to a size, without nesting that breaks a reader.

A pipe would block its reader, a device may have no end, and a link leads to a file that its author could not read.
Such a file is refused with `UnfitFile`, which names it. A missing or unreadable file is an OSError.

links: follow links. A user's link to a file that the command line names may be followed; one in a folder from
elsewhere, such as a run's, may not.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from rlcli.errors import RlcliError

CONFIG_BYTES = 4 << 20
"""Largest TOML file."""
JSON_BYTES = 256 << 20
"""Largest JSON file."""
LINE_BYTES = 16 << 20
"""Longest line of a record; a line of the timeline has every span of every worker."""
LINES_BYTES = 1 << 30
"""Largest file of JSON lines that is held in memory: more than 100,000 steps of metrics."""
DATA_LINE_BYTES = 256 << 20
"""Longest line of a dataset, which may have images as text."""
DATA_BYTES = 2 << 30
"""Largest dataset that is one JSON value, which is held in memory."""
TEMPLATE_BYTES = 16 << 20
"""Largest chat template."""
DEEPEST = 100
"""Deepest nesting of JSON and TOML."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_TEMPLATES, _SETTINGS = (".jinja",), (".json", ".txt", ".model", ".tiktoken")
"""Suffixes of a model's files that are read as a whole."""
_LONG_KEY = re.compile(
    rf"""(?:(?:(?<![\w-])[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""",
    re.ASCII,
)
"""A TOML key with more parts: `tomllib` takes a time that grows with their square."""


class BinaryLines(Protocol):
    """A binary file, or one that is decompressed while it is read."""

    def readline(self, size: int = -1, /) -> bytes: ...


_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Beginnings of texts in other encodings than UTF-8; the first that matches."""
ENCODING_BYTES = 4
"""Bytes at the beginning of a text that show its encoding."""


class UnfitFile(RlcliError):
    """A file that is not read: not a regular file, a link, or too large. why: the reason, which follows its name."""

    def __init__(self, path: str | Path, why: str, hint: str = "") -> None:
        self.why = why
        super().__init__(f"{path} {why}" if path else why, hint or "put the file itself there, as it was written")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ("", self.message, self.hint), self.__dict__


def check_regular(path: Path, *, links: bool = False) -> os.stat_result:
    """The status of a regular file. Raises `UnfitFile` for anything else, and OSError if it does not exist."""
    facts = os.stat(path) if links else os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        raise UnfitFile(path, f"is a link, to {os.readlink(path)!r:.200}", "put the file itself there")
    if not stat.S_ISREG(facts.st_mode):
        raise UnfitFile(path, f"is {_KINDS.get(stat.S_IFMT(facts.st_mode), 'no file')}, not a regular file")
    return facts


def opened(path: Path, *, links: bool = False) -> BufferedReader:
    """A regular file, opened for reading without ever waiting for it. Raises like `check_regular`."""
    check_regular(path, links=links)  # before it is opened: that alone has effects on some devices
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # it was replaced meanwhile
            raise UnfitFile(path, "is not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnfitFile(path, "is not a regular file")
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path, max_bytes: int, *, links: bool = False) -> bytes:
    """The content of a file of at most `max_bytes`. Raises `UnfitFile` and OSError."""
    with opened(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise _too_large(path, size, max_bytes)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew
        raise _too_large(path, len(content), max_bytes)
    return content


def read_text(path: Path, max_bytes: int = CONFIG_BYTES, *, links: bool = False, errors: str = "strict") -> str:
    """The text of a file in UTF-8. Raises `UnfitFile`, OSError and UnicodeDecodeError."""
    return read_bytes(path, max_bytes, links=links).decode("utf-8", errors=errors)


def read_json(path: Path, max_bytes: int = JSON_BYTES, *, links: bool = False) -> Any:
    """The JSON value in a file. Raises `UnfitFile`, OSError, and ValueError if it is not JSON."""
    return parse_json(read_bytes(path, max_bytes, links=links))


def read_toml(path: Path, *, links: bool = False) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UnfitFile`, OSError, and ValueError if it is not TOML."""
    return parse_toml(read_text(path, links=links))


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text, in UTF-8. Raises ValueError, also for one that is nested more than `DEEPEST` deep: code
    that walks it would fail later. TypeError if `content` is not text.

    >>> parse_json(b'{"step": 1}')
    {'step': 1}
    """
    text = content if isinstance(content, str) else str(content, "utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError, also for nesting like `parse_json`."""
    if _LONG_KEY.search(text):
        raise ValueError("it is nested too deeply")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _is_deep(tables):
        raise ValueError("it is nested too deeply")
    return tables


def bounded_lines(
    file: BinaryLines, name: str | Path, max_line_bytes: int = LINE_BYTES, max_bytes: int = 0
) -> Iterator[bytes]:
    """The lines of a file with their line feeds, the last one perhaps without. max_bytes: of all lines; 0: any number.
    Raises `UnfitFile` for a longer line, and for more bytes.

    >>> import io
    >>> list(bounded_lines(io.BytesIO(b"a\\nbc"), "notes"))
    [b'a\\n', b'bc']
    """
    total = 0
    for number, line in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), 1):
        total += len(line)
        if len(line) > max_line_bytes:
            raise UnfitFile(
                name, f"has a line of more than {_size(max_line_bytes)} (line {number})", "remove that line"
            )
        if max_bytes and total > max_bytes:
            raise _too_large(name, total, max_bytes)
        yield line


def check_encoding(beginning: bytes, name: str | Path) -> None:
    """Raise `UnfitFile` for a text in UTF-16 or UTF-32, by its first `ENCODING_BYTES`: no line of it would be one of
    UTF-8.

    >>> check_encoding(b'{"prompt"', "rows.jsonl")
    """
    encoding = next((name for mark, name in _MARKS.items() if beginning.startswith(mark)), "")
    if not encoding and beginning[:2].count(0) == 1:  # without a mark: every second byte of a text in English is 0
        encoding = "UTF-16BE" if beginning[:1] == b"\0" else "UTF-16LE"
    if encoding:
        raise UnfitFile(name, f"is text in {encoding}, not in UTF-8", f"convert it: {_conversion(encoding, name)}")


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message about a line in another encoding, with the fix.

    >>> not_utf8(UnicodeDecodeError("utf-8", bytes([99, 233]), 1, 2, "invalid"))
    'it is not UTF-8 (byte 0xe9 at 1); if the file is in Latin-1, convert it: iconv -f LATIN1 -t UTF-8 OLD > NEW'
    """
    byte = f"byte 0x{error.object[error.start]:02x} at {error.start}"
    return f"it is not UTF-8 ({byte}); if the file is in Latin-1, convert it: {_conversion('LATIN1', '')}"


def _conversion(encoding: str, name: str | Path) -> str:
    """The command that converts a file to UTF-8."""
    path = Path(name)
    files = f"{shlex.quote(str(name))} > {shlex.quote(f'utf8-{path.name}')}" if str(name) else "OLD > NEW"
    return f"iconv -f {encoding} -t UTF-8 {files}"


def json_objects(path: Path, *, max_bytes: int = LINES_BYTES, links: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON objects in the lines of a file, one at a time, without lines that are damaged or truncated. max_bytes:
    of all lines; 0: any number, for a reader that keeps none of them. Raises `UnfitFile` and OSError."""
    with opened(path, links=links) as file:
        for line in bounded_lines(file, path, max_bytes=max_bytes):
            if (value := json_object(line)) is not None:
                yield value


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if the line is no object."""
    try:
        value = parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def check_model_folder(folder: Path) -> None:
    """Raise `UnfitFile` if a file of a model's folder is not a regular file, or a link to one, or is too large for its
    kind: libraries read them by their names, and would wait for a pipe."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:  # it is not a folder, or cannot be read: its reader says so
        return
    for name in names:
        path = folder / name
        if path.is_dir():
            continue
        try:
            size = check_regular(path, links=True).st_size
        except FileNotFoundError:
            continue  # a broken link is a missing file
        max_bytes = TEMPLATE_BYTES if path.suffix in _TEMPLATES else JSON_BYTES if path.suffix in _SETTINGS else size
        if size > max_bytes:
            raise _too_large(path, size, max_bytes)


def _is_deep(value: object) -> bool:
    """True if dicts and lists are nested more than `DEEPEST` deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _too_large(path: str | Path, size: int, max_bytes: int) -> UnfitFile:
    return UnfitFile(path, f"has {size:,} bytes, more than {_size(max_bytes)}", "put the file there as it was written")


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count:,} bytes"
