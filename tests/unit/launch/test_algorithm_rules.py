"""Rules that functions declare where they are registered: built-in functions and those of plugins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlcli.algorithms import advantages, selection
from rlcli.algorithms.advantages import AdvantageInputs
from rlcli.algorithms.build import build_algorithm
from rlcli.config.load import resolve
from rlcli.errors import ConfigError
from rlcli.launch.algorithm_rules import check_algorithm


@pytest.fixture
def plugin() -> Iterator[None]:
    """Advantages and a selection of a plugin, which declare their requirements."""

    @advantages.register("best_of_group", needs=("rewards",), needs_group=True)
    def best_of_group(inputs: AdvantageInputs) -> Tensor:
        return inputs.rewards - inputs.rewards.max()

    @advantages.register("same_for_all", needs=("rewards",), ignores_rewards=True)
    def same_for_all(inputs: AdvantageInputs) -> Tensor:
        return torch.full_like(inputs.rewards, 0.5)

    @selection.register("first_two", makes_pairs=True)
    def first_two(rewards: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
        return torch.arange(2)

    yield
    for registry, name in ((advantages, "best_of_group"), (advantages, "same_for_all"), (selection, "first_two")):
        del registry.get.__self__._parts[name]  # type: ignore[attr-defined]


def check(recipe: str, *sets: str) -> None:
    config = resolve(recipe, {}, sets).config
    check_algorithm(config, build_algorithm(**config.algorithm.model_dump()))


FORWARD = ("algorithm.advantage=one", "algorithm.loss=opd_forward")
ONE, SMALL = "rollout.samples_per_prompt=1", "train.tokens_per_microbatch=4000"


@pytest.mark.parametrize(
    ("recipe", "sets", "says"),
    [
        ("grpo", [ONE], "samples_per_prompt = 1: algorithm.advantage = grpo compares the samples of a group; give 2"),
        ("prime", [ONE, "dynamic_sampling.keep=all"], "algorithm.advantage = prime compares the samples of a group"),
        ("rft", [ONE, "algorithm.select=pairs"], "algorithm.select = pairs compares the samples of a group"),
        ("grpo", ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "use k1+, k2 or k3"),
        ("dpo", [SMALL], "2 × (data.max_prompt_tokens + rollout.max_response_tokens) = 4096"),
        ("sft", ["algorithm.advantage=remax"], "no rewards for algorithm.advantage = remax; give one"),
        ("grpo", [ONE, "algorithm.advantage=best_of_group"], "advantage = best_of_group compares the samples of a"),
        ("grpo", [SMALL, "algorithm.select=first_two"], "a pair of samples may hold (algorithm.select = first_two)"),
        ("opd", [], "algorithm.advantage = opd and algorithm.loss = ppo need a teacher; give teacher.path"),
        (
            "grpo",
            ["teacher.path=t"],
            "teacher.path = t, but algorithm.advantage = grpo and algorithm.loss = ppo use no",
        ),
        ("opd", ["teacher.path=t", *FORWARD], "teacher.top_k = 0: algorithm.loss = opd_forward compares the teacher's"),
        ("opd", ["teacher.path=t", "teacher.top_k=4"], "teacher.top_k = 4, but algorithm.loss = ppo compares sampled"),
        ("sft", ["teacher.path=t", "algorithm.advantage=opd"], "no rewards for algorithm.advantage = opd; give one"),
        ("grpo", ["critic.workers=1", "algorithm.advantage=best_of_group"], "best_of_group has no value model"),
    ],
)
def test_what_a_function_rules_out_is_refused(recipe: str, sets: list[str], says: str, plugin: None) -> None:
    with pytest.raises(ConfigError) as refused:
        check(recipe, *sets)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("rft", [ONE]),
        ("ppo", [ONE]),
        ("reinforce_pp", ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_in=reward"]),
        ("grpo", ["algorithm.kl_estimator=k1"]),
        ("grpo", ["algorithm.advantage=best_of_group"]),
        ("grpo", [ONE, "algorithm.advantage=same_for_all", "algorithm.loss=gpg"]),
        ("sft", ["algorithm.advantage=same_for_all"]),
        ("sft", []),
        ("dpo", []),
        ("opd", ["teacher.path=t"]),
        ("opd", ["teacher.path=t", "teacher.top_k=4", *FORWARD]),
        ("sft", ["teacher.path=t", "teacher.top_k=4", "algorithm.loss=opd_forward"]),
    ],
)
def test_what_fits_is_accepted(recipe: str, sets: list[str], plugin: None) -> None:
    check(recipe, *sets)


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(TypeError, match="needs_groups"):
        advantages.register("wrong", needs_groups=True)(lambda inputs: inputs)  # type: ignore[call-arg]
