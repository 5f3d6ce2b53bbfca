"""Sampling settings of evaluations: every value reaches an endpoint, and keys that nothing reads are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


class Sampler(ThreadingHTTPServer):
    """A served model whose generation config says top_k = 1: it always gives the same answer to requests without one.
    refuses: a sampling value that it does not know."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.refuses = ""
        self.finish_reason = "stop"

    def handle_error(self, *_: Any) -> None:
        """A client that was refused once cancels its other requests: nothing to print."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Sampler

    def log_message(self, *_: Any) -> None: ...

    def send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": "sampler"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.refuses in body:
            self.send(400, {"error": {"message": f"Unknown parameter: '{self.server.refuses}'."}})
            return
        greedy = body.get("temperature", 1.0) == 0 or body.get("top_k", 1) == 1
        text = WORDS[0 if greedy else body["seed"] % len(WORDS)]
        choice = {"message": {"content": text}, "finish_reason": self.server.finish_reason}
        self.send(200, {"choices": [choice], "usage": {"completion_tokens": 1}})


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    server = Sampler()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        row(
            data_source="toy",
            messages=[{"role": "user", "content": f"Count {n}"}],
            verifier="exact",
            ground_truth="one",
        )
        for n in range(2)
    ]
    write_rows(tmp_path / "data" / "test.parquet", rows)
    return tmp_path / "data"


def responses(folder: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(folder / "data.parquet").column("response").to_pylist()


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    return line


@pytest.mark.long
def test_samples_do_not_depend_on_the_servers_own_defaults(sampler: Sampler, data: Path, tmp_path: Path) -> None:
    words = ["eval", "--endpoint", sampler.url, "--data", data, "--samples", "8", "--top-p", "0.95"]
    words += ["--temperature", "0.6", "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    assert len(set(responses(tmp_path / "out"))) > 1
    assert {body["top_p"] for body in sampler.bodies} == {0.95}
    assert {body["top_k"] for body in sampler.bodies} == {-1}
    settings = json.loads((tmp_path / "out" / "evaluation.json").read_text())["settings"]
    assert (settings["temperature"], settings["top_p"]) == (0.6, 0.95)


@pytest.mark.long
def test_a_folder_of_samples_is_not_continued_with_other_sampling(
    sampler: Sampler, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", "--endpoint", sampler.url, "--data", data, "--samples", "2", "--out", tmp_path / "out")
    assert main([str(word) for word in words]) == 0
    assert "top_p = None, now 0.5" in refusal(capsys, *words, "--top-p", "0.5")
    assert "sampling values sent = temperature, top_p, top_k, " in refusal(capsys, *words, "--omit", "top_k")
    assert "temperature = 1.0, now 0.5" in refusal(capsys, *words, "--set", "evaluation.temperature=0.5")


@pytest.mark.long
def test_a_refused_value_is_named_and_can_be_left_out(
    sampler: Sampler, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler.refuses = "repetition_penalty"
    words = ("eval", "--endpoint", sampler.url, "--data", data)
    line = refusal(capsys, *words)
    assert "refuses repetition_penalty = 1.0" in line
    options = ("--omit", "repetition_penalty", "--omit", "top_k", "--omit", "min_p")
    assert " ".join(options) in line
    assert main([str(word) for word in (*words, *options)]) == 0
    assert "the server's own default applies: min_p, repetition_penalty, top_k" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("eval",), ("prep", "filter", "--out", "kept")])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "rollout.top_p=0.2"], "does not read rollout.top_p (--set); give --set evaluation.top_p=…"),
        (["--set", "train.lr=1e-3"], "does not read train.lr (--set)"),
        (["--set", "algorithm.kl_coef=0.1"], "does not read algorithm.kl_coef (--set)"),
    ],
)
@pytest.mark.parametrize("model", [("--model", "tiny"), ("--endpoint", "http://127.0.0.1:9/v1")])
def test_a_key_that_an_evaluation_does_not_read_is_refused(
    command: tuple[str, ...],
    words: list[str],
    says: str,
    model: tuple[str, str],
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert says in refusal(capsys, *command, "--data", data / "test.parquet", *model, *words)


def test_what_only_local_engines_read_is_refused_for_an_endpoint(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ("eval", "--endpoint", "http://127.0.0.1:9/v1", "--data", data)
    line = refusal(capsys, *endpoint, "--set", "rollout.speculate=2")
    assert "rlcli eval of an endpoint does not read rollout.speculate" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "0.9"], "--top-p = 0.9 has no effect at temperature 0"),
        (["--omit", "top_k"], "--omit top_k: only an endpoint is sent sampling values"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], says: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, "eval", "--model", "tiny", "--data", data, *words)


def test_an_unknown_sampling_value_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = ("eval", "--endpoint", "http://127.0.0.1:9/v1", "--data", data)
    assert "--omit topk: no such sampling value; give one of: temperature" in refusal(
        capsys, *endpoint, "--omit", "topk"
    )


@pytest.mark.long
def test_a_lower_limit_of_the_server_is_noted(sampler: Sampler, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampler.finish_reason = "length"
    words = ("eval", "--endpoint", sampler.url, "--data", str(data), "--max-tokens")
    assert main([*words, "9"]) == 0
    assert "the server cut 2 responses off before --max-tokens = 9" in capsys.readouterr().err
    assert main([*words, "1"]) == 0
    assert "the server cut" not in capsys.readouterr().err


@pytest.mark.long
def test_equal_samples_of_every_prompt_are_noted(
    sampler: Sampler, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", "--endpoint", sampler.url, "--data", str(data), "--samples", "6")
    equal = "all samples of a prompt are equal, for each of 2 prompts, at temperature 1"
    assert main([*words, "--omit", "top_k"]) == 0  # the server's own default is 1
    assert equal in capsys.readouterr().err
    assert main([*words]) == 0
    assert equal not in capsys.readouterr().err


def test_data_that_is_not_there_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = ("eval", "--endpoint", "http://127.0.0.1:9/v1", "--data")
    assert f"no such file or folder: {tmp_path / 'gone'}" in refusal(capsys, *endpoint, tmp_path / "gone")


def test_data_whose_rows_are_all_one_prompt_is_refused(
    sampler: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repeated = row(
        data_source="toy", messages=[{"role": "user", "content": "Count"}], verifier="exact", ground_truth="one"
    )
    write_rows(tmp_path / "test.parquet", [repeated] * 32)
    line = refusal(capsys, "eval", "--endpoint", sampler.url, "--data", tmp_path / "test.parquet")
    assert "all 32 rows to evaluate ask the same prompt, 'Count'" in line
    assert sampler.bodies == []
