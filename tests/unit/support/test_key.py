"""The key that servers of models ask for, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlcli.support.server_key import RequireKey


def asked(app: RequireKey, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[dict[str, Any]]:
    """The response of the app to a request."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request")

    asyncio.run(app({"type": kind, "path": path, "headers": list(headers)}, receive, send))
    return sent


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> RequireKey:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "passed", "path": scope["path"]})

    monkeypatch.setenv("VLLM_API_KEY", "secret-0")
    return RequireKey(answers)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/invocations", "/health/", "//health", "/"])
@pytest.mark.parametrize("value", [None, b"", b"Bearer ", b"Bearer secret-1", b"secret-0", b"Bearer secret-0\xff"])
def test_a_request_without_the_key_is_refused(app: RequireKey, path: str, value: bytes | None) -> None:
    headers = [] if value is None else [(b"authorization", value)]
    assert [message.get("status") for message in asked(app, path, *headers)] == [401, None]
    assert asked(app, path, *headers, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_a_request_with_the_key_and_the_look_at_its_health_pass(app: RequireKey) -> None:
    key = (b"Authorization", b"Bearer secret-0")
    assert asked(app, "/metrics", key) == [{"type": "passed", "path": "/metrics"}]
    assert asked(app, "/v1/realtime", key, kind="websocket") == [{"type": "passed", "path": "/v1/realtime"}]
    assert asked(app, "/health") == [{"type": "passed", "path": "/health"}]
    assert asked(app, "/health", kind="websocket")[0]["type"] == "websocket.close"


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", " ")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        RequireKey(lambda *_: asyncio.sleep(0))
