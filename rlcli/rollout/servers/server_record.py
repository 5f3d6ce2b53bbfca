"""Files in a run's folder with the state of its servers and requests to change it, for `rlcli engines`."""

from __future__ import annotations

import json
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rlcli.errors import DataError
from rlcli.runs.folder import add_event, append_line
from rlcli.support.files import replacing
from rlcli.support.reading import LINES_BYTES, bounded_lines, json_object, opened, read_json

if TYPE_CHECKING:
    from rlcli.rollout.servers.server_fleet import Fleet

EVERY_S = 0.2
WISHES = "wishes.jsonl"


class ServerChange(TypedDict):
    """A request to change the servers of a run: a line of `wishes.jsonl`."""

    wish: str
    """`add` or `remove`."""
    server: str
    """Address of the server."""


class ServerState(TypedDict):
    """State of one server."""

    server: str
    """Its address."""
    kind: str
    """`vllm` or `sglang`; empty while it is not attached."""
    state: str
    """`starting`, `ready`, `lost` or `gone`."""
    running: int
    """Responses that it generates."""
    finished: int
    """Responses that it has generated."""
    lost: int
    """Number of times it was lost."""
    weights: int
    """Version of its weights."""
    pid: int | None
    """Id of its process group, if the run started it."""
    why: str
    """Why it is lost or gone."""


class WorkerServers(TypedDict):
    """State of the servers of one engine."""

    worker: int
    """Rank of the engine."""
    weights: int
    """Version of the weights that servers are to have."""
    servers: list[ServerState]
    """State of each server."""


class WorkerRecord(WorkerServers):
    """The file `worker-RANK.json`."""

    time: float
    """Unix time of the last change."""


class Record:
    """Record of one engine, of rank `rank` of `world`. logs: the run's; empty: nothing is recorded.

    The state of its servers is written when it changes, and what `wish` asks for is done."""

    def __init__(self, logs: str, rank: int, world: int) -> None:
        self._folder = Path(logs) / "engines" if logs else None
        self._run = Path(logs).parent if logs else None
        self._rank, self._world = rank, world
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._read = 0
        self._written: WorkerServers | None = None

    def log_of(self, number: int) -> Path:
        """Output of a server that this engine starts."""
        return Path("/dev/null") if self._folder is None else self._folder / f"server-{self._rank}-{number}.log"

    def lost(self, url: str, why: str) -> None:
        """Record that a server is lost."""
        if self._run is not None and (self._run / "events.jsonl").exists():
            add_event(self._run, "engine lost", server=url, why=why, worker=self._rank)

    def follow(self, fleet: Fleet) -> None:
        """Write the state of `fleet` from now on, and do what is wished."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(fleet)
            self._thread = threading.Thread(
                target=self._run_on, args=(fleet,), name="rlcli-servers-record", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run_on(self, fleet: Fleet) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(OSError):
                for change in self._changes():
                    url, joins = change["server"], change["wish"] == "add"
                    if not joins:
                        fleet.leave(url)
                    elif zlib.crc32(url.encode()) % self._world == self._rank:
                        fleet.join(url)
                self._write(fleet)

    def _changes(self) -> list[ServerChange]:
        """Requests that were not read yet."""
        assert self._folder is not None
        lines = requested_changes(self._folder)
        new, self._read = lines[self._read :], len(lines)
        return new

    def _write(self, fleet: Fleet) -> None:
        """Only what has changed."""
        assert self._folder is not None
        rows: list[ServerState] = [
            {
                "server": member.url,
                "kind": member.server.kind if member.server is not None else "",
                "state": member.state,
                "running": len(member.running),
                "finished": member.finished,
                "lost": member.lost,
                "weights": member.version,
                "pid": member.process.pid if member.process is not None else None,
                "why": member.why,
            }
            for member in list(fleet.members)
        ]
        state: WorkerServers = {"worker": self._rank, "weights": fleet.version, "servers": rows}
        if state == self._written:
            return
        with replacing(self._folder / f"worker-{self._rank}.json") as temporary:
            temporary.write_text(json.dumps({"time": round(time.time(), 3), **state}))
        self._written = state


def requested_changes(folder: Path) -> list[ServerChange]:
    """The requests of `wishes.jsonl`, without lines that are cut off or are none."""
    path = folder / WISHES
    if not path.exists():
        return []
    changes: list[ServerChange] = []
    with opened(path) as file:
        for line in bounded_lines(file, path, max_bytes=LINES_BYTES):
            values = json_object(line) if line.endswith(b"\n") else None
            server, action = (values.get("server"), values.get("wish")) if values is not None else (None, None)
            if isinstance(server, str) and isinstance(action, str):
                changes.append({"wish": action, "server": server})
    return changes


def request_change(run: Path, action: str, url: str) -> None:
    """Ask a run for a server to join (`add`) or to leave (`remove`)."""
    folder = run / "logs" / "engines"
    states(run)
    append_line(folder / WISHES, json.dumps({"time": round(time.time(), 3), "wish": action, "server": url}))


def states(run: Path) -> list[WorkerRecord]:
    """The last states that the engines of a run wrote, one of each worker. Raises `DataError` if it has no servers."""
    records: list[WorkerRecord] = []
    for path in sorted((run / "logs" / "engines").glob("worker-*.json")):
        try:
            records.append(read_json(path))
        except ValueError:
            raise DataError(f"{path}: not JSON", "remove it; a run that is alive writes it again") from None
    if not records:
        raise DataError(f"{run}: no servers are recorded there", "name a run with rollout.engine = server")
    return records
