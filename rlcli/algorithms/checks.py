"""What is refused before a model is loaded: parts that do not fit together, and functions that fail on a trial."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.named import call, inputs_of, options_of
from rlcli.errors import ConfigError
from rlcli.registry import near

if TYPE_CHECKING:
    from rlcli.algorithms.algorithm import Algorithm

RESPONSE_INPUTS = frozenset({"rewards", "groups", "lengths", "baselines", "parts"})
TOKEN_INPUTS = frozenset(
    {"token_rewards", "values", "process_rewards", "sequence", "lengths", "rewards", "groups", "group_count", "ranks"}
)
LOSS_INPUTS = frozenset(
    {"log_probs", "old_log_probs", "reference_log_probs", "advantages", "sequence", "lengths", "pairs", "selected"}
    | {"weights"}
)
AGGREGATION_INPUTS = frozenset({"values", "sequence", "lengths", "denominators", "group_tokens"})
SELECTION_INPUTS = frozenset({"rewards", "groups", "generator"})
SELECTOR_INPUTS = frozenset({"old_log_probs", "advantages", "noise", "ranks"})
CORRECTION_INPUTS = frozenset(
    {"log_probs", "policy_log_probs", "rollout_log_probs", "advantages", "sequence", "lengths"}
)
REJECTION_INPUTS = CORRECTION_INPUTS - {"policy_log_probs", "advantages"}
"""Before the first update there is no other policy, and there may be no advantages yet."""
KL_INPUTS = frozenset({"log_probs", "reference_log_probs", "old_log_probs"})

POSITIVE = frozenset(
    {"correction_cap", "tau_positive", "tau_negative", "beta", "eta", "alpha", "cov_share"} | {"kl_horizon"}
)
NOT_NEGATIVE = frozenset({"correction_low", "off_policy_threshold", "cov_coef", "process_coef", "accuracy_coef"})
"""Bounds of the options of the functions here; beyond them nothing is learnt, or the contrary."""

_UNUSED = {"scale": "group", "gamma": 1.0, "lam": 1.0}
"""What keys that are options hold where nobody asks for them; the others are unset."""


def check(
    algorithm: Algorithm,
    chosen: Mapping[str, str],
    options: Mapping[str, float],
    named: Mapping[str, Any],
    *,
    tried: bool = True,
) -> None:
    """Raise `ConfigError` for what would fail, or be ignored, in the run.

    chosen: the name of each part, by its key. options, named: the numbers that are given, in the table `options` and as
    keys of their own. tried: whether functions of this package are tried, too.
    """
    level = TOKEN_INPUTS if algorithm.is_token_level else RESPONSE_INPUTS
    _check_inputs("advantage", chosen["advantage"], algorithm.advantage, level)
    _check_inputs("policy loss", chosen["loss"], algorithm.loss, LOSS_INPUTS)
    if algorithm.token_selector is not None:
        _check_inputs("token selection", chosen["loss"], algorithm.token_selector, SELECTOR_INPUTS)
    _check_inputs("selection", chosen["select"], algorithm.select, SELECTION_INPUTS)
    _check_inputs("aggregation", chosen["aggregation"], algorithm.aggregation, AGGREGATION_INPUTS)
    for name, function in zip(chosen["correction"].split("*"), algorithm.correction.functions, strict=True):
        rejecting = function in algorithm.correction.rejecting
        known = REJECTION_INPUTS if rejecting else CORRECTION_INPUTS
        _check_inputs("rollout correction", name.strip(), function, known)
    _check_correction(algorithm, chosen["correction"], chosen["loss"])
    _check_inputs("KL estimator", chosen["kl_estimator"], algorithm.kl_estimator, KL_INPUTS)
    _check_fit(algorithm, chosen["advantage"], chosen["loss"], chosen["select"])
    _check_options(algorithm, options, named)
    if tried or not _is_ours(algorithm.loss):
        _try_loss(algorithm, chosen["loss"])
    if tried or not _is_ours(algorithm.advantage):
        _try_advantage(algorithm, chosen["advantage"])


def loss_vanishes(algorithm: Algorithm) -> bool:
    """Whether the policy loss has no gradient where A = 0, tried on a few tokens."""
    log_probs, loss = _loss_of_four(algorithm, 0.0)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return not bool(gradient.any())


def pulls_by_advantage(algorithm: Algorithm) -> bool:
    """Whether the loss of a policy that has not moved has the gradient −A at each token, tried on a few tokens.

    Not where the loss applies the correction itself, nor where π_old is the engine's, from which π may have moved.
    """
    if algorithm.bypasses or "weights" in inputs_of(algorithm.loss):
        return False
    log_probs, sequence = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True), torch.tensor([0, 0, 1, 1])
    advantages, lengths = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64), torch.tensor([2, 2])
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "reference_log_probs": log_probs.detach(),
        "advantages": advantages,
        "sequence": sequence,
        "lengths": lengths,
        "pairs": torch.tensor([0, 0]),
        "selected": torch.zeros(4, dtype=torch.bool),
    }
    loss = call(algorithm.loss, inputs, algorithm.options).loss.sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return bool(torch.allclose(gradient, -advantages, rtol=0.05))


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith(f"{__package__}.")


def _check_inputs(kind: str, name: str, function: Callable[..., Any], known: frozenset[str]) -> None:
    parameters = inspect.signature(function).parameters
    required = {asked for asked in inputs_of(function) if parameters[asked].default is inspect.Parameter.empty}
    for asked in sorted(required - known):
        raise ConfigError(f"the {kind} '{name}' asks for '{asked}', which it is not given", near(asked, known))


def _check_fit(algorithm: Algorithm, advantage: str, loss: str, select: str) -> None:
    """Refuse parts that do not go together."""
    if "pairs" in inputs_of(algorithm.loss) and not algorithm.selects_pairs:
        raise ConfigError(
            f"algorithm.loss = {loss} compares pairs and algorithm.select = {select} makes none",
            "give algorithm.select = pairs",
        )
    if "pairs" in inputs_of(algorithm.loss) and not _tells_pairs_apart(algorithm):
        raise ConfigError(
            f"algorithm.loss = {loss} knows the better of a pair by the sign of its advantage, which "
            f"algorithm.advantage = {advantage} does not give it",
            "give algorithm.advantage = dr_grpo",
        )
    rewarded = "token_rewards" if algorithm.is_token_level else "rewards"
    if algorithm.kl_in_reward and rewarded not in inputs_of(algorithm.advantage):
        raise ConfigError(
            f"algorithm.advantage = {advantage} does not look at the reward that algorithm.kl_in = reward changes",
            "give kl_in = loss",
        )
    if algorithm.kl_in_reward and not algorithm.is_token_level and select != "all":
        raise ConfigError(
            f"algorithm.select = {select} chooses by rewards that algorithm.kl_in = reward has yet to change",
            "give kl_in = loss, select = all, or an advantage made of token rewards, such as reinforce_pp",
        )


def _check_correction(algorithm: Algorithm, correction: str, loss: str) -> None:
    """Refuse corrections that do not go together, or not with the loss."""
    of = algorithm.correction
    again = [f for f in of.functions if f not in of.rejecting and "log_probs" in inputs_of(f)]
    if algorithm.bypasses and len(again) > 1:
        raise ConfigError(
            f"algorithm.correction = {correction} makes up for the engine twice: with bypass the ratio of the loss is "
            "to the engine's log-probs",
            "join bypass to nothing but rejections and off_policy_mask",
        )
    if algorithm.rejects and algorithm.selects_pairs:
        raise ConfigError(
            f"algorithm.correction = {correction} may reject one response of a pair, and algorithm.loss = {loss} "
            "compares the two",
            "give a correction without rejection, such as token_tis",
        )


def _check_options(algorithm: Algorithm, options: Mapping[str, float], named: Mapping[str, Any]) -> None:
    """Refuse numbers that no part takes, and parts that lack one. named: those that are keys of their own."""
    taken = [option for part in algorithm.parts for option in options_of(part).items()]
    names = {name for name, _ in taken}
    for name, value in named.items():
        unset = _UNUSED.get(name)
        if name not in names and value != unset:
            raise ConfigError(
                f"algorithm.{name} = {value}: none of the chosen functions takes it",
                f"give {'unset' if unset is None else unset}",
            )
    for name, number in options.items():
        if name in named:
            raise ConfigError(f"algorithm.options.{name} is a key of its own", f"give algorithm.{name} = {number:g}")
        if name not in names:
            raise ConfigError(f"algorithm.options.{name}: none of the chosen functions takes it", near(name, names))
        bound = "more than 0" if name in POSITIVE else "0 or more" if name in NOT_NEGATIVE else ""
        if (name in POSITIVE and number <= 0) or (bound and number < 0):
            raise ConfigError(f"algorithm.options.{name} = {number:g}", f"give {bound}")
    low, high = options.get("correction_low", -math.inf), options.get("correction_high", math.inf)
    if low > high:
        raise ConfigError(
            f"algorithm.options.correction_low = {low:g} is more than correction_high = {high:g}", "swap the two"
        )
    for name, default in taken:
        if default is inspect.Parameter.empty and name not in algorithm.options:
            raise ConfigError(f"algorithm.options.{name} is not given", "the chosen functions have no default")


def _try_loss(algorithm: Algorithm, name: str) -> None:
    """Refuse a loss that fails or has no gradient on a few tokens, before a model is loaded: it may be anyone's."""
    try:
        loss = _loss_of_four(algorithm, 1.0)[1]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.loss = {name} fails on four tokens: {why}",
            "it takes and gives float [T], the latter as TokenLoss; see docs/your_own_algorithm.md",
        ) from error
    if not loss.requires_grad:
        raise ConfigError(f"algorithm.loss = {name} has no gradient", "let it depend on log_probs, not detached")


