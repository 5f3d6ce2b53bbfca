"""The conversations of one round: a turn goes to its environment, and the answer is the engine's next request."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.data.messages import PromptTask, sample_seed
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation
from rlcli.environments.environment import Cause, EnvironmentFailed, Failure, Opening, Reply
from rlcli.environments.environment_pool import Environments, row_of
from rlcli.environments.finished_conversation import FinishedConversation, Turn
from rlcli.environments.image_sessions import SeeingSession
from rlcli.errors import ModelError
from rlcli.types import Outcome, Verdict

if TYPE_CHECKING:
    from rlcli.rollout.in_flight import PolicyResponse

TRIES = 2
"""How often a sample's conversation is begun if its environment fails."""
LOSSES = 50
"""How often it is lost with its process for another one's sake, or for none that is known, before it is given up: that
costs none of its tries, but has to end where processes die by themselves."""


@dataclass
class _Talk:
    task: PromptTask
    session: SeeingSession
    record: Trajectory | None = None
    """What an earlier round drew, and the answers to it: set until all of it has been said again."""
    conversation: Conversation | None = None
    failures: int = 0
    """Tries that have failed by themselves."""
    losses: int = 0
    """Tries that were lost with their process."""
    alone: bool = False
    """Whether its environment's process works at one call at a time, because it may have ended one."""


@dataclass
class _Group:
    """The samples of a prompt that converse. prompt, state: of the first one that was opened: its prompt, and what
    `state_of` says of it."""

    talks: int = 0
    prompt: Trajectory | None = None
    state: int = 0


