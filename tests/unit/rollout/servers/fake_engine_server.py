"""A server that answers as vLLM's or SGLang's does, from a rule in place of a model, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlcli.model.weight_check.checksum import Checksums

VLLM_PATHS = ("/inference/v1/generate", "/collective_rpc", "/abort_requests", "/v1/models", "/version", "/health")


def drawn(tokens: list[int], seed: int, max_tokens: int) -> list[int]:
    """The tokens that each of these servers samples: a function of the request only."""
    return [(sum(tokens) + 7 * seed + n) % 50 for n in range(max_tokens)]


@dataclass
class FakeServer:
    """configured: of its model. change: changes an answer, by path. holds: requests wait until `release` is set, or
    they are aborted. loaded: the weights that it has, by name."""

    configured: dict[str, Any]
    kind: str = "vllm"
    key: str = ""
    longest: int = 512
    change: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    holds: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    loaded: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    loads: int = 0
    on_load: Callable[[], None] = lambda: None
    port: int = 0

    def __enter__(self) -> FakeServer:
        self.aborted: set[str] = set()
        self.started = threading.Semaphore(0)
        self._dead = threading.Event()
        self.connections: list[socket.socket] = []
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Close everything, without another answer."""
        self._dead.set()
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, body: Any) -> Any:
        path = path.partition("?")[0]
        reply = (self._sglang if self.kind == "sglang" else self._vllm)(path, body)
        return self.change[path](reply) if path in self.change else reply

    def _vllm(self, path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            params = body["sampling_params"]
            seed = params.get("extra_args", {}).get("rlcli_seed", 0)
            ids, aborted = self._generated(body["request_id"], body, body["token_ids"], seed, params["max_tokens"])
            content = [{"token_id": token, "logprob": -token / 100} for token in ids]
            choice = {
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": "abort" if aborted else "length",
            }
            prompt = [None, *({str(token): {"logprob": self._bias()}} for token in body["token_ids"][1:])]
            return {
                "choices": [choice],
                "prompt_logprobs": prompt if "prompt_logprobs" in params else None,
                "usage": {},
            }
        if path == "/abort_requests":
            self.aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
            return {"status": "aborted"}
        if path == "/collective_rpc":
            return {"results": [self._called(body["method"], *body["args"])]}
        return {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"max_model_len": self.longest}]}}.get(path)

    def _sglang(self, path: str, body: Any) -> Any:
        if path == "/generate":
            params = body["sampling_params"]
            max_tokens, seed = params["max_new_tokens"], params["sampling_seed"]
            ids, aborted = self._generated(body["rid"], body, body["input_ids"], seed, max_tokens)
            meta = {
                "output_token_logprobs": [[-token / 100, token, None] for token in ids],
                "finish_reason": {"type": "abort" if aborted else "length"},
                "cached_tokens": 0,
            }
            if "logprob_start_len" in body:
                meta["input_token_logprobs"] = [
                    [None, 0, None],
                    *([-0.5, token, None] for token in body["input_ids"][1:]),
                ]
            return {"text": "", "output_ids": ids, "meta_info": meta}
        if path == "/update_weights_from_disk":
            self._load(body["model_path"])
            return {"success": True, "message": "Succeeded to update model weights."}
        if path == "/abort_request":
            self.aborted.add(body["rid"])
        return {"model_path": "m"} if path == "/get_model_info" else None

    def _generated(self, name: str, body: Any, tokens: list[int], seed: int, max_tokens: int) -> tuple[list[int], bool]:
        if not name.startswith("ping-"):
            self.requests.append(body)
        if self.holds and name.rpartition("-")[0] not in ("", "ping") and max_tokens > 1:
            self.started.release()
            while not self.release.wait(0.01):
                if name in self.aborted:
                    return drawn(tokens, seed, 2), True
            if self._dead.is_set():
                raise ConnectionError
        return drawn(tokens, seed, max_tokens), False

    def _called(self, method: str, *args: str) -> Any:
        if method == "rlcli_attach":
            return {"configured": self.configured, "by_counter": True, "by_place": False}
        if method == "rlcli_load":
            self._load(args[0])
            return {"loaded": len(self.loaded)}
        sums = Checksums()
        for _ in sums.of(self.loaded.items()):
            pass
        return {
            "parts": [[name, [], entry.numel, entry.checksum] for name, entry in sums.sent().items()],
            "untouched": [],
        }

    def _load(self, folder: str) -> None:
        from safetensors.torch import load_file

        self.loads += 1
        self.on_load()
        if self._dead.is_set():
            raise ConnectionError
        self.loaded = {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}

    def _bias(self) -> float:
        return float(next(iter(self.loaded.values())).flatten()[0]) if self.loaded else 0.0


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.fake.connections.append(self.connection)
        if self.fake._dead.is_set():  # it was accepted just before: nobody else would close it
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

    def _answer(self, body: Any) -> None:
        fake, path = self.fake, self.path.partition("?")[0]
        if fake._dead.is_set():
            self.close_connection = True
            return
        known = VLLM_PATHS if fake.kind == "vllm" else ("/health", "/get_model_info", "/generate", "/abort_request")
        known += () if fake.kind == "vllm" else ("/update_weights_from_disk",)
        status = fake.status.get(path, 200 if path in known else 404)
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}" and path != "/health":
            status = 401
        try:
            reply = fake.answer(self.path, body) if status == 200 else {"error": "no"}
        except ConnectionError:
            self.close_connection = True
            return
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
