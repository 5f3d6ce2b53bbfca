"""A run folder to publish: without what names the machine that it ran on."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcli.config.recipes import flatten
from rlcli.export.model_card import WHOLE_PATH
from rlcli.redact import redacted
from rlcli.runs.environment import environment_of
from rlcli.runs.folder import EVENTS
from rlcli.runs.listing import config_of

ENVIRONMENT = "environment.json"
REWRITTEN = ("config.toml", ENVIRONMENT, EVENTS)
LEFT_OUT = ("logs", "exports", "bad-batches", "profile", "code", "trackers.json", ".place")
"""What a report does not show."""
OF_THE_MACHINE = ("host", "directory", "command")
"""Entries of environment.json."""
LEAST = 3
"""Characters of a host name; a shorter one may be part of any text."""


@contextmanager
def public_run(run: Path) -> Iterator[Path]:
    """A folder of the same name with the records of the run in `run`, for the time of the block: links to what it
    measured and sampled, and copies of its other records without host names, addresses and folders."""
    with tempfile.TemporaryDirectory(prefix="rlcli-public-") as room:
        copy = Path(room) / run.name
        copy.mkdir()
        for entry in run.iterdir():
            if entry.name not in (*LEFT_OUT, *REWRITTEN):
                (copy / entry.name).symlink_to(entry.resolve())
        names = [str(environment_of(run).get("host", "")), str(flatten(config_of(run)).get("cluster.address", ""))]
        for name in REWRITTEN:
            with suppress(OSError):  # readers cope with a missing file
                text = _public((run / name).read_text(encoding="utf-8", errors="replace"), names)
                (copy / name).write_text(_less(text) if name == ENVIRONMENT else text, encoding="utf-8")
        yield copy


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
    """The text of environment.json without the entries that name the machine."""
    try:
        found = json.loads(text)
    except ValueError:
        return "{}"
    return json.dumps({name: value for name, value in found.items() if name not in OF_THE_MACHINE}, indent=2)
