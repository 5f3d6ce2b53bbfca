"""The larger set of pairs: `math` accepts every right response and no wrong one."""

from __future__ import annotations

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


def test_the_set_is_large_and_has_no_pair_twice() -> None:
    assert len(set(pairs())) == len(list(pairs())) >= 1600
