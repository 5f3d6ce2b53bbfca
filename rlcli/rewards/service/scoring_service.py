"""The process that verifies the responses of all engines of a machine: it decodes, runs the pool and sends verdicts.

    engine's worker ── Unix socket ──> service ──> scoring processes   (see `scoring_client`, `scoring_pool`)

It is separate from the engines' processes, because decoding, pickling and the pool's threads would compete with vLLM's
scheduler for the GIL. It ends when its last client has disconnected; a client that finds no service starts another.

A message is one marshalled tuple. From a client:

    ("source", key, data)                             the data of a row, as in `Source`
    ("verify", number, verifier, key, token ids as int32, number of trailing ids without text, fields of the response)
    ("verify_group", number, verifier, key, [(token ids, number of trailing ids without text, fields), …])

A group has all responses to a prompt, which one call of the verifier gets. The field `other_responses` is a list of
such pairs of token ids and number of trailing ids. The service sends lists of tuples; the first tuple is

    ("ready", [expressions that read the responses to a prompt together]) or ("failed", message, hint)

and then for each number:

    ("verdict", number, [(CRC-32 of the token ids, text, score, outcome, answer, parts, detail, latency_s, extra), …])
    ("missing", number)                               its source has been dropped: send both again
    ("error", number, message, hint)                  no verdict, for a reason unrelated to the response
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import os
import queue
import shutil
import signal
import socket
import threading
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal, TypedDict

from rlcli.errors import RlcliError
from rlcli.rewards import harmony
from rlcli.rewards.processes.scoring_pool import MAX_COMPLETION_CHARS, ScoringPool
from rlcli.rewards.service.shared_rows import Source, SourceCache, pack_response
from rlcli.support.files import private_folder
from rlcli.types import FinishReason, Verdict, VerifyRequest

SOURCES_BYTES = 256 << 20
"""Maximum size of cached sources that no request waits for: the most recently used."""

MAX_VERDICTS_PER_MESSAGE = 64
"""Maximum number of verdicts in one message."""

FIRST_CLIENT_S = 60.0
"""A service without clients ends after this time."""

TOKENIZER = "tokenizer.json"
"""In the service's folder, if the library `tokenizers` suffices to read the tokenizer."""

Decode = Callable[[Sequence[int]], str]


class FrameFields(TypedDict, total=False):
    """Other fields of a response's `VerifyRequest`, plain values."""

    finish_reason: FinishReason | Literal[""]
    """Why its generation ended; empty: unknown."""
    thinking: bool
    """True if the prompt ends within an open <think>."""
    conversation: Sequence[Mapping[str, object]]
    """All messages of a conversation, the prompt's included."""
    environment: Mapping[str, object]
    """Report of the environment on it."""
    other_responses: Sequence[tuple[bytes, int]]
    """Token ids of each other response, and its number of trailing ids without text."""
    step: int
    """Set if the verifier reads the responses to a prompt together; the service adds `steps`."""


VerdictRow = tuple[int, str, float, str, str | None, dict[str, float], str, float, dict[str, str]]
"""CRC-32 of the token ids, text, score, outcome, answer, parts, detail, latency_s, extra."""
ServiceMessage = (
    tuple[Literal["ready"], Collection[str]]
    | tuple[Literal["failed"], str, str]
    | tuple[Literal["verdict"], int, list[VerdictRow]]
    | tuple[Literal["missing"], int]
    | tuple[Literal["error"], int, str, str]
)
"""A tuple that the service sends."""


