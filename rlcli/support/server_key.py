"""The key of a server: `--middleware rlcli.support.server_key.RequireKey` of vLLM's server.

By itself vLLM requires VLLM_API_KEY only for a few prefixes (`/v1`); `/invocations`, `/tokenize`, `/metrics` and the
control endpoints answer everybody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = "/health"
"""The only path that answers without the key: the health check."""


class RequireKey:
    """ASGI middleware: each request but one for `OPEN` needs `Authorization: Bearer KEY`, with the key of VLLM_API_KEY.
    Raises `RuntimeError` if that is not set: then the server does not start."""

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._expected = f"Bearer {key}".encode()
        if not key.strip():
            raise RuntimeError("rlcli.support.server_key.RequireKey: VLLM_API_KEY is not set")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _may_pass(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN:
            return True
        return any(
            name.lower() == b"authorization" and secrets.compare_digest(value, self._expected)
            for name, value in scope["headers"]
        )
