"""Submission of responses to their verifiers, and tracking of the groups that have all their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from rlcli.cluster.watchdog import progress
from rlcli.data.messages import PromptTask
from rlcli.data.trajectories import Trajectory
from rlcli.environments.finished_conversation import FinishedConversation
from rlcli.rewards.expression import other_responses_of
from rlcli.rewards.service.scoring_client import Scored, ScoringClient
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.rollout.worker.pending_samples import last_turn_bytes


@dataclass(frozen=True)
class Verification:
    """The verifiers of a worker's responses."""

    scorer: ScoringClient
    """Client of the scoring service."""
    thinking: bool = False
    """True if prompts end within an open <think>."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a response, and are not part of its text."""
    grouped: frozenset[str] = frozenset()
    """Expressions of verifiers that read all responses to a prompt in one call."""

    def submit(
        self, task: PromptTask, trajectory: Trajectory, fields: Mapping[str, object] | None = None
    ) -> Future[Scored]:
        """Submit the policy's last turn; the future has its text and verdict. fields: further ones of the request."""
        tokens, control_tokens, request = self._frame(trajectory, fields or {})
        return self.scorer.submit(task.prompt, tokens, control_tokens, request)

    def submit_group(
        self, task: PromptTask, responses: Sequence[tuple[Trajectory, Mapping[str, object]]]
    ) -> list[Future[Scored]]:
        """Like `submit`, for all responses of a group in one call of their verifier."""
        frames = [self._frame(trajectory, fields) for trajectory, fields in responses]
        return self.scorer.submit_group(task.prompt, frames)

    def _frame(self, trajectory: Trajectory, fields: Mapping[str, object]) -> tuple[bytes, int, dict[str, object]]:
        common = {"finish_reason": trajectory.stop_reason or "", "thinking": self.thinking}
        return last_turn_bytes(trajectory), self.trailing_control_tokens(trajectory), {**common, **fields}

    def trailing_control_tokens(self, trajectory: Trajectory) -> int:
        """Number of tokens at the end of the last turn that are not text."""
        tokens = trajectory.last_turn
        return int(len(tokens) > 0 and int(tokens[-1]) in self.stop_token_ids)


@dataclass(frozen=True)
class DeferredResponse:
    """A response whose verification is deferred until its group is complete."""

    sample: int
    """Index within the group."""
    task: PromptTask
    """Its group."""
    trajectory: Trajectory
    """Its tokens."""
    fields: Mapping[str, object]
    """Further fields of the verifier's request."""
    scored: Future[Scored] = field(default_factory=Future)
    """Its text and its verdict."""


class GroupVerdicts:
    """Verdicts of a generation's groups, each from its first response to its last verdict. Of the workers that share an
    engine, only the one that verifies has a `verification`."""

    def __init__(self, verification: Verification | None) -> None:
        self._verification = verification
        self._verdicts: dict[int, list[Future[Scored]]] = {}
        self._deferred: dict[int, list[DeferredResponse]] = {}
        self._generated: list[int] = []

    def begin(self, task: PromptTask) -> None:
        """Register a group."""
        self._verdicts[task.group] = []

    def add(
        self,
        task: PromptTask,
        sample: int,
        trajectory: Trajectory,
        conversation: FinishedConversation | None = None,
        step: int = 0,
    ) -> Future[Scored]:
        """Submit a response to verification: at once, or with its group if its verifier compares responses or reads
        them together. step: of the training."""
        scored: Future[Scored] = Future()
        fields: Mapping[str, object] = conversation.fields if conversation else {}
        grouped = self._verification is not None and task.prompt.verifier in self._verification.grouped
        if conversation is not None and conversation.failure is not None:
            scored.set_result(Scored("", conversation.failure))
        elif grouped or other_responses_of(task.prompt.verifier):
            fields = {**fields, "step": step} if grouped else fields
            self._deferred.setdefault(task.group, []).append(DeferredResponse(sample, task, trajectory, fields, scored))
        else:
            assert self._verification is not None
            scored = self._verification.submit(task, trajectory, fields)
        self._verdicts[task.group].append(scored)
        if len(self._verdicts[task.group]) == task.responses:
            self._generated.append(task.group)
            self._submit_deferred(task.group)
        return scored

    def _submit_deferred(self, prompt: int) -> None:
        """Submit the deferred responses of a group. A verifier that compares gets each response with those that follow
        it, cyclically. For a verifier that reads responses together, the greedy baseline is a separate group."""
        verification = self._verification
        assert verification is not None
        group = sorted(self._deferred.pop(prompt, ()), key=attrgetter("sample"))
        if not group:
            return
        task, compared = group[0].task, other_responses_of(group[0].task.prompt.verifier)
        frames = [
            (last_turn_bytes(response.trajectory), verification.trailing_control_tokens(response.trajectory))
            for response in group
        ]
        responses: list[tuple[Trajectory, Mapping[str, object]]] = []
        for index, response in enumerate(group):
            others = [*frames[index + 1 :], *frames[:index]][:compared]
            fields = {**response.fields, "other_responses": others} if compared else response.fields
            responses.append((response.trajectory, fields))
        if task.prompt.verifier in verification.grouped:
            baselines = int(task.greedy and group[0].sample == GREEDY)
            parts = [part for part in (responses[:baselines], responses[baselines:]) if part]
            futures = [future for part in parts for future in verification.submit_group(task, part)]
        else:
            futures = [verification.submit(task, trajectory, fields) for trajectory, fields in responses]
        for response, future in zip(group, futures, strict=True):
            future.add_done_callback(partial(_copy_result, response.scored))

    @property
    def deferred(self) -> Sequence[DeferredResponse]:
        """Responses that are not submitted yet: their group is incomplete."""
        return [response for group in self._deferred.values() for response in group]

    @property
    def unverified(self) -> int:
        """Number of groups that are generated and wait for verdicts."""
        return len(self._generated)

    def newly_verified(self) -> int:
        """Number of groups whose last verdict has arrived since the last call."""
        waiting = [prompt for prompt in self._generated if not all(v.done() for v in self._verdicts[prompt])]
        count = len(self._generated) - len(waiting)
        for prompt in set(self._generated) - set(waiting):
            del self._verdicts[prompt]
        self._generated = waiting
        if count:
            progress()
        return count


def _copy_result(scored: Future[Scored], verified: Future[Scored]) -> None:
    if verified.cancelled():
        scored.cancel()
    elif error := verified.exception():
        scored.set_exception(error)
    else:
        scored.set_result(verified.result())
