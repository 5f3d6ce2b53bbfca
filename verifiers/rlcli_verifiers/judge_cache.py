"""Verdicts of judges by content, on disk, so that what was judged once is neither paid nor waited for again."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlcli.support.files import cache_folder, closed_folder
from rlcli_verifiers.judge_prompt import Graded

MOST = 100_000
"""Verdicts that are kept: the newest. About 60 MB."""

REASON_CHARS = 500
PRUNE_EVERY = 1000
BUSY_S = 5.0


def key_of(*content: Any) -> str:
    """The key of what a verdict depends on."""
    return sha256(json.dumps(content, sort_keys=True).encode(errors="replace")).hexdigest()


class Cache:
    """Shared by all processes of a user; they may read and write at once. If the file cannot be used (no home, a disk
    that is full), verdicts are simply not kept.

    file: None: in the user's cache folder.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._connection: sqlite3.Connection | None = None
        with contextlib.suppress(OSError, RuntimeError, sqlite3.Error):
            file = file or cache_folder() / "judge" / "verdicts.sqlite"
            closed_folder(file.parent)
            self._connection = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (id INTEGER PRIMARY KEY, key TEXT UNIQUE, points INT, reason TEXT)"
            )

    def get(self, key: str) -> Graded | None:
        """The verdict; None if it is not there."""
        row = self._execute("SELECT points, reason FROM verdicts WHERE key = ?", key)
        found = row.fetchone() if row else None
        return Graded(int(found[0]), str(found[1])) if found else None

    def put(self, key: str, verdict: Graded) -> None:
        """Keep a verdict; the oldest go."""
        values = (key, verdict.points, verdict.reason[:REASON_CHARS])
        added = self._execute("INSERT OR IGNORE INTO verdicts (key, points, reason) VALUES (?, ?, ?)", *values)
        if added and added.lastrowid and added.lastrowid % PRUNE_EVERY == 0:
            self._execute("DELETE FROM verdicts WHERE id <= ?", added.lastrowid - MOST)

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor | None:
        """None if the file cannot be used."""
        try:
            return self._connection.execute(statement, values) if self._connection else None
        except sqlite3.Error:
            return None
