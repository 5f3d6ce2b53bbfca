"""The scoring pool inside a Ray actor, where verifiers run in training: neither the main thread nor its own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcli.cluster.ray_monitor import exit_on_loss
from rlcli.cluster.ray_session import local_cluster
from rlcli.types import Outcome, Verdict, VerifyRequest

OWN = """
import asyncio, os
from rlcli.types import Outcome, Verdict

async def judge(request):
    await asyncio.sleep(0.05)
    if request.completion == "hang":
        while True:
            pass
    return Verdict(1.0, Outcome.OK, answer=f"{os.getpid()} {sum(request.completion_ids)}")
"""


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Any]:
    import ray

    (tmp_path / "own.py").write_text(OWN)

    class Owner:
        def __init__(self, verifier_file: str) -> None:
            from rlcli.rewards.processes.scoring_pool import ScoringPool

            self.verifier = f"{verifier_file}:judge + gsm8k"
            self.pool = ScoringPool(1, 0.5, [self.verifier])

        def pid(self) -> int:
            return os.getpid()

        def verify(self, requests: list[VerifyRequest]) -> list[Verdict]:
            return [future.result() for future in [self.pool.submit(self.verifier, request) for request in requests]]

    with local_cluster(1, exit_on_loss):
        yield ray.remote(num_cpus=0)(Owner).remote(str(tmp_path / "own.py"))


def test_verifiers_score_in_killable_processes_of_an_actor(actor: Any) -> None:
    import ray

    requests = [VerifyRequest(text, "42", completion_ids=[1, 2]) for text in ("#### 42", "hang", "#### 41", "#### 42")]
    verdicts = ray.get(actor.verify.remote(requests), timeout=120)
    assert [verdict.score for verdict in verdicts] == [2.0, 0.0, 1.0, 2.0]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.OK, Outcome.WRONG, Outcome.OK, Outcome.OK]
    (first, tokens), (last, _) = (map(int, str(verdicts[index].answer).split()) for index in (0, -1))
    owner = ray.get(actor.pid.remote())
    assert len({first, last, owner}) == 3
    assert tokens == 3
    running = [psutil.Process(pid) for pid in (last, owner)]
    ray.kill(actor)
    assert psutil.wait_procs(running, timeout=10)[1] == []
