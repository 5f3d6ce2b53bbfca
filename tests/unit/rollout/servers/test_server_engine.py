"""The engine `server` against servers that are fakes: what they answer wrong, late or not at all."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine_server import FakeServer, drawn

from rlcli.errors import ConfigError, DataError, RlcliError, RunFailed, SetupError
from rlcli.model.io.model_config import read_config
from rlcli.model.weight_check.checksum import Checksums
from rlcli.rollout.engine import EngineSpec, Generation, GenerationRequest, Sampling, ServerSettings, finished
from rlcli.rollout.servers import server_fleet, server_record
from rlcli.rollout.servers.server_engine import ServerEngine
from rlcli.rollout.servers.vllm_extension import CONFIGURED
from rlcli.rollout.servers.vllm_server import VllmServer
from rlcli.runs.lost_engines import LostEngines
from rlcli.support.json_link import ServerFault, checked_url

PROMPT = np.arange(5, 9, dtype=np.int32)
SAMPLING = Sampling(1.0, 6)
GENERATE = "/inference/v1/generate"
LONGEST_S = 120.0
"""For what takes a moment on any machine."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_fleet, "RETRY_S", 0.05)
    monkeypatch.setattr(server_fleet, "PING_S", 0.1)
    monkeypatch.setattr(server_fleet, "LOOK_S", 0.02)
    monkeypatch.setattr(server_record, "EVERY_S", 0.02)


@pytest.fixture
def servers(base: str) -> Iterator[Callable[..., FakeServer]]:
    """Makes servers of the tiny model."""
    config = read_config(base)
    configured = {name: getattr(config, name) for name in CONFIGURED if name != "architectures"}
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            FakeServer({"architectures": config.architectures, **configured}, **options)
        )


