"""Chat with a model that is loaded in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rlcli.data.messages import sample_seed
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.errors import ModelError, RlcliError
from rlcli.rewards import harmony
from rlcli.rollout.engine import EngineSpec, Generation, GenerationRequest, Sampling, Streaming, engine_named
from rlcli.support.machine.gpus import gpu_available

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcli.rollout.engine import Engine
    from rlcli.types import FinishReason

REPLACEMENT_CHARACTER = "\ufffd"
"""Decoded in place of a character whose last bytes are missing."""


@dataclass(frozen=True)
class Reply:
    """One answer of the model."""

    text: str
    """Its text, without control tokens."""
    tokens: int
    """Number of generated tokens."""
    finish_reason: FinishReason | None
    """None if it was interrupted."""


def local_engine(model: str, stops: Sequence[int], max_length: int, group_id: str) -> Engine:
    """The transformers engine with the weights of `model` (a folder or hub id), for one response at a time. Raises
    `RlcliError`, also for a model that takes images."""
    from transformers.utils import logging

    from rlcli.model.io.model_checks import check_model

    if check_model(model).image_rule is not None:
        raise ModelError(
            f"{model} takes images, and is asked in runs and evaluations alone",
            "rlcli train … --steps 1, then rlcli view RUN, shows what it answers",
        )
    logging.disable_progress_bar()  # of files, not of bytes
    on_gpu = gpu_available()
    return engine_named("transformers")(
        EngineSpec(
            model=model,
            dtype="bfloat16" if on_gpu else "float32",
            device="cuda" if on_gpu else "cpu",
            max_length=max_length,
            max_concurrent=1,
            tensor_parallel=1,
            lora_rank=0,
            weights_follow=False,
            kv_cache_bytes=None,
            gpu_memory_utilization=0.9,
            enforce_eager=True,
            stop_token_ids=tuple(stops),
            group_id=group_id,
        )
    )


@dataclass
class Chat:
    """A chat between a user and a model.

    chat = Chat.load("my-model", Sampling(temperature=0.7, max_tokens=256))
    chat.ask("2+2?", on_text=print).text
    """

    engine: Engine
    """Engine with the model."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer, with its chat template."""
    stops: frozenset[int]
    """Tokens that end a turn."""
    positions: int
    """Maximum number of tokens of a conversation."""
    sampling: Sampling
    """Sampling parameters of all answers."""
    seed: int = 0
    """Seed of the chat."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Messages so far."""

    @classmethod
    def load(cls, model: str, sampling: Sampling, *, seed: int = 0, system: str = "") -> Chat:
        """Load the model in a folder, or of a hub id. Raises `RlcliError` if it cannot be loaded or has no chat
        template."""
        from rlcli.model.io.model_checks import check_model

        positions = check_model(model).max_positions
        tokenizer = chat_template.fix(load_tokenizer(model), {}, None)
        stops = chat_template.stop_tokens(tokenizer, model, ())
        engine = local_engine(model, tuple(stops), positions, "chat")
        chat = cls(engine, tokenizer, frozenset(stops), positions, sampling, seed)
        chat.restart(system)
        return chat

    def restart(self, system: str = "") -> None:
        """Clear the conversation. system: text of the new system message; empty: none."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, on_text: Callable[[str], None] = lambda text: None) -> Reply:
        """Add a message of the user, and generate the model's answer; Ctrl-C ends it.

        on_text: called with each piece of the answer as it is generated, or with the complete answer if the engine does
        not stream. Raises `RlcliError` if the conversation is too long; then it is unchanged.
        """
        import numpy as np

        messages = [*self.messages, {"role": "user", "content": question}]
        text = chat_template.render(self.tokenizer, messages)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RlcliError("the model's tokenizer makes no token of the conversation", "ask something else")
        if len(ids) >= self.positions:
            raise RlcliError(
                f"the conversation has {len(ids)} tokens, and the model takes {self.positions}",
                "begin a new one, or ask less",
            )
        seed = sample_seed(self.seed, "chat", len(messages), "", 0)
        generation = self._generate(GenerationRequest(0, np.asarray(ids, np.int32), seed), on_text)
        tokens = generation.tokens.tolist()
        reply = Reply(self._text(tokens), len(tokens), generation.finish_reason)
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    def _generate(self, request: GenerationRequest, on_text: Callable[[str], None]) -> Generation:
        import numpy as np

        engine, shown = self.engine, ""

        def show(tokens: Sequence[int], *, last: bool = False) -> None:
            nonlocal shown
            text = self._text(tokens)
            if text.startswith(shown) and (last or not text.endswith(REPLACEMENT_CHARACTER)):
                on_text(text[len(shown) :])
                shown = text

        engine.begin(self.sampling)
        engine.add(request)
        done: list[Generation] = []
        try:
            while engine.unfinished:
                done += engine.step()
                if not done and isinstance(engine, Streaming):
                    show(engine.so_far(request.key))
        except KeyboardInterrupt:
            done += engine.abort()
        if not done:  # interrupted as it ended
            done.append(Generation(request.key, np.zeros(0, np.int32), np.zeros(0, np.float32), None))
        show(done[0].tokens.tolist(), last=True)
        return done[0]

    @cached_property
    def _speaks_harmony(self) -> bool:
        return harmony.speaks(self.tokenizer.get_vocab())

    def _text(self, tokens: Sequence[int]) -> str:
        """Decode a turn, without the token that ends it and other control tokens."""
        content = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        if self._speaks_harmony:
            return harmony.plain(self.tokenizer.decode(content, clean_up_tokenization_spaces=False))
        text: str = self.tokenizer.decode(content, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
