"""Conversations of one round: a turn goes to its environment, whose answer becomes the engine's next request."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rlcli.data.messages import PromptTask, sample_seed
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation
from rlcli.environments.environment import Cause, EnvironmentFailed, Failure, Opening, Reply
from rlcli.environments.environment_pool import Environments, row_of
from rlcli.environments.finished_conversation import EnvironmentReport, FinishedConversation, RequestFields, Turn
from rlcli.environments.image_sessions import ImageSession
from rlcli.errors import ModelError
from rlcli.types import Outcome, Verdict

if TYPE_CHECKING:
    from rlcli.rollout.in_flight import RequestOutput

TRIES = 2
"""Maximum number of tries of a sample's conversation if its environment fails."""
LOSSES = 50
"""Maximum number of conversations of a sample that are lost with their process because of another session or an unknown
cause. They do not count as tries, but the sample is given up at last if processes keep dying."""

Answer: TypeAlias = "Future[Opening] | Future[Reply]"
"""Future of an environment's answer to `reset` or `step`."""


@dataclass
class ConversationState:
    """State of one sample's conversation."""

    task: PromptTask
    """Its group."""
    session: ImageSession
    """Session of its environment."""
    replay: Trajectory | None = None
    """Trajectory of an earlier round, until all its turns are replayed."""
    conversation: Conversation | None = None
    """The conversation, once the environment has answered `reset`."""
    failures: int = 0
    """Tries that failed because of this session."""
    losses: int = 0
    """Tries that were lost with their process."""
    alone: bool = False
    """True if its environment's process works at one call at a time, because this session may have ended one."""


@dataclass
class _Group:
    """Open conversations of a prompt, which must start equally."""

    conversations: int = 0
    """Number of open conversations."""
    prompt: Trajectory | None = None
    """Prompt of the first one that was opened."""
    state_hash: int = 0
    """`state_of` the messages of that prompt."""


