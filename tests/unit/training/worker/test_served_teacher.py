"""A teacher behind a server: what it gives is what the model in the worker gives, and what a server answers wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_teacher import DRAWN, TOP, by_sample, configured, taught

from rlcli.errors import ModelError, RunFailed
from rlcli.training.worker import served_teacher
from rlcli.training.worker.served_teacher import ServedTeacher, check_served_teacher
from rlcli.training.worker.teacher import OF_TOKENS, OF_TOP
from tests.model_fixtures import VOCABULARY, save_tiny, tiny_lm

PLACES = 32


class Teacher(BaseHTTPRequestHandler):
    """Answers as vLLM's server does, by the model's own forward pass of one sequence in float64."""

    lm: Any
    tokenizer: Any
    changed: Callable[[str, Any], Any]
    """By path: another answer, or the number of an HTTP status."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher", "max_model_len": PLACES}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "teacher"
        if self.path == "/detokenize":
            return self._answer({"prompt": self.tokenizer.decode(body["tokens"])})
        ids = torch.tensor(body["prompt"])
        with torch.no_grad():
            rows = self.lm(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        listed: list[Any] = [None]
        for row, token in zip(rows, ids[1:].tolist(), strict=True):
            ranks = row.argsort(descending=True).argsort() + 1
            wanted = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            listed.append({str(i): {"logprob": float(row[i]), "rank": int(ranks[i])} for i in wanted})
        return self._answer({"choices": [{"prompt_logprobs": listed}]})

    def _answer(self, content: Any) -> None:
        content = type(self).changed(self.path, content)
        data = b"no" if isinstance(content, int) else json.dumps(content).encode()
        self.send_response(content if isinstance(content, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


Served = Callable[..., str]


@pytest.fixture
def served(base: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    from transformers import AutoTokenizer

    monkeypatch.setattr(served_teacher, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)
    servers = []

    def serve(seed: int = 1, changed: Callable[[str, Any], Any] = lambda path, content: content) -> str:
        attributes = {
            "lm": tiny_lm(seed=seed).double().eval(),
            "tokenizer": AutoTokenizer.from_pretrained(base),
            "changed": staticmethod(changed),
        }
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Teacher,), attributes)))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def folder(path: Path, seed: int) -> str:
    return str(save_tiny(path / f"teacher-{seed}", seed=seed))


@pytest.mark.parametrize(("algorithm", "top_k"), [(DRAWN, 0), (TOP, 4)], ids=["drawn", "top"])
@pytest.mark.parametrize("tokens", [400, 24])
def test_it_gives_what_the_model_in_the_worker_gives(
    mesh: Any, base: str, served: Served, tmp_path: Path, algorithm: dict[str, Any], top_k: int, tokens: int
) -> None:
    _, far = taught(configured(base, served(1), algorithm, tokens, top_k), mesh)
    _, local = taught(configured(base, folder(tmp_path, 1), algorithm, tokens, top_k), mesh)
    assert_alike(far, local, OF_TOKENS + OF_TOP * bool(top_k))


def test_one_teacher_is_served_and_another_is_here(mesh: Any, base: str, served: Served, tmp_path: Path) -> None:
    first, second = folder(tmp_path, 1), folder(tmp_path, 2)
    sources = ["sums", "code"]
    batches = [
        taught(configured(base, [{"path": each, "sources": sources}, second], TOP, top_k=3), mesh)[1]
        for each in (served(1), first)
    ]
    assert_alike(*batches, OF_TOKENS + OF_TOP)


def assert_alike(far: Any, local: Any, names: tuple[str, ...]) -> None:
    for name in names:
        expected = by_sample(local, name)
        assert any(len(values) for values in expected.values())
        for sample, values in by_sample(far, name).items():
            torch.testing.assert_close(values, expected[sample], rtol=0, atol=1e-5)


