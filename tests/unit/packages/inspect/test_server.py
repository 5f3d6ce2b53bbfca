"""The server of `rlcli view`: on loopback, for local names, for those who know the token, on a free port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rlcli_inspect.report import page_server as serving
from rlcli_inspect.report.page_api import Api
from rlcli_inspect.report.page_server import Server

from rlcli.errors import SetupError
from rlcli.runs.run_data import RunData
from tests.report_runs import write_run


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Api:
    return Api([RunData(write_run(tmp_path_factory.mktemp("runs") / "run", steps=2))])


def asked(api: Api, ask: Callable[[Any, Server], Awaitable[Any]], port: int | None = None) -> Any:
    """The result of `ask` for a session and a server."""
    import aiohttp

    async def main() -> Any:
        async with Server(api, port) as server, aiohttp.ClientSession() as session:
            return await ask(session, server)

    return asyncio.run(main())


def api_of(server: Server, query: str) -> str:
    return f"{server.origin}api/{query}&token={server.access.token}"


def test_it_answers_with_the_page_and_with_json(api: Api) -> None:
    async def ask(session: Any, server: Server) -> Any:
        async with session.get(server.url) as page, session.get(api_of(server, "samples?outcome=ok")) as samples:
            return page.headers, await page.text(), samples.headers, await samples.json()

    headers, html, of_json, answer = asked(api, ask)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert 'data-mode="view"' in html
    assert (of_json["X-Content-Type-Options"], of_json["Cache-Control"]) == ("nosniff", "no-store")
    assert "Access-Control-Allow-Origin" not in of_json
    assert {row["outcome"] for row in answer["rows"]} == {"ok"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "localhost:9000", "127.0.0.1:1", "[::1]:80", "[::1]")),
        *(
            (name, 403)
            for name in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.2", "[::2]:80")
        ),
    ],
)
def test_it_answers_to_local_names_alone(api: Api, host: str, status: int) -> None:
    async def ask(session: Any, server: Server) -> Any:
        async with session.get(api_of(server, "index?"), headers={"Host": host}) as response:
            return response.status

    assert asked(api, ask) == status


@pytest.mark.parametrize("where", ["", "api/index", "api/samples", "nowhere"])
@pytest.mark.parametrize("query", ["", "?token=", "?token=0", "?token=%FF%ED%A0%80", "?once=0", "?token={once}"])
def test_nothing_is_answered_without_the_token(api: Api, where: str, query: str) -> None:
    async def ask(session: Any, server: Server) -> Any:
        async with session.get(server.origin + where + query.format(once=server.access.once)) as response:
            return response.status, response.headers["X-Frame-Options"], await response.text()

    assert asked(api, ask) == (403, "DENY", serving.REFUSED)
    assert serving.REFUSED.count("\n") == 1


def test_the_link_for_a_browser_opens_the_page_once(api: Api) -> None:
    async def ask(session: Any, server: Server) -> Any:
        responses = []
        for url in (server.once.replace("/?", "/api/index?"), server.once, server.once):
            async with session.get(url) as response:
                responses.append((response.status, str(response.url) == server.url))
        return responses

    assert asked(api, ask) == [(403, False), (200, True), (403, False)]


def test_what_does_not_exist_is_an_error_in_json(api: Api) -> None:
    async def ask(session: Any, server: Server) -> Any:
        async with session.get(api_of(server, "group?step=9&prompt=p")) as response:
            return response.status, await response.json()

    assert asked(api, ask) == (
        400,
        {"error": "step 9 has no samples of the prompt p; choose another step or prompt"},
    )


def test_a_port_in_use_is_passed_over_or_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def address(session: Any, server: Server) -> str:
        return server.origin

    with socket.socket() as blocker:
        blocker.bind((serving.HOST, 0))
        blocker.listen()
        port = blocker.getsockname()[1]
        with pytest.raises(SetupError, match=f"--port {port}: it is in use"):
            asked(api, address, port)
        monkeypatch.setattr(serving, "PORT", port)
        assert asked(api, address) != f"http://{serving.HOST}:{port}/"
        monkeypatch.setattr(serving, "TRIES", 1)
        with pytest.raises(SetupError, match="are in use; give a free one with --port"):
            asked(api, address)


def test_a_defect_is_shown_by_the_page_and_logged(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "answer", lambda page, query: 1 / 0)
    assert serving.answered(api, "index", {}) == (500, '{"error":"ZeroDivisionError: division by zero"}')
    assert "/api/index failed" in caplog.text