@dataclass(frozen=True)
class Settings:
    """Settings of a new service."""

    tokenizer: str
    """A model's folder or hub id, used if there is no `TOKENIZER`."""
    processes: int
    """Number of scoring processes."""
    deadline_s: float
    """CPU seconds of one verification."""
    verifiers: tuple[str, ...]
    """Expressions that are loaded at the start."""
    sandbox: str
    """Backend for verifiers that run programs; empty: from the environment."""
    log: str
    """File for output of verifiers; empty: standard error."""
    steps: int = 0
    """Steps of the training, for requests; 0: none."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def main(listener_fd: str, folder: str, settings: str) -> None:
    """Serve all clients that connect to the socket, until the last has disconnected."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the owners decide
    listener, config = socket.socket(fileno=int(listener_fd)), Settings(**json.loads(settings))
    try:
        decode = _decoder(Path(folder, TOKENIZER), config.tokenizer)
        log = Path(config.log) if config.log else None
        pool = ScoringPool(config.processes, config.deadline_s, config.verifiers, config.sandbox, log=log)
    except RlcliError as error:
        _refuse(listener, Path(folder), error)
        return
    with pool:
        Service(listener, Path(folder), pool, decode, config.steps).serve()


def _decoder(file: Path, name: str) -> Decode:
    if file.exists():
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(file))
        if harmony.speaks(backend.get_vocab()):
            return lambda tokens: harmony.plain(str(backend.decode(tokens, skip_special_tokens=False)))
        return lambda tokens: str(backend.decode(tokens, skip_special_tokens=True))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if harmony.speaks(tokenizer.get_vocab()):
        return lambda tokens: harmony.plain(str(tokenizer.decode(tokens, skip_special_tokens=False)))
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def _refuse(listener: socket.socket, folder: Path, error: RlcliError) -> None:
    """Send the reason why there is no service to all clients that connect."""
    while not _ended(listener, folder):
        while wait([listener], 1.0):
            with Connection(listener.accept()[0].detach()) as connection, contextlib.suppress(OSError):
                connection.send_bytes(marshal.dumps([("failed", error.message, error.hint)]))


def _ended(listener: socket.socket, folder: Path) -> bool:
    """End and remove the folder, unless a client has connected meanwhile."""
    with locked(folder):
        if wait([listener], 0.0):
            return False
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock among processes that start, find or end the service of this folder; creates it if missing."""
    while True:
        try:
            private_folder(folder)
            lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:  # a service that ended has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_same_file(folder / "lock", lock):
                yield
                return
        finally:
            os.close(lock)


def _is_same_file(path: Path, fd: int) -> bool:
    """True if an open file is still the one with this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


class Service:
    """Serves its clients, each with two threads. steps: number of training steps."""

    def __init__(
        self, listener: socket.socket, folder: Path, pool: ScoringPool, decode: Decode, steps: int = 0
    ) -> None:
        self.pool, self.decode, self.steps = pool, decode, steps
        self.sources = _Sources()
        self._listener, self._folder = listener, folder
        self._clients: set[_Client] = set()
        self.client_left = threading.Event()

    def serve(self) -> None:
        """Run until the last client has disconnected; the folder is then removed."""
        connected = bool(wait([self._listener], FIRST_CLIENT_S))
        while True:
            while wait([self._listener], 0.0 if not connected else 0.05):
                self._clients.add(_Client(self, Connection(self._listener.accept()[0].detach())))
            self._clients = {client for client in self._clients if client.reader.is_alive()}
            if self._clients:
                self.client_left.wait(0.2)
                self.client_left.clear()
            elif _ended(self._listener, self._folder):
                return