def test_a_server_that_answers_late_is_asked_again(served: Served) -> None:
    failures = iter([500, 503])
    url = served(1, lambda path, content: next(failures, content) if path == "/v1/completions" else content)
    tokens = np.array([5, 6, 7], np.int32)
    (scores,) = ServedTeacher(url, 0, VOCABULARY).score([(tokens, np.array([False, True, True]))])
    with torch.no_grad():
        row = tiny_lm(seed=1).double()(torch.tensor([[5, 6]])).logits[0].log_softmax(-1)
    assert scores.log_probs.tolist() == pytest.approx([float(row[0, 6]), float(row[1, 7])], abs=1e-6)
    assert next(failures, None) is None


def without(name: str) -> Callable[[str, Any], Any]:
    def changed(path: str, content: Any) -> Any:
        if path == "/v1/completions":
            for entries in content["choices"][0]["prompt_logprobs"][1:]:
                for entry in entries.values():
                    del entry[name]
        return content

    return changed


def only(at: str, answer: Any) -> Callable[[str, Any], Any]:
    return lambda path, content: answer if path == at else content


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (only("/v1/completions", 500), "answers 500 to /v1/completions: no"),
        (only("/v1/completions", {"choices": [{"text": "4"}]}), "it has no log-prob for each token of the prompt"),
        (only("/v1/completions", {"choices": [{"prompt_logprobs": [None]}]}), "it has no log-prob for each token"),
        (without("rank"), "it does not list 1 log-probs at a position"),
        (without("logprob"), "it does not list 1 log-probs at a position"),
        (only("/v1/models", {"data": []}), "answers /v1/models out of protocol"),
        (only("/v1/models", 401), "refuses the key (401): set RLCLI_ENGINE_KEY"),
    ],
)
def test_an_answer_without_scores_ends_the_run(
    served: Served, changed: Callable[[str, Any], Any], problem: str
) -> None:
    url = served(1, changed)
    with pytest.raises(RunFailed) as failed:
        ServedTeacher(url, 0, VOCABULARY).score([(np.array([5, 6], np.int32), np.array([False, True]))])
    assert failed.value.message.startswith(f"teacher.path = '{url}': ")
    assert problem in failed.value.message
    assert (failed.value.who, failed.value.retry) == ("the teacher", True)


def test_a_server_that_is_gone_ends_the_run() -> None:
    with pytest.raises(RunFailed, match="cannot be reached"):
        ServedTeacher("http://127.0.0.1:9", 0, VOCABULARY).score([(np.zeros(2, np.int32), np.array([False, True]))])


def test_ids_that_the_policy_does_not_have_are_refused(served: Served) -> None:
    with pytest.raises(RunFailed, match="likeliest that are not in the policy's vocabulary"):
        ServedTeacher(served(1), 4, 1).score([(np.array([0, 0], np.int32), np.array([False, True]))])


def test_a_server_of_the_policys_vocabulary_is_accepted(served: Served, base: str) -> None:
    check_served_teacher(served(), base, PLACES - 1, 8)


@pytest.mark.parametrize(
    ("changed", "positions", "problem"),
    [
        (lambda path, content: content, PLACES, f"it serves sequences of {PLACES} tokens, samples have up to"),
        (only("/detokenize", {"prompt": "x"}), 8, "its vocabulary is not the policy's: the id 0 is 'x' there, and"),
        (only("/detokenize", {}), 8, "answers /detokenize out of protocol: it has no text"),
        (only("/v1/completions", 400), 8, "answers 400 to /v1/completions"),
        (only("/v1/completions", [1]), 8, "it has no log-prob for each token of the prompt"),
    ],
)
def test_what_cannot_teach_is_refused_before_the_run(
    served: Served, base: str, changed: Callable[[str, Any], Any], positions: int, problem: str
) -> None:
    with pytest.raises(ModelError) as refused:
        check_served_teacher(served(1, changed), base, positions, 4)
    assert problem in refused.value.message
    assert "\n" not in refused.value.message


def test_the_first_token_that_differs_is_named(served: Served, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "IDS_AT_ONCE", 16)
    character = chr(0x4E00 + 37)

    def changed(path: str, content: Any) -> Any:
        return {"prompt": content["prompt"].replace(character, "?")} if path == "/detokenize" else content

    with pytest.raises(ModelError, match=rf"the id 37 is '\?' there, and '{character}' is the policy's"):
        check_served_teacher(served(1, changed), base, 8, 0)
