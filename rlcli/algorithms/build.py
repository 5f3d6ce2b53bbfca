"""Builds an algorithm from the names and numbers of a configuration.

Parts that do not fit together, and functions that fail a trial call, are refused before a model is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlcli.algorithms import advantages, kl, losses, selection
from rlcli.algorithms.aggregation import get as get_aggregation
from rlcli.algorithms.algorithm import Algorithm, loss_of_four
from rlcli.algorithms.controllers import EntropyController, kl_controller
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.lazy import torch
from rlcli.algorithms.losses import selectors
from rlcli.algorithms.named import call, inputs_of, options_of
from rlcli.algorithms.plugins import load_file
from rlcli.errors import ConfigError
from rlcli.registry import near

RESPONSE_INPUTS = frozenset({"rewards", "groups", "lengths", "baselines", "parts"})
TURN_INPUTS = frozenset({"turn_rewards", "turn_states", "turns", "groups"})
TOKEN_INPUTS = frozenset(
    {"token_rewards", "values", "process_rewards", "sequence", "lengths", "rewards", "groups", "group_count", "ranks"}
    | {"old_log_probs", "teacher_log_probs"}
)
LOSS_INPUTS = frozenset(
    {"log_probs", "old_log_probs", "reference_log_probs", "advantages", "sequence", "lengths", "pairs", "selected"}
    | {"weights", "teacher_log_probs", "candidate_log_probs", "teacher_top_log_probs"}
)
AGGREGATION_INPUTS = frozenset({"values", "sequence", "lengths", "denominators", "group_tokens"})
SELECTION_INPUTS = frozenset({"rewards", "groups", "generator"})
SELECTOR_INPUTS = frozenset({"old_log_probs", "advantages", "noise", "ranks"})
CORRECTION_INPUTS = frozenset(
    {"log_probs", "policy_log_probs", "rollout_log_probs", "advantages", "sequence", "lengths"}
)
REJECTION_INPUTS = CORRECTION_INPUTS - {"policy_log_probs", "advantages"}
"""Before the first update there is only one policy, and there may be no advantages yet."""
KL_INPUTS = frozenset({"log_probs", "reference_log_probs", "old_log_probs"})

POSITIVE = frozenset(
    {"correction_cap", "tau_positive", "tau_negative", "beta", "eta", "alpha", "cov_share"} | {"kl_horizon"}
)
NOT_NEGATIVE = frozenset(
    {"correction_low", "off_policy_threshold", "cov_coef", "process_coef", "accuracy_coef", "omega"}
)
"""Bounds of the options of the functions here; beyond them nothing, or the opposite, is learned."""

_UNUSED = {"scale": "group", "gamma": 1.0, "lam": 1.0}
"""Values of option keys that no function uses; the other keys are unset then."""


def build_algorithm(
    *,
    code: str = "",
    advantage: str = "grpo",
    scale: str = "group",
    gamma: float = 1.0,
    lam: float = 1.0,
    loss: str = "ppo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    select: str = "all",
    aggregation: str = "token-mean",
    options: Mapping[str, float] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_in: str = "loss",
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
    entropy_target: float | None = None,
    nll_coef: float = 0.0,
    correction: str = "token_tis",
    mismatch_warning: float = 0.05,
    tried: bool = True,
) -> Algorithm:
    """Build an algorithm from the configuration's `algorithm` section. tried: also call the functions on a few tokens;
    if false, call only functions from outside this package, so that torch is not imported.

    Raises `UnknownName` for a part that does not exist, and `ConfigError` for parts that do not fit together.
    """
    if code:
        load_file(code)
    named: dict[str, Any] = {"scale": scale, "gamma": gamma, "lam": lam}
    named |= {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    given = {name: value for name, value in named.items() if value is not None} | dict(options or {})
    loss_function = losses.get(loss)
    selects_tokens = "selected" in inputs_of(loss_function)
    algorithm = Algorithm(
        advantage=advantages.get(advantage),
        loss=loss_function,
        token_selector=selectors.get(loss) if selects_tokens else None,
        select=selection.get(select),
        aggregation=get_aggregation(aggregation),
        correction=Corrections.of(correction),
        kl_estimator=kl.get(kl_estimator),
        options=given,
        kl=call(kl_controller, {"coef": kl_coef, "target": kl_target}, given),
        kl_in_reward=kl_in == "reward" and kl_coef > 0,
        entropy=EntropyController(entropy_coef, entropy_target),
        nll_coef=nll_coef,
        mismatch_warning=mismatch_warning,
        selects_pairs=selection.rules(select).makes_pairs,
    )
    chosen = {"advantage": advantage, "loss": loss, "select": select, "aggregation": aggregation}
    chosen |= {"correction": correction, "kl_estimator": kl_estimator}
    check(algorithm, chosen, options or {}, named, tried=tried)
    return algorithm


def check(
    algorithm: Algorithm,
    chosen: Mapping[str, str],
    options: Mapping[str, float],
    named: Mapping[str, Any],
    *,
    tried: bool = True,
) -> None:
    """Raise `ConfigError` for values that would fail, or be ignored, in the run.

    chosen: the name of each part, by its key. options, named: the given numbers, in the table `options` and as separate
    keys. tried: whether functions of this package are called, too.
    """
    level = TOKEN_INPUTS if algorithm.is_token_level else TURN_INPUTS if algorithm.is_turn_level else RESPONSE_INPUTS
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


def pulls_by_advantage(algorithm: Algorithm) -> bool:
    """Whether the loss of a policy that has not moved has the gradient −A at each token, tested on a few tokens.

    False if the loss applies the correction itself, or if π_old is the engine's, from which π may have moved.
    """
    if algorithm.bypasses or "weights" in inputs_of(algorithm.loss):
        return False
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    log_probs, loss = loss_of_four(algorithm, advantages, moved=False)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return bool(torch.allclose(gradient, -advantages, rtol=0.05))


def _is_ours(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith(f"{__package__}.")


def _check_inputs(kind: str, name: str, function: Callable[..., Any], known: frozenset[str]) -> None:
    parameters = inspect.signature(function).parameters
    required = {asked for asked in inputs_of(function) if parameters[asked].default is inspect.Parameter.empty}
    for asked in sorted(required - known):
        raise ConfigError(f"the {kind} '{name}' asks for '{asked}', which is not available", near(asked, known))


def _check_fit(algorithm: Algorithm, advantage: str, loss: str, select: str) -> None:
    """Refuse parts that do not fit together."""
    if "pairs" in inputs_of(algorithm.loss) and not algorithm.selects_pairs:
        raise ConfigError(
            f"algorithm.loss = {loss} compares pairs and algorithm.select = {select} makes none",
            "give algorithm.select = pairs",
        )
    if "pairs" in inputs_of(algorithm.loss) and not _tells_pairs_apart(algorithm):
        raise ConfigError(
            f"algorithm.loss = {loss} finds the better of a pair by the sign of the advantage, which "
            f"algorithm.advantage = {advantage} does not provide",
            "give algorithm.advantage = dr_grpo",
        )
    rewarded = "token_rewards" if algorithm.is_token_level else "rewards"
    if algorithm.kl_in_reward and rewarded not in inputs_of(algorithm.advantage):
        raise ConfigError(
            f"algorithm.advantage = {advantage} does not use the reward that algorithm.kl_in = reward changes",
            "give kl_in = loss",
        )
    if algorithm.kl_in_reward and not algorithm.is_token_level and select != "all":
        raise ConfigError(
            f"algorithm.select = {select} selects by rewards before algorithm.kl_in = reward changes them",
            "give kl_in = loss, select = all, or an advantage made of token rewards, such as reinforce_pp",
        )


def _check_correction(algorithm: Algorithm, correction: str, loss: str) -> None:
    """Refuse corrections that do not fit together, or do not fit the loss."""
    of = algorithm.correction
    again = [f for f in of.functions if f not in of.rejecting and "log_probs" in inputs_of(f)]
    if algorithm.bypasses and len(again) > 1:
        raise ConfigError(
            f"algorithm.correction = {correction} corrects for the engine twice: with bypass the ratio of the loss "
            "already uses the engine's log-probs",
            "combine bypass only with rejections and off_policy_mask",
        )
    if algorithm.rejects and algorithm.selects_pairs:
        raise ConfigError(
            f"algorithm.correction = {correction} may reject one response of a pair, and algorithm.loss = {loss} "
            "compares the two",
            "give a correction without rejection, such as token_tis",
        )


def _check_options(algorithm: Algorithm, options: Mapping[str, float], named: Mapping[str, Any]) -> None:
    """Refuse numbers that no part takes, and parts that lack one. named: those that are separate keys."""
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
            raise ConfigError(f"algorithm.options.{name} is a separate key", f"give algorithm.{name} = {number:g}")
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
    """Refuse a loss that fails or has no gradient on a few tokens, before a model is loaded: it may be user code."""
    try:
        loss = loss_of_four(algorithm, torch.ones(4, dtype=torch.float64))[1]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.loss = {name} fails on four tokens: {why}",
            "it takes float [T] and returns a TokenLoss of float [T]; see docs/your_own_algorithm.md",
        ) from error
    if not loss.requires_grad:
        raise ConfigError(f"algorithm.loss = {name} has no gradient", "let it depend on log_probs, not detached")


def _try_advantage(algorithm: Algorithm, name: str) -> None:
    """Refuse an advantage that returns anything but one number a response, or a turn, tested on a group of two."""
    if algorithm.is_token_level:
        return
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.int64)
    inputs = {"groups": ones, "lengths": ones, "baselines": rewards, "parts": rewards[:, None], "turns": ones}
    inputs |= {"turn_rewards": rewards[:, None], "turn_states": ones[:, None]}
    try:
        made = algorithm.response_advantages({"rewards": rewards, **inputs})
        assert bool(torch.isfinite(made).all()), f"{made.tolist()} is not finite"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.advantage = {name} fails on two rewards: {why}",
            "it returns a finite number for each reward, float [N]; see docs/your_own_algorithm.md",
        ) from error


def _tells_pairs_apart(algorithm: Algorithm) -> bool:
    """Whether A > 0 for the best of a group and A < 0 for its worst, tested on two groups of unequal lengths."""
    if algorithm.is_token_level or algorithm.is_turn_level:
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
