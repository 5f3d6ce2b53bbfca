"""Real servers of tiny models: a judge and a reward model."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from rlcli_verifiers import judge_client, reward_model, served_reward_model
from rlcli_verifiers.judge import preload, verify
from transformers import Qwen2ForSequenceClassification
from transformers.models.qwen2 import Qwen2Config

from rlcli.errors import ConfigError, RunFailed
from rlcli.model.io.tiny_model import make_tiny_model, save_model, tiny_config
from rlcli.rewards.function_calls import run
from rlcli.rollout.model_servers.local_servers import serving_here
from rlcli.rollout.model_servers.model_server import ModelServer, ServerPlace
from rlcli.support.served_models import ADDRESSES, KEY, ServedModel, publish
from rlcli.types import Outcome, VerifyRequest

QUESTION = ({"role": "user", "content": "What is 6 × 7?"},)
REQUESTS = [VerifyRequest(f"It is {answer}.", "42", QUESTION) for answer in range(38, 46)]
CHOICE = {"structured_outputs": {"choice": [json.dumps({"reason": "so", "score": score}) for score in (0, 1)]}}
"""A tiny model then gives a verdict."""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADDRESSES, KEY):
        monkeypatch.setenv(name, "")
    judge_client._http.cache_clear()  # each event loop has its own


@pytest.mark.long
def test_a_served_reward_model_gives_the_logits_of_the_classifier(tmp_path: Path) -> None:
    config: Qwen2Config = tiny_config(hidden=32, layers=1, heads=1, kv_heads=1)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        save_model(Qwen2ForSequenceClassification(config), folder := tmp_path / "reward")
    expected = [reward_model.verify(request, path=str(folder)) for request in REQUESTS]
    notes: list[str] = []
    with serving_here([f"served_reward_model(serve='{folder}')"], notes.append):
        verdicts = [run(served_reward_model.verify(request, serve=str(folder))) for request in REQUESTS]
        squashed = run(served_reward_model.verify(REQUESTS[0], serve=str(folder), transform="sigmoid"))
    for request, other in zip(verdicts, expected, strict=True):
        assert request.score == pytest.approx(other.score, abs=1e-5)
        assert request.outcome is other.outcome
        assert request.parts["usage/calls"] == 1
        assert request.parts["usage/prompt_tokens"] > 0
    assert 0 < squashed.score < 1
    assert len(notes) == 1


@pytest.mark.exhaustive
def test_a_judge_that_is_killed_is_started_again_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_client, "LONGEST_WAIT_S", 1.0)
    folder = str(make_tiny_model(tmp_path / "tiny"))
    server = ModelServer(ServedModel(folder), ServerPlace("cpu", "127.0.0.1", "secret-0", tmp_path / "log"))
    try:
        server.wait()
        publish({folder: (server.url,)}, "secret-0")
        first = run(verify(REQUESTS[0], serve=folder, structured=False, extra=CHOICE, cache=False))
        assert first.outcome in (Outcome.OK, Outcome.WRONG), first.detail
        publish({folder: (server.url,)}, "another")
        refused = run(verify(REQUESTS[0], serve=folder, structured=False, extra=CHOICE, cache=False))
        assert (refused.outcome, "answers 401" in refused.detail) == (Outcome.CRASH, True)
        publish({folder: (server.url,)}, "secret-0")
        os.killpg(server.pid, signal.SIGKILL)
        repeated = run(verify(REQUESTS[0], serve=folder, structured=False, extra=CHOICE, cache=False))
        assert (repeated.outcome, repeated.score, server.deaths) == (first.outcome, first.score, 1)
    finally:
        server.close()
        server.close()
    assert not _in_group(server.pid)


@pytest.mark.long
def test_no_path_of_a_served_model_answers_without_the_key(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "tiny"))
    server = ModelServer(ServedModel(folder), ServerPlace("cpu", "127.0.0.1", "secret-0", tmp_path / "log"))
    with httpx.Client(base_url=server.url, timeout=30.0, trust_env=False) as client:
        try:
            server.wait()
            key = {"Authorization": "Bearer secret-0"}
            listed = client.get("/openapi.json", headers=key).json()["paths"]
            paths = {path: [method.upper() for method in methods] for path, methods in listed.items()}
            assert {"/v1/models", "/invocations", "/tokenize"} <= set(paths)
            del paths["/health"]
            for path, methods in {**paths, "/metrics": ["GET"], "/docs": ["GET"], "/nowhere": ["GET", "POST"]}.items():
                for method in (*methods, "OPTIONS"):
                    for sent in ({}, {"Authorization": "Bearer secret-1"}):
                        assert client.request(method, path, headers=sent).status_code == 401, (method, path)
            assert client.get("/metrics", headers=key).status_code == 200
            assert client.get("/health").status_code == 200
        finally:
            server.close()


@pytest.mark.long
def test_a_model_that_does_not_load_is_one_error_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = ModelServer(ServedModel(str(tmp_path)), ServerPlace("cpu", "127.0.0.1", "k", tmp_path / "log"))
    try:
        with pytest.raises(RunFailed, match=r"the server of .* ended \(exit status 1\): .*"):
            server.wait()
    finally:
        server.close()


def test_a_judge_is_an_endpoint_or_a_served_model() -> None:
    for options in ({}, {"url": "http://x"}, {"model": "m"}, {"url": "http://x", "model": "m", "serve": "m"}):
        with pytest.raises(ConfigError, match="either an endpoint or a model"):
            preload(**options)


def _in_group(group: int) -> list[int]:
    """The processes of a group that is to end."""
    until = time.monotonic() + 5
    while processes := [process.pid for process in psutil.process_iter() if _group(process.pid) == group]:
        if time.monotonic() > until:
            return processes
        time.sleep(0.1)
    return []


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
