"""Cache of judges' verdicts by content, on disk, so that no request is paid twice."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from hashlib import sha256
from pathlib import Path

from rlcli.support.files import cache_folder, closed_folder
from rlcli_verifiers.judge_prompt import Graded

MAX_VERDICTS = 100_000
"""Verdicts that are kept: the newest. About 60 MB."""

REASON_CHARS = 500
PRUNE_EVERY = 1000
BUSY_S = 5.0


def key_of(*content: object) -> str:
    """Hash of the values that a verdict depends on."""
    return sha256(json.dumps(content, sort_keys=True).encode(errors="replace")).hexdigest()


class Cache:
    """Verdicts shared by all processes of a user, which may read and write at once.

    If the file cannot be used (no home, a full disk), verdicts are not cached. file: None: in the user's cache folder.
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
        """The cached verdict; None if there is none."""
        row = self._execute("SELECT points, reason FROM verdicts WHERE key = ?", key)
        columns = row.fetchone() if row else None
        return Graded(int(columns[0]), str(columns[1])) if columns else None

    def put(self, key: str, verdict: Graded) -> None:
        """Cache a verdict; the oldest are removed."""
        insert = "INSERT OR IGNORE INTO verdicts (key, points, reason) VALUES (?, ?, ?)"
        added = self._execute(insert, key, verdict.points, verdict.reason[:REASON_CHARS])
        if added and added.lastrowid and added.lastrowid % PRUNE_EVERY == 0:
            self._execute("DELETE FROM verdicts WHERE id <= ?", added.lastrowid - MAX_VERDICTS)

    def _execute(self, statement: str, *values: str | int) -> sqlite3.Cursor | None:
        """Run a statement; None if the file cannot be used."""
        try:
            return self._connection.execute(statement, values) if self._connection else None
        except sqlite3.Error:
            return None
