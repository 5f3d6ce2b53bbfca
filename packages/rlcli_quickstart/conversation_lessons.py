"""Demonstrations of conversations: a scripted player in place of the policy, with the environment of the run.

The environment's processes, the chat template and the mask are those of a run, so a demonstration has the tokens that
the policy would have read and generated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rlcli.config.schema import RunConfig
from rlcli.data.trajectories import Trajectory
from rlcli.environments.conversation import Conversation
from rlcli.environments.environment import Message
from rlcli.environments.environment_pool import Environments, row_of
from rlcli.model.io.tiny_template import TOOL_MARKERS, TOOL_TEMPLATE
from rlcli.rollout.worker.conversations import row_seed
from rlcli.types import Prompt
from rlcli_quickstart.warm_start import IGNORED, Batch, DrawBatches, Lessons, padded

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from transformers import PreTrainedTokenizerBase

VOCABULARY = 640
"""Upper bound. Fewer tokens are enough for all words of a task; a digit stays one token."""
TOKENIZER_CONVERSATIONS = 24
"""Conversations from which the tokenizer is trained."""
MAX_CHARACTERS = 2048
"""Maximum characters of these."""
POOL = 3000
"""Number of demonstrations; more of them do not help at this model size."""


Row = tuple[list[int], list[int]]
"""Token ids and labels."""


class Player(Protocol):
    """Writes the policy's turns in a demonstration."""

    @property
    def steps(self) -> int:
        """Steps of the warm start, after which the model behaves like the player."""
        ...

    def key(self) -> object:
        """Its settings, as JSON."""
        ...

    def turn(self, messages: Sequence[Message], rng: random.Random) -> str:
        """The next turn's text after `messages`, the last of which is from the environment."""
        ...


class Conversations(Lessons):
    """Lessons from a player that converses with the environment of `config` about each of `prompts`."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], player: Player) -> None:
        self.config, self.prompts, self.player, self.steps = config, prompts, player, player.steps

    def key(self) -> object:
        """See `Lessons.key`."""
        rows = [(prompt.id, prompt.messages[-1]["content"]) for prompt in self.prompts]
        section = self.config.environment
        return [
            section.name,
            dict(section.options),
            TOOL_TEMPLATE,
            TOKENIZER_CONVERSATIONS,
            POOL,
            self.player.key(),
            rows,
        ]

    def prepare(self, seed: int) -> tuple[PreTrainedTokenizerBase, DrawBatches]:
        """See `Lessons.prepare`."""
        rng = random.Random(seed)
        sampled = [rng.choice(self.prompts) for _ in range(POOL)]
        tokenizer = tokenizer_of(self.config, sampled[:TOKENIZER_CONVERSATIONS], self.player, rng)
        rows = demonstrations(self.config, tokenizer, sampled, self.player, rng)

        def batches(rng: random.Random, count: int, done: float) -> list[Batch]:
            selected = rng.choices(rows, k=count)
            short = max(len(ids) for ids, _ in selected) * 2 // 3
            halves = (
                [row for row in selected if len(row[0]) <= short],
                [row for row in selected if len(row[0]) > short],
            )
            return [padded(half, tokenizer.pad_token_id) for half in halves if half]

        return tokenizer, batches


def tokenizer_of(
    config: RunConfig, prompts: Sequence[Prompt], player: Player, rng: random.Random
) -> PreTrainedTokenizerBase:
    """A byte-level BPE whose merges make one token of each word in the conversations about `prompts`."""
    from rlcli.model.io.tiny_model import tiny_tokenizer

    character_tokenizer = tiny_tokenizer()
    character_tokenizer.chat_template = TOOL_TEMPLATE
    character_tokenizer.add_tokens(list(TOOL_MARKERS), special_tokens=True)
    # Each character is a token here, so the configured limits in tokens are too low.
    rollout = config.rollout.model_copy(update={"max_response_tokens": MAX_CHARACTERS})
    environment = config.environment.model_copy(update={"turn_tokens": None, "context_tokens": MAX_CHARACTERS})
    wide = config.model_copy(update={"rollout": rollout, "environment": environment})
    texts = [
        character_tokenizer.decode(ids) for ids, _ in demonstrations(wide, character_tokenizer, prompts, player, rng)
    ]
    tokenizer = character_tokenizer.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def demonstrations(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], player: Player, rng: random.Random
) -> list[Row]:
    """A conversation about each prompt. Only the player's tokens have labels."""
    import numpy as np

    def turn(conversation: Conversation) -> Message:
        text = player.turn(conversation.messages, rng)
        ids = np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
        log_probs: Float[np.ndarray, " R"] = np.zeros(len(ids), np.float32)
        return conversation.add_turn(conversation.trajectory.extended("policy", ids, log_probs, 0, "stop"), text)

    with Environments(config, [config.environment.name], tokenizer, [tokenizer.eos_token_id]) as environments:
        sessions = [environments.session(prompt) for prompt in prompts]
        resets = [s.reset(row_of(p), row_seed(p.id)) for s, p in zip(sessions, prompts, strict=True)]
        conversations = [environments.conversation(reset.result()) for reset in resets]
        pairs = list(zip(sessions, conversations, strict=True))
        while in_progress := [(session, conversation) for session, conversation in pairs if conversation.ended is None]:
            answers = [session.step(turn(conversation)) for session, conversation in in_progress]
            for (_, conversation), answer in zip(in_progress, answers, strict=True):
                conversation.add_reply(answer.result())
    return [_row(conversation.finished()) for conversation in conversations]


def _row(trajectory: Trajectory) -> Row:
    import numpy as np

    return trajectory.tokens.tolist(), np.where(trajectory.response_mask, trajectory.tokens, IGNORED).tolist()
