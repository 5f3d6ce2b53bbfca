"""Checks of the environments that a run's samples converse with, and its rows if no dataset is given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.prompt_table import JoinedPrompts, verifiers_of
from rlcli.environments.environment import VERIFIER
from rlcli.environments.environment_pool import OF_ROW, Environments, name_of
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.errors import ConfigError
from rlcli.images.image_processor import ImageProcessor
from rlcli.images.image_rule import ImageRule
from rlcli.rewards.expression import parse
from rlcli.rewards.verifier_registry import of_row
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def numbered_rows(config: RunConfig, *, evaluation: bool = False) -> list[Prompt]:
    """Rows for an environment that needs none: each is another seed of `reset`. evaluation: those that follow the ones
    to train on."""
    train = config.environment.rows
    numbers = range(train, train + config.environment.eval_rows) if evaluation else range(train)
    name = config.environment.name.rpartition(":")[2]
    verifier = str(of_row(parse(config.verifier.name).located(), VERIFIER))
    return [
        Prompt(
            id=f"{name}:{number}",
            messages=({"role": "user", "content": str(number)},),  # reset writes the prompt
            data_source=name,
            ability="",
            verifier=verifier,
            ground_truth=VERIFIER,
            extra_info={"index": number},
        )
        for number in numbers
    ]


def check_environments(
    config: RunConfig,
    sets: Sequence[Sequence[Prompt]],
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    *,
    thinking: bool,
    rule: ImageRule | None = None,
) -> tuple[str, ...]:
    """Open a conversation with each environment of the rows, and let the chat template append to it; of a command, let
    it ask for a turn. sets: of rows. rule: image preprocessing of the model, if it takes images. Returns their names.
    Raises `RlcliError` with the problem."""
    section, rows = config.environment, JoinedPrompts(sets)
    if not section.name:
        used = next((v for v in verifiers_of(rows) if any(t.ref == VERIFIER for t in parse(v).terms)), "")
        if used:
            raise ConfigError(
                f"the verifier '{used}' scores conversations, but environment.name is unset",
                "name the environment with --environment (rlcli env list)",
            )
        return ()
    image_processor = None if rule is None else ImageProcessor(rule)
    if section.is_command:
        with AgentPool(config, tokenizer, stops, thinking=thinking, image_processor=image_processor) as agents:
            agents.check(rows[0])
        return (section.name,)
    every = rows if section.name == OF_ROW else rows[:1]
    first: dict[str, Prompt] = {}
    for prompt in every:
        first.setdefault(name_of(section, prompt), prompt)
    with Environments(
        config, first, tokenizer, stops, thinking=thinking, image_processor=image_processor
    ) as environments:
        environments.check(first)
    return tuple(first)
