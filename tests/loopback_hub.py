"""As much of the Hugging Face hub as an upload needs, on this machine: what it was sent can be read afterwards."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_the_test"


class LoopbackHub(ThreadingHTTPServer):
    """repos: what was created, by name: its settings. files: what was committed, by repository and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.full = False


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackHub

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid user token."})
        elif self.path == "/api/whoami-v2":
            self._answer(200, {"name": "me", "type": "user"})
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(filter(None, [request.get("organization") or "me", request["name"]]))
            self.server.repos[name] = request
            self._answer(200, {"url": f"{self.server.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path and self.server.full:
            self._answer(403, {"error": "Storage quota exceeded."})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def _commit(self, body: bytes) -> None:
        repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        files = self.server.files.setdefault(repo, {})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        at = f"{self.server.url}/{repo}/commit/{'0' * 40}"
        self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": at, "hookOutput": ""})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
