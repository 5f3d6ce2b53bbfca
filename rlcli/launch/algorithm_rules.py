"""Rules between an algorithm's functions, as they declare them where they are registered, and the rest of a run."""

from __future__ import annotations

from rlcli.algorithms import advantages, kl, selection
from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError


def check_algorithm(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` for each rule that `config` breaks, in one line."""
    rules = (*_group(config), _pairs(config, algorithm), _kl(config), _given_responses(config))
    rules = (*rules, *_teacher(config, algorithm))
    if messages := [message for message in rules if message]:
        raise ConfigError("; ".join(messages))
    _check_critic(config, algorithm)


def _group(config: RunConfig) -> list[str]:
    a, samples = config.algorithm, config.rollout.samples_per_prompt
    parts = {f"algorithm.advantage = {a.advantage}": advantages.rules(a.advantage)}
    parts |= {f"algorithm.select = {a.select}": selection.rules(a.select)}
    return [
        f"rollout.samples_per_prompt = {samples}: {part} compares the samples of a group; give 2 or more"
        for part, rules in parts.items()
        if rules.needs_group and samples < 2
    ]


def _pairs(config: RunConfig, algorithm: Algorithm) -> str:
    tokens = config.train.tokens_per_microbatch
    pair = 2 * config.max_length
    if not algorithm.selects_pairs or tokens >= pair:
        return ""
    return (
        f"train.tokens_per_microbatch = {tokens} is less than a pair of samples may hold (algorithm.select = "
        f"{config.algorithm.select}): 2 × ({config.longest}) = {pair}; raise the "
        "first or lower the others"
    )


def _kl(config: RunConfig) -> str:
    a = config.algorithm
    if not kl.rules(a.kl_estimator).only_in_reward or a.kl_coef == 0 or a.kl_in == "reward":
        return ""
    return (
        f"algorithm.kl_estimator = {a.kl_estimator} has an expected gradient of 0 as a term of the loss; use k1+, k2 "
        "or k3"
    )


def _given_responses(config: RunConfig) -> str:
    if not config.data.response or advantages.rules(config.algorithm.advantage).ignores_rewards:
        return ""
    return (
        f"data.response = {config.data.response} trains on given responses, which have no rewards for "
        f"algorithm.advantage = {config.algorithm.advantage}; give one, or start from the recipe sft"
    )


def _teacher(config: RunConfig, algorithm: Algorithm) -> list[str]:
    a, teacher = config.algorithm, config.teacher
    functions = f"algorithm.advantage = {a.advantage} and algorithm.loss = {a.loss}"
    paths = ", ".join(model.path for model in teacher.models)
    if not algorithm.needs_teacher:
        return [f"teacher.path = {paths}, but {functions} use no teacher; start from the recipe opd"] if paths else []
    if not paths:
        return [f"{functions} need a teacher; give teacher.path, a model with this model's vocabulary"]
    if algorithm.needs_teacher_top and not teacher.top_k:
        return [f"teacher.top_k = 0: algorithm.loss = {a.loss} compares the teacher's likeliest tokens; give 16"]
    if teacher.top_k and not algorithm.needs_teacher_top:
        return [
            f"teacher.top_k = {teacher.top_k}, but algorithm.loss = {a.loss} compares sampled tokens only; give 0, or "
            "algorithm.advantage = one and algorithm.loss = opd_forward or opd_reverse"
        ]
    return []


def _check_critic(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse critic settings if there is no critic."""
    advantage, critic = config.algorithm.advantage, config.critic
    if critic.workers and not algorithm.needs_critic:
        raise ConfigError(
            f"critic.workers = {critic.workers}, but algorithm.advantage = {advantage} has no value model to place "
            "there",
            "give 0",
        )
    if not algorithm.needs_critic and not algorithm.needs_process_rewards:
        for name, value, none in (("path", critic.path, '""'), ("warmup_steps", critic.warmup_steps, "0")):
            if value:
                raise ConfigError(
                    f"critic.{name} = {value}, but algorithm.advantage = {advantage} has no critic", f"give {none}"
                )
