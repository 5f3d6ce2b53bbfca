"""The engine `server` on two real servers of vLLM, compared with vLLM in the process; and a run whose server is killed.

The servers run in one spawned process, as in test_engine.py; the tests read its results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import spawned, start

LIMIT, COUNT = 40, 48
STEP_S = 600.0
"""Longest time that is waited for something to happen in the run."""
SHORTER = """
from rlcli.types import Outcome, Verdict

def verify(request):
    return Verdict(score=1 / (1 + len(request.completion)), outcome=Outcome.OK)
"""
"""Random weights earn this too, so that the weights change at every step."""


def spec_of(model: str, group: str, servers: int) -> Any:
    from rlcli.model.io.model_config import read_config
    from rlcli.rollout.engine import EngineSpec, ServerSettings

    return EngineSpec(
        model=model,
        dtype="float32",
        device="cpu",
        max_length=256,
        max_concurrent=16,
        tensor_parallel=1,
        lora_rank=0,
        weights_follow=True,
        kv_cache_bytes=64 << 20,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        stop_token_ids=(read_config(model).eos_token_id,),
        group_id=group,
        servers=ServerSettings(count=servers, answer_s=120.0),
    )


def main(model: str, output_path: str) -> None:
    """In the spawned process."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlcli.rollout.servers.server_engine import ServerEngine
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{output_path}.store", rank=0, world_size=1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with ThreadPoolExecutor(1) as executor:
        starting = executor.submit(ServerEngine, spec_of(model, f"servers-{os.getpid()}", 2))
        local = VllmEngine(spec_of(model, f"here-{os.getpid()}", 0))
        servers = starting.result()
    try:
        results = run_engines(local, servers, lm)
    finally:
        servers.close()
    results["left"] = servers._own.exists()
    Path(output_path).write_text(json.dumps(results))


def run_engines(local: Any, servers: Any, lm: Any) -> dict[str, Any]:
    import numpy as np
    import torch

    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    prompts = [np.arange(first, first + 40, dtype=np.int32) for first in (10, 20, 30)]
    requests = [GenerationRequest(key, prompts[key % 3], seed=key, greedy=key < 6) for key in range(COUNT)]

    def generate(engine: Any) -> list[Any]:
        responses = sorted(finished(engine, requests, Sampling(1.0, LIMIT)), key=lambda response: response.key)
        return [
            [response.tokens.tolist(), response.log_probs.tolist(), response.finish_reason] for response in responses
        ]

    results: dict[str, Any] = {"synced": [synced(engine, lm) for engine in (local, servers)]}
    results["cached"] = [servers.cached_tokens(prompts[0]) for _ in range(2)]
    results["here"], results["servers"] = generate(local), generate(servers)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    results["stale"] = max_error(servers, lm, prompts[0])
    results["synced"] += [synced(engine, lm) for engine in (local, servers)]
    results["cached after"] = servers.cached_tokens(prompts[0])  # before the probe, which fills the cache again
    results["probe"] = max_error(servers, lm, prompts[0])
    results["here then"], results["servers then"] = generate(local), generate(servers)
    results["killed"] = kill_one_server(servers, requests)
    results["probe of the new one"] = max_error(servers, lm, prompts[0])
    results["broken off"], results["gone on"] = abort_and_resume(servers, requests)
    return results


def synced(engine: Any, lm: Any) -> list[Any]:
    from rlcli.model.weight_check.checksum import Checksums

    sums = Checksums()
    engine.load_weights(sums.of((name, p.detach()) for name, p in lm.named_parameters()))
    return [len(sums.sent()), *engine.verify(sums.sent())]


def max_error(engine: Any, lm: Any, prompt: Any) -> float:
    """Largest difference of a log-prob of the prompt from the model's own."""
    import torch

    ids = torch.as_tensor(prompt, dtype=torch.int64)
    with torch.no_grad():
        rows = lm(ids[None]).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(-1, ids[1:, None])[:, 0]
    return float((expected - torch.as_tensor(engine.probe(prompt)[1])).abs().max())


def kill_one_server(engine: Any, requests: list[Any]) -> dict[str, Any]:
    """Kill one of the two servers while both generate, and wait for its replacement."""
    start_on_both(engine, requests)
    os.killpg(engine._fleet.members[0].process.pid, signal.SIGKILL)
    responses: list[Any] = []
    while engine.unfinished:
        responses += engine.step()
    counts = engine.counts()
    while engine._fleet.ready < 2:
        engine.step()
    tokens = [
        [response.key, response.tokens.tolist()] for response in sorted(responses, key=lambda response: response.key)
    ]
    return {"tokens": tokens, "counts": counts, "version": [member.version for member in engine._fleet.members]}


def abort_and_resume(engine: Any, requests: list[Any]) -> tuple[list[Any], list[Any]]:
    """Abort while both servers generate, and resume the partial responses: `(partial, resumed)`, each by key."""
    from dataclasses import replace

    from rlcli.rollout.engine import Sampling, finished

    start_on_both(engine, requests)
    partial = {response.key: response for response in [*engine.step(), *engine.abort()]}
    continuations = [
        replace(r, response_prefix=partial[r.key].tokens) for r in requests if partial[r.key].finish_reason is None
    ]
    resumed = finished(engine, continuations, Sampling(1.0, LIMIT))
    return [[key, response.tokens.tolist()] for key, response in partial.items()], [
        [continued.key, continued.tokens.tolist()] for continued in resumed
    ]