@pytest.fixture
def engine_of(base: str, tmp_path: Path) -> Iterator[Callable[..., ServerEngine]]:
    with ExitStack() as stack:

        def made(*fakes: FakeServer, answer_s: float = 30.0, max_concurrent: int = 4) -> ServerEngine:
            (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
            (tmp_path / "run" / "events.jsonl").touch()
            urls = tuple(server.url for server in fakes)
            settings = ServerSettings(urls, logs=str(tmp_path / "run" / "logs"), answer_s=answer_s)
            engine = ServerEngine(spec_of(base, settings, max_concurrent))
            stack.callback(engine.close)
            return engine

        yield made


def spec_of(model: str, settings: ServerSettings, max_concurrent: int = 4) -> EngineSpec:
    return EngineSpec(
        model=model,
        dtype="float32",
        device="cpu",
        max_length=64,
        max_concurrent=max_concurrent,
        tensor_parallel=1,
        lora_rank=0,
        weights_follow=True,
        kv_cache_bytes=None,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        stop_token_ids=(1,),
        group_id=f"test-{uuid.uuid4().hex[:8]}",
        servers=settings,
    )


def asked(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(key, PROMPT, seed=key) for key in range(count)]


def check_all(generations: list[Generation], count: int) -> None:
    """Each response exactly once, with its own tokens."""
    assert sorted(generation.key for generation in generations) == list(range(count))
    for generation in generations:
        assert generation.tokens.tolist() == drawn(PROMPT.tolist(), generation.key, 6)
        assert generation.log_probs == pytest.approx(-generation.tokens / 100)


def synced(engine: ServerEngine, value: float) -> Any:
    """Load one tensor of that value, and compare."""
    sums = Checksums()
    engine.load_weights(sums.of([("w", torch.full((4,), value))]))
    return engine.verify(sums.sent())


def until(engine: ServerEngine, holds: Callable[[], bool]) -> list[Generation]:
    """Wait for something that happens in the background; returns what is generated meanwhile."""
    generations, last = list[Generation](), time.monotonic() + LONGEST_S
    while not holds():
        generations += engine.step()
        assert time.monotonic() < last, [
            (member.url, member.state, member.why, list(member.running)) for member in members(engine)
        ]
    return generations


def members(engine: ServerEngine) -> list[Any]:
    return engine._fleet.members


def all_of(engine: ServerEngine) -> list[Generation]:
    """All responses, once they are there."""
    return until(engine, lambda: not engine.unfinished)


def held(engine: ServerEngine, *holding: FakeServer, count: int) -> None:
    """Begin so many responses, which all of these servers then hold."""
    engine.begin(SAMPLING)
    for request in asked(count):
        engine.add(request)
    for server in holding:
        assert server.started.acquire(timeout=LONGEST_S), [
            (member.url, member.state, member.why) for member in members(engine)
        ]


def test_each_response_is_generated_once_with_its_log_probs(servers: Any, engine_of: Any) -> None:
    server_a, server_b = servers(), servers()
    engine = engine_of(server_a, server_b)
    assert engine.slots == 8
    check_all(list(finished(engine, asked(20), SAMPLING)), 20)
    greedy = GenerationRequest(3, PROMPT, 0, greedy=True, response_prefix=PROMPT[:2])
    list(finished(engine, [greedy], SAMPLING))
    body = next(body for body in server_a.requests + server_b.requests if body["sampling_params"]["temperature"] == 0)
    assert body["token_ids"] == [*PROMPT.tolist(), *PROMPT[:2].tolist()]
    assert body["sampling_params"]["max_tokens"] == 4


def test_weights_reach_all_servers_and_are_compared(servers: Any, engine_of: Any) -> None:
    server_a, server_b = servers(), servers()
    engine = engine_of(server_a, server_b)
    assert synced(engine, 2.0) == (1, 0, [])
    assert engine.probe(PROMPT)[1].tolist() == [2.0] * 3
    server_b.loaded = {"w": torch.full((4,), 9.0)}
    sums = Checksums()
    sums.add("w", torch.full((4,), 2.0))
    assert engine.verify(sums.sent()).differences == ["w differs"]
    assert synced(engine, 3.0).differences == []
    assert len(list(engine._folder.glob("weights-*"))) == 1, "those of earlier versions are removed"


def test_no_prefix_of_other_weights_or_another_run_is_used(servers: Any, engine_of: Any) -> None:
    server = servers()
    salts = []
    for engine in (engine_of(server), engine_of(server)):
        for value in (1.0, 2.0):
            synced(engine, value)
            list(finished(engine, asked(1), SAMPLING))
            salts.append(server.requests[-1]["cache_salt"])
    assert len(set(salts)) == 4


WRONG = {
    "text": (lambda answer: {"choices": [{"text": "six", "finish_reason": "stop"}]}, "it has no token ids"),
    "no log-probs": (lambda answer: _without(answer, "logprobs"), "it has no log-probs"),
    "fewer log-probs": (lambda answer: _shorter(answer), "1 tokens with 0 log-probs"),
    "other form": (lambda answer: ["what?"], "out of protocol"),
    "no number": (lambda answer: _logged(answer, math.nan), "nan is no log-prob"),
    "above 0": (lambda answer: _logged(answer, 5.0), "5.0 is no log-prob"),
    "other vocabulary": (lambda answer: _drew(answer, [100_000]), "the model has no token 100000"),
    "below 0": (lambda answer: _drew(answer, [-5]), "the model has no token -5"),
    "longer": (lambda answer: _drew(answer, [3] * 800), "800 tokens where 1 were asked for"),
    "no JSON": (lambda answer: b"<html>hello</html>", "<html>hello</html>"),
}


def _logged(answer: Any, value: float) -> Any:
    answer["choices"][0]["logprobs"]["content"][-1]["logprob"] = value
    return answer


def _drew(answer: Any, ids: list[int]) -> Any:
    (choice,) = answer["choices"]
    choice["token_ids"], choice["logprobs"]["content"] = ids, choice["logprobs"]["content"][:1] * len(ids)
    return answer


def _without(answer: Any, name: str) -> Any:
    answer["choices"][0][name] = None
    return answer


def _shorter(answer: Any) -> Any:
    answer["choices"][0]["logprobs"]["content"].pop()
    return answer


@pytest.mark.parametrize("fault", WRONG)
def test_a_server_that_answers_something_else_is_refused(servers: Any, engine_of: Any, fault: str) -> None:
    change, text = WRONG[fault]
    with pytest.raises(SetupError, match=r"^rollout.servers: http") as error:
        engine_of(servers(change={GENERATE: change}))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_of_another_model_or_vocabulary_is_refused(servers: Any, engine_of: Any) -> None:
    server = servers()
    for name in ("vocab_size", "intermediate_size", "num_key_value_heads"):
        server.configured[name] += 1
        with pytest.raises(SetupError, match=f"serves another model: its {name} is"):
            engine_of(server)
        server.configured[name] -= 1
    with pytest.raises(SetupError, match="sequences of 32 tokens, the run needs 64: start it with --max-model-len 64"):
        engine_of(servers(longest=32))


def test_what_is_no_engine_server_is_refused_in_one_line(servers: Any, engine_of: Any) -> None:
    with pytest.raises(SetupError, match="neither vLLM's server nor SGLang's"):
        engine_of(servers(status={"/version": 404}))
    with pytest.raises(SetupError, match=r"no methods of rlcli in its workers .*worker-extension-cls"):
        engine_of(servers(status={"/collective_rpc": 404}))
    with pytest.raises(SetupError, match="enable-scale-out"):
        engine_of(servers(status={GENERATE: 404}))
    gone = servers()
    gone.kill()
    with pytest.raises(SetupError, match="cannot be reached"):
        engine_of(gone)


def test_a_key_is_sent_and_is_in_no_message(servers: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers(key="open-sesame")
    with pytest.raises(SetupError, match=r"refuses the key .*RLCLI_ENGINE_KEY"):
        engine_of(server)
    monkeypatch.setenv("RLCLI_ENGINE_KEY", "open-sesame")
    check_all(list(finished(engine_of(server), asked(2), SAMPLING)), 2)
    server.change[GENERATE] = lambda answer: ["open-sesame"]
    with pytest.raises(SetupError) as error:
        engine_of(server)
    assert "open-sesame" not in str(error.value)


def test_addresses_that_are_no_urls_are_refused() -> None:
    assert checked_url("http://a:1/") == "http://a:1"
    for url in ("a:1", "ftp://a", "http://", "http://a/v1"):
        with pytest.raises(ConfigError, match="is not the URL of a server"):
            checked_url(url)
    with pytest.raises(ConfigError, match="holds a password"):
        checked_url("http://me:secret@a:1")


def test_the_responses_of_a_killed_server_go_to_others(servers: Any, engine_of: Any, tmp_path: Path) -> None:
    dies, lives = servers(holds=True), servers()
    engine = engine_of(dies, lives)
    synced(engine, 1.0)
    held(engine, dies, count=8)
    dies.kill()
    check_all(all_of(engine), 8)
    counts = engine.counts()
    assert (counts["servers"], counts["lost"]) == (1, 1)
    assert counts["moved"] >= 1
    assert engine.counts()["lost"] == 0
    (event,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["server"]) == ("engine lost", dies.url)


def test_a_server_that_is_there_again_gets_the_current_weights(servers: Any, engine_of: Any) -> None:
    dies, lives = servers(), servers()
    engine = engine_of(dies, lives)
    synced(engine, 1.0)
    dies.kill()
    until(engine, lambda: engine._fleet.ready == 1)
    synced(engine, 2.0)
    restarted = servers(port=dies.port)
    until(engine, lambda: engine._fleet.ready == 2)
    assert restarted.loaded["w"].tolist() == [2.0] * 4
    assert synced(engine, 3.0).differences == []
    assert restarted.loaded["w"].tolist() == [3.0] * 4


def test_what_fails_late_does_not_lose_the_server_that_is_there_again(
    servers: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, generate = asyncio.Event(), VllmServer.generate

    async def stubborn(self: VllmServer, *args: Any) -> Any:
        try:
            return await generate(self, *args)
        except asyncio.CancelledError:
            await late.wait()
            raise ServerFault("too late") from None

    monkeypatch.setattr(VllmServer, "generate", stubborn)
    dies, lives = servers(holds=True), servers()
    engine = engine_of(dies, lives)
    held(engine, dies, count=8)
    dies.kill()
    servers(port=dies.port)
    generations = until(engine, lambda: engine._fleet.lost == 1 and engine._fleet.ready == 2)
    engine._fleet._loop.call_soon_threadsafe(late.set)
    generations += all_of(engine)
    check_all(generations, 8)
    generations = list(finished(engine, asked(6), SAMPLING))
    check_all(generations, 6)
    assert (engine._fleet.lost, engine._fleet.ready) == (1, 2)


def test_a_server_killed_in_the_middle_of_a_sync_loses_nothing(servers: Any, engine_of: Any) -> None:
    dies, lives = servers(), servers()
    dies.on_load = dies._dead.set
    engine = engine_of(dies, lives)
    assert synced(engine, 1.0) == (1, 0, [])
    assert engine.counts()["lost"] == 1
    check_all(list(finished(engine, asked(6), SAMPLING)), 6)


def test_weights_that_no_server_can_load_stop_the_run(servers: Any, engine_of: Any) -> None:
    server = servers(change={"/collective_rpc": lambda result: _failing(result)})
    with pytest.raises(RunFailed, match="cannot load the weights: ValueError: sizes differ"):
        synced(engine_of(server), 1.0)


def _failing(result: Any) -> Any:
    return {"results": [{"error": "ValueError: sizes differ"}]} if "loaded" in result["results"][0] else result


def test_a_server_that_hangs_is_lost_and_its_responses_are_not(servers: Any, engine_of: Any) -> None:
    hangs, lives = servers(holds=True), servers()
    engine = engine_of(hangs, lives, answer_s=2.0)
    hangs.change[GENERATE] = lambda answer: hangs.release.wait() and answer
    engine.begin(SAMPLING)
    for request in asked(8):
        engine.add(request)
    check_all(all_of(engine), 8)
    assert engine.counts()["lost"] >= 1


def test_the_last_server_that_is_lost_for_good_stops_the_run(servers: Any, engine_of: Any) -> None:
    server = servers(holds=True)
    engine = engine_of(server, answer_s=0.5)
    held(engine, server, count=2)
    server.kill()
    with pytest.raises(RunFailed, match=r"no server generates any more: .*cannot be reached") as error:
        until(engine, lambda: False)
    assert error.value.retry


def test_servers_that_all_refuse_are_not_waited_for(
    servers: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are there, and answer something else than they did."""
    monkeypatch.setattr(server_fleet, "REFUSED_S", 0.2)
    monkeypatch.setattr(server_fleet, "RETRY_S", 0.05)
    server, watched = servers(), LostEngines(tmp_path / "run")
    engine = engine_of(server, answer_s=300.0)
    server.change[GENERATE] = WRONG["text"][0]
    for request in asked(2):
        engine.add(request)
    with pytest.raises(RunFailed, match=r"no server generates any more: .*it has no token ids"):
        all_of(engine)
    reports: list[str] = []
    with watched.reporting(reports.append):
        pass
    (line,) = reports
    assert line.startswith(f"server {server.url} is lost and is polled until it answers: ")
    assert not list(watched.new())


def test_a_response_that_ends_every_server_stops_the_run(servers: Any, engine_of: Any) -> None:
    all_servers = [servers() for _ in range(4)]
    engine = engine_of(*all_servers)
    for server in all_servers:
        server.status[GENERATE] = 500
    engine.begin(SAMPLING)
    engine.add(asked(1)[0])
    with pytest.raises(RunFailed, match="3 servers were lost with the same response"):
        until(engine, lambda: False)


def test_a_request_that_a_server_finds_wrong_stops_the_run(servers: Any, engine_of: Any) -> None:
    """It is not sent to all other servers, which would be lost with it."""
    server_a, server_b = servers(), servers()
    engine = engine_of(server_a, server_b)
    server_a.status[GENERATE] = server_b.status[GENERATE] = 400
    engine.begin(SAMPLING)
    engine.add(asked(1)[0])
    with pytest.raises(RunFailed, match=r"a response cannot be generated: .* answers 400"):
        until(engine, lambda: False)


def test_a_defect_in_reading_an_answer_does_not_hang(
    servers: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def odd(*_: Any) -> None:
        raise ValueError("odd")

    engine = engine_of(servers())
    monkeypatch.setattr(VllmServer, "generate", odd)
    engine.begin(SAMPLING)
    engine.add(asked(1)[0])
    with pytest.raises(RunFailed, match="ValueError: odd"):
        until(engine, lambda: False)


@pytest.mark.timeout(100)
def test_an_abort_after_a_request_that_was_wrong_ends(servers: Any, engine_of: Any) -> None:
    server = servers()
    engine = engine_of(server)
    server.status[GENERATE] = 400
    engine.begin(SAMPLING)
    engine.add(asked(1)[0])
    last = time.monotonic() + 60
    while engine._fleet.failures.empty() and time.monotonic() < last:
        time.sleep(0.01)
    with pytest.raises(RunFailed, match="a response cannot be generated"):
        engine.abort()


@pytest.mark.timeout(100)
def test_it_closes_although_a_cancellation_is_swallowed(
    base: str, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` of Python 3.11 does, if what it waits for is done at that moment."""
    swallowed = []

    async def deaf(*_: Any) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            swallowed.append(True)
        await asyncio.sleep(1000)

    engine = ServerEngine(spec_of(base, ServerSettings((servers().url,))))
    monkeypatch.setattr(VllmServer, "generate", deaf)
    engine.begin(SAMPLING)
    engine.add(asked(1)[0])
    until(engine, lambda: bool(engine._fleet.members[0].running))
    engine.step()
    engine.close()
    assert swallowed == [True]
    assert not engine._fleet._thread.is_alive()


def test_a_slow_server_gets_fewer_responses(servers: Any, engine_of: Any) -> None:
    slow, quick = servers(holds=True), servers()
    engine = engine_of(slow, quick, max_concurrent=2)
    held(engine, slow, count=20)
    until(engine, lambda: engine.unfinished <= 2)
    assert len([body for body in slow.requests if body["request_id"] != "attach"]) == 2
    slow.release.set()
    until(engine, lambda: not engine.unfinished)


def test_the_turns_of_a_conversation_go_to_one_server(servers: Any, engine_of: Any) -> None:
    server_a, server_b = servers(holds=True), servers(holds=True)
    engine = engine_of(server_a, server_b)
    engine.begin(SAMPLING)
    for turn in range(5):
        for key in range(2):
            engine.add(GenerationRequest(10 * turn + key, PROMPT + key, seed=0, conversation=key))
        for server in (server_a, server_b):  # each holds one first turn: both were sent before either ended
            server.release.set()
        until(engine, lambda: not engine.unfinished)
    for server in (server_a, server_b):
        prompts = {body["token_ids"][0] for body in server.requests if body["sampling_params"]["max_tokens"] == 6}
        assert len(prompts) == 1


def test_an_abort_returns_each_response_once_with_what_there_is(servers: Any, engine_of: Any) -> None:
    server = servers(holds=True)
    engine = engine_of(server, max_concurrent=2)
    held(engine, server, server, count=5)
    aborted = engine.abort()
    assert engine.unfinished == 0
    assert sorted(generation.key for generation in aborted) == list(range(5))
    assert {generation.finish_reason for generation in aborted} == {None}
    assert sorted(len(generation.tokens) for generation in aborted) == [0, 0, 0, 2, 2]
    server.release.set()
    check_all(list(finished(engine, asked(5), SAMPLING)), 5)


def test_an_abort_loses_nothing_if_the_server_dies_meanwhile(servers: Any, engine_of: Any) -> None:
    server, other = servers(holds=True), servers(holds=True)
    engine = engine_of(server, other)
    held(engine, server, other, count=6)
    server.kill()
    aborted = engine.abort()
    assert sorted(generation.key for generation in aborted) == list(range(6))


def test_servers_join_and_leave_a_run(servers: Any, engine_of: Any, tmp_path: Path) -> None:
    server_a, server_b = servers(), servers()
    engine = engine_of(server_a)
    synced(engine, 1.0)
    run = tmp_path / "run"
    server_record.request_change(run, "add", server_b.url)
    until(engine, lambda: engine._fleet.ready == 2)
    assert server_b.loaded["w"].tolist() == [1.0] * 4
    server_record.request_change(run, "remove", server_a.url)
    until(engine, lambda: engine._fleet.ready == 1)
    request_count = len(server_a.requests)
    check_all(list(finished(engine, asked(6), SAMPLING)), 6)
    assert len(server_a.requests) == request_count

    def listed() -> dict[str, str]:
        (state,) = server_record.states(run)
        return {server["server"]: server["state"] for server in state["servers"]}

    until(engine, lambda: listed() == {server_a.url: "gone", server_b.url: "ready"})


def test_a_server_that_cannot_be_used_does_not_join(servers: Any, engine_of: Any, tmp_path: Path) -> None:
    good, other = servers(), servers()
    other.configured["hidden_size"] += 1
    engine = engine_of(good)
    server_record.request_change(tmp_path / "run", "add", other.url)
    until(engine, lambda: "another model" in server_record.states(tmp_path / "run")[0]["servers"][-1]["why"])
    check_all(list(finished(engine, asked(4), SAMPLING)), 4)


def test_a_run_without_servers_has_none_to_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no servers are recorded"):
        server_record.states(tmp_path)


def test_a_folder_that_is_full_or_missing_is_named(servers: Any, engine_of: Any, tmp_path: Path) -> None:
    engine = engine_of(servers())
    engine._folder = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    with pytest.raises(RlcliError, match=r"cannot be written to .*below.*rollout.servers_folder"):
        synced(engine, 1.0)


def test_sglang_is_asked_in_its_own_protocol(servers: Any, engine_of: Any) -> None:
    server = servers(kind="sglang")
    engine = engine_of(server)
    assert synced(engine, 1.0) == (0, 1, []), "its weights cannot be compared"
    generations = list(finished(engine, asked(5), SAMPLING))
    check_all(generations, 5)
    body = next(body for body in server.requests if body["sampling_params"]["max_new_tokens"] == 6)
    assert set(body) == {"rid", "input_ids", "sampling_params", "return_logprob"}
    assert engine.probe(PROMPT)[1].tolist() == [-0.5] * 3
    server.holds = True
    held(engine, server, count=1)
    (aborted,) = engine.abort()
    assert (len(aborted.tokens), aborted.finish_reason) == (2, None)


def test_sglang_with_other_log_probs_than_ids_is_refused(servers: Any, engine_of: Any) -> None:
    def other(answer: Any) -> Any:
        answer["meta_info"]["output_token_logprobs"][0][1] += 1
        return answer

    with pytest.raises(SetupError, match="log-probs are of other tokens"):
        engine_of(servers(kind="sglang", change={"/generate": other}))


def test_engines_share_the_servers_among_them(base: str, servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    all_servers = [servers() for _ in range(3)]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    spec = spec_of(base, ServerSettings(tuple(server.url for server in all_servers)))
    used = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        engine = ServerEngine(replace(spec, group_id=f"{spec.group_id}{rank}"))
        used.append([member.url for member in engine._fleet.members])
        engine.close()
    assert used == [[all_servers[0].url, all_servers[2].url], [all_servers[1].url]]
