from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlcli.errors import EndpointError
from rlcli.rollout import openai_client
from rlcli.rollout.openai_client import ChatClient, ChatRequest

KEY = "sk-secret-0123456789"


class Server(ThreadingHTTPServer):
    """A loopback server that speaks the protocol; `answers` scripts what precedes the good answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["tiny"]
        self.answers: list[Callable[[Handler], None]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.open = self.most_open = 0
        self.delay_s = 0.0
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def send(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.bodies.append(body)
            scripted = self.server.answers.pop(0) if self.server.answers else None
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        try:
            if scripted:
                scripted(self)
            elif body["model"] not in self.server.models:
                self.send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            else:
                self.server.stopping.wait(self.server.delay_s)
                self.send(200, completion(f"echo {body['messages'][-1]['content']}"))
        finally:
            with self.server.lock:
                self.server.open -= 1


def completion(text: str | None, reason: str = "stop", tokens: int = 3) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def answer(status: int, body: Any, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(status, body, {name.replace("_", "-"): v for name, v in headers.items()})


def hang(handler: Handler) -> None:
    handler.server.stopping.wait(30)
    handler.close_connection = True


def drop(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(openai_client, "BACKOFF_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.stopping.set()
    running.shutdown()
    running.server_close()
    thread.join()


def ask(content: str = "hi", key: str = "a", **rest: Any) -> ChatRequest:
    return ChatRequest(key=key, messages=[{"role": "user", "content": content}], **rest)


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    with pytest.raises(EndpointError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    assert KEY not in line
    for part in parts:
        assert part in line
    assert caught.value.hint


def test_every_request_returns_with_its_key_and_its_fields_are_sent(server: Server) -> None:
    requests = [ask(f"question {i}", f"{i}", temperature=0.5, max_tokens=7, seed=i, top_p=0.9) for i in range(20)]
    results = {result.key: result for result in ChatClient(server.url).generate(requests)}
    assert {key: result.text for key, result in results.items()} == {f"{i}": f"echo question {i}" for i in range(20)}
    assert results["3"].finish_reason == "stop"
    assert results["3"].completion_tokens == 3
    assert results["3"].latency_s > 0
    sent = {body["seed"]: body for body in server.bodies}
    assert sent[4] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "question 4"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 4,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


@pytest.mark.parametrize(
    ("status", "error", "says", "options"),
    [
        (
            400,
            {"error": {"message": "Unrecognized request argument supplied: top_k", "param": None}},
            "refuses top_k = -1 (400 Unrecognized request argument supplied: top_k)",
            "--omit top_k --omit min_p --omit repetition_penalty",
        ),
        (
            400,
            {"error": {"message": "Only the default (1) value is supported.", "param": "temperature"}},
            "refuses temperature = 0.5 (400 Only the default (1) value is supported.)",
            "--omit temperature",
        ),
        (
            422,
            {"detail": [{"loc": ["body", "min_p"], "msg": "Extra inputs are not permitted", "input": {"top_p": 1}}]},
            "refuses min_p = 0.0 (422 ",
            "--omit min_p --omit top_k --omit repetition_penalty",
        ),
        (400, b"seed is not supported", "refuses seed = 3 (400 seed is not supported)", "--omit seed"),
        (400, {"error": "repetition_penalty: 1.0"}, "refuses repetition_penalty = 1.0", "--omit repetition_penalty"),
    ],
)
def test_a_refused_sampling_value_is_named_with_its_option(
    server: Server, status: int, error: Any, says: str, options: str
) -> None:
    server.answers = [answer(status, error)]
    with refused(says, options):
        list(ChatClient(server.url, concurrency=1).generate([ask(temperature=0.5, seed=3)]))


def test_other_refusals_name_no_sampling_value(server: Server) -> None:
    server.answers = [answer(400, {"error": {"message": "the prompt is longer than the model's context"}})]
    with refused("answers 400 to /chat/completions: the prompt is longer"):
        list(ChatClient(server.url, concurrency=1).generate([ask()]))


def test_omitted_sampling_values_are_not_sent(server: Server) -> None:
    list(ChatClient(server.url, omit=("top_k", "seed", "max_tokens")).generate([ask(seed=3)]))
    (body,) = server.bodies
    assert body.keys().isdisjoint({"top_k", "seed", "max_tokens"})
    assert body.keys() >= {"temperature", "top_p", "min_p", "repetition_penalty"}


def test_no_seed_sends_none_and_no_requests_give_no_results(server: Server) -> None:
    assert len(list(ChatClient(f"{server.url}/v1/").generate([ask()]))) == 1
    assert "seed" not in server.bodies[0]
    assert list(ChatClient(server.url).generate([])) == []


def test_requests_run_side_by_side_up_to_the_bound(server: Server) -> None:
    server.delay_s = 0.1
    results = list(ChatClient(server.url, concurrency=4).generate(ask(key=str(i)) for i in range(16)))
    assert len(results) == 16
    assert server.most_open == 4


def test_results_come_as_they_finish(server: Server) -> None:
    server.answers = [hang]
    results = ChatClient(server.url, concurrency=2).generate(ask(key=str(i)) for i in range(5))
    early = [next(results).key for _ in range(4)]  # one of the first two met the hang; the rest came back
    assert len(set(early)) == 4
    results.close()


def test_leaving_early_cancels_what_is_under_way(server: Server) -> None:
    server.answers = [answer(200, completion("first")), *[hang] * 8]
    for _ in ChatClient(server.url, concurrency=8).generate(ask(key=str(i)) for i in range(100)):
        break
    assert len(server.bodies) <= 10
    assert not [thread for thread in threading.enumerate() if thread.name == "rlcli-endpoint"]


def test_requests_are_read_as_they_are_sent(server: Server) -> None:
    server.delay_s = 0.2
    read: list[int] = []

    def requests() -> Iterator[ChatRequest]:
        for i in range(100):
            read.append(i)
            yield ask(key=str(i))

    results = ChatClient(server.url, concurrency=3).generate(requests())
    next(results)
    results.close()
    assert len(read) <= 6


@pytest.mark.parametrize(
    "troubles",
    [
        [answer(429, {"error": {"message": "slow down"}})],
        [answer(500, b"oops"), answer(503, b""), answer(502, b"<html>")],
        [hang],
    ],
    ids=["429", "5xx", "hang"],
)
def test_what_passes_is_asked_again(server: Server, troubles: list[Callable[[Handler], None]]) -> None:
    server.answers = troubles.copy()
    (result,) = ChatClient(server.url, timeout_s=0.3).generate([ask()])
    assert result.text == "echo hi"
    assert len(server.bodies) == len(troubles) + 1


def test_a_dropped_connection_is_retried_once_the_endpoint_has_answered(server: Server) -> None:
    server.answers = [answer(200, completion("first")), drop]
    results = list(ChatClient(server.url, concurrency=1).generate([ask(key="1"), ask(key="2")]))
    assert [result.text for result in results] == ["first", "echo hi"]


def test_the_wait_that_the_server_asks_for_is_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, waits = asyncio.sleep, list[float]()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(openai_client.asyncio, "sleep", wait)
    server.answers = [answer(429, {}, Retry_After="7")]
    list(ChatClient(server.url, model="tiny").generate([ask()]))
    assert len([seconds for seconds in waits if seconds >= 7.0]) == 1


def test_an_endpoint_that_keeps_failing_is_an_error_not_an_empty_response(server: Server) -> None:
    server.answers = [answer(500, {"error": {"message": "out of\nmemory"}})] * openai_client.TRIES
    with refused(server.url, "500 out of memory", f"({openai_client.TRIES} tries)"):
        list(ChatClient(server.url).generate([ask()]))


def test_a_hanging_endpoint_is_given_up(server: Server) -> None:
    server.answers = [hang] * 9
    with refused("gave no answer in 0.2 s", "2 tries"):
        list(ChatClient(server.url, timeout_s=0.2).generate([ask()]))


def test_nothing_listening_is_said_at_once(server: Server) -> None:
    closed = Server()
    closed.server_close()
    for model in (None, "tiny"):
        with refused(closed.url, "cannot be reached", "check that the server runs"):
            list(ChatClient(closed.url, model=model).generate([ask()]))


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"choices": []}', b"[1]", b'"x"', b"\xff\xfe", b"null", b""])
def test_garbage_is_out_of_protocol(server: Server, body: bytes) -> None:
    server.answers = [answer(200, body)]
    with refused("/chat/completions out of protocol"):
        list(ChatClient(server.url).generate([ask()]))


def test_a_response_without_content_or_usage_is_empty_text(server: Server) -> None:
    server.answers = [answer(200, {"choices": [completion(None, "length")["choices"][0]]})]
    (result,) = ChatClient(server.url).generate([ask()])
    assert (result.text, result.finish_reason, result.completion_tokens) == ("", "length", None)


def test_an_unknown_model_names_the_near_ones(server: Server) -> None:
    with refused("serves no model 'tinny'", "did you mean tiny?"):
        list(ChatClient(server.url, model="tinny").generate([ask()]))


def test_of_several_models_one_must_be_named(server: Server) -> None:
    server.models = ["base", "lora"]
    with refused("serves base, lora", "--model"):
        list(ChatClient(server.url).generate([ask()]))


def test_a_refused_request_gives_the_servers_reason(server: Server) -> None:
    server.answers = [answer(400, {"message": "context length is 512"})]
    with refused("answers 400", "context length is 512"):
        list(ChatClient(server.url).generate([ask()]))


def test_the_key_comes_from_the_environment_and_appears_in_no_message(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    client = ChatClient(server.url)
    list(client.generate([ask()]))
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(client)
    server.answers = [answer(401, {"error": {"message": f"Incorrect API key: {KEY}"}})]
    with refused("refuses the API key (401", "OPENAI_API_KEY"):
        list(client.generate([ask()]))


def test_no_key_where_one_is_wanted(server: Server) -> None:
    server.answers = [answer(401, {"error": "who are you"})]
    with refused("refuses access (401", "set OPENAI_API_KEY"):
        list(ChatClient(server.url).generate([ask()]))
    assert server.keys == [None]


@pytest.mark.parametrize("address", ["localhost:8000", "", "ftp://host", "http://", "http://host:port", "/v1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with refused("is not a URL", "http://localhost:8000/v1"):
        ChatClient(address)


def test_a_password_in_the_address_is_refused_without_printing_it() -> None:
    with pytest.raises(EndpointError) as caught:
        ChatClient("http://user:hunter2@host:8000")
    assert "hunter2" not in str(caught.value)


def test_an_error_in_the_callers_requests_is_the_callers(server: Server) -> None:
    def requests() -> Iterator[ChatRequest]:
        yield ask()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        list(ChatClient(server.url).generate(requests()))