class Conversations:
    """On the rank that leads an engine: `open` one for each sample; `poll` returns what follows the environments'
    answers; `drew` sends a turn to its environment. version: of the weights that the engine has now. ordered: `poll`
    waits for all answers, so that what the engine computes together does not depend on how long environments take.
    waiting: conversations whose environment has not answered.

    What a round breaks off, a later one goes on with: a new session hears the recorded turns again. Where it answers
    something else than before, the conversation is drawn anew; redrawn: how many were.
    """

    def __init__(self, environments: Environments, version: int, *, ordered: bool = False) -> None:
        self.waiting, self.redrawn, self._ordered = 0, 0, ordered
        self._environments, self.version = environments, version
        self._talks: dict[int, _Talk] = {}
        self._replaying = False
        self._groups: dict[int, _Group] = {}
        self._answers: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()

    @property
    def replaying(self) -> bool:
        """Whether an environment hears again what an earlier round drew, or has not answered to the last of it."""
        said = all(talk.record is None for talk in self._talks.values())
        self._replaying = self._replaying and not (said and not self.waiting)
        return self._replaying

    def room(self, slots: int) -> int:
        """How many more to open on an engine of so many slots: those that wait leave theirs to as many others."""
        return 2 * slots - len(self._talks)

    def open(self, key: int, task: PromptTask, record: Trajectory | None = None) -> None:
        """Begin the conversation of the sample `key`, or go on with what `so_far` returned of it."""
        self._talks[key] = _Talk(task, self._environments.session(task.source), record)
        self._groups.setdefault(task.prompt, _Group()).talks += 1
        self._replaying = self._replaying or record is not None
        self._reset(key)

    def drew(self, key: int, drawn: PolicyResponse) -> None:
        """Take a turn from the engine."""
        talk = self._talks[key]
        conversation = talk.conversation
        assert conversation is not None, "the environment has not opened it"
        whole = drawn.after(conversation.trajectory)
        message = conversation.drew(whole, self._environments.text(whole.last_turn.tolist()))
        self._expect(key, talk.session.step(message))

    def poll(self) -> list[Turn | FinishedConversation]:
        """What follows the answers that have come since the last call."""
        answers: list[tuple[int, Future[Any]]] = []
        with contextlib.suppress(queue.Empty):
            while not self._ordered or len(answers) < self.waiting:
                answers.append(self._answers.get(block=self._ordered))
        self.waiting -= len(answers)
        return [one for key, answer in sorted(answers, key=itemgetter(0)) for one in self._answered(key, answer)]

    def so_far(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[int, Trajectory]]:
        """The key and the trajectory so far of each conversation in which the policy has spoken. drawn: of the turns
        that the engine has not finished."""
        for key, talk in self._talks.items():
            whole = talk.record
            if whole is None and talk.conversation is not None:
                whole = talk.conversation.trajectory
                if key in drawn and len(drawn[key].tokens):
                    whole = drawn[key].after(whole)
            if whole is not None and whole.drawn_tokens:
                yield key, whole

    def close(self) -> None:
        """End all conversations."""
        for talk in self._talks.values():
            talk.session.close()
        self._talks.clear()
        self._groups.clear()

    def _reset(self, key: int) -> None:
        talk = self._talks[key]
        self._expect(key, talk.session.reset(row_of(talk.task.source), row_seed(talk.task.source.id)))

    def _expect(self, key: int, answer: Future[Any]) -> None:
        self.waiting += 1
        answer.add_done_callback(lambda done: self._answers.put((key, done)))

    def _answered(self, key: int, answer: Future[Any]) -> list[Turn | FinishedConversation]:
        talk = self._talks[key]
        try:
            conversation = self._taken(talk, answer.result())
        except EnvironmentFailed as error:
            return self._failed(key, error)
        if talk.record is not None:
            return self._replayed(key, conversation, talk.record)
        if conversation.ended:
            return [self._over(key, conversation)]
        whole = conversation.trajectory
        return [Turn(key, whole.branch, conversation.room, whole.turns, pictures=whole.branch_pictures)]

    def _replayed(self, key: int, conversation: Conversation, record: Trajectory) -> list[Turn | FinishedConversation]:
        """Say the next recorded turn again. After the last one, the policy goes on."""
        talk, now = self._talks[key], conversation.trajectory
        count, number = len(now.tokens), now.turns
        same = (record.tokens[:count] == now.tokens).all() if count <= len(record.tokens) else False
        same = same and _same_pictures(record.pictures[: len(now.pictures)], now.pictures)
        if conversation.ended or not same or (record.drawn[:count] != now.drawn).any():
            talk.session.close()
            self._again(key)
            return []
        record = replace(record, pictures=now.pictures)  # equal ones, which the other samples share
        said = record.until_turn(number + 1)
        if len(said.tokens) == len(record.tokens):
            talk.record = None
        if said.stop_reason is not None:
            message = conversation.drew(said, self._environments.text(said.last_turn.tolist()))
            self._expect(key, talk.session.step(message))
            return []
        begun = record.tokens[count:] if len(said.last_turn) else None
        turn = Turn(key, now.branch, conversation.room, number, begun, now.branch_pictures)
        conversation.trajectory = record
        return [turn]

    def _again(self, key: int) -> None:
        """Begin the conversation anew, and draw all of it."""
        talk = self._talks[key]
        self.redrawn += talk.record is not None
        talk.session = self._environments.session(talk.task.source, alone=talk.alone)
        talk.conversation, talk.record = None, None
        self._reset(key)

    def _taken(self, talk: _Talk, answer: Opening | Reply) -> Conversation:
        try:
            if talk.conversation is None:
                assert isinstance(answer, Opening), "reset is answered first"
                talk.conversation = self._environments.conversation(answer)
                self._check_opening(talk.task.prompt, talk.conversation)
            else:
                assert isinstance(answer, Reply), "step is answered later"
                talk.conversation.replied(answer)
        except ModelError as error:
            raise EnvironmentFailed(Failure.PROTOCOL, f"{error.message}; {error.hint}") from error
        return talk.conversation

    def _check_opening(self, prompt: int, conversation: Conversation) -> None:
        """The samples of a group begin alike."""
        group, prompt_of = self._groups[prompt], conversation.trajectory
        if group.prompt is None:
            group.prompt, group.state = prompt_of, conversation.states[0]
        if group.state != conversation.states[0] or not np.array_equal(group.prompt.tokens, prompt_of.tokens):
            raise EnvironmentFailed(Failure.PROTOCOL, "reset returned other messages for the same row and seed")

    def _failed(self, key: int, error: EnvironmentFailed) -> list[Turn | FinishedConversation]:
        """Try once more from the beginning, then give the sample up. What another one caused is no try."""
        talk = self._talks[key]
        talk.session.close()
        if error.cause is Cause.OWN:
            talk.failures += 1
        else:
            talk.losses += 1
            talk.alone = talk.alone or error.cause is Cause.UNKNOWN
        if talk.failures < TRIES and talk.losses < LOSSES:
            self._again(key)
            return []
        verdict = Verdict(0.0, Outcome.ENVIRONMENT, detail=str(error))
        return [self._over(key, talk.conversation, verdict)]

    def _over(
        self, key: int, conversation: Conversation | None, failure: Verdict | None = None
    ) -> FinishedConversation:
        talk = self._talks.pop(key)
        talk.session.close()
        group = self._groups[talk.task.prompt]
        group.talks -= 1
        if not group.talks:  # what it showed may be large
            del self._groups[talk.task.prompt]
        if conversation is not None and failure is None:
            rewards = [reward for _, reward in conversation.rewards]
            facts = {"rewards": rewards, "ended": conversation.ended, "info": dict(conversation.info)}
            fields = {"conversation": [dict(m) for m in conversation.messages], "environment": facts}
            counts = conversation.calls, conversation.failed_calls
            by_turn = tuple(rewards), tuple(conversation.states)
            return FinishedConversation(
                key, conversation.finished(), fields, *counts, None, *by_turn, conversation.copies
            )
        # What it drew is left out of everything, so that only the prompt stays.
        row = Trajectory.of_prompt(np.asarray(talk.task.tokens, np.int32), talk.task.pictures)
        nothing: tuple[Any, Any] = np.zeros(0, np.int32), np.zeros(0, np.float32)
        whole = (group.prompt or row).extended("policy", *nothing, self.version, "stop")
        return FinishedConversation(key, whole, {"environment": {"ended": "failed"}}, 0, 0, failure)


def _same_pictures(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def row_seed(prompt_id: str) -> int:
    """The seed that `reset` gets: always the same for a row, so that a row is the same task in every step."""
    return sample_seed(0, "environment", 0, prompt_id, 0)


def turn_seed(seed: int, number: int) -> int:
    """The seed of a turn, from that of its sample, which is the first one's."""
    return sample_seed(seed, "turn", number, "", 0) if number else seed
