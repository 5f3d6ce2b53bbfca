"""Where the tokens of a round come from: single turns, conversations with an environment, or agents.

A source gives the engine its requests and takes what the engine generates. A sample whose tokens are complete goes to
the `SampleAssembler`, which is the same for all sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from rlcli.cluster.watchdog import progress
from rlcli.data.trajectories import Trajectory
from rlcli.environments.finished_conversation import FinishedConversation, Turn
from rlcli.environments.gateway.agent_round import AgentRound
from rlcli.rollout.engine import Engine, GenerationRequest
from rlcli.rollout.in_flight import InFlight, PolicyResponse
from rlcli.rollout.worker.assembler import SampleAssembler
from rlcli.rollout.worker.conversations import Conversations, turn_seed
from rlcli.rollout.worker.sample_request import SampleRequest


class TokenSource(ABC):
    """Requests of one round to the engine. Keys number the samples of the round.

    Workers that share an engine (tensor parallel) each have a source and make the same requests in the same order. Only
    the leader has an assembler, and environments or agents.
    """

    resumes_finished: ClassVar[bool] = False
    """Whether `open` accepts a finished response, which waits for others of its group."""
    is_waiting = False
    """Whether environments or agents have to act before the engine can finish a sample."""

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler | None) -> None:
        self._engine, self._in_flight, self._assembler = engine, in_flight, assembler
        self._requests: dict[int, SampleRequest] = {}

    @abstractmethod
    def open(self, key: int, request: SampleRequest) -> None:
        """Begin a sample, or resume one that was aborted."""

    def advance(self) -> bool:
        """Give the engine what follows from the answers of environments or agents. Returns whether the engine may take
        its next step."""
        return True

    @abstractmethod
    def took(self, drawn: PolicyResponse) -> None:
        """The engine has finished a request."""

    @abstractmethod
    def partial(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        """Samples that are not complete, with their tokens so far. drawn: by key, of the engine's unfinished
        requests."""

    def room(self) -> int:
        """Samples that may be opened now, so that the engine has no free slots."""
        return self._engine.slots - self._engine.unfinished

    @property
    def redrawn(self) -> int:
        """Resumed samples that were generated anew."""
        return 0

    @abstractmethod
    def set_version(self, version: int) -> None:
        """The engine has weights of this policy version."""

    @abstractmethod
    def close(self) -> None:
        """End what is not complete."""

    def _finish(self, key: int, whole: Trajectory, held: FinishedConversation | None = None) -> None:
        request = self._requests.pop(key)
        if self._assembler is not None:
            self._assembler.add(request, whole, held)


class SingleTurns(TokenSource):
    """One response to each prompt."""

    resumes_finished = True

    def open(self, key: int, request: SampleRequest) -> None:
        task, whole = request.task, request.so_far()
        self._requests[key] = request
        if whole.stop_reason is not None:  # it waited for others of its group
            self._finish(key, whole)
            return
        begun = whole.tokens[len(task.tokens) :] if request.is_resumed else None
        self._in_flight.add(
            GenerationRequest(
                key, task.tokens, request.seed, greedy=request.is_greedy, begun=begun, pictures=task.pictures
            )
        )

    def took(self, drawn: PolicyResponse) -> None:
        if self._assembler is None:
            del self._requests[drawn.key]
        else:
            self._finish(drawn.key, drawn.after(self._requests[drawn.key].so_far()))

    def partial(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        for key, tokens in drawn.items():
            request = self._requests[key]
            yield request, tokens.after(request.so_far())

    def set_version(self, version: int) -> None:
        """`InFlight` records the version of each token."""

    def close(self) -> None:
        """The engine has no requests once they are paused."""


class Turns(TokenSource):
    """Samples of several turns: an environment or a program decides what the engine does next.

    This class is the source of workers that follow: they learn the turns from the leader of their engine.
    """

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler | None) -> None:
        super().__init__(engine, in_flight, assembler)
        self._turns: list[Turn] = []

    def open(self, key: int, request: SampleRequest) -> None:
        self._requests[key] = request
        self._begin(key, request)
        self.is_waiting = True

    def advance(self) -> bool:
        """The workers that share an engine add the same turns. The engine does not step while conversations are
        replayed, if what it computes together must not depend on that."""
        events = self._poll()
        if events:
            progress()
        state = [event for event in events if isinstance(event, Turn)], self._others_act, self._holds
        turns, self.is_waiting, holds = self._engine.agree(state)
        self._turns += turns
        if not holds:
            self._add_turns()
        for event in events:
            if isinstance(event, FinishedConversation):
                self._finish(event.key, event.whole, event)
        return not holds

    def took(self, drawn: PolicyResponse) -> None:
        self.is_waiting = True
        self._answer(drawn)

    def partial(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        raise AssertionError("only the leader reports partial samples")

    def set_version(self, version: int) -> None:
        """The leader needs it."""

    def close(self) -> None:
        """The leader ends conversations."""

    def _add_turns(self) -> None:
        """Resumed turns first, as in a run that was not interrupted."""
        turns, self._turns = sorted(self._turns, key=lambda turn: (turn.begun is None, turn.key)), []
        for turn in turns:
            request = self._requests[turn.key]
            self._in_flight.add(
                GenerationRequest(
                    turn.key,
                    turn.tokens,
                    turn_seed(request.seed, turn.number),
                    request.is_greedy,
                    turn.begun,
                    turn.room,
                    conversation=turn.key,
                    pictures=turn.pictures,
                )
            )

    def _begin(self, key: int, request: SampleRequest) -> None:
        """Begin a sample's conversation, or start its agent."""

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        """Turns to generate, and samples that are over, since the last call."""
        return ()

    def _answer(self, drawn: PolicyResponse) -> None:
        """Give a turn to the environment or the agent."""

    @property
    def _others_act(self) -> bool:
        """Whether environments or agents have not answered."""
        return False

    @property
    def _holds(self) -> bool:
        """Whether the engine must wait for them."""
        return False


