"""scripts/proofs/conversations.py on templates of our own: what it finds right, and that it finds what is wrong."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlcli.environments.turn_tokens import TurnTemplate
from tests.chat_templates import HERMES

PROOFS = Path(__file__).parents[3] / "scripts" / "proofs"


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(PROOFS))
    return runpy.run_path(str(PROOFS / "conversations.py"))


def played(proof: dict[str, Any], count: int) -> Any:
    tokenizer = proof["tokenizer_of"](HERMES, eos="<|im_end|>")
    return proof["played"](tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]), count, random.Random(1))


def test_random_conversations_are_what_the_engine_saw_and_drew(proof: dict[str, Any]) -> None:
    result = played(proof, 40)
    assert not result.wrong
    assert result.conversations == 40
    assert result.turns > 80
    assert result.equal == result.comparable > 10


def test_the_proof_finds_a_token_too_many(proof: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = TurnTemplate.append

    def twice(self: TurnTemplate, *args: Any) -> Any:
        appended = sound(self, *args)
        return appended._replace(tokens=[*appended.tokens[:1], *appended.tokens])

    monkeypatch.setattr(TurnTemplate, "append", twice)
    result = played(proof, 10)
    assert result.comparable > 0
    assert len(result.wrong) == result.comparable
    assert result.equal == 0