def _try_advantage(algorithm: Algorithm, name: str) -> None:
    """Refuse an advantage of responses that gives anything but a number for each, on a group of two."""
    if algorithm.is_token_level:
        return
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.int64)
    inputs = {"groups": ones, "lengths": ones, "baselines": rewards, "parts": rewards[:, None]}
    try:
        made = algorithm.response_advantages({"rewards": rewards, **inputs})
        assert bool(torch.isfinite(made).all()), f"{made.tolist()} is not finite"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.advantage = {name} fails on two rewards: {why}",
            "it gives a finite number for each reward, float [N]; see docs/your_own_algorithm.md",
        ) from error


def _loss_of_four(algorithm: Algorithm, advantage: float) -> tuple[Tensor, Tensor]:
    """log π of four tokens of two responses, and the sum of their losses."""
    log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.6, -3.0, -1.0, -0.1], dtype=torch.float64)
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "reference_log_probs": old.flip(0),
        "advantages": torch.full_like(old, advantage),
        "sequence": torch.tensor([0, 0, 1, 1]),
        "lengths": torch.tensor([2, 2]),
        "pairs": torch.tensor([0, 0]),
        "selected": torch.tensor([True, False, True, False]),
    }
    return log_probs, call(algorithm.loss, inputs, algorithm.options).loss.sum()


def _tells_pairs_apart(algorithm: Algorithm) -> bool:
    """Whether A > 0 for the best of a group and A < 0 for its worst, tried on two groups of unequal lengths."""
    if algorithm.is_token_level:
        return False
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    inputs = {
        "rewards": rewards,
        "groups": torch.tensor([0, 0, 0, 1, 1]),
        "lengths": torch.tensor([1, 9, 9, 1, 1]),
        "baselines": torch.zeros_like(rewards),
        "parts": -rewards[:, None],  # parts need not rise with the reward
    }
    return bool((algorithm.response_advantages(inputs).sign() == torch.where(rewards > 0, 1.0, -1.0)).all())
