"""Countdown in several attempts: a wrong expression is answered with what it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli_verifiers.countdown import verify

from rlcli.types import Outcome, VerifyRequest


class Countdown:
    """Reach a target from given numbers; a wrong expression is answered with what it makes.

    Rows as `rlcli prep countdown` makes them. Each attempt is checked as the verifier countdown does. The reward is 1.0
    for a right expression within the attempts.
    attempts: turns of the policy. use_all: each number is used exactly once, else at most once.
    """

    def __init__(self, attempts: int = 3, use_all: bool = True) -> None:
        if attempts < 1:
            raise ValueError(f"attempts = {attempts} is below 1")
        self.attempts, self.use_all = attempts, use_all
        self.tried = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.row = row
        self._verdict("")  # a row without numbers and target is refused now
        return row["messages"]

    def step(self, message: Mapping[str, Any]) -> Any:
        self.tried += 1
        verdict = self._verdict(message["content"])
        info = {"attempts": self.tried}
        if verdict.outcome is Outcome.OK:
            return [], 1.0, True, info
        if self.tried >= self.attempts:
            return [], 0.0, True, info
        text = f"That is not right: {verdict.detail}. Attempts left: {self.attempts - self.tried}."
        return [{"role": "user", "content": text}], 0.0, False, info

    def _verdict(self, text: str) -> Any:
        truth, extra_info = self.row["ground_truth"], self.row.get("extra_info", {})
        return verify(VerifyRequest(text, truth, extra_info=extra_info), use_all=self.use_all)
