"""Checks that the models of a run fit its layout and each other, and the roles of the policy's workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.config.rules import nearest_divisors
from rlcli.config.schema import RunConfig
from rlcli.data.messages import Role
from rlcli.data.prompts.prompt_table import verifiers_of
from rlcli.errors import ConfigError, ModelError
from rlcli.rollout.scheduler.verifier_failures import part_weights
from rlcli.types import Prompt

if TYPE_CHECKING:
    from rlcli.model.io.model_checks import ModelFacts

MOST_LISTED = 5


def check_layout(config: RunConfig, positions: int, heads: int, experts: int) -> int:
    """Tokens of the longest prompt and response. Raises `ConfigError` if the model has fewer positions,
    or other attention heads or experts than it is to divide, or no experts whose routes it is to replay."""
    length, shared = config.max_length, config.rollout.tensor_parallel
    if length > positions:
        raise ConfigError(
            f"{config.longest} = {length} is more than the {positions} positions of {config.model.path}",
            "lower one of them",
        )
    if heads % shared:
        raise ConfigError(
            f"rollout.tensor_parallel = {shared} does not divide the {heads} attention heads of {config.model.path}",
            "give a divisor of it",
        )
    _check_context_parallel(config, config.model.path, heads)
    divided = config.parallel.expert
    if divided > 1 and not experts:
        raise ConfigError(f"parallel.expert = {divided}: {config.model.path} has no experts to divide", "leave it out")
    _check_expert_parallel(config, config.model.path, experts)
    if config.rollout.replay_routes and not experts:
        raise ConfigError(f"rollout.replay_routes: {config.model.path} has no experts", "leave it out")
    return length


def _check_context_parallel(config: RunConfig, path: str, heads: int) -> None:
    """Raise `ConfigError` if the model at `path` has too few attention heads to be divided."""
    if config.parallel.context > heads:
        raise ConfigError(
            f"parallel.context = {config.parallel.context} is more than the {heads} attention heads of {path}, which "
            "it divides",
            f"give at most {heads}",
        )


def _check_expert_parallel(config: RunConfig, path: str, experts: int) -> None:
    """Raise `ConfigError` if the experts of each layer of the model at `path` cannot be divided as they are to be."""
    divided = config.parallel.expert
    if experts % divided:
        raise ConfigError(
            f"parallel.expert = {divided} does not divide the {experts} experts of each layer of {path}",
            f"give {nearest_divisors(math.gcd(experts, config.cluster.workers // config.parallel.replicate), divided)}",
        )


def policy_roles(config: RunConfig, policy: ModelFacts, rows: Sequence[Prompt], evaluates: bool) -> frozenset[Role]:
    """The roles of the policy's workers. Raises `ConfigError` for an algorithm whose parts do not fit together,
    `ModelError` for a critic that cannot be trained, and the errors of `_check_teachers`."""
    from rlcli.algorithms.build import build_algorithm
    from rlcli.launch.algorithm_rules import check_algorithm
    from rlcli.model.io.model_checks import check_model, check_value_model

    algorithm = build_algorithm(**config.algorithm.model_dump())
    check_algorithm(config, algorithm)
    part_weights(config.algorithm.advantage, verifiers_of(rows))
    if policy.image_rule is not None and (
        algorithm.needs_critic or algorithm.needs_process_rewards or algorithm.needs_teacher
    ):
        raise ConfigError(
            "critics, process reward models and teachers do not support images, which the policy reads",
            "give a recipe without them, such as grpo",
        )
    roles: set[Role] = {"policy"}
    if not config.rollout.workers and (evaluates or not config.data.response):
        roles.add("engine")
    critic = config.critic.path or config.model.path
    if algorithm.needs_critic:
        heads, experts = check_value_model(critic, policy.tokenizer_size)
        _check_context_parallel(config, critic, heads)
        _check_expert_parallel(config, critic, 0 if config.critic.workers else experts)
        roles |= set() if config.critic.workers else {"critic"}
    if algorithm.needs_process_rewards:
        process = check_model(critic, key="critic.path")
        _check_context_parallel(config, critic, process.heads)
        _check_expert_parallel(config, critic, process.experts)
        if process.vocab_size < policy.tokenizer_size:  # it reads the policy's tokens
            raise ModelError(
                f"critic.path = '{config.critic.path}': its vocabulary ends at {process.vocab_size - 1}, but the "
                f"policy's tokenizer has ids up to {policy.tokenizer_size - 1}",
                "give a process reward model of the policy's family, or leave critic.path out",
            )
        roles.add("process_reward")
    if algorithm.needs_teacher:
        _check_teachers(config, rows)
        roles |= set() if config.teacher.workers else {"teacher"}
    return frozenset(roles)


def _check_teachers(config: RunConfig, rows: Sequence[Prompt]) -> None:
    """Raise `ModelError` for a teacher that cannot score the policy's tokens, and `ConfigError` for rows without a
    teacher, for a data source that no row has and for a malformed URL."""
    from rlcli.model.io.model_checks import check_teacher
    from rlcli.support.json_link import checked_url
    from rlcli.training.worker.served_teacher import check_served_teacher

    models = config.teacher.models
    for path in dict.fromkeys(model.path for model in config.teacher.held):
        facts = check_teacher(path, config.model.path, config.max_length, config.parallel.context)
        _check_expert_parallel(config, path, 0 if config.teacher.workers else facts.experts)
    for path in dict.fromkeys(model.path for model in models if model.is_served):
        check_served_teacher(checked_url(path), config.model.path, config.max_length, config.teacher.top_k)
    if not any(model.sources for model in models):
        return
    data_sources = sorted({row.data_source for row in rows})
    listed = ", ".join(data_sources[:MOST_LISTED]) + (", …" if len(data_sources) > MOST_LISTED else "")
    for source in (source for model in models for source in model.sources if source not in data_sources):
        raise ConfigError(f"teacher.path: no row has the data source '{source}'", f"the data has {listed}")
    for source in (source for source in data_sources if config.teacher.number_of(source) is None):
        raise ConfigError(
            f"teacher.path: rows of the data source '{source}' have no teacher",
            "name it in a teacher's sources, or give one teacher without sources, which teaches all others",
        )
