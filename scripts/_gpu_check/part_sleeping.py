"""The engine's sleep and wake in a process that also trains: what is freed, how long it takes, and what is the same."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

from _gpu_check import runs, single_worker
from _gpu_check.check import Check

GB = 1e9
ROUNDS = 3


def run(check: Check) -> None:
    with single_worker.worker(check, check.shape) as worker:
        measure_sleep(check, worker)


def measure_sleep(check: Check, worker: Any) -> None:
    """Put the engine of a new worker to sleep and wake it, several times."""
    engine = worker.rollout_role.engine
    first = worker.sync_weights(single_worker.probe(), 1)
    check.require(first.difference < runs.TOLERANCE, "the engine starts with the weights", f"{first.difference:.4f}")
    log_probs_before, tokens_before = engine.prompt_log_probs(single_worker.probe()), greedy(engine)
    for number in range(1 if check.rehearse else ROUNDS):
        round_trip(check, worker, number)
    log_probs_after, tokens_after = engine.prompt_log_probs(single_worker.probe()), greedy(engine)
    off = float(abs(log_probs_before - log_probs_after).max())
    check.figure("log-probs after waking, worst difference", off, "nats", "<= 0.001")
    # The weights are the same, and so are the kernels; only the cache's blocks may be others.
    check.require(off < 1e-2, "the engine computes the same before its sleep and after", f"{off:.5f} nats")
    same = sum(map(operator.eq, tokens_before, tokens_after))
    check.figure("greedy tokens that are the same", f"{same} of {len(tokens_before)}")


def round_trip(check: Check, worker: Any, number: int) -> None:
    engine, awake = worker.rollout_role.engine, single_worker.free_bytes(check)
    asleep_s = timed(check, worker.release_rollout_memory)
    asleep = single_worker.free_bytes(check)
    worker.set_engine_active(True)  # as a sync begins: torch's segments must not grow beside vLLM's pool
    weights_s = timed(check, engine.wake_weights)
    weights = single_worker.free_bytes(check)
    synced = worker.sync_weights(single_worker.probe(), number + 2)  # wakes the cache, too
    back = single_worker.free_bytes(check)
    off = synced.difference
    check.require(off < runs.TOLERANCE, f"round {number + 1}: the weights are back", f"{off:.4f} nats")
    none = "a no-op on CPUs" if check.rehearse else ""
    check.figure("freed by sleep", (asleep - awake) / GB, "GB", note=none or "weights and KV cache")
    check.figure("taken by the weights", (asleep - weights) / GB, "GB", note=none)
    check.figure("not given back by a round", (awake - back) / GB, "GB", "<= 0.2", none)
    check.figure("sleep", asleep_s, "s", "<= 1.0", none)
    check.figure("waking the weights", weights_s, "s", "<= 1.0", none)
    check.figure("loading them again", synced.seconds, "s", note="as in every step")
    if not check.rehearse:
        check.require(asleep > awake, f"round {number + 1}: sleep frees memory", f"{(asleep - awake) / GB:.2f} GB")


def timed(check: Check, work: Callable[[], object]) -> float:
    single_worker.free_bytes(check)
    began = time.perf_counter()
    work()
    if not check.rehearse:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - began


def greedy(engine: Any) -> list[int]:
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    (response,) = finished(engine, [GenerationRequest(0, single_worker.probe(), seed=0)], Sampling(0.0, 32))
    return [int(token) for token in response.tokens]
