"""Sources of a round's tokens: single turns, conversations with an environment, or agents.

A source adds requests to the engine and handles its outputs. A sample whose tokens are complete goes to the
`SampleAssembler`, which is the same for all sources.
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
from rlcli.rollout.in_flight import InFlight, RequestOutput
from rlcli.rollout.worker.assembler import SampleAssembler
from rlcli.rollout.worker.conversations import Conversations, turn_seed
from rlcli.rollout.worker.sample_request import SampleRequest


class TokenSource(ABC):
    """Requests of one round to the engine. Keys number the samples of the round.

    Workers that share an engine (tensor parallel) each have a source and make the same requests in the same order. Only
    the leader has an assembler, and environments or agents.
    """

    resumes_finished: ClassVar[bool] = False
    """True if `open` accepts a finished response that waits for the rest of its group."""
    is_waiting = False
    """True if a sample needs an answer of its environment or agent before the engine can finish it."""

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler | None) -> None:
        self._engine, self._in_flight, self._assembler = engine, in_flight, assembler
        self._requests: dict[int, SampleRequest] = {}

    @abstractmethod
    def open(self, key: int, request: SampleRequest) -> None:
        """Start a sample, or resume one that was aborted."""

    def advance(self) -> bool:
        """Add the requests that follow from answers of environments or agents. Returns whether the engine may take its
        next step."""
        return True

    @abstractmethod
    def add_output(self, output: RequestOutput) -> None:
        """Handle a request that the engine has finished."""

    @abstractmethod
    def partial(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        """Incomplete samples with their tokens so far. outputs: by key, of the engine's unfinished requests."""

    def room(self) -> int:
        """Number of samples to open now, to fill the engine's slots."""
        return self._engine.slots - self._engine.unfinished

    @property
    def replay_diverged(self) -> int:
        """Resumed samples whose replay diverged, so that they were generated from the start."""
        return 0

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set the policy version of the engine's weights."""

    @abstractmethod
    def close(self) -> None:
        """End incomplete samples."""

    def _finish(self, key: int, trajectory: Trajectory, conversation: FinishedConversation | None = None) -> None:
        request = self._requests.pop(key)
        if self._assembler is not None:
            self._assembler.add(request, trajectory, conversation)