def start_on_both(engine: Any, requests: list[Any]) -> None:
    """Start generation on both servers, and retry if a server finishes before both are seen generating."""
    from rlcli.rollout.engine import Sampling

    limit = time.monotonic() + 120
    while True:
        engine.begin(Sampling(1.0, LIMIT))
        for request in requests:
            engine.add(request)
        while engine._done.qsize() < len(requests) and time.monotonic() < limit:
            if all(member.running for member in engine._fleet.members):
                return
            time.sleep(0.001)
        while engine.unfinished:
            engine.step()
        assert time.monotonic() < limit, f"not both generate: {[server.why for server in engine._fleet.members]}"


@pytest.fixture(scope="module")
def results(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return spawned(__file__, tiny, tmp_path_factory.mktemp("servers") / "found.json", timeout=900)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_servers_draw_the_same_as_the_engine_in_the_process(results: dict[str, Any]) -> None:
    """Greedy and sampled ids and log-probs, before and after a weight update."""
    for local, servers in (("here", "servers"), ("here then", "servers then")):
        for expected, response in zip(results[local], results[servers], strict=True):
            assert expected[0] == response[0]
            assert expected[1] == pytest.approx(response[1], abs=1e-4)
            assert expected[2] == response[2]
    assert results["here"] != results["here then"]


@pytest.mark.long
def test_weights_in_servers_are_compared_tensor_by_tensor(results: dict[str, Any]) -> None:
    for sent, equal, unchecked, differences in results["synced"]:
        assert (equal, unchecked, differences) == (sent, 0, [])
    assert results["stale"] > 0.1
    assert results["probe"] < 1e-4
    assert results["cached"] == [0, 32]
    assert results["cached after"] == 0


@pytest.mark.long
def test_a_killed_server_is_replaced_with_the_current_weights(results: dict[str, Any]) -> None:
    killed = results["killed"]
    assert killed["tokens"] == [[key, response[0]] for key, response in enumerate(results["servers then"])]
    assert (killed["counts"]["lost"], killed["counts"]["servers"]) == (1, 1)
    assert killed["counts"]["moved"] >= 1
    assert killed["version"] == [2, 2]
    assert results["probe of the new one"] < 1e-4
    assert not results["left"], "nothing is left in shared memory"


@pytest.mark.long
def test_aborted_responses_go_on_as_if_never_aborted(results: dict[str, Any]) -> None:
    partial, resumed = dict(results["broken off"]), dict(results["gone on"])
    assert sorted(partial) == list(range(COUNT))
    for key, (tokens, _, _) in enumerate(results["servers then"]):
        assert partial[key] + resumed.get(key, []) == tokens


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_run_loses_nothing_when_its_servers_are_killed(tiny: Path, sums: Path, tmp_path: Path) -> None:
    """One while it generates, one in the middle of a sync. Servers take minutes to start and to be replaced."""
    import rlcli

    run, verifier = tmp_path / "run", tmp_path / "reward.py"
    verifier.write_text(SHORTER)
    settings = {
        "verifier.name": f"{verifier}:verify",
        "train.lr": 1e-5,  # or the policy learns all there is, and its weights stop changing
        "rollout.engine": "server",
        "rollout.servers": 2,
        "rollout.workers": 1,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 16,
        "rollout.max_response_tokens": 192,
        "rollout.max_concurrent": 16,
        "data.max_prompt_tokens": 32,
        "train.tokens_per_microbatch": 2048,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = start("train", "grpo", "--model", tiny, "--data", sums, "--out", run, "--steps", "1000", *sets)
    until(process, lambda: len(servers_of(run)) == 2 and servers_of(run)[0]["running"] > 0 and steps_of(run) >= 1)
    os.killpg(servers_of(run)[0]["pid"], signal.SIGKILL)
    until(process, lambda: servers_of(run)[0]["lost"] > 0)
    until(process, lambda: servers_of(run)[0]["state"] == "ready")
    # Weights of a sync are in a new folder beside the servers' sockets before any server loads them.
    folder = Path(servers_of(run)[1]["server"].removeprefix("unix:")).parent
    earlier, pid = set(folder.glob("weights-*")), servers_of(run)[1]["pid"]
    until(process, lambda: set(folder.glob("weights-*")) - earlier)
    os.killpg(pid, signal.SIGKILL)
    until(process, lambda: servers_of(run)[1]["lost"] > 0)
    until(process, lambda: servers_of(run)[1]["state"] == "ready")
    last = steps_of(run) + 2
    until(process, lambda: steps_of(run) >= last)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=STEP_S)
    assert process.returncode == 130, errors
    record = rlcli.Run(run)
    metrics = record.metrics()
    assert len(metrics["step"]) == record.step
    for step in range(1, record.step + 1):
        samples = record.samples(step)
        keys = list(zip(samples["group"], samples["sample"], strict=True))
        assert len(keys) == len(set(keys)) == 4 * 16, step
    lost = [event for event in record.events if event["event"] == "engine lost"]
    assert len(lost) == sum(count or 0 for count in metrics["engine/lost"]) == 2
    assert sum(count or 0 for count in metrics["engine/moved"]) > 0
    assert max(metrics["log_prob_check/max_abs_diff"]) < 1e-3
    assert all(metrics["sync/changed_tensors"])
    assert not any(metrics["sync/unchecked_tensors"])


def servers_of(run: Path) -> list[dict[str, Any]]:
    from rlcli.errors import DataError
    from rlcli.rollout.servers.server_record import states

    try:
        (state,) = states(run)
    except DataError:
        return []
    return [dict(server) for server in state["servers"]]


def steps_of(run: Path) -> int:
    lines = run / "metrics.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def until(process: subprocess.Popen[str], holds: Callable[[], Any]) -> None:
    limit = time.monotonic() + STEP_S
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.002)


if __name__ == "__main__":
    main(*sys.argv[1:])
