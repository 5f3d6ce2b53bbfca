"""JSON over HTTP with one server; each error is one line."""

from __future__ import annotations

import os
from typing import Any

import httpx

from rlcli.errors import ConfigError
from rlcli.support.served_models import ENGINE_KEY

CONNECT_S = 10.0
UNIX = "unix:"
"""Prefix of the address of a server on a Unix socket."""
MOST_TEXT = 200
KEPT_S = 2.0
"""Lifetime of an idle connection: uvicorn, which serves vLLM, closes one after 5 s, and a request at that moment gets
no answer."""


class ServerFault(Exception):
    """A server that cannot be used: it is gone, too slow, or answers something else than it should."""


class Refused(ServerFault):
    """A server that answers, but refuses the request or speaks another protocol."""


class Rejected(Refused):
    """A request that is invalid: any other server would refuse it too."""


class Link:
    """Requests to one server. url: `http://host:port`, or `unix:` and the path of a socket.

    Raises `ServerFault` if it cannot be reached, gives no answer in time or fails; `Refused` if it answers out of
    protocol. The key of RLCLI_ENGINE_KEY is sent to it, and is in no message.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._key = os.environ.get(ENGINE_KEY, "").strip()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key and not url.startswith(UNIX) else {}
        uds = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEPT_S)
        self._http = httpx.AsyncClient(
            base_url="http://server" if uds else url,
            transport=httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False),
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )

    async def get(self, path: str, timeout_s: float) -> Any:
        return await self._json("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """The answer's JSON; None if it is empty."""
        return await self._json("POST", path, body, timeout_s)

    async def status(self, path: str, timeout_s: float) -> int:
        """The status code of a GET."""
        return (await self._request("GET", path, None, timeout_s)).status_code

    async def close(self) -> None:
        await self._http.aclose()

    async def _json(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        answer = await self._request(method, path, body, timeout_s)
        if answer.status_code in (401, 403):
            raise ServerFault(f"{self.url} refuses the key ({answer.status_code}): set {ENGINE_KEY}")
        if answer.status_code >= 500:
            raise ServerFault(f"{self.url} answers {answer.status_code} to {path}: {self._line(answer.text)}")
        if answer.status_code != 200:
            kind = Rejected if answer.status_code in (400, 413, 422) else Refused
            raise kind(f"{self.url} answers {answer.status_code} to {path}: {self._line(answer.text)}")
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise self.out_of_protocol(path, answer.text) from None

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> httpx.Response:
        import asyncio

        try:
            async with asyncio.timeout(timeout_s):
                return await self._http.request(method, path, json=body)
        except TimeoutError:
            raise ServerFault(f"{self.url} gave no answer to {path} in {timeout_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            why = self._line(str(error)) or type(error).__name__
            raise ServerFault(f"{self.url} cannot be reached ({why})") from None

    def out_of_protocol(self, path: str, answer: object) -> Refused:
        return Refused(f"{self.url} answers {path} out of protocol: {self._line(str(answer)) or '(nothing)'}")

    def _line(self, text: str) -> str:
        """Text from the server as one short printable line, without the key."""
        if self._key:
            text = text.replace(self._key, "…")
        line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
        return line if len(line) <= MOST_TEXT else line[: MOST_TEXT - 1] + "…"


def checked_url(url: str) -> str:
    """`url` without a trailing slash. Raises `ConfigError` if it is not the address of a server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.userinfo:
        raise ConfigError("the URL of a server holds a password", f"set the key in {ENGINE_KEY} instead")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.path.rstrip("/"):
        raise ConfigError(f"'{url}' is not the URL of a server", "give one like http://localhost:8000, without a path")
    return url.rstrip("/")
