"""The agents of one round: what they ask goes to the engine, and what they have done at their end is a sample."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from rlcli.data.messages import PromptTask
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import OUT_OF_TOKENS, states_of
from rlcli.environments.environment import VERIFIER, EnvironmentFailed, Failure
from rlcli.environments.finished_conversation import FinishedConversation, Turn
from rlcli.environments.gateway.agent_pool import AgentPool, Asked, Over
from rlcli.environments.gateway.agent_processes import AgentRun
from rlcli.environments.gateway.session_record import Generated
from rlcli.rewards.expression import parse
from rlcli.types import Ended, Outcome, Verdict

TRIES = 2
"""How often a sample's agent is started if it fails."""


@dataclass
class _Sample:
    """session: of its agent. asked: its request that waits for the engine. is_thinking: its agent is at work, and has
    asked nothing."""

    task: PromptTask
    session: str = ""
    failures: int = 0
    asked: Asked | None = None
    is_thinking: bool = False


class AgentRound:
    """On the rank that leads an engine: `open` an agent for each sample; `poll` returns the turns that they ask for,
    and the samples whose agents have ended; `drew` answers a request. version: of the weights that draw all turns:
    they do not change while an agent runs.
    ordered: `poll` waits until each agent that runs has asked or ended, so that what the engine computes together does
    not depend on how long agents take.

    The trajectory of a sample has all that its agent drew, branch by branch. No round breaks off: what a program has
    heard cannot be said to it again, so that `rollout.oversample` is refused.
    """

    redrawn = 0

    def __init__(self, agents: AgentPool, version: int, *, ordered: bool = False) -> None:
        self.version, self._agents, self._ordered = version, agents, ordered
        self._samples: dict[int, _Sample] = {}
        self._queued: deque[int] = deque()
        self._keys: dict[str, int] = {}  # session → sample
        self._drawing: dict[int, Asked] = {}  # what the engine works at; it cannot be taken back

    @property
    def waiting(self) -> int:
        """Samples whose agents have to do something before the engine can go on with them."""
        return sum(sample.is_thinking for sample in self._samples.values())

    def room(self, slots: int) -> int:
        """How many more to open on an engine of so many slots."""
        return min(2 * slots, self._agents.at_once) - len(self._samples)

    def open(self, key: int, task: PromptTask, record: Trajectory | None = None) -> None:
        """Begin the sample `key`, once there is room for its agent."""
        assert record is None, "no earlier round broke it off"
        self._samples[key] = _Sample(task)
        self._queued.append(key)
        self._fill()

    def drew(self, key: int, generation: Generated) -> None:
        """Answer the request of the sample `key`."""
        asked, sample = self._drawing.pop(key), self._samples.get(key)
        if asked.future.set_running_or_notify_cancel():
            asked.future.set_result(generation)
        if sample is not None and sample.asked is None and sample.session:
            sample.is_thinking = True

    def poll(self) -> list[Turn | FinishedConversation]:
        """What has come since the last call, in the order of the samples."""
        held: list[FinishedConversation] = []
        with contextlib.suppress(queue.Empty):
            while not self._ordered or self.waiting:
                held += self._took(*self._agents.events.get(block=self._ordered))
        return [*self._turns(), *sorted(held, key=attrgetter("key"))]

    def _turns(self) -> Iterable[Turn]:
        for key, sample in sorted(self._samples.items()):
            if sample.asked is not None and key not in self._drawing:
                asked = self._drawing[key] = sample.asked
                sample.asked = None
                ask = asked.ask
                yield Turn(key, ask.prompt, ask.max_tokens, ask.turn, pictures=ask.pictures)

    def _fill(self) -> None:
        while self._queued and len(self._keys) < self._agents.at_once:
            self._start(self._queued.popleft())

    def _start(self, key: int) -> None:
        sample = self._samples[key]
        sample.session = self._agents.start(sample.task.source, self.version)
        sample.asked, sample.is_thinking = None, True
        self._keys[sample.session] = key

    def _took(self, session: str, event: Asked | Over) -> list[FinishedConversation]:
        key = self._keys.get(session)
        if key is None:  # of an agent that has ended since
            return []
        sample = self._samples[key]
        sample.is_thinking = False
        if isinstance(event, Asked):
            sample.asked = event
            return []
        del self._keys[session]
        sample.session, sample.asked = "", None
        found = self._ended(key, event)
        self._fill()
        return found

    def _ended(self, key: int, event: Over) -> list[FinishedConversation]:
        sample = self._samples[key]
        try:
            run = event.run.result()
            _check_reward(run, sample.task.source.verifier)
        except EnvironmentFailed as error:
            sample.failures += 1
            if sample.failures < TRIES:
                self._start(key)
                return []
            held = self._lost(key, sample.task, error)
        else:
            held = _held(key, run)
        del self._samples[key]
        return [held]

    def _lost(self, key: int, task: PromptTask, error: EnvironmentFailed) -> FinishedConversation:
        """What it drew is left out of everything, so that only the prompt stays."""
        import numpy as np

        empty: tuple[Any, Any] = np.zeros(0, np.int32), np.zeros(0, np.float32)
        prompt = Trajectory.of_prompt(np.asarray(task.tokens, np.int32), task.pictures)
        whole = prompt.extended("policy", *empty, self.version, "stop")
        verdict = Verdict(0.0, Outcome.ENVIRONMENT, detail=str(error))
        return FinishedConversation(key, whole, {"environment": {"ended": "failed"}}, 0, 0, verdict)


def _held(key: int, run: AgentRun) -> FinishedConversation:
    last = run.branches[-1]
    cut: Ended = "turn_tokens" if last.trajectory.stop_reason == "length" else "done"
    ended = run.ended or cut
    joined = Trajectory.joined([branch.trajectory for branch in run.branches])
    whole = replace(joined, stop_reason="length" if ended in OUT_OF_TOKENS else "stop")
    rewards = [] if run.reward is None else [run.reward]
    facts: dict[str, Any] = {"rewards": rewards, "ended": ended, "info": {}}
    fields = {"conversation": [dict(message) for message in last.messages], "environment": facts}
    by_turn = [0.0] * (whole.turns - 1) + [run.reward or 0.0]  # a program posts its reward at the end
    credit = tuple(by_turn), tuple(states_of(whole))
    return FinishedConversation(key, whole, fields, run.calls, run.failed_calls, None, *credit, run.copies)


def _check_reward(run: AgentRun, verifier: str) -> None:
    """A reward that nothing reads, or that is missing, is no reward. Raises `EnvironmentFailed` (PROTOCOL)."""
    reads = any(term.ref == VERIFIER for term in parse(verifier).terms) if verifier else False
    if reads and run.reward is None and run.ended is None:
        detail = f"the agent posted no reward, which the verifier '{verifier}' needs: {run.reward_refused}".rstrip(": ")
        raise EnvironmentFailed(Failure.PROTOCOL, detail)
    if not reads and run.reward is not None:
        raise EnvironmentFailed(
            Failure.PROTOCOL,
            f"the agent posted a reward, which the verifier '{verifier}' does not read: give --verifier {VERIFIER}",
        )
