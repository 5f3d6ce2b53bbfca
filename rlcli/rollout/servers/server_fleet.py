"""The servers of one engine: each is attached, gets the current weights, and is watched and replaced when it is lost.

All of it runs in one thread, in an event loop. `Fleet`'s public methods are called from the engine's thread.

A request belongs to one server at a time. If that server is lost its requests go to others at once, from their
beginning: its own answers are not read any more, so that none counts twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from rlcli.errors import RlcliError, RunFailed, SetupError
from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.servers.server_protocol import Answer, ServerKind, ServerRequest
from rlcli.rollout.servers.sglang_server import SglangServer
from rlcli.rollout.servers.vllm_process import ServerProcess
from rlcli.rollout.servers.vllm_server import VllmServer
from rlcli.support.json_link import UNIX, Link, Refused, Rejected, ServerFault

if TYPE_CHECKING:
    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")

KINDS: tuple[type[ServerKind], ...] = (VllmServer, SglangServer)
LOOK_S, PING_S, RETRY_S = 0.25, 5.0, 5.0
PING_ANSWER_S, HEALTH_S = 120.0, 30.0
"""Longest time for one token from a server that generates, and for a sign of life of one that does not: it is lost
after it."""
START_S = 600.0
"""Longest time for a server of this run to start."""
STARTS = 3
"""Starts in a row without an answer, after which a server of this run is given up."""
REFUSED_S = 30.0
"""Time for which servers that all refuse are asked again: others may be starting in their place."""
TRIES = 3
"""Servers that may be lost while they generate the same response."""
ABORT_S = 0.1
"""Interval of aborts, until everything is aborted: a request that is on its way is not known to the server yet."""


@dataclass
class Member:
    """A server of the fleet and its state."""

    url: str
    """Its address."""
    socket: Path | None = None
    """Socket of a server that this run starts."""
    state: str = "starting"
    """`starting`, `ready`, `lost`, or `gone` (it left, or was given up)."""
    why: str = ""
    """Reason of the state `lost` or `gone`."""
    link: Link | None = None
    """Connection, while it is attached."""
    server: ServerKind | None = None
    """Its interface, while it is attached."""
    process: ServerProcess | None = None
    """Its process, if this run started it."""
    running: dict[str, tuple[Request, asyncio.Task[None]]] = field(default_factory=dict)
    """Requests that it generates, by name."""
    finished: int = 0
    """Responses that it has generated."""
    lost: int = 0
    """Number of times it was lost."""
    failed_starts: int = 0
    """Failed starts in a row."""
    refused_at: float | None = None
    """Since when it refuses to be attached; None: it does not."""
    version: int = 0
    """Version of its weights."""
    leaves: bool = False
    """True if it gets no more requests, because it leaves."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the state changes."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def refuses(self) -> bool:
        """True if it answers, and has refused to be attached for a long time."""
        return self.refused_at is not None and time.monotonic() - self.refused_at > REFUSED_S

    @property
    def speaks(self) -> ServerKind:
        assert self.server is not None, "it is attached"
        return self.server


@dataclass
class Request:
    """A response to generate, on any server."""

    ask: ServerRequest
    """The response."""
    answer: Callable[[Answer], None]
    """Called with the result, in the loop's thread."""
    conversation: int | None = None
    """As in `GenerationRequest`."""
    losses: int = 0
    """Servers that were lost while they generated it."""


