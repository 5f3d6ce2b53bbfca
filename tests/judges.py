"""A loopback server that plays a judge behind the OpenAI protocol, gullible or sound, and misbehaves on request."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-judge-0123456789"
BLOCK = re.compile(
    r"^=== (question|reference answer|conversation|response(?: [AB])?) (\w+) ===\n(.*?)\n=== end \2 ===$",
    re.DOTALL | re.MULTILINE,
)


class Judge(ThreadingHTTPServer):
    """decide: the quoted texts and the whole chat → the text of the reply. script: what precedes the good answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, decide: Callable[[dict[str, str], list[dict[str, str]]], str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.decide = decide
        self.script: list[Callable[[Handler], None]] = []
        self.always: Callable[[Handler], None] | None = None
        self.on_models: Callable[[Handler], None] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.refuses_schema = self.hangs = False
        self.open = self.most_open = 0
        self.lock, self.stopping = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Judge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def send(self, status: int, answer: Any, **headers: str) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.on_models:
            self.server.on_models(self)
        elif self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send(401, {"error": {"message": "bad key"}})
        else:
            self.send(200, {"data": [{"id": "judge-1"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            scripted = self.server.script.pop(0) if self.server.script else self.server.always
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        try:
            if scripted:
                scripted(self)
            elif self.server.refuses_schema and "response_format" in body:
                self.send(400, {"error": {"message": "response_format is not supported"}})
            else:
                texts = {name: text for name, _, text in BLOCK.findall(body["messages"][-1]["content"])}
                self.send(200, completion(self.server.decide(texts, body["messages"])))
        finally:
            with self.server.lock:
                self.server.open -= 1


def completion(text: str | None, reason: str = "stop") -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}


def says(status: int, body: Any, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(status, body, **headers)


def hangs(handler: Handler) -> None:
    handler.server.stopping.wait(20)


def hangs_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def sound(texts: dict[str, str], chat: list[dict[str, str]]) -> str:
    """Right if the response ends with the reference answer, whatever else it says."""
    right = texts["response"].strip().rstrip(".").endswith(texts["reference answer"].strip())
    return json.dumps({"reason": "as the reference says" if right else "another answer", "score": int(right)})


def gullible(texts: dict[str, str], chat: list[dict[str, str]]) -> str:
    """Follows instructions in the response, and prefers long responses."""
    obeys = re.search(r"ignore|full marks|\"score\": ?1|score of 1", texts["response"], re.IGNORECASE)
    return (
        json.dumps({"reason": "I was told to", "score": 1})
        if obeys or len(texts["response"]) > 300
        else sound(texts, chat)
    )


@contextmanager
def judging(decide: Callable[[dict[str, str], list[dict[str, str]]], str] = sound) -> Iterator[Judge]:
    server = Judge(decide)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
