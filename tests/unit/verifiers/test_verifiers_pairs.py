"""The larger set of pairs: `math` accepts every right response and no wrong one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from rlcli_verifiers.math import verify

from rlcli.types import VerifyRequest
from tests.unit.math_pairs import pairs


@pytest.mark.parametrize("gold", dict.fromkeys(gold for gold, _, _ in pairs()), ids=lambda gold: gold[:30])
def test_pairs_are_judged_as_a_careful_reader_does(gold: str) -> None:
    rows = [(response, right) for truth, response, right in pairs() if truth == gold]
    assert {right for _, right in rows} == {True, False}
    judged = [(response, verify(VerifyRequest(response, gold)).score == 1.0) for response, _ in rows]
    assert judged == rows


def test_the_proof_counts_both_kinds_of_mistake() -> None:
    path = Path(__file__).parents[3] / "scripts" / "proofs" / "math_pairs.py"
    proof = runpy.run_path(str(path))
    assert proof["read_pairs"]() == list(pairs())
    three = [("42", r"\boxed{42}", True), ("42", r"\boxed{43}", False), ("42", r"\boxed{42\text{ million}}", False)]
    rows = [proof["Pair"](*row) for row in three]
    ours, theirs = (proof["tally"](name, proof[name], rows) for name in ("by_math", "by_math_verify"))
    assert (ours.false_accepts, ours.false_rejects) == ([], [])
    assert (theirs.false_accepts, theirs.false_rejects) == ([rows[2]], [])
    raises = proof["tally"]("x", lambda gold, response: 1 / 0, rows)
    assert (raises.false_accepts, raises.false_rejects) == ([], [rows[0]])


def test_the_set_is_large_and_has_no_pair_twice() -> None:
    assert len(set(pairs())) == len(list(pairs())) >= 1600
