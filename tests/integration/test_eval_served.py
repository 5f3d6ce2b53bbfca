"""`rlcli eval --endpoint`: a served model is evaluated without torch, ray or vllm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import Cli, start

RESPONSES = (8 + 16) * 5
"""To the test split and to 16 rows of the train split, four samples each and a greedy one."""
DELAY_S = 0.1


class Adder(BaseHTTPRequestHandler):
    """Serves a model that adds right, except that it says 0 where the sum's first number is even; sampled, it is wrong
    by one for some seeds. It answers after `delay_s`."""

    delay_s = 0.0
    answered = 0

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "adder", "object": "model"}]})

    def do_POST(self) -> None:
        time.sleep(self.delay_s)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        a, b = (int(number) for number in body["messages"][-1]["content"].rstrip("=").split("+"))
        slip = body["seed"] % 2 if body["temperature"] else 0
        text = f"#### {a + b + slip if a % 2 else 0}"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer({"choices": [choice], "usage": {"completion_tokens": len(text)}})
        Adder.answered += 1

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that was killed
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Adder, "answered", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Adder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_served_model_is_verified_and_reported(cli: Cli, endpoint: str, sums: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    words = ("eval", "--endpoint", endpoint, "--data", sums, "--out", tmp_path / "out", "--json")
    report = json.loads(cli(*words).stdout)
    prompts = [row["prompt"][-1]["content"] for row in pq.read_table(sums / "test.parquet").to_pylist()]
    right = sum(int(prompt.split("+")[0]) % 2 for prompt in prompts)
    assert report["pass"]["pass@1"]["mean"] == pytest.approx(right / len(prompts))
    assert report["samples"] == 8
    assert report["outcomes"]["ok"] + report["outcomes"]["wrong"] == 1.0
    assert len(pq.read_table(tmp_path / "out" / "sums.parquet")) == 8
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.long
def test_a_killed_evaluation_requests_only_what_is_missing(
    cli: Cli, endpoint: str, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    def words(folder: str) -> tuple[str | Path, ...]:
        return (
            *("eval", "--endpoint", endpoint, "--data", sums, "--data", sums / "train.parquet", "--samples", "4"),
            *(
                "--greedy",
                "--max-prompts",
                "16",
                "--set",
                "rollout.max_concurrent=2",
                "--out",
                tmp_path / folder,
                "--json",
            ),
        )

    complete = json.loads(cli(*words("whole")).stdout)
    assert Adder.answered == complete["generated"] == RESPONSES
    assert list(complete["datasets"]) == ["sums", "sums-train"]
    assert complete["prompts"] == 24
    monkeypatch.setattr(Adder, "answered", 0)
    monkeypatch.setattr(Adder, "delay_s", DELAY_S)
    killed = start(*words("killed"))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "killed" / "parts").glob("sums-train.*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    monkeypatch.setattr(Adder, "delay_s", 0.0)
    time.sleep(0.2)
    answered_before_resume = Adder.answered
    resumed = json.loads(cli(*words("killed")).stdout)
    answered_after_resume = Adder.answered - answered_before_resume
    assert 0 < answered_after_resume == resumed["generated"] < RESPONSES
    # Of what had been answered, no more is asked again than a second's worth and what was under way.
    assert answered_before_resume + answered_after_resume - RESPONSES <= 2 * 1.5 / DELAY_S + 4
    assert {**resumed, "generated": 0} == {**complete, "generated": 0}
    columns = ["prompt_id", "sample", "response", "score", "outcome", "answer", "response_tokens"]
    for name in ("sums", "sums-train"):
        complete_table, resumed_table = (
            pq.read_table(tmp_path / folder / f"{name}.parquet", columns=columns) for folder in ("whole", "killed")
        )
        assert complete_table.equals(resumed_table)
    assert not (tmp_path / "killed" / "parts").exists()
    # All is there: nothing is asked, and with another temperature the folder is refused.
    third = json.loads(cli(*words("killed")).stdout)
    assert (third["generated"], Adder.answered) == (0, answered_before_resume + answered_after_resume)
    refused = cli(*words("killed"), "--temperature", "0.5", expect=2).stderr
    assert "temperature = 1.0, now 0.5" in refused
    assert "--force" in refused
    same = json.loads(cli("eval", "compare", tmp_path / "whole", tmp_path / "killed", "--json").stdout)
    assert (same["same"], same["better"], same["worse"]) == (24, 0, 0)
    assert same["measures"]["greedy"]["p"] == 1.0


def test_an_endpoint_that_is_not_there_is_said_in_one_line(cli: Cli, sums: Path) -> None:
    done = cli("eval", "--endpoint", "http://127.0.0.1:9/v1", "--data", sums, expect=2)
    assert done.stderr.strip().splitlines()[-1].startswith("error:")
    assert "127.0.0.1:9" in done.stderr
