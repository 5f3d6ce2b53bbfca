"""Agents of one round: their requests go to the engine, and a finished agent is a sample."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from rlcli.data.messages import PromptTask
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import OUT_OF_TOKENS, states_of
from rlcli.environments.environment import VERIFIER, EnvironmentFailed, Failure
from rlcli.environments.finished_conversation import EnvironmentReport, FinishedConversation, RequestFields, Turn
from rlcli.environments.gateway.agent_pool import AgentEnd, AgentPool, AgentTurnRequest
from rlcli.environments.gateway.agent_processes import AgentRun
from rlcli.environments.gateway.session_record import Generated
from rlcli.rewards.expression import parse
from rlcli.types import Ended, Outcome, Verdict

TRIES = 2
"""Maximum number of starts of a sample's agent if it fails."""


@dataclass
class _Sample:
    """State of one sample's agent."""

    task: PromptTask
    """Its group."""
    session: str = ""
    """Id of the agent's session; empty: no agent runs."""
    failures: int = 0
    """Agents that failed."""
    request: AgentTurnRequest | None = None
    """The agent's request that waits for the engine."""
    is_thinking: bool = False
    """True if the agent runs without a request."""


class AgentRound:
    """Agents of one round, on the rank that leads an engine: `open` an agent for each sample; `poll` returns the turns
    that they request and the samples whose agents have ended; `add_turn` answers a request.

    A sample's trajectory has all turns of its agent, branch by branch. No round is interrupted: a program cannot replay
    its requests, so that `rollout.oversample` is refused.
    """

    def __init__(self, agents: AgentPool, version: int, *, ordered: bool = False) -> None:
        self.version = version
        """Policy version of all turns: the weights do not change while an agent runs."""
        self._agents = agents
        self._ordered = ordered  # `poll` waits for all agents: batches do not depend on their speed
        self._samples: dict[int, _Sample] = {}
        self._queued: deque[int] = deque()
        self._keys: dict[str, int] = {}  # session → sample
        self._generating: dict[int, AgentTurnRequest] = {}  # requests that the engine is generating

    @property
    def waiting(self) -> int:
        """Number of samples whose agents have no request for the engine."""
        return sum(sample.is_thinking for sample in self._samples.values())

    def room(self, slots: int) -> int:
        """Number of samples to open now, on an engine with this many slots."""
        return min(2 * slots, self._agents.at_once) - len(self._samples)

    def open(self, key: int, task: PromptTask) -> None:
        """Start the sample `key`, once there is room for its agent."""
        self._samples[key] = _Sample(task)
        self._queued.append(key)
        self._fill()

    def add_turn(self, key: int, generation: Generated) -> None:
        """Answer the request of the sample `key`."""
        request, sample = self._generating.pop(key), self._samples.get(key)
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(generation)
        if sample is not None and sample.request is None and sample.session:
            sample.is_thinking = True

    def poll(self) -> list[Turn | FinishedConversation]:
        """Turns to generate and finished samples since the last call, in the order of the samples."""
        finished: list[FinishedConversation] = []
        with contextlib.suppress(queue.Empty):
            while not self._ordered or self.waiting:
                finished += self._handle_event(*self._agents.events.get(block=self._ordered))
        return [*self._turns(), *sorted(finished, key=attrgetter("key"))]

    def _turns(self) -> Iterable[Turn]:
        for key, sample in sorted(self._samples.items()):
            if sample.request is not None and key not in self._generating:
                request = self._generating[key] = sample.request
                sample.request = None
                ask = request.ask
                yield Turn(key, ask.prompt, ask.max_tokens, ask.turn, images=ask.images)

    def _fill(self) -> None:
        while self._queued and len(self._keys) < self._agents.at_once:
            self._start(self._queued.popleft())

    def _start(self, key: int) -> None:
        sample = self._samples[key]
        sample.session = self._agents.start(sample.task.prompt, self.version)
        sample.request, sample.is_thinking = None, True
        self._keys[sample.session] = key

    def _handle_event(self, session: str, event: AgentTurnRequest | AgentEnd) -> list[FinishedConversation]:
        key = self._keys.get(session)
        if key is None:  # of an agent that has ended since
            return []
        sample = self._samples[key]
        sample.is_thinking = False
        if isinstance(event, AgentTurnRequest):
            sample.request = event
            return []
        del self._keys[session]
        sample.session, sample.request = "", None
        finished = self._ended(key, event)
        self._fill()
        return finished

    def _ended(self, key: int, event: AgentEnd) -> list[FinishedConversation]:
        sample = self._samples[key]
        try:
            run = event.run.result()
            _check_reward(run, sample.task.prompt.verifier)
        except EnvironmentFailed as error:
            sample.failures += 1
            if sample.failures < TRIES:
                self._start(key)
                return []
            finished = self._lost(key, sample.task, error)
        else:
            finished = _finished_of(key, run)
        del self._samples[key]
        return [finished]

    def _lost(self, key: int, task: PromptTask, error: EnvironmentFailed) -> FinishedConversation:
        """The sample of a failed agent."""
        import numpy as np

        prompt = Trajectory.of_prompt(np.asarray(task.tokens, np.int32), task.images)
        failure = Verdict(0.0, Outcome.ENVIRONMENT, detail=str(error))
        return FinishedConversation.failed(key, prompt, self.version, failure)


def _finished_of(key: int, run: AgentRun) -> FinishedConversation:
    """The sample of an agent that has ended."""
    last = run.branches[-1]
    last_reason: Ended = "turn_tokens" if last.trajectory.stop_reason == "length" else "done"
    ended = run.ended or last_reason
    joined = Trajectory.joined([branch.trajectory for branch in run.branches])
    trajectory = replace(joined, stop_reason="length" if ended in OUT_OF_TOKENS else "stop")
    rewards = [] if run.reward is None else [run.reward]
    report = EnvironmentReport(rewards=rewards, ended=ended, info={})
    messages = [message.copy() for message in last.messages]
    return FinishedConversation(
        key=key,
        trajectory=trajectory,
        fields=RequestFields(conversation=messages, environment=report),
        tool_calls=run.calls,
        failed_calls=run.failed_calls,
        turn_rewards=(*[0.0] * (trajectory.turns - 1), run.reward or 0.0),  # a program posts its reward at the end
        turn_states=tuple(states_of(trajectory)),
        copies=run.copies,
    )


def _check_reward(run: AgentRun, verifier: str) -> None:
    """Raise `EnvironmentFailed` (PROTOCOL) for a reward that the verifier does not read, or that is missing."""
    reads = any(term.ref == VERIFIER for term in parse(verifier).terms) if verifier else False
    if reads and run.reward is None and run.ended is None:
        detail = f"the agent posted no reward, which the verifier '{verifier}' needs: {run.reward_refused}".rstrip(": ")
        raise EnvironmentFailed(Failure.PROTOCOL, detail)
    if not reads and run.reward is not None:
        raise EnvironmentFailed(
            Failure.PROTOCOL,
            f"the agent posted a reward, which the verifier '{verifier}' does not read: give --verifier {VERIFIER}",
        )
