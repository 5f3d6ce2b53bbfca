"""The agents of one engine: programs that request turns of the policy, a limited number at once."""

from __future__ import annotations

import queue
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rlcli.config.schema import RunConfig
from rlcli.environments.chat_messages import EnvironmentRow
from rlcli.environments.environment import EnvironmentFailed
from rlcli.environments.environment_pool import limits_of, row_of
from rlcli.environments.gateway.agent_processes import AgentRun, run_agent, words_of
from rlcli.environments.gateway.gateway_server import Gateway, GenerationAsk
from rlcli.environments.gateway.session_record import Generated
from rlcli.errors import ConfigError
from rlcli.images.image_processor import ImageProcessor
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 32
"""Agents of one engine, unless `environment.processes` is set."""
ANSWERS = frozenset(
    [
        *("answer", "answers", "entry", "gold", "ground_truth", "response", "reward_model"),
        *("solution", "solutions"),
    ]
)
"""Entries of `extra_info` that datasets have the answer in."""


@dataclass(frozen=True)
class AgentTurnRequest:
    """An agent's request for a turn."""

    ask: GenerationAsk
    """The turn to generate."""
    future: Future[Generated]
    """Receives the generated turn; cancelled if the agent gives up."""


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent."""

    run: Future[AgentRun]
    """Its result, or its failure."""


class AgentPool:
    """Starts the programs of `environment.name`; their requests and ends are in the queue `events`.

    tokenizer: with its final chat template. stops: tokens that end a response. thinking: prompts end within an open
    <think>. image_processor: preprocesses images, for a model that takes images. Raises `SetupError` if there is no
    such program.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        stops: Collection[int],
        *,
        thinking: bool = False,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._section = config.environment
        self.at_once = self._section.processes or AT_ONCE
        """Maximum number of programs that run at once."""
        self.events: queue.SimpleQueue[tuple[str, AgentTurnRequest | AgentEnd]] = queue.SimpleQueue()
        """Id of a session, and the event."""
        words_of(self._section.name)
        self._gateway = Gateway(
            tokenizer, stops, limits_of(config), self._submit, thinking=thinking, image_processor=image_processor
        )

    def start(self, prompt: Prompt, version: int) -> str:
        """Start a program on a row; returns the id of its session. version: of the weights."""
        session, section = self._gateway.open(version), self._section
        run = run_agent(
            self._gateway,
            session,
            section.name,
            self._row(prompt),
            deadline_s=section.deadline_s,
            memory_bytes=section.memory_mb << 20,
            variables=section.variables,
        )
        run.add_done_callback(lambda done: self.events.put((session.id, AgentEnd(done))))
        return session.id

    def check(self, prompt: Prompt) -> None:
        """Run the program on a row until it asks for its first turn. Raises `ConfigError` if it asks for none."""
        self.start(prompt, 0)
        _, event = self.events.get()
        if not isinstance(event, AgentEnd):
            return
        try:
            event.run.result()
        except EnvironmentFailed as error:
            raise ConfigError(
                f"environment.name = {self._section.name} asks for no turn on row {prompt.id}: {error}",
                "let it ask OPENAI_BASE_URL with OPENAI_API_KEY, which it gets (docs/gateway.md)",
            ) from error

    def close(self) -> None:
        """End all programs. Idempotent."""
        self._gateway.close()

    def _row(self, prompt: Prompt) -> EnvironmentRow:
        """The row for a program, with the answer only if `environment.ground_truth` is set."""
        row = row_of(prompt, urls=True)
        if not self._section.ground_truth:
            del row["ground_truth"]
            row["extra_info"] = {name: value for name, value in row["extra_info"].items() if name not in ANSWERS}
        return row

    def _submit(self, ask: GenerationAsk) -> Future[Generated]:
        future: Future[Generated] = Future()
        self.events.put((ask.session, AgentTurnRequest(ask, future)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
