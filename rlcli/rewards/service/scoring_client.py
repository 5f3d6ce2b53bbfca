"""The engine's client of its machine's scoring service: find or start it, send it responses, await verdicts."""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from rlcli.errors import VerifierError
from rlcli.rewards.processes.fork_server import environment_of
from rlcli.rewards.service.scoring_service import TOKENIZER, ServiceMessage, Settings, locked
from rlcli.rewards.service.shared_rows import Source
from rlcli.support.importing import python
from rlcli.types import Outcome, Prompt, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEATHS = 3
"""Maximum number of times in a row that a service may die before its first verdict."""

READY_S = 180.0
"""Maximum time for a service to load the tokenizer and the verifiers."""

MAX_KNOWN_SOURCES = 100_000
"""Number of sources that are remembered as sent."""


class Scored(NamedTuple):
    """A response and its verdict."""

    text: str
    """The response, decoded."""
    verdict: Verdict
    """The verifier's result."""
    checksum: int = 0
    """CRC-32 of the tokens that the service verified, so that the verdict cannot be used for another response; 0: not
    known."""


ResponseFrame = tuple[bytes, int, Mapping[str, object]]
"""A response as it is sent: its tokens (int32 ids), the number of trailing tokens that are not text, and other fields
of its `VerifyRequest`, plain values."""


_Value = str | int | bytes | dict[str, object] | list[tuple[bytes, int, dict[str, object]]]
_Frame = tuple[_Value, ...]
"""A message to the service, for marshal."""


class _PendingRequest(NamedTuple):
    """The message for a response, or for all responses to a prompt; it is sent again if the service was killed."""

    scored: list[Future[Scored]]
    """Receive the verdict on each response."""
    prompt: Prompt
    """The row."""
    key: bytes
    """Key of the row's source."""
    frame: _Frame
    """The message."""


