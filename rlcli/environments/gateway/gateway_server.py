"""The gateway: a server on loopback that sends the turns that clients request to the engine, as token ids."""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from rlcli.environments.calls import cleaned, format_of, parse
from rlcli.environments.chat_messages import ToolSchema
from rlcli.environments.conversation import Limits
from rlcli.environments.environment import MOST_REWARD
from rlcli.environments.gateway.chat_protocol import (
    Answer,
    ChatRequest,
    Refused,
    chunks,
    completion,
    logprobs_content,
    read_chat,
    read_max_tokens,
)
from rlcli.environments.gateway.session_record import (
    OUT_OF_CONTEXT,
    Branch,
    Generated,
    GeneratedTurn,
    Record,
    TurnRequest,
)
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.errors import ModelError
from rlcli.images.image_processor import ImageProcessor, NoRoom
from rlcli.images.row_images import BadImage
from rlcli.support.json_types import JsonValue
from rlcli.types import Ended

if TYPE_CHECKING:
    import numpy as np
    from aiohttp import web
    from jaxtyping import Int32, UInt8
    from transformers import PreTrainedTokenizerBase

TurnResult = TypeVar("TurnResult", Answer, GeneratedTurn)

MOST_BYTES = 64 << 20
"""Size limit of a request's body."""
NOT_THE_REWARD_KEY = (
    "a reward needs the key in the file RLCLI_REWARD_KEY, not OPENAI_API_KEY: read it before the first turn, when the "
    "file is removed (docs/gateway.md)"
)


@dataclass(frozen=True)
class GenerationAsk:
    """One turn for the engine to generate."""

    session: str
    """Id of the session."""
    turn: int
    """Number of the turn in the session, from 0."""
    prompt: Int32[np.ndarray, " T"]
    """Token ids."""
    max_tokens: int
    """Maximum number of tokens of the response."""
    images: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()
    """Images in the prompt, preprocessed for the model."""


Submit = Callable[[GenerationAsk], "Future[Generated]"]
"""The engine's side: called from the server's thread, it returns at once. If the future fails, or its generation was
aborted, the client gets an error and nothing is recorded. It is cancelled if the client goes away."""


@dataclass
class GatewaySession:
    """The session of one sample's programs."""

    id: str
    """Its id."""
    token: str = field(repr=False)
    """Key of requests for turns, for OPENAI_API_KEY."""
    reward_key: str = field(repr=False)
    """Key of `/sessions/ID/reward`."""
    url: str
    """Address, for OPENAI_BASE_URL."""
    record: Record
    """Its turns."""
    reward: float | None = None
    """The last reward that was posted; None if none was."""
    refused: str = ""
    """Reason of the last refused request; empty: none was refused."""
    reward_refused: str = ""
    """Reason of the last refused reward, until one is accepted."""
    until_turn: tuple[Path, ...] = ()
    """Files that are removed before the first turn."""
    busy: bool = field(default=False, repr=False)
    """True if a turn is being generated."""
    quiet_since: float = field(default_factory=time.monotonic, repr=False)
    """End of the last turn, by the monotonic clock."""

    @property
    def branches(self) -> list[Branch]:
        """Branches of the session: trajectories with their messages."""
        return self.record.branches

    @property
    def ended(self) -> Ended | None:
        """The limit that refused the last request."""
        return self.record.ended