class ConversationTurns(Turns):
    """Conversations with environments (`Conversations`)."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        assembler: SampleAssembler,
        conversations: Conversations,
        *,
        ordered: bool,
    ) -> None:
        super().__init__(engine, in_flight, assembler)
        self._conversations, self._ordered = conversations, ordered

    def partial(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        for key, whole in self._conversations.so_far(drawn):
            yield self._requests[key], whole

    def room(self) -> int:
        return self._conversations.room(self._engine.slots)

    @property
    def redrawn(self) -> int:
        return self._conversations.redrawn

    def set_version(self, version: int) -> None:
        self._conversations.version = version

    def close(self) -> None:
        self._conversations.close()

    def _begin(self, key: int, request: SampleRequest) -> None:
        self._conversations.open(key, request.task, request.so_far() if request.is_resumed else None)

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        return self._conversations.poll()

    def _answer(self, drawn: PolicyResponse) -> None:
        self._conversations.drew(drawn.key, drawn)

    @property
    def _others_act(self) -> bool:
        return self._conversations.waiting > 0

    @property
    def _holds(self) -> bool:
        return self._ordered and self._conversations.replaying


class AgentTurns(Turns):
    """Programs that ask for the policy's turns (`AgentRound`). They are never interrupted."""

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler, agents: AgentRound) -> None:
        super().__init__(engine, in_flight, assembler)
        self._agents = agents

    def partial(self, drawn: Mapping[int, PolicyResponse]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        raise AssertionError("no agent is interrupted")

    def room(self) -> int:
        return self._agents.room(self._engine.slots)

    def set_version(self, version: int) -> None:
        self._agents.version = version

    def close(self) -> None:
        """No agent is interrupted: a round ends when all have ended."""

    def _begin(self, key: int, request: SampleRequest) -> None:
        assert not request.is_resumed, "no agent is interrupted"
        self._agents.open(key, request.task)

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        return self._agents.poll()

    def _answer(self, drawn: PolicyResponse) -> None:
        self._agents.drew(drawn.key, drawn)

    @property
    def _others_act(self) -> bool:
        return self._agents.waiting > 0