class ScoringClient:
    """Verifies the responses of one engine in the service that all engines of this machine share.

    folder: of its socket; the first client creates it and starts the service. tokenizer: of transformers, the one that
    `settings.tokenizer` names. If the service is killed, the responses that it was verifying are verified again by
    another, which the first client to notice starts. Raises `VerifierError`, from here or from the future, if no
    service is available: never a score of 0. Any thread may submit.
    """

    def __init__(self, settings: Settings, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._lock = threading.RLock()
        self._pending: dict[int, _PendingRequest] = {}
        self._numbers = 0
        self._keys: dict[int, tuple[Prompt, bytes]] = {}
        self._known: set[bytes] = set()
        self._ready = threading.Event()
        self.grouped: frozenset[str] = frozenset()
        """Expressions that read the responses to a prompt together, known once the service is ready: see
        `submit_group`."""
        self._failure: VerifierError | None = None
        self._closed = False
        self._deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.bytes_sent = 0
        self._connection = self._connect()
        self._reader = threading.Thread(target=self._read, name="rlcli-scoring-client", daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until the verifiers are loaded. Raises `VerifierError` if they do not load."""
        if not self._ready.wait(READY_S):
            raise VerifierError(f"the scoring service was not ready within {READY_S:g} s", "see its log")
        if self._failure is not None:
            raise self._failure

    def submit(
        self, prompt: Prompt, tokens: bytes, spare: int, fields: Mapping[str, object] = MappingProxyType({})
    ) -> Future[Scored]:
        """Decode and verify the response `tokens` (int32 ids), of which the last `spare` are not text. fields: other
        fields of its `VerifyRequest`, plain values."""
        scored: Future[Scored] = Future()
        self._ask("verify", prompt, [scored], (tokens, spare, dict(fields)))
        return scored

    def submit_group(self, prompt: Prompt, responses: Sequence[ResponseFrame]) -> list[Future[Scored]]:
        """Decode and verify all responses to a prompt, in one call of its verifier."""
        scored: list[Future[Scored]] = [Future() for _ in responses]
        frames = [(tokens, spare, dict(fields)) for tokens, spare, fields in responses]
        self._ask("verify_group", prompt, scored, (frames,))
        return scored

    def _ask(self, kind: str, prompt: Prompt, scored: list[Future[Scored]], values: _Frame) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise VerifierError("the scoring service is closed")
            self._numbers = number = self._numbers + 1
            key = self._key(prompt)
            frame: _Frame = (kind, number, prompt.verifier, key, *values)
            self._pending[number] = request = _PendingRequest(scored, prompt, key, frame)
            with contextlib.suppress(OSError):  # it was killed: the reading thread starts another and sends this again
                self._send(request)

    def close(self) -> None:
        """Disconnect. Futures without a result yet raise `CancelledError`. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _hang_up(self._connection)
        self._reader.join(5.0)
        self._connection.close()
        for request in self._pending.values():
            for scored in request.scored:
                if not scored.cancel():
                    scored.set_exception(CancelledError())

    def _key(self, prompt: Prompt) -> bytes:
        """The key of the row's source: computed once for all unfinished responses of a row."""
        cached = self._keys.get(id(prompt))
        if cached is not None and cached[0] is prompt:
            return cached[1]
        if (len(self._keys) > 64 and not self._pending) or len(self._keys) > 4096:
            self._keys.clear()
        key = Source.of(prompt.request()).key
        self._keys[id(prompt)] = (prompt, key)
        return key

    def _send(self, request: _PendingRequest) -> None:
        """Send a request, with its source if the service lacks it. Call this with the lock held."""
        if request.key not in self._known:
            if len(self._known) >= MAX_KNOWN_SOURCES:
                self._known.clear()
            source = Source.of(request.prompt.request())
            self._put(("source", source.key, source.data))
            self._known.add(request.key)
        self._put(request.frame)

    def _put(self, frame: _Frame) -> None:
        message = marshal.dumps(frame)
        self.bytes_sent += len(message)
        self._connection.send_bytes(message)

    def _read(self) -> None:
        while True:
            try:
                rows = marshal.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                if self._closed or not self._reconnect():
                    return
                continue
            for row in rows:
                self._handle(row)

    def _handle(self, row: ServiceMessage) -> None:
        """Handle one tuple from the service (see `scoring_service`)."""
        if row[0] == "ready":
            self.grouped = frozenset(row[1])
            self._ready.set()
        elif row[0] == "failed":
            self._fail(VerifierError(row[1], row[2]))
        elif row[0] == "missing":
            with self._lock, contextlib.suppress(OSError):
                if missing := self._pending.get(row[1]):
                    self._known.discard(missing.key)
                    self._send(missing)
        else:
            with self._lock:
                request = self._pending.pop(row[1], None)
            self._deaths = 0
            if request is None:
                return  # it was sent again, so two verdicts arrived
            if row[0] == "error":
                for scored in request.scored:
                    scored.set_exception(VerifierError(row[2], row[3]))
                return
            for scored, verdict_row in zip(request.scored, row[2], strict=True):
                checksum, text, score, outcome, answer, parts, detail, latency_s, extra = verdict_row
                verdict = Verdict(score, Outcome(outcome), answer, parts, detail, latency_s, extra)
                scored.set_result(Scored(text, verdict, checksum))

    def _reconnect(self) -> bool:
        """Find or start another service, and send it all requests without a verdict; False if none is available."""
        if self._failure is not None:
            return False
        self._deaths += 1
        if self._deaths > DEATHS:
            why = f"the scoring service died {self._deaths} times before it gave a verdict"
            self._fail(VerifierError(why, "its error is in the log of a worker, logs/ of the run"))
            return False
        try:
            with self._lock:
                if self._closed:
                    return False
                self._connection.close()
                self._connection = self._connect()
                self._known.clear()
                with contextlib.suppress(OSError):
                    for request in list(self._pending.values()):
                        self._send(request)
        except Exception as error:
            self._fail(VerifierError(f"the scoring service cannot be started: {error}"))
            return False
        return True

    def _fail(self, error: VerifierError) -> None:
        with self._lock:
            self._failure = error
            pending, self._pending = self._pending, {}
        self._ready.set()
        for request in pending.values():
            for scored in request.scored:
                scored.set_exception(error)

    def _connect(self) -> Connection:
        """Connect to the service, and start it if it does not run."""
        path = self._folder / "socket"
        if self._process is not None:
            self._process.poll()  # otherwise a dead one stays a zombie
        with locked(self._folder):
            client = socket.socket(socket.AF_UNIX)
            try:
                client.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                self._start(path)
                client.connect(str(path))
        return Connection(client.detach())

    def _start(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if not (self._folder / TOKENIZER).exists() and (text := tokenizer_json(self._tokenizer)):
            (self._folder / TOKENIZER).write_text(text, encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            # Its own session: it keeps serving others if this process ends, or is signalled with its group.
            self._process = subprocess.Popen(
                python(
                    "rlcli.rewards.service.scoring_service",
                    str(listener.fileno()),
                    str(self._folder),
                    self._settings.to_json(),
                ),
                env=environment_of(self._settings.sandbox),
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def _hang_up(connection: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_WR)  # verdicts already sent may still arrive


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer in the format of the library `tokenizers`, if that decodes identically; else empty. With it the
    service need not import transformers, which takes seconds."""
    from transformers import TokenizersBackend

    tokenizer_class = type(tokenizer)
    same = isinstance(tokenizer, TokenizersBackend) and not tokenizer.clean_up_tokenization_spaces
    overridden = any(
        getattr(tokenizer_class, name) is not getattr(TokenizersBackend, name) for name in ("decode", "_decode") if same
    )
    return "" if not same or overridden else str(tokenizer.backend_tokenizer.to_str())
