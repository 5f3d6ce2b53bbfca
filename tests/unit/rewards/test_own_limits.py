"""Verifiers with limits and start checks of their own, and outcomes that they report themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import ConfigError, VerifierError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.types import Outcome, VerifyRequest

VERIFIERS = """
import os, time
from pathlib import Path
from rlcli.errors import ConfigError
from rlcli.types import USAGE, Outcome, Verdict

RIGHT = Verdict(1.0, Outcome.OK)

def busy(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def waits(request, *, wait_s: float = 20.0):
    time.sleep(float(request.ground_truth))
    return RIGHT

def computes(request, *, deadline_s: float = 20.0):
    busy(float(request.ground_truth))
    return RIGHT

def spins(request):
    busy(float(request.completion))
    return RIGHT

def reports(request, *, count: str, wait_s: float = 5.0):
    with open(count, "a") as file:
        file.write("x")
    return Verdict(0.0, Outcome(request.ground_truth), parts={USAGE + "calls": 1.0}, detail="it said so")

def preload(**options):
    if options.get("count") == "refuse":
        raise ConfigError("the option count is 'refuse'", "give a file")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "slow.py"
    path.write_text(VERIFIERS)
    return path


def ask(pool: ScoringPool, verifier: str, completion: str = "0", truth: str = "0") -> tuple[Outcome, str]:
    verdict = pool.submit(verifier, VerifyRequest(completion, truth)).result()
    return verdict.outcome, verdict.detail


def test_a_verifier_may_wait_and_compute_longer_than_the_others(file: Path) -> None:
    with ScoringPool(1, 0.2, wall_s=0.4) as pool:
        assert ask(pool, f"{file}:waits", truth="0.8") == (Outcome.OK, "")
        assert ask(pool, f"{file}:computes", truth="0.5") == (Outcome.OK, "")
        assert ask(pool, f"{file}:computes(deadline_s=0.2)", truth="9")[0] is Outcome.TIMEOUT  # never wrong


def test_a_slow_term_of_a_sum_loosens_no_others_deadline(file: Path) -> None:
    composition = f"{file}:waits + {file}:computes + {file}:spins"
    with ScoringPool(1, 0.3) as pool:
        assert ask(pool, composition, completion="0", truth="0.5") == (Outcome.OK, "")
        outcome, detail = ask(pool, composition, completion="9", truth="0")
        assert outcome is Outcome.WRONG
        assert detail.startswith(OVERRAN)


def test_a_failure_that_a_waiting_verifier_reports_is_final(file: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    name = f"{file}:reports(count='{count}')"
    with ScoringPool(1, 5.0, [name]) as pool:
        for outcome in (Outcome.CRASH, Outcome.TIMEOUT, Outcome.UNPARSED):
            assert ask(pool, name, truth=outcome) == (outcome, "it said so")
    assert count.read_text() == "xxx"


def test_a_term_without_a_verdict_leaves_none_for_the_sum_but_its_costs(file: Path, tmp_path: Path) -> None:
    name = f"{file}:spins + 0.5 * {file}:reports(count='{tmp_path / 'count'}')"
    with ScoringPool(1, 5.0, [name]) as pool:
        verdict = pool.submit(name, VerifyRequest("0", "unparsed")).result()
        assert (verdict.score, verdict.outcome, verdict.parts) == (0.0, Outcome.UNPARSED, {"usage/calls": 1.0})
        verdict = pool.submit(name, VerifyRequest("0", "wrong")).result()
        assert verdict.parts == {"spins": 1.0, "reports": 0.0, "usage/calls": 1.0}
        assert verdict.score == 1.0


def test_preload_gets_the_options_and_may_refuse_them(file: Path) -> None:
    with pytest.raises(VerifierError, match=r"reports': the option count is 'refuse'; give a file$"):
        ScoringPool(1, 5.0, [f"{file}:reports(count=refuse)"])
    with pytest.raises(ConfigError, match="must be given its option count"):
        ScoringPool(1, 5.0, [f"{file}:reports"])
