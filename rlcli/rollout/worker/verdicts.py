"""Send responses to their verifiers, and know which groups have all their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from rlcli.cluster.watchdog import progress
from rlcli.data.messages import PromptTask
from rlcli.data.trajectories import Trajectory
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.rewards.expression import rivals_of
from rlcli.rewards.service.scoring_client import Scored, ScoringService
from rlcli.rollout.rollout_call import GREEDY
from rlcli.rollout.worker.pending_samples import sent


@dataclass(frozen=True)
class Verification:
    """How a worker's responses are verified. thinking: prompts end within an open <think>. stop_token_ids: those that
    end a response, and are not part of its text. grouped: expressions of verifiers that read the responses to a prompt
    together."""

    scorer: ScoringService
    thinking: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    grouped: frozenset[str] = frozenset()

    def submit(
        self, task: PromptTask, trajectory: Trajectory, fields: Mapping[str, Any] | None = None
    ) -> Future[Scored]:
        """Future of the policy's last turn as text, and of the verdict on it. fields: others of the request."""
        return self.scorer.submit(task.source, *self._frame(trajectory, fields or {}))

    def submit_group(
        self, task: PromptTask, responses: Sequence[tuple[Trajectory, Mapping[str, Any]]]
    ) -> list[Future[Scored]]:
        """Like `submit`, of all responses of a group in one call of their verifier."""
        return self.scorer.submit_group(task.source, [self._frame(whole, fields) for whole, fields in responses])

    def _frame(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> tuple[bytes, int, dict[str, Any]]:
        known = {"finish_reason": trajectory.stop_reason or "", "thinking": self.thinking}
        return sent(trajectory), self.spare(trajectory), {**known, **fields}

    def spare(self, trajectory: Trajectory) -> int:
        """How many of the last turn's last tokens are not text."""
        tokens = trajectory.last_turn
        return int(len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)


@dataclass(frozen=True)
class Compared:
    """A response that waits for the others of its group."""

    sample: int
    task: PromptTask
    whole: Trajectory
    fields: Mapping[str, Any]
    scored: Future[Scored] = field(default_factory=Future)


class GroupVerdicts:
    """The verdicts of a generation's groups, each from its first response to its last verdict. Only the worker that
    verifies, of those that share an engine, has a `verification`."""

    def __init__(self, verification: Verification | None) -> None:
        self._verification = verification
        self._verdicts: dict[int, list[Future[Scored]]] = {}
        self._compared: dict[int, list[Compared]] = {}
        self._generated: list[int] = []

    def begin(self, task: PromptTask) -> None:
        self._verdicts[task.prompt] = []

    def add(
        self, task: PromptTask, sample: int, whole: Trajectory, held: FinishedConversation | None = None, step: int = 0
    ) -> Future[Scored]:
        """Have a response verified: at once, or with its group if its verifier compares responses, or reads them
        together. step: of the training."""
        scored: Future[Scored] = Future()
        fields: Mapping[str, Any] = held.fields if held else {}
        grouped = self._verification is not None and task.source.verifier in self._verification.grouped
        if held is not None and held.failure is not None:
            scored.set_result(Scored("", held.failure))
        elif grouped or rivals_of(task.source.verifier):
            fields = {**fields, "step": step} if grouped else fields
            self._compared.setdefault(task.prompt, []).append(Compared(sample, task, whole, fields, scored))
        else:
            assert self._verification is not None
            scored = self._verification.submit(task, whole, fields)
        self._verdicts[task.prompt].append(scored)
        if len(self._verdicts[task.prompt]) == task.responses:
            self._generated.append(task.prompt)
            self._compare(task.prompt)
        return scored

    def _compare(self, prompt: int) -> None:
        """Send the kept responses of a group; of a verifier that compares, each with those that follow it, in a
        ring. The greedy baseline is a group of its own for a verifier that reads responses together."""
        assert self._verification is not None
        ring = sorted(self._compared.pop(prompt, ()), key=attrgetter("sample"))
        if not ring:
            return
        task, frames = ring[0].task, [(sent(one.whole), self._verification.spare(one.whole)) for one in ring]
        rivals = rivals_of(task.source.verifier)
        responses = [
            (
                one.whole,
                {**one.fields, "rivals": [*frames[place + 1 :], *frames[:place]][:rivals]} if rivals else one.fields,
            )
            for place, one in enumerate(ring)
        ]
        if task.source.verifier in self._verification.grouped:
            baseline = int(task.greedy and ring[0].sample == GREEDY)
            groups = [part for part in (responses[:baseline], responses[baseline:]) if part]
            verified = [one for part in groups for one in self._verification.submit_group(task, part)]
        else:
            verified = [
                self._verification.submit(one.task, *response) for one, response in zip(ring, responses, strict=True)
            ]
        for one, future in zip(ring, verified, strict=True):
            future.add_done_callback(partial(_passed_on, one.scored))

    @property
    def waiting(self) -> Sequence[Compared]:
        """Responses that wait for others of their group."""
        return [one for kept in self._compared.values() for one in kept]

    @property
    def unverified(self) -> int:
        """Groups that are generated and wait for verdicts."""
        return len(self._generated)

    def newly_verified(self) -> int:
        """How many more groups have all their verdicts than at the last call."""
        still = [prompt for prompt in self._generated if not all(v.done() for v in self._verdicts[prompt])]
        found = len(self._generated) - len(still)
        for prompt in set(self._generated) - set(still):
            del self._verdicts[prompt]
        self._generated = still
        if found:
            progress()
        return found


def _passed_on(scored: Future[Scored], verified: Future[Scored]) -> None:
    if verified.cancelled():
        scored.cancel()
    elif error := verified.exception():
        scored.set_exception(error)
    else:
        scored.set_result(verified.result())