class Conversations:
    """Conversations of one round, on the rank that leads an engine: `open` one for each sample; `add_turn` sends a turn
    to its environment; `poll` returns what follows from the environments' answers.

    A later round resumes interrupted conversations: the recorded turns are replayed to a new session. If it answers
    differently, the replay has diverged, and the conversation is generated from the start.
    """

    def __init__(self, environments: Environments, version: int, *, ordered: bool = False) -> None:
        self.version = version
        """Policy version of the engine."""
        self.waiting = 0
        """Conversations whose environment has not answered."""
        self.replay_diverged = 0
        """Conversations whose replay diverged."""
        self._ordered = ordered  # `poll` waits for all answers: batches do not depend on the speed of environments
        self._environments = environments
        self._states: dict[int, ConversationState] = {}
        self._replaying = False
        self._groups: dict[int, _Group] = {}
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()

    @property
    def replaying(self) -> bool:
        """True if recorded turns are being replayed, or the answer to the last one has not arrived."""
        replayed = all(state.replay is None for state in self._states.values())
        self._replaying = self._replaying and not (replayed and not self.waiting)
        return self._replaying

    def room(self, slots: int) -> int:
        """Number of conversations to open now, on an engine with this many slots: for each one in a slot, another may
        wait for its environment."""
        return 2 * slots - len(self._states)

    def open(self, key: int, task: PromptTask, replay: Trajectory | None = None) -> None:
        """Start the conversation of the sample `key`, or resume it from the trajectory that `so_far` returned."""
        self._states[key] = ConversationState(task, self._environments.session(task.prompt), replay)
        self._groups.setdefault(task.group, _Group()).conversations += 1
        self._replaying = self._replaying or replay is not None
        self._reset(key)

    def add_turn(self, key: int, output: RequestOutput) -> None:
        """Send a turn of the engine to its environment."""
        state = self._states[key]
        conversation = state.conversation
        assert conversation is not None, "the environment has not opened it"
        trajectory = output.appended_to(conversation.trajectory)
        message = conversation.add_turn(trajectory, self._environments.text(trajectory.last_turn.tolist()))
        self._await_answer(key, state.session.step(message))

    def poll(self) -> list[Turn | FinishedConversation]:
        """Turns to generate and finished conversations, from the answers since the last call."""
        answers: list[tuple[int, Answer]] = []
        with contextlib.suppress(queue.Empty):
            while not self._ordered or len(answers) < self.waiting:
                answers.append(self._answers.get(block=self._ordered))
        self.waiting -= len(answers)
        events: list[Turn | FinishedConversation] = []
        for key, answer in sorted(answers, key=itemgetter(0)):
            events += self._handle_answer(key, answer)
        return events

    def so_far(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[int, Trajectory]]:
        """Key and trajectory so far of each conversation with tokens of the policy. outputs: of the turns that the
        engine has not finished."""
        for key, state in self._states.items():
            trajectory = state.replay
            if trajectory is None and state.conversation is not None:
                trajectory = state.conversation.trajectory
                if key in outputs and len(outputs[key].tokens):
                    trajectory = outputs[key].appended_to(trajectory)
            if trajectory is not None and trajectory.response_tokens:
                yield key, trajectory

    def close(self) -> None:
        """End all conversations."""
        for state in self._states.values():
            state.session.close()
        self._states.clear()
        self._groups.clear()

    def _reset(self, key: int) -> None:
        state = self._states[key]
        self._await_answer(key, state.session.reset(row_of(state.task.prompt), row_seed(state.task.prompt.id)))

    def _await_answer(self, key: int, answer: Answer) -> None:
        self.waiting += 1
        answer.add_done_callback(lambda done: self._answers.put((key, answer)))

    def _handle_answer(self, key: int, answer: Answer) -> list[Turn | FinishedConversation]:
        state = self._states[key]
        try:
            conversation = self._apply(state, answer.result())
        except EnvironmentFailed as error:
            return self._retry_or_give_up(key, error)
        if state.replay is not None:
            return self._replay_turn(key, conversation, state.replay)
        if conversation.ended:
            return [self._finish(key, conversation)]
        trajectory = conversation.trajectory
        return [Turn(key, trajectory.branch, conversation.room, trajectory.turns, images=trajectory.branch_images)]

    def _replay_turn(
        self, key: int, conversation: Conversation, recorded: Trajectory
    ) -> list[Turn | FinishedConversation]:
        """Replay the next recorded turn. After the last one, the engine continues."""
        state, current = self._states[key], conversation.trajectory
        count, number = len(current.tokens), current.turns
        equal = count <= len(recorded.tokens) and bool((recorded.tokens[:count] == current.tokens).all())
        equal = equal and _same_images(recorded.images[: len(current.images)], current.images)
        if conversation.ended or not equal or (recorded.response_mask[:count] != current.response_mask).any():
            state.session.close()
            self._restart(key)
            return []
        recorded = replace(recorded, images=current.images)  # equal ones, which the other samples share
        replayed = recorded.until_turn(number + 1)
        if len(replayed.tokens) == len(recorded.tokens):
            state.replay = None
        if replayed.stop_reason is not None:
            message = conversation.add_turn(replayed, self._environments.text(replayed.last_turn.tolist()))
            self._await_answer(key, state.session.step(message))
            return []
        response_prefix = recorded.tokens[count:] if len(replayed.last_turn) else None
        turn = Turn(key, current.branch, conversation.room, number, response_prefix, current.branch_images)
        conversation.trajectory = recorded
        return [turn]

    def _restart(self, key: int) -> None:
        """Restart the conversation without its replay."""
        state = self._states[key]
        self.replay_diverged += state.replay is not None
        state.session = self._environments.session(state.task.prompt, alone=state.alone)
        state.conversation, state.replay = None, None
        self._reset(key)

    def _apply(self, state: ConversationState, answer: Opening | Reply) -> Conversation:
        """Add an environment's answer to its conversation."""
        try:
            if state.conversation is None:
                assert isinstance(answer, Opening), "reset is answered first"
                state.conversation = self._environments.conversation(answer)
                self._check_opening(state.task.group, state.conversation)
            else:
                assert isinstance(answer, Reply), "step is answered later"
                state.conversation.add_reply(answer)
        except ModelError as error:
            raise EnvironmentFailed(Failure.PROTOCOL, f"{error.message}; {error.hint}") from error
        return state.conversation

    def _check_opening(self, prompt: int, conversation: Conversation) -> None:
        """Check that all samples of a group start equally."""
        group, opening, state_hash = self._groups[prompt], conversation.trajectory, conversation.states[0]
        if group.prompt is None:
            group.prompt, group.state_hash = opening, state_hash
        if group.state_hash != state_hash or not np.array_equal(group.prompt.tokens, opening.tokens):
            raise EnvironmentFailed(Failure.PROTOCOL, "reset returned other messages for the same row and seed")

    def _retry_or_give_up(self, key: int, error: EnvironmentFailed) -> list[Turn | FinishedConversation]:
        """Restart a failed conversation, or give the sample up after its tries. A failure that another session caused
        is not counted as a try."""
        state = self._states[key]
        state.session.close()
        if error.cause is Cause.OWN:
            state.failures += 1
        else:
            state.losses += 1
            state.alone = state.alone or error.cause is Cause.UNKNOWN
        if state.failures < TRIES and state.losses < LOSSES:
            self._restart(key)
            return []
        verdict = Verdict(0.0, Outcome.ENVIRONMENT, detail=str(error))
        return [self._finish(key, state.conversation, verdict)]

    def _finish(
        self, key: int, conversation: Conversation | None, failure: Verdict | None = None
    ) -> FinishedConversation:
        state = self._states.pop(key)
        state.session.close()
        group = self._groups[state.task.group]
        group.conversations -= 1
        if not group.conversations:  # its images may be large
            del self._groups[state.task.group]
        if conversation is not None and failure is None:
            assert conversation.ended is not None, "only ended conversations are finished"
            rewards = [reward for _, reward in conversation.rewards]
            report = EnvironmentReport(rewards=rewards, ended=conversation.ended, info=dict(conversation.info))
            messages = [message.copy() for message in conversation.messages]
            return FinishedConversation(
                key=key,
                trajectory=conversation.finished(),
                fields=RequestFields(conversation=messages, environment=report),
                tool_calls=conversation.calls,
                failed_calls=conversation.failed_calls,
                turn_rewards=tuple(rewards),
                turn_states=tuple(conversation.states),
                copies=conversation.copies,
            )
        assert failure is not None, "a conversation ends, or fails with a verdict"
        prompt = group.prompt or Trajectory.of_prompt(np.asarray(state.task.tokens, np.int32), state.task.images)
        return FinishedConversation.failed(key, prompt, self.version, failure)


def _same_images(images: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(images) == len(others) and all(map(np.array_equal, images, others))


def row_seed(prompt_id: str) -> int:
    """The seed of `reset`. It depends on the row alone, so that a row is the same task in every step."""
    return sample_seed(0, "environment", 0, prompt_id, 0)


def turn_seed(seed: int, number: int) -> int:
    """The seed of a turn. The first turn has that of its sample."""
    return sample_seed(seed, "turn", number, "", 0) if number else seed
