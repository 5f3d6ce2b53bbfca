"""A copy of a run folder for publication, without data that identifies the machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcli.config.recipes import flatten
from rlcli.export.model_card import WHOLE_PATH
from rlcli.runs.folder import EVENTS, INPUTS, LOCK, SOURCES, check_records
from rlcli.runs.listing import config_of
from rlcli.runs.software_record import environment_of
from rlcli.support.reading import CONFIG_BYTES, LINES_BYTES, parse_json, read_text
from rlcli.support.redact import redacted

ENVIRONMENT = "environment.json"
REWRITTEN = {"config.toml": CONFIG_BYTES, ENVIRONMENT: CONFIG_BYTES, EVENTS: LINES_BYTES}
"""Records that are copied without data that identifies the machine → largest size in bytes."""
LEFT_OUT = ("logs", "exports", "bad-batches", "profile", "code", SOURCES, INPUTS, "trackers.json", ".place")
"""Entries of a run folder that a report does not show."""
OF_THE_MACHINE = ("host", "directory", "command")
"""Entries of environment.json that identify the machine."""
LEAST = 3
"""Fewest characters of a host name to redact; a shorter one may be part of any text."""


@contextmanager
def public_run(run: Path) -> Iterator[Path]:
    """A folder of the same name with the records of the run in `run` while the block runs: what it measured, links
    to what it sampled, and copies of its other records without host names, addresses and folders. Raises `UnfitFile`
    if one of them is a link or no regular file: what it leads to is not to be published."""
    check_records(run)
    with tempfile.TemporaryDirectory(prefix="rlcli-public-") as room:
        copy = Path(room) / run.name
        copy.mkdir()
        for entry in run.iterdir():
            if entry.name in (*LEFT_OUT, *REWRITTEN) or (entry.is_symlink() and entry.name != "checkpoints"):
                continue
            if entry.is_dir() or entry.name == LOCK:  # the lock says whether the run is alive
                (copy / entry.name).symlink_to(entry.resolve())
            elif entry.is_file():
                _same(entry, copy / entry.name)
        names = [str(environment_of(run).get("host", "")), str(flatten(config_of(run)).get("cluster.address", ""))]
        for name, max_bytes in REWRITTEN.items():
            with suppress(OSError):  # readers cope with a missing file
                text = _public(read_text(run / name, max_bytes, errors="replace"), names)
                (copy / name).write_text(_less(text) if name == ENVIRONMENT else text, encoding="utf-8")
        yield copy


def _same(file: Path, copy: Path) -> None:
    """The same file under another name; a copy on another file system."""
    try:
        os.link(file, copy)
    except OSError:
        shutil.copyfile(file, copy)


def _public(text: str, names: Sequence[str]) -> str:
    """`text` without secrets, the folders of whole paths, and these names.

    >>> _public("model /home/me/models/tiny on node-7: node-70", ["node-7"])
    'model tiny on …: node-70'
    """
    shown = WHOLE_PATH.sub("", redacted(text))
    for name in names:
        if len(name) >= LEAST:
            shown = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "…", shown)
    return shown


def _less(text: str) -> str:
    """The text of environment.json without the entries that identify the machine."""
    try:
        entries = parse_json(text)
    except ValueError:
        return "{}"
    if not isinstance(entries, dict):
        return "{}"
    return json.dumps({name: value for name, value in entries.items() if name not in OF_THE_MACHINE}, indent=2)