class _Sources:
    """The most recently used sources, up to SOURCES_BYTES. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._cache = threading.Lock(), SourceCache(SOURCES_BYTES)
        self._sources: dict[bytes, Source] = {}

    def add(self, source: Source) -> None:
        with self._lock:
            self._sources[source.key] = source
            _, dropped = self._cache.change([source])
            for key in dropped:
                del self._sources[key]

    def get(self, key: bytes) -> Source | None:
        with self._lock:
            source = self._sources.get(key)
            if source is not None:
                self._cache.change([source])
            return source


class _Client:
    """One worker that sends responses and gets verdicts."""

    def __init__(self, service: Service, connection: Connection) -> None:
        self._service, self._connection = service, connection
        self._out: queue.SimpleQueue[ServiceMessage | None] = queue.SimpleQueue()
        self._pending: dict[int, list[Future[Verdict]]] = {}
        self._lock = threading.Lock()  # so that only the last verdict of a message sends it
        self._out.put(("ready", service.pool.grouped))
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                kind, *payload = marshal.loads(self._connection.recv_bytes())
                if kind == "source":
                    self._service.sources.add(Source(*payload))
                elif kind == "verify_group":
                    self._verify(*payload)
                else:
                    number, verifier, key, tokens, spare, fields = payload
                    self._verify(number, verifier, key, [(tokens, spare, fields)])
        except (EOFError, OSError):
            pass
        finally:
            for verdicts in list(self._pending.values()):  # no client waits for these any more
                for verdict in verdicts:
                    verdict.cancel()
            self._out.put(None)
            self._service.client_left.set()

    def _verify(self, number: int, verifier: str, key: bytes, frames: Sequence[tuple[bytes, int, FrameFields]]) -> None:
        """Decode and submit the responses of one message. frames: for each its tokens (int32 ids), the number of
        trailing ids without text, and other fields of its request."""
        source = self._service.sources.get(key)
        if source is None:
            self._out.put(("missing", number))
            return
        texts, responses = [], []
        for tokens, spare, fields in frames:
            ids, text = self._decoded(tokens, spare)
            others = [self._decoded(other_ids, spare)[1] for other_ids, spare in fields.get("other_responses", ())]
            request = VerifyRequest(
                text,
                "",
                completion_ids=ids,
                finish_reason=fields.get("finish_reason", ""),
                thinking=fields.get("thinking", False),
                conversation=fields.get("conversation", ()),
                environment=fields.get("environment", {}),
                other_responses=[other[-MAX_COMPLETION_CHARS:] for other in others],
                step=fields.get("step", 0),
                steps=self._service.steps if "step" in fields else 0,
            )
            texts.append(text)
            responses.append(pack_response(request.tail(MAX_COMPLETION_CHARS)))
        try:
            verdicts = self._service.pool.submit_group(verifier, source, responses)
        except RlcliError as error:
            self._out.put(("error", number, error.message, error.hint))
            return
        self._pending[number] = verdicts
        checksums = [zlib.crc32(tokens) for tokens, _, _ in frames]
        for verdict in verdicts:
            verdict.add_done_callback(lambda _: self._done(number, checksums, texts, verdicts))

    def _decoded(self, tokens: bytes, spare: int) -> tuple[array[int], str]:
        ids = array("i", tokens)
        return ids, self._service.decode(ids[: len(ids) - spare].tolist())

    def _done(
        self, number: int, checksums: Sequence[int], texts: Sequence[str], verdicts: Sequence[Future[Verdict]]
    ) -> None:
        """Send the verdicts on the responses of one message, once they are complete."""
        with self._lock:
            if not all(verdict.done() for verdict in verdicts) or self._pending.pop(number, None) is None:
                return
        rows: list[VerdictRow] = []
        try:
            for checksum, text, future in zip(checksums, texts, verdicts, strict=True):
                result = future.result()
                rows.append(
                    (
                        checksum,
                        text,
                        result.score,
                        str(result.outcome),
                        result.answer,
                        dict(result.parts),
                        result.detail,
                        result.latency_s,
                        dict(result.extra),
                    )
                )
        except CancelledError:
            return
        except Exception as error:
            hint = error.hint if isinstance(error, RlcliError) else ""
            self._out.put(("error", number, getattr(error, "message", repr(error)), hint))
            return
        self._out.put(("verdict", number, rows))

    def _write(self) -> None:
        with self._connection, contextlib.suppress(OSError):
            while (first := self._out.get()) is not None:
                rows = [first]
                with contextlib.suppress(queue.Empty):
                    while len(rows) < MAX_VERDICTS_PER_MESSAGE and (row := self._out.get_nowait()) is not None:
                        rows.append(row)
                self._connection.send_bytes(marshal.dumps(rows))