class Gateway:
    """Serves `/sessions/ID/v1/chat/completions`, `/sessions/ID/v1/models`, `/sessions/ID/inference/v1/generate` and
    `/sessions/ID/reward`, each with `Authorization: Bearer KEY`, on a free port of 127.0.0.1, in a separate thread.
    The key of the reward is another one than that of the turns: what the policy writes may have the latter.

        with Gateway(tokenizer, stops, limits, submit) as gateway:
            session = gateway.open(version=3)
            ...  # a program asks session.url
            gateway.close_session(session)
            session.branches, session.reward

    tokenizer: with its chat template fixed. stops: the ids that end a response. thinking: a prompt ends within an open
    <think>. image_processor: of a vision-language model. `open` and `close_session` are for any thread.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Collection[int],
        limits: Limits,
        submit: Submit,
        *,
        thinking: bool = False,
        model: str = "policy",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        # A tokenizer is not for two threads.
        self._tokenizer, self._stops, self._limits = copy.deepcopy(tokenizer), frozenset(stops), limits
        self._submit, self._thinking, self._model, self._image_processor = submit, thinking, model, image_processor
        self._form = format_of(str(tokenizer.chat_template))
        self._templates: dict[str, TurnTemplate] = {}
        self._sessions: dict[str, GatewaySession] = {}
        self.loop = asyncio.new_event_loop()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="rlcli-gateway", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{started.result()}"

    def open(self, version: int = 0) -> GatewaySession:
        """A new session. version: of the weights that draw."""
        name, token, reward_key = secrets.token_hex(8), secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        record = Record(self._limits, version, None if self._image_processor is None else self._image_processor.rule)
        session = GatewaySession(name, token, reward_key, f"{self.url}/sessions/{name}/v1", record)
        self._sessions[name] = session
        return session

    def close_session(self, session: GatewaySession) -> None:
        """Close a session: its later requests get 404. Idempotent."""
        self._sessions.pop(session.id, None)

    def close(self) -> None:
        """End the server, and the agents that run on it; waiting requests are dropped. Idempotent."""
        self._sessions.clear()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, started: Future[int]) -> None:
        from aiohttp import web

        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=MOST_BYTES)
        for path, handle in (
            ("v1/chat/completions", self._chat),
            ("inference/v1/generate", self._generate),
        ):
            app.router.add_post(f"/sessions/{{id}}/{path}", self._handler(handle))
        app.router.add_post("/sessions/{id}/reward", self._handler(self._reward, of_reward=True))
        app.router.add_get("/sessions/{id}/v1/models", self._handler(self._models))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None, logger=_logger())
        try:
            self.loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, "127.0.0.1", 0)
            self.loop.run_until_complete(site.start())
            started.set_result(runner.addresses[0][1])
        except BaseException as error:
            started.set_exception(error)
            return
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)  # agents too, whose processes end
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    def _handler(
        self,
        handle: Callable[[web.Request, GatewaySession, JsonValue], Awaitable[web.StreamResponse]],
        *,
        of_reward: bool = False,
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler with the session, checked, and the body, parsed; what it raises becomes an answer. of_reward: it
        takes the key of the reward instead of the turns'."""
        from aiohttp import web

        async def checked(request: web.Request, session: GatewaySession) -> web.StreamResponse:
            try:
                return await handle(request, session, await _body(request))
            except ModelError as error:  # of the chat template
                raise Refused(400, str(error)) from error
            except web.HTTPException as error:  # a body that is too large
                raise Refused(error.status, error.reason) from error
            except web.RequestPayloadError as error:
                raise Refused(400, "the body cannot be read") from error

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session_of(request)
                try:
                    _authorize(request, session, of_reward)
                    return await checked(request, session)
                except Refused as error:
                    session.refused = str(error)
                    if of_reward:
                        session.reward_refused = str(error)
                    raise
            except Refused as error:
                return web.json_response(error.body, status=error.status)

        return answer

    def _session_of(self, request: web.Request) -> GatewaySession:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            raise Refused(404, f"there is no session {request.match_info['id'][:40]!r}")
        return session

    async def _models(self, request: web.Request, session: GatewaySession, body: JsonValue) -> web.StreamResponse:
        from aiohttp import web

        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlcli"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, session: GatewaySession, body: JsonValue) -> web.StreamResponse:
        from aiohttp import web

        reward = body.get("reward") if isinstance(body, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MOST_REWARD:
            raise Refused(400, f'reward = {reward!r:.40}: give {{"reward": NUMBER}}')
        session.reward, session.reward_refused = float(reward), ""
        return web.json_response({"reward": session.reward})

    async def _chat(self, request: web.Request, session: GatewaySession, body: JsonValue) -> web.StreamResponse:
        from aiohttp import web

        chat = read_chat(body)
        answer = await self._alone(session, lambda: self._chat_turn(session, chat))
        if not chat.stream:
            return web.json_response(completion(answer))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for chunk in chunks(answer, chat.include_usage):
            await stream.write(chunk.encode())
        return stream

    async def _generate(self, request: web.Request, session: GatewaySession, body: JsonValue) -> web.StreamResponse:
        from aiohttp import web

        fields = body if isinstance(body, dict) else {}
        values = fields.get("token_ids")
        vocabulary = len(self._tokenizer)
        tokens = [t for t in values if type(t) is int and 0 <= t < vocabulary] if isinstance(values, list) else []
        if not isinstance(values, list) or not values or len(tokens) != len(values):
            raise Refused(400, f"token_ids is no list of ids below {vocabulary}")
        sampling = fields.get("sampling_params") or {}
        if not isinstance(sampling, dict) or sampling.get("n") not in (None, 1):
            raise Refused(400, "sampling_params is no JSON object, or asks for more than one choice")
        limit = read_max_tokens(sampling, "max_tokens")
        turn = await self._alone(session, lambda: self._token_turn(session, tokens, limit))
        choice = {
            "index": 0,
            "token_ids": turn.tokens.tolist(),
            "logprobs": logprobs_content(self._pairs(turn)),
            "finish_reason": turn.finish_reason,
        }
        name = str(fields.get("request_id") or _turn_id(session))
        return web.json_response({"request_id": name, "choices": [choice], "prompt_logprobs": None})

    async def _alone(self, session: GatewaySession, turn: Callable[[], Awaitable[TurnResult]]) -> TurnResult:
        if session.busy:
            raise Refused(409, "another request of this session is not answered yet: one client at a time")
        session.busy = True
        for file in session.until_turn:  # before the policy has written anything that could read them
            file.unlink(missing_ok=True)
        try:
            return await turn()
        finally:
            session.busy = False

    async def _chat_turn(self, session: GatewaySession, chat: ChatRequest) -> Answer:
        if chat.tools and not self._form:
            raise Refused(400, "tools: the chat template of the model describes no calls of tools that are known here")
        offered, record = json.dumps(chat.tools, sort_keys=True), session.record
        images = await self._preprocessed(record, chat.images) if chat.images else {}
        request = record.ask(chat.messages, offered, self._template(offered, chat.tools), chat.max_tokens, images)
        turn, text = self._until(await self._generated(session, request), chat.stop)
        form = self._form if chat.tools else ""
        message, failed = parse(text, form, thinking=self._thinking, tools=chat.tools)
        message.pop("invalid_tool_calls", None)  # no field of OpenAI's messages
        record.failed_calls += failed
        for number, call in enumerate(message.get("tool_calls", ()), record.calls + 1):
            call["id"] = f"call{number:05}"  # unique in the session
        record.record_turn(request, turn, message)
        return Answer(
            id=_turn_id(session),
            model=chat.model or self._model,
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else str(turn.finish_reason),
            prompt_tokens=len(request.trajectory.tokens),
            response_tokens=len(turn.tokens),
            logprobs=self._pairs(turn) if chat.logprobs else None,
        )

    async def _preprocessed(
        self, record: Record, images: Mapping[str, bytes]
    ) -> dict[str, UInt8[np.ndarray, "height width 3"]]:
        """Images, preprocessed for the model, by digest."""
        if self._image_processor is None:
            raise Refused(400, "a message has an image, and the model reads text alone")
        try:  # in a thread, so that other sessions continue
            processed = await asyncio.to_thread(
                self._image_processor.process_with_copies, list(images.values()), self._limits.tokens
            )
        except NoRoom as error:
            record.ended = "tokens"
            raise Refused(400, str(error), OUT_OF_CONTEXT) from error
        except BadImage as error:
            raise Refused(400, str(error)) from error
        record.copies |= processed.copies
        return dict(zip(images, processed.images, strict=True))

    async def _token_turn(self, session: GatewaySession, tokens: list[int], max_tokens: int | None) -> GeneratedTurn:
        request = session.record.ask_tokens(tokens, max_tokens)
        turn = await self._generated(session, request)
        session.record.record_turn(request, turn, None)
        return turn

    async def _generated(self, session: GatewaySession, request: TurnRequest) -> GeneratedTurn:
        """Have the engine generate a turn."""
        number, trajectory = len(session.record.turns), request.trajectory
        ask = GenerationAsk(session.id, number, trajectory.tokens, request.room, trajectory.images)
        try:
            generation = await asyncio.wrap_future(self._submit(ask))
        except Exception as error:
            raise Refused(500, f"the engine failed: {type(error).__name__}: {str(error)[:200]}") from error
        finally:
            session.quiet_since = time.monotonic()
        if generation.finish_reason is None or session.id not in self._sessions:
            raise Refused(503, "the generation was aborted")
        return GeneratedTurn(generation.tokens, generation.log_probs, generation.finish_reason, generation.routes)

    def _until(self, turn: GeneratedTurn, stop: Sequence[str]) -> tuple[GeneratedTurn, str]:
        """Cut a turn at the first of the texts `stop`, after the token that completes it. Returns the turn and its
        text, without the stop text and the token that ended it."""
        ids = turn.tokens.tolist()
        text = self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stops else ids)
        positions = [text.find(stop_text) for stop_text in stop if stop_text in text]
        if not positions:
            return turn, text

        def has_stop(count: int) -> bool:
            prefix = self._tokenizer.decode(ids[:count])
            return any(stop_text in prefix for stop_text in stop)

        count = bisect_left(range(len(ids) + 1), True, key=has_stop)
        tokens, log_probs = turn.tokens[:count], turn.log_probs[:count]
        return replace(turn, tokens=tokens, log_probs=log_probs, finish_reason="stop"), text[: min(positions)]

    def _pairs(self, turn: GeneratedTurn) -> list[tuple[str, float]]:
        """The text and the log-prob of each token."""
        ids, values = turn.tokens.tolist(), turn.log_probs.tolist()
        return [(self._tokenizer.decode([token]), value) for token, value in zip(ids, values, strict=True)]

    def _template(self, offered: str, tools: Sequence[ToolSchema]) -> TurnTemplate:
        if offered not in self._templates:
            never = () if self._image_processor is None else self._image_processor.rule.never
            self._templates[offered] = TurnTemplate(self._tokenizer, self._stops, tools, never)
        return self._templates[offered]


def _authorize(request: web.Request, session: GatewaySession, of_reward: bool) -> None:
    """Raise `Refused` unless the request has its key. Headers may hold any bytes."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
    if hmac.compare_digest(key, (session.reward_key if of_reward else session.token).encode()):
        return
    if of_reward and hmac.compare_digest(key, session.token.encode()):
        raise Refused(401, NOT_THE_REWARD_KEY)
    raise Refused(401, "the token is not this session's")


def _logger() -> logging.Logger:
    """For the server."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_bug)
    return logger


def _is_bug(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback of each request that is no HTTP, too, and of a body that it cannot decode after it has
    answered: what a client sends is no bug."""
    from aiohttp.http_exceptions import HttpProcessingError
    from aiohttp.web_protocol import RequestPayloadError

    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, RequestPayloadError)))


async def _body(request: web.Request) -> JsonValue:
    if request.method == "GET":
        return None
    if (request.content_length or 0) > MOST_BYTES:
        raise Refused(413, f"the body has more than {MOST_BYTES} bytes")
    try:
        return cleaned(json.loads(await request.read()))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error


def _turn_id(session: GatewaySession) -> str:
    return f"chatcmpl-{session.id}-{len(session.record.turns)}"
