"""Serves the pages on loopback, for `rlcli view`.

Loopback is open to every user of the machine, and to every web page that makes its own name resolve to it. So each
request must have a secret token, which only the printed address has, and ask by a local name.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from rlcli.errors import RlcliError, SetupError
from rlcli_inspect.report.page_api import Api, as_json
from rlcli_inspect.report.page_assembly import SERVED, content_policy, page

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST, PORT = "127.0.0.1", 8765
TRIES = 50
"""Ports that are tried, from PORT on, if none is given."""
_PORT = re.compile(r":\d+$")
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser may ask. Another name in the Host header means that a foreign page has made its own name
resolve to this machine; with any port, since it may be forwarded."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
MIN_COMPRESSED = 1 << 14
REFUSED = "403: the token is missing or wrong. Open the whole address that rlcli view has printed.\n"


class Access:
    """Access control: requests need `token`. `once` opens the page a single time, for the command line of a browser,
    which other users can read."""

    def __init__(self) -> None:
        self.token, self.once = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._used = False

    def allows(self, query: Mapping[str, str]) -> bool:
        """True if a request has the token."""
        return _equal(query.get("token", ""), self.token)

    def redeems(self, query: Mapping[str, str]) -> bool:
        """True if a request has `once`, for the first time."""
        valid = not self._used and _equal(query.get("once", ""), self.once)
        self._used = self._used or valid
        return valid


class Server:
    """Serves `api` in the running event loop.

    async with Server(api, port=None) as server:
        print(server.url)              # http://127.0.0.1:8765/?token=…
        webbrowser.open(server.once)   # leads there, a single time
    """

    def __init__(self, api: Api, port: int | None = None) -> None:
        self.api, self._port = api, port
        self.access = Access()
        self.origin = self.url = self.once = ""

    async def __aenter__(self) -> Server:
        """Listen. SetupError if the given port, or every port that is tried, is in use."""
        from aiohttp import web

        self._runner = web.AppRunner(application(self.api, self.access), access_log=None)
        await self._runner.setup()
        try:
            port = await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise
        self.origin = f"http://{HOST}:{port}/"
        self.url, self.once = f"{self.origin}?token={self.access.token}", f"{self.origin}?once={self.access.once}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _listen(self) -> int:
        from aiohttp import web

        for port in range(PORT, PORT + TRIES) if self._port is None else (self._port,):
            site = web.TCPSite(self._runner, HOST, port, shutdown_timeout=1.0)
            try:
                await site.start()
            except OSError as error:
                if error.errno == errno.EADDRINUSE and self._port is None:
                    continue
                why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
                raise SetupError(f"--port {port}: {why}", "give another, or none to take a free one") from None
            address: tuple[str, int] = self._runner.addresses[-1]
            return address[1]
        raise SetupError(f"ports {PORT} to {PORT + TRIES - 1} are in use", "give a free one with --port")


def application(api: Api, access: Access) -> web.Application:
    """The page at `/`, and answers below `/api/`, for requests that `access` allows."""
    from aiohttp import web

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if _PORT.sub("", request.host) not in NAMES:
            response: web.StreamResponse = web.Response(
                status=403, text="403: this server answers to localhost alone\n"
            )
        elif request.path == "/" and access.redeems(request.query):
            response = web.Response(status=303, headers={"Location": f"/?token={access.token}"})
        elif not access.allows(request.query):
            response = web.Response(status=403, text=REFUSED)
        else:
            response = await handler(request)
        response.headers.update(HEADERS)
        return response

    async def index(request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": content_policy(SERVED) + "; frame-ancestors 'none'"}
        return web.Response(text=page(SERVED), content_type="text/html", headers=headers)

    async def answer(request: web.Request) -> web.Response:
        status, text = await asyncio.to_thread(answered, api, request.match_info["name"], request.query)
        response = web.Response(text=text, content_type="application/json", status=status)
        if len(text) > MIN_COMPRESSED:
            response.enable_compression()
        return response

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get("/", index), web.get("/api/{name}", answer)])
    return app


def answered(api: Api, name: str, query: Mapping[str, str]) -> tuple[int, str]:
    """The HTTP status and the JSON of an answer; a user's error as `{"error": …}`."""
    try:
        return 200, as_json(api.answer(name, query))
    except RlcliError as error:
        return 400, as_json({"error": str(error)})
    except Exception as error:  # a defect: the page shows it, and the terminal has the traceback
        logging.getLogger(__name__).exception("/api/%s failed", name)
        return 500, as_json({"error": f"{type(error).__name__}: {error}"})


def warm_up(api: Api) -> None:
    """Read the records of the runs, and import what reads samples, while the browser starts: a second each."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    api.answer("state", {})


def serve(api: Api, port: int | None, on_start: Callable[[Server], None]) -> None:
    """Serve until interrupted. on_start: receives the server once it listens."""

    async def forever() -> None:
        async with Server(api, port) as server:
            on_start(server)
            await asyncio.to_thread(warm_up, api)
            await asyncio.Event().wait()

    asyncio.run(forever())


def _equal(token: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(token.encode(errors="replace"), secret.encode())
