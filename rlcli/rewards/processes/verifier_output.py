"""Log the output of verifiers up to a limit, so that it floods neither a terminal nor a disk."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from rlcli.support.redact import printable, redacted

LOG_BYTES = 1 << 20
"""Limit of a run's file, on each machine."""

TERMINAL_BYTES = 2000
"""Limit if there is no file."""

LONGEST_LINE = 1 << 16
"""Maximum number of bytes that wait for the end of their line."""

_DROPPED = b"\n... further output of verifiers is dropped\n"


class Output:
    """The writing end of a pipe, `fd`, as standard output and standard error of scoring processes.

    Output goes to the file `log`, else to this process's standard error; beyond the limit it is read, so that writers
    do not block, and dropped.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._drain, args=(read,), name="rlcli-scoring-output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Add text to the output of the processes."""
        os.write(self.fd, text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Call this once the processes have ended."""
        os.close(self.fd)
        self._thread.join(1.0)  # a process left behind by a verifier may hold the pipe open

    def _drain(self, read: int) -> None:
        remaining = LOG_BYTES if self._log else TERMINAL_BYTES
        partial = b""
        while data := os.read(read, 1 << 16):
            if remaining <= 0:
                continue
            # Whole lines, so that no secret is split.
            lines, newline, partial = (partial + data).rpartition(b"\n")
            if len(partial) > LONGEST_LINE:
                lines, newline, partial = lines + newline + partial, b"", b""
            remaining = self._pass_on(lines + newline, remaining)
        self._pass_on(partial, remaining)
        os.close(read)

    def _pass_on(self, text: bytes, remaining: int) -> int:
        """Write as much as the limit allows, without secrets and control characters; returns the bytes left of it."""
        redacted_text = printable(redacted(text.decode(errors="backslashreplace"))).encode()
        if remaining > 0 and redacted_text:
            with contextlib.suppress(OSError):
                self._write(redacted_text if len(redacted_text) < remaining else redacted_text[:remaining] + _DROPPED)
        return remaining - len(redacted_text)

    def _write(self, redacted_text: bytes) -> None:
        if self._log is None:
            sys.stderr.write(redacted_text.decode(errors="replace"))
            sys.stderr.flush()
            return
        with self._log.open("ab") as file:
            file.write(redacted_text)
