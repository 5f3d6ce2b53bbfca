"""Demonstrations of conversations: a scripted player in the place of the policy, with the run's own environment.

The environment's processes, the chat template and the mask are those of a run, so a demonstration has the tokens that
the policy would have seen and drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlcli.config.schema import RunConfig
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation
from rlcli.environments.environment import Message
from rlcli.environments.environment_pool import Environments, row_of
from rlcli.model.io.tiny_template import TOOL_MARKERS, TOOL_TEMPLATE
from rlcli.rollout.worker.conversations import row_seed
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, Lessons, padded

VOCABULARY = 640
"""Upper bound. Fewer tokens are enough for all words of a task; a digit stays one token."""
READ = 24
"""Conversations whose words become tokens."""
LETTERS = 2048
"""Longest of these, in characters."""
POOL = 3000
"""Different conversations to demonstrate; further ones add nothing at this size."""


Row = tuple[list[int], list[int]]
"""Token ids and labels."""


class Player(Protocol):
    """Writes the policy's turns in a demonstration. steps: of the warm start, until the model does it as well."""

    @property
    def steps(self) -> int: ...

    def key(self) -> Any:
        """Its settings, as JSON."""
        ...

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
        """The next turn's text after `messages`, the last of which is of the environment."""
        ...


class Conversations(Lessons):
    """Lessons from a player that converses with the environment of `config` about each of `prompts`."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], player: Player) -> None:
        self.config, self.prompts, self.player, self.steps = config, prompts, player, player.steps

    def key(self) -> Any:
        rows = [(prompt.id, prompt.messages[-1]["content"]) for prompt in self.prompts]
        section = self.config.environment
        return [section.name, dict(section.options), TOOL_TEMPLATE, READ, POOL, self.player.key(), rows]

    def prepare(self, seed: int) -> tuple[Any, Callable[[random.Random, int, float], list[Batch]]]:
        rng = random.Random(seed)
        drawn = [rng.choice(self.prompts) for _ in range(POOL)]
        tokenizer = tokenizer_of(self.config, drawn[:READ], self.player, rng)
        rows = demonstrations(self.config, tokenizer, drawn, self.player, rng)

        def batches(rng: random.Random, count: int, done: float) -> list[Batch]:
            drawn = rng.choices(rows, k=count)
            short = max(len(ids) for ids, _ in drawn) * 2 // 3
            halves = [row for row in drawn if len(row[0]) <= short], [row for row in drawn if len(row[0]) > short]
            return [padded(half, tokenizer.pad_token_id) for half in halves if half]

        return tokenizer, batches


def tokenizer_of(config: RunConfig, prompts: Sequence[Prompt], player: Player, rng: random.Random) -> Any:
    """A byte-level BPE whose merges make one token of each word in the conversations about `prompts`."""
    from rlcli.model.io.tiny_model import tiny_tokenizer

    letters = tiny_tokenizer()
    letters.chat_template = TOOL_TEMPLATE
    letters.add_tokens(list(TOOL_MARKERS), special_tokens=True)
    # A letter is a token here, so the limits in tokens are too low.
    rollout = config.rollout.model_copy(update={"max_response_tokens": LETTERS})
    environment = config.environment.model_copy(update={"turn_tokens": None, "context_tokens": LETTERS})
    wide = config.model_copy(update={"rollout": rollout, "environment": environment})
    texts = [letters.decode(ids) for ids, _ in demonstrations(wide, letters, prompts, player, rng)]
    tokenizer = letters.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def demonstrations(
    config: RunConfig, tokenizer: Any, prompts: Sequence[Prompt], player: Player, rng: random.Random
) -> list[Row]:
    """A conversation about each prompt. The labels are the player's tokens alone."""
    import numpy as np

    def turn(conversation: Conversation) -> Message:
        text = player.turn(conversation.messages, rng)
        ids = np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
        log_probs: np.ndarray = np.zeros(len(ids), np.float32)
        return conversation.add_turn(conversation.trajectory.extended("policy", ids, log_probs, 0, "stop"), text)

    with Environments(config, [config.environment.name], tokenizer, [tokenizer.eos_token_id]) as environments:
        sessions = [environments.session(prompt) for prompt in prompts]
        opened = [s.reset(row_of(p), row_seed(p.id)) for s, p in zip(sessions, prompts, strict=True)]
        held = [environments.conversation(opening.result()) for opening in opened]
        while open_ := [(session, one) for session, one in zip(sessions, held, strict=True) if one.ended is None]:
            answers = [session.step(turn(one)) for session, one in open_]
            for (_, one), answer in zip(open_, answers, strict=True):
                one.add_reply(answer.result())
    return [_row(one.finished()) for one in held]


def _row(found: Trajectory) -> Row:
    import numpy as np

    return found.tokens.tolist(), np.where(found.drawn, found.tokens, IGNORED).tolist()