class SingleTurns(TokenSource):
    """One response to each prompt."""

    resumes_finished = True

    def open(self, key: int, request: SampleRequest) -> None:
        task, trajectory = request.task, request.so_far()
        self._requests[key] = request
        if trajectory.stop_reason is not None:  # it waited for the rest of its group
            self._finish(key, trajectory)
            return
        self._in_flight.add(
            GenerationRequest(
                key=key,
                prompt=task.tokens,
                seed=request.seed,
                greedy=request.is_greedy,
                response_prefix=trajectory.tokens[len(task.tokens) :] if request.is_resumed else None,
                images=task.images,
            )
        )

    def add_output(self, output: RequestOutput) -> None:
        if self._assembler is None:
            del self._requests[output.key]
        else:
            self._finish(output.key, output.appended_to(self._requests[output.key].so_far()))

    def partial(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        for key, output in outputs.items():
            request = self._requests[key]
            yield request, output.appended_to(request.so_far())

    def set_version(self, version: int) -> None:
        """`InFlight` records the version of each token."""

    def close(self) -> None:
        """Nothing to end: paused requests are not in the engine."""


class Turns(TokenSource):
    """Samples of several turns, which an environment or a program requests.

    This class itself is the source of workers that do not lead: they receive the turns from the leader of their engine.
    """

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler | None) -> None:
        super().__init__(engine, in_flight, assembler)
        self._turns: list[Turn] = []

    def open(self, key: int, request: SampleRequest) -> None:
        self._requests[key] = request
        self._begin(key, request)
        self.is_waiting = True

    def advance(self) -> bool:
        """Add the same turns on all workers that share an engine. The engine does not step during replays, if its
        batches must not depend on their speed."""
        events = self._poll()
        if events:
            progress()
        new_turns = [event for event in events if isinstance(event, Turn)]
        turns, self.is_waiting, must_wait = self._engine.agree((new_turns, self._awaits_answers, self._must_wait))
        self._turns += turns
        if not must_wait:
            self._add_turns()
        for event in events:
            if isinstance(event, FinishedConversation):
                self._finish(event.key, event.trajectory, event)
        return not must_wait

    def add_output(self, output: RequestOutput) -> None:
        self.is_waiting = True
        self._send_turn(output)

    def partial(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        raise AssertionError("only the leader reports partial samples")

    def set_version(self, version: int) -> None:
        """Only the leader records versions."""

    def close(self) -> None:
        """Only the leader has conversations."""

    def _add_turns(self) -> None:
        """Add turns to the engine: resumed ones first, as in a run that was not interrupted."""
        turns, self._turns = sorted(self._turns, key=lambda turn: (turn.response_prefix is None, turn.key)), []
        for turn in turns:
            request = self._requests[turn.key]
            self._in_flight.add(
                GenerationRequest(
                    key=turn.key,
                    prompt=turn.tokens,
                    seed=turn_seed(request.seed, turn.number),
                    greedy=request.is_greedy,
                    response_prefix=turn.response_prefix,
                    max_tokens=turn.room,
                    conversation=turn.key,
                    images=turn.images,
                )
            )

    def _begin(self, key: int, request: SampleRequest) -> None:
        """Start a sample's conversation, or its agent."""

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        """Turns to generate and finished samples, since the last call."""
        return ()

    def _send_turn(self, output: RequestOutput) -> None:
        """Send a turn to its environment or agent."""

    @property
    def _awaits_answers(self) -> bool:
        """True if environments or agents have not answered."""
        return False

    @property
    def _must_wait(self) -> bool:
        """True if the engine must not step before they answer."""
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

    def partial(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        for key, trajectory in self._conversations.so_far(outputs):
            yield self._requests[key], trajectory

    def room(self) -> int:
        return self._conversations.room(self._engine.slots)

    @property
    def replay_diverged(self) -> int:
        return self._conversations.replay_diverged

    def set_version(self, version: int) -> None:
        self._conversations.version = version

    def close(self) -> None:
        self._conversations.close()

    def _begin(self, key: int, request: SampleRequest) -> None:
        self._conversations.open(key, request.task, request.so_far() if request.is_resumed else None)

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        return self._conversations.poll()

    def _send_turn(self, output: RequestOutput) -> None:
        self._conversations.add_turn(output.key, output)

    @property
    def _awaits_answers(self) -> bool:
        return self._conversations.waiting > 0

    @property
    def _must_wait(self) -> bool:
        return self._ordered and self._conversations.replaying


class AgentTurns(Turns):
    """Programs that request the policy's turns (`AgentRound`). They are never interrupted."""

    def __init__(self, engine: Engine, in_flight: InFlight, assembler: SampleAssembler, agents: AgentRound) -> None:
        super().__init__(engine, in_flight, assembler)
        self._agents = agents

    def partial(self, outputs: Mapping[int, RequestOutput]) -> Iterator[tuple[SampleRequest, Trajectory]]:
        raise AssertionError("no agent is interrupted")

    def room(self) -> int:
        return self._agents.room(self._engine.slots)

    def set_version(self, version: int) -> None:
        self._agents.version = version

    def close(self) -> None:
        """Nothing to end: a round waits until all agents have ended."""

    def _begin(self, key: int, request: SampleRequest) -> None:
        assert not request.is_resumed, "no agent is interrupted"
        self._agents.open(key, request.task)

    def _poll(self) -> Sequence[Turn | FinishedConversation]:
        return self._agents.poll()

    def _send_turn(self, output: RequestOutput) -> None:
        self._agents.add_turn(output.key, output)

    @property
    def _awaits_answers(self) -> bool:
        return self._agents.waiting > 0
