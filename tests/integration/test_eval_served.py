"""`rlcli eval --endpoint`: a served model is evaluated without torch, ray or vllm."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import Cli


class Adder(BaseHTTPRequestHandler):
    """Serves a model that adds right, except that it says 0 where the sum's first number is even."""

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "adder", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        a, b = (int(number) for number in body["messages"][-1]["content"].rstrip("=").split("+"))
        text = f"#### {a + b if a % 2 else 0}"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer({"choices": [choice], "usage": {"completion_tokens": len(text)}})

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Adder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_served_model_is_verified_and_reported(cli: Cli, endpoint: str, sums: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    words = ("eval", "--endpoint", endpoint, "--data", sums, "--samples", "2", "--out", tmp_path / "out", "--json")
    report = json.loads(cli(*words).stdout)
    prompts = [row["prompt"][-1]["content"] for row in pq.read_table(sums / "test.parquet").to_pylist()]
    right = sum(int(prompt.split("+")[0]) % 2 for prompt in prompts)
    assert report["pass"]["pass@1"]["mean"] == pytest.approx(right / len(prompts))
    assert report["samples"] == 16
    assert report["outcomes"]["ok"] + report["outcomes"]["wrong"] == 1.0
    assert len(pq.read_table(tmp_path / "out" / "samples.parquet")) == 16


def test_an_endpoint_that_is_not_there_is_said_in_one_line(cli: Cli, sums: Path) -> None:
    done = cli("eval", "--endpoint", "http://127.0.0.1:9/v1", "--data", sums, expect=2)
    assert done.stderr.strip().splitlines()[-1].startswith("error:")
    assert "127.0.0.1:9" in done.stderr
