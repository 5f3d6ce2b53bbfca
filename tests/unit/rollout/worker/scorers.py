"""The verifier's side of a round."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlcli.rewards.service.scoring_client import Scored
from rlcli.types import Outcome, Prompt, Verdict


class Scorer:
    """Scores a conversation with the sum of its rewards, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes, dict[str, Any]]] = []
        self.groups: list[int] = []

    def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: dict[str, Any]) -> Future[Scored]:
        self.requests.append((prompt.id, tokens, fields))
        done: Future[Scored] = Future()
        done.set_result(Scored("", Verdict(sum(fields["environment"]["rewards"]), Outcome.OK)))
        return done

    def submit_group(
        self, prompt: Prompt, responses: Sequence[tuple[bytes, int, dict[str, Any]]]
    ) -> list[Future[Scored]]:
        self.groups.append(len(responses))
        return [self.submit(prompt, *response) for response in responses]