class Fleet:
    """log: of a server that this run starts, by its number. on_lost: called in the loop's thread with the address and
    the reason when a server is lost that was ready. failures: what the engine raises."""

    def __init__(
        self,
        spec: EngineSpec,
        log: Callable[[int], Path],
        on_lost: Callable[[str, str], None] = lambda url, why: None,
    ) -> None:
        self.spec, self._log, self._on_lost = spec, log, on_lost
        self.members: list[Member] = []
        self.failures: SimpleQueue[RlcliError] = SimpleQueue()
        self.lost, self.moved, self.version = 0, 0, 0
        self._weights = ""
        self._sent: Mapping[str, TensorChecksum] | None = None
        self._waiting: deque[Request] = deque()
        self._seats: dict[int, Member] = {}
        self._aborting = self._loading = False
        self._started, self._ready_at = False, time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlcli-servers", daemon=True)
        self._thread.start()

    # From the engine's thread.

    def start(self, addresses: list[tuple[str, Path | None]]) -> None:
        """Attach the first servers, (URL, socket), and wait for all of them. Raises `SetupError` for one that cannot be
        used."""
        self.call(self._start(addresses))

    def call(self, work: Coroutine[object, None, T]) -> T:
        """The result of a coroutine that runs in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, request: Request) -> None:
        """Generate this, on any server."""
        self._loop.call_soon_threadsafe(self._take, request)

    def begin(self) -> None:
        """Another generation: its conversations are others."""
        self._loop.call_soon_threadsafe(self._seats.clear)

    def abort(self) -> list[Request]:
        """Abort all requests. Returns those that no server had started; the others are answered with their tokens so
        far."""
        return self.call(self._abort())

    def load(self, folder: str) -> None:
        """Give all servers the weights in `folder`, and later ones too. Raises `RunFailed` if no server has them."""
        self.call(self._load(folder))

    def verify(self, sent: Mapping[str, TensorChecksum]) -> list[Verified]:
        """Compare the weights of each ready server. Later ones are compared with `sent` before they are used."""
        self._sent = sent
        return self.on_each(lambda server: server.verify(sent, self.spec.servers.answer_s))

    def on_each(self, work: Callable[[ServerKind], Awaitable[T]]) -> list[T]:
        """The results of all servers that are ready; one that fails is lost, and at least one does not."""
        return self.call(self._on_each(work))

    def join(self, url: str) -> None:
        self._loop.call_soon_threadsafe(self._join, url, None)

    def leave(self, url: str) -> None:
        """Use this server no more, once it has finished what it generates."""
        self._loop.call_soon_threadsafe(self._leave, url)

    @property
    def ready(self) -> int:
        return sum(member.ready for member in list(self.members))

    def close(self) -> None:
        """End the servers that this run started, and leave the others."""
        self.call(self._close())
        for member in self.members:
            if member.process is not None:
                member.process.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # In the loop.

    async def _start(self, addresses: list[tuple[str, Path | None]]) -> None:
        for url, socket in addresses:
            self._join(url, socket)
        self._in_loop(self._look_after())
        while not all(member.ready for member in self.members):
            for member in self.members:
                if member.why and not member.ready:
                    if member.socket is None:
                        raise SetupError(f"rollout.servers: {member.why}", "check that server, or leave its URL out")
                    raise SetupError(
                        f"a server of rollout.engine = server did not start: {member.why}",
                        f"its log is {self._log_of(member)}",
                    )
            await asyncio.sleep(0.05)
        self._started = True

    def _join(self, url: str, socket: Path | None) -> None:
        if any(member.url == url and not member.leaves for member in self.members):
            return
        member = Member(url, socket)
        self.members.append(member)
        self._in_loop(self._keep(member))

    def _leave(self, url: str) -> None:
        for member in self.members:
            if member.url == url:
                member.leaves = True
                member.changed.set()

    def _in_loop(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, member: Member) -> None:
        """Attach a server, and attach it again whenever it is lost, until it leaves or is given up."""
        while not member.leaves and member.failed_starts < STARTS:
            try:
                await self._attach(member)
                await self._fill(member)
            except Exception as error:  # whatever it is, the engine must not wait for this server
                member.why, member.state = _reason(error), "lost"
                member.refused_at = (member.refused_at or time.monotonic()) if isinstance(error, Refused) else None
                member.failed_starts += member.socket is not None
                await self._detach(member)
                await asyncio.sleep(RETRY_S)
                continue
            member.state, member.why, member.failed_starts, member.refused_at = "ready", "", 0, None
            self._dispatch()
            await self._watch(member)
            await self._detach(member)
        member.state = "gone"

    async def _attach(self, member: Member) -> None:
        member.state = "starting" if not member.lost else "lost"
        if member.socket is not None:
            number = self.members.index(member)
            member.process = await asyncio.to_thread(ServerProcess, self.spec, member.socket, self._log(number))
        member.link = Link(member.url)
        if member.process is not None:
            await self._until_up(member.link, member.process)
        for kind in KINDS:
            if await kind.is_there(member.link):
                member.server = kind(member.link, self.spec)
                await member.server.attach()
                return
        raise Refused(f"{member.url} is neither vLLM's server nor SGLang's")

    async def _until_up(self, link: Link, process: ServerProcess) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if process.exit_status is not None:
                raise ServerFault(f"it ended with exit status {process.exit_status}: {process.tail()}")
            with contextlib.suppress(ServerFault):  # not yet
                if await link.status("/health", PING_S) == 200:
                    return
            await asyncio.sleep(LOOK_S)
        raise ServerFault(f"it did not start in {START_S:g} s: {process.tail()}")

    async def _fill(self, member: Member) -> None:
        """Give a new server the current weights, which may change meanwhile."""
        server, limit_s = member.speaks, self.spec.servers.answer_s
        while True:
            version, folder, sent = self.version, self._weights, self._sent
            try:
                if folder:
                    await server.load(folder, str(version), limit_s)
                if sent is not None and version == self.version and not self._loading:
                    differences = (await server.verify(sent, limit_s)).differences
                    if differences:
                        raise Refused(f"{member.url} does not hold the weights that it was sent: {differences[0]}")
            except ServerFault:
                if version == self.version:
                    raise
                continue  # the folder was removed meanwhile
            if version == self.version and sent is self._sent:
                member.version = version
                return

    async def _watch(self, member: Member) -> None:
        """Return once the server is lost, or has left."""
        last_ping = time.monotonic()
        while member.ready:
            await _within(member.changed.wait(), LOOK_S)
            member.changed.clear()
            if member.leaves and not member.running:
                member.state, member.why = "gone", "it was asked to leave"
                return
            if member.process is not None and (status := member.process.exit_status) is not None:
                self._lose(member, member.server, f"the server ended (exit status {status})")
            elif member.ready and not self._loading and time.monotonic() - last_ping > PING_S:
                try:
                    await self._ping(member)
                except Exception as error:
                    self._lose(member, member.server, _reason(error))
                last_ping = time.monotonic()

    async def _ping(self, member: Member) -> None:
        answer_s = self.spec.servers.answer_s
        if member.running:
            ask = ServerRequest(self._name("ping"), [0, 0], 1, 1.0, 1.0, 0, "ping")
            await member.speaks.generate(ask, min(PING_ANSWER_S, answer_s))
        else:
            await member.speaks.alive(min(HEALTH_S, answer_s))

    def _lose(self, member: Member, server: ServerKind | None, why: str) -> None:
        """Use a server no more until it is attached again; its requests go to others. server: as it was attached when
        it failed: what fails late is not the one that has replaced it."""
        if not member.ready or member.server is not server:
            return
        member.state, member.why = "lost", why
        member.lost, self.lost = member.lost + 1, self.lost + 1
        requests = list(member.running.values())
        member.running.clear()
        for request, task in reversed(requests):
            if task is not asyncio.current_task():
                task.cancel()
            request.losses += 1
            if request.losses >= TRIES:
                self.failures.put(
                    RunFailed(f"{request.losses} servers were lost with the same response, the last: {why}")
                )
            self._waiting.appendleft(request)
        self.moved += len(requests)
        member.changed.set()
        self._on_lost(member.url, why)
        self._dispatch()

    async def _detach(self, member: Member) -> None:
        if member.link is not None:
            await member.link.close()
        if member.process is not None:
            await asyncio.to_thread(member.process.end)
        member.link = member.server = member.process = None

    def _take(self, request: Request) -> None:
        self._waiting.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what waits to servers that have room."""
        while self._waiting and not (self._aborting or self._loading):
            member = self._route(self._waiting[0])
            if member is None:
                return
            request = self._waiting.popleft()
            if request.conversation is not None:
                self._seats[request.conversation] = member
            member.running[request.ask.name] = request, self._in_loop(self._run(member, request))

    def _route(self, request: Request) -> Member | None:
        """The server that has the earlier turns of the conversation, else the one that generates least."""
        free = [member for member in self.members if member.ready and not member.leaves]
        free = [member for member in free if len(member.running) < self.spec.max_concurrent]
        if request.conversation is not None and (seat := self._seats.get(request.conversation)) in free:
            return seat
        return min(free, key=lambda member: len(member.running), default=None)

    async def _run(self, member: Member, request: Request) -> None:
        name, server = request.ask.name, member.speaks
        try:
            # Its time is limited by the pings: they ask whether the server still generates.
            answer = await server.generate(request.ask, float("inf"))
        except Rejected as fault:
            # No other server would take it, and this one is sound.
            self.failures.put(RunFailed(f"a response cannot be generated: {fault}", "see the server's log"))
            return
        except ServerFault as fault:
            self._lose(member, server, str(fault))
            return
        except Exception as error:  # a defect, which must not leave the engine waiting
            self.failures.put(RunFailed(f"the answer of {member.url}: {_reason(error)}", "report it with that answer"))
            return
        if member.running.pop(name, None) is None:
            return  # it was moved
        member.finished += answer.reason is not None
        request.answer(answer)
        if member.leaves:
            member.changed.set()
        self._dispatch()

    async def _abort(self) -> list[Request]:
        self._aborting = True
        try:
            while self.failures.empty() and (running := [member for member in self.members if member.running]):
                await asyncio.gather(*map(self._abort_on, running))
                tasks = [task for member in running for _, task in member.running.values()]
                if tasks:
                    await asyncio.wait(tasks, timeout=ABORT_S)
            waiting = list(self._waiting)
            self._waiting.clear()
            self._seats.clear()
            return waiting
        finally:
            self._aborting = False

    async def _abort_on(self, member: Member) -> None:
        names = list(member.running)
        if not names:  # a server takes an empty list for all requests, of others too
            return
        server = member.speaks
        try:
            await server.abort(names, min(PING_ANSWER_S, self.spec.servers.answer_s))
        except ServerFault as fault:
            self._lose(member, server, str(fault))

    async def _load(self, folder: str) -> None:
        self._loading, self._sent = True, None
        self._weights, self.version = folder, self.version + 1
        version, limit_s = self.version, self.spec.servers.answer_s
        try:
            await self._on_each(lambda server: server.load(folder, str(version), limit_s))
            for member in self.members:
                if member.ready:
                    member.version = version
        finally:
            self._loading = False
            self._dispatch()

    async def _on_each(self, work: Callable[[ServerKind], Awaitable[T]]) -> list[T]:
        while True:
            members = [member for member in self.members if member.ready]
            servers = [member.speaks for member in members]
            results = await asyncio.gather(*map(work, servers), return_exceptions=True)
            ready_results: list[T] = []
            for member, server, result in zip(members, servers, results, strict=True):
                if isinstance(result, ServerFault):
                    self._lose(member, server, str(result))
                elif isinstance(result, BaseException):
                    raise result
                elif member.ready:
                    ready_results.append(result)
            if ready_results:
                return ready_results
            if members and all(isinstance(result, Refused) for result in results):
                raise RunFailed(f"all servers refuse: {results[0]}", "serve the run's own model; their logs say more")
            self._check_hope()
            await asyncio.sleep(LOOK_S)

    def _check_hope(self) -> None:
        """Raise `RunFailed` if no server is ready, and none will be."""
        if any(member.ready for member in self.members):
            self._ready_at = time.monotonic()
            return
        waited, limit_s = time.monotonic() - self._ready_at, self.spec.servers.answer_s
        if any(member.socket is not None for member in self.members):
            limit_s += START_S
        if waited > limit_s or all(member.state == "gone" or member.refuses for member in self.members):
            reasons = "; ".join(dict.fromkeys(f"{member.url}: {member.why}" for member in self.members if member.why))
            raise RunFailed(
                f"no server generates any more: {reasons or 'all have left'}",
                "start them again, or let others join: rlcli engines add RUN URL",
                retry=True,
            )

    async def _look_after(self) -> None:
        """Notice while responses wait that no server will ever generate them."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._started:
                    self._check_hope()
            except RunFailed as error:
                self.failures.put(error)
                return

    async def _close(self) -> None:
        self._aborting = True
        while self._tasks:  # `asyncio.wait_for` of Python 3.11 may swallow one
            for task in list(self._tasks):
                task.cancel()
            await asyncio.wait(list(self._tasks), timeout=LOOK_S)
        for member in self.members:
            if member.link is not None:
                await member.link.close()

    def _name(self, prefix: str) -> str:
        return f"{prefix}-{time.monotonic_ns()}"

    def _log_of(self, member: Member) -> Path:
        return self._log(self.members.index(member))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ServerFault) else f"{type(error).__name__}: {error}"


async def _within(work: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, seconds)


def unix_url(socket: Path) -> str:
    return f"{UNIX}{socket}"
