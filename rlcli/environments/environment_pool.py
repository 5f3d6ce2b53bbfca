"""The environments of a run: their processes, and a chat template for the tools of each one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from rlcli.algorithms import selection
from rlcli.config.schema import Environment as Section
from rlcli.config.schema import RunConfig
from rlcli.environments.calls import format_of
from rlcli.environments.chat_messages import EnvironmentRow, Message, ToolSchema
from rlcli.environments.conversation import Conversation, Limits
from rlcli.environments.environment import EnvironmentFailed, Failure, Opening
from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec
from rlcli.environments.image_sessions import ImageSession, SessionImages
from rlcli.environments.message_images import messages_of_row
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.errors import ConfigError
from rlcli.images.image_processor import ImageProcessor
from rlcli.rewards import harmony
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_RESULT: Message = {"role": "tool", "name": "tool", "tool_call_id": "call00001", "content": "x"}
USER_MESSAGE: Message = {"role": "user", "content": "x"}
OF_ROW = "auto"
"""The `environment.name` with which each row names its environment."""


def name_of(section: Section, prompt: Prompt) -> str:
    """The environment of a row. Raises `ConfigError` if the row must name one and does not. It must be an installed
    one: a dataset must not name code."""
    if section.name != OF_ROW:
        return section.name
    name = prompt.extra_info.get("environment")
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(
            f"environment.name = auto, but extra_info.environment of row {prompt.id} is {name!r:.60}",
            "name an installed environment in every row (rlcli env list), or give environment.name",
        )
    return name


def limits_of(config: RunConfig) -> Limits:
    """The limits of a conversation."""
    section, response_tokens = config.environment, config.rollout.max_response_tokens
    samples = 2 if selection.rules(config.algorithm.select).makes_pairs else 1  # that one micro-batch must hold
    return Limits(
        turns=section.turns,
        turn_tokens=section.turn_tokens or response_tokens,
        response_tokens=response_tokens,
        tokens=config.max_length,
        sample_tokens=config.train.tokens_per_microbatch // samples,
        tool_calls=section.tool_calls or Limits.tool_calls,
        reply_chars=section.reply_chars,
        seconds=section.seconds or Limits.seconds,
    )


def row_of(prompt: Prompt, *, urls: bool = False) -> EnvironmentRow:
    """The row for `reset`. urls: images in the form of OpenAI's clients."""
    return {
        "id": prompt.id,
        "messages": messages_of_row(prompt, urls=urls),
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "ability": prompt.ability,
        "extra_info": dict(prompt.extra_info),
    }


class Environments:
    """The environments `names`, each in separate processes.

    tokenizer: with its final chat template. stops: tokens that end a response. thinking: prompts end within an open
    <think>. image_processor: preprocesses images, for a model that takes images. Raises `SetupError` if an environment
    does not load.
    """

    def __init__(
        self,
        config: RunConfig,
        names: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        stops: Collection[int],
        *,
        thinking: bool = False,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.section, self.limits = config.environment, limits_of(config)
        self._images = SessionImages(image_processor, self.limits.tokens)
        self._tokenizer, self._stops, self._thinking = tokenizer, frozenset(stops), thinking
        self._harmony = harmony.speaks({str(token) for token in tokenizer.added_tokens_decoder.values()})
        self._past = config.environment.past
        self._templates: dict[str, TurnTemplate] = {}
        self._hosts: dict[str, EnvironmentHost] = {}
        try:
            for name in names:
                self._hosts[name] = EnvironmentHost(spec_of(config, name))
        except BaseException:
            self.close()
            raise

    def session(self, prompt: Prompt, *, alone: bool = False) -> ImageSession:
        """Open a session of the row's environment. alone: as in `EnvironmentHost.session`."""
        return self._images.session(self._hosts[name_of(self.section, prompt)].session(alone=alone))

    def conversation(self, opening: Opening) -> Conversation:
        """Start a conversation with an environment's first messages. Raises `EnvironmentFailed` if they leave no room
        for a turn, `ConfigError` if the model cannot call the tools."""
        form = format_of(str(self._tokenizer.chat_template)) if opening.tools else ""
        if opening.tools and not form:
            raise ConfigError(
                "the environment offers tools, but the chat template of "
                f"{self._tokenizer.name_or_path or 'the model'} describes no calls of tools that are known here",
                "use a model whose template has tools, such as Qwen2.5, Qwen3 or Llama 3.1",
            )
        if not opening.fits:
            limit = self.limits.tokens
            raise EnvironmentFailed(Failure.PROTOCOL, f"reset showed images of more than {limit} tokens")
        conversation = Conversation(
            template=self._template(opening.tools),
            limits=self.limits,
            opening=opening,
            form=form,
            thinking=self._thinking,
            past=self._past,
            rule=None if self._images.image_processor is None else self._images.image_processor.rule,
        )
        if conversation.ended:
            length = len(conversation.trajectory.tokens)
            raise EnvironmentFailed(
                Failure.PROTOCOL, f"reset returned {length} tokens, which leave no room within {self.limits.tokens}"
            )
        return conversation

    def text(self, tokens: Sequence[int]) -> str:
        """Decode a turn of the policy, without the token that ended it."""
        ids = list(tokens)
        text = str(self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._stops else ids))
        return harmony.plain(text) if self._harmony else text

    def check(self, prompts: Mapping[str, Prompt], seed: int = 0) -> None:
        """Check each environment: start a conversation, and append a message with its template. prompts: environment →
        one of its rows. Raises an `RlcliError`."""
        for name, prompt in prompts.items():
            session = self.session(prompt)
            try:
                conversation = self.conversation(session.reset(row_of(prompt), seed).result())
                conversation.template.append([], [TOOL_RESULT if conversation.form else USER_MESSAGE])
            except EnvironmentFailed as error:
                raise ConfigError(
                    f"environment.name = {name} cannot open a conversation for row {prompt.id}: {error}",
                    f"try it: rlcli env try {name}",
                ) from error
            finally:
                session.close()

    @property
    def pids(self) -> list[int]:
        """Ids of all processes."""
        return [pid for host in self._hosts.values() for pid in host.pids]

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._images.close()
        for host in self._hosts.values():
            with contextlib.suppress(OSError):
                host.close()

    def _template(self, tools: Sequence[ToolSchema]) -> TurnTemplate:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            never = () if self._images.image_processor is None else self._images.image_processor.rule.never
            self._templates[key] = TurnTemplate(self._tokenizer, self._stops, tools, never)
        return self._templates[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spec_of(config: RunConfig, name: str) -> EnvironmentSpec:
    """The specification of the environment `name`, by the config."""
    section, sandbox = config.environment, config.verifier.sandbox
    return EnvironmentSpec(
        name=name,
        options=dict(section.options),
        python=section.python,
        processes=section.processes or 1,
        deadline_s=section.deadline_s,
        memory_bytes=section.memory_mb << 20,
        sandbox="" if sandbox == "auto" else sandbox,
        variables=section.variables,
    )
