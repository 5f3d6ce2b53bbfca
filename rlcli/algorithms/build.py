"""Builds an algorithm from the names and numbers of a configuration.

Parts that do not fit together, and functions that fail a trial call, are refused before a model is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

from rlcli.algorithms import advantages, kl, losses, selection
from rlcli.algorithms import aggregation as aggregations
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.algorithm import Algorithm, trial_inputs, trial_loss
from rlcli.algorithms.controllers import EntropyController, kl_controller
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.function_registry import Part, chosen_options, options_of
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.lazy import torch
from rlcli.algorithms.losses import selectors
from rlcli.algorithms.plugins import load_file
from rlcli.errors import ConfigError, RlcliError
from rlcli.registry import near

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
    trial_calls: bool = True,
) -> Algorithm:
    """Build an algorithm from the configuration's `algorithm` section. trial_calls: also call the functions on a few
    tokens; if false, call only functions from outside this package, so that torch is not imported.

    Raises `UnknownName` for a part that does not exist, and `ConfigError` for parts that do not fit together.
    """
    if code:
        load_file(code)
    separate_keys: dict[str, object] = {"scale": scale, "gamma": gamma, "lam": lam}
    separate_keys |= {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    values = {name: value for name, value in separate_keys.items() if value is not None} | dict(options or {})
    loss_part = losses.part(loss, values)
    algorithm = Algorithm(
        advantage=advantages.part(advantage, values),
        loss=loss_part,
        token_selector=selectors.part(loss, values) if "selected" in loss_part.needs else None,
        select=selection.part(select, values),
        aggregation=aggregations.part(aggregation, values),
        correction=Corrections.of(correction, values),
        kl_estimator=kl.part(kl_estimator, values),
        options=values,
        kl=kl_controller(kl_coef, kl_target, **chosen_options(kl_controller, options or {})),
        kl_in_reward=kl_in == "reward" and kl_coef > 0,
        entropy=EntropyController(entropy_coef, entropy_target),
        nll_coef=nll_coef,
        mismatch_warning=mismatch_warning,
        selects_pairs=selection.rules(select).makes_pairs,
    )
    part_names = {"advantage": advantage, "loss": loss, "select": select, "aggregation": aggregation}
    part_names |= {"correction": correction, "kl_estimator": kl_estimator}
    check(algorithm, part_names, options or {}, separate_keys, trial_calls=trial_calls)
    return algorithm


def check(
    algorithm: Algorithm,
    part_names: Mapping[str, str],
    options: Mapping[str, float],
    separate_keys: Mapping[str, object],
    *,
    trial_calls: bool = True,
) -> None:
    """Raise `ConfigError` for values that would fail, or be ignored, in the run.

    part_names: the name of each part, by its key. options: the table `options`. separate_keys: values of the keys that
    are not in that table. trial_calls: also call functions of this package.
    """
    _check_correction(algorithm, part_names["correction"], part_names["loss"])
    _check_fit(algorithm, part_names["advantage"], part_names["loss"], part_names["select"])
    _check_options(algorithm, options, separate_keys)
    if trial_calls or not _is_ours(algorithm.loss):
        _try_loss(algorithm, part_names["loss"])
    if not _is_ours(algorithm.advantage) or (trial_calls and not algorithm.is_token_level):
        _try_advantage(algorithm, part_names["advantage"])
    for part in (algorithm.aggregation, algorithm.kl_estimator, *algorithm.correction.parts):
        if not _is_ours(part):
            _try_on_tokens(part, takes_values=part is algorithm.aggregation)


def is_weighted_by_advantage(algorithm: Algorithm) -> bool:
    """True if the loss of a policy that has not moved has the gradient −A at each token, tested on a few tokens.

    False if the loss applies the correction itself, or if π_old is the engine's, from which π may have moved.
    """
    if algorithm.bypasses or "weights" in algorithm.loss.needs:
        return False
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    log_probs, loss = trial_loss(algorithm, advantages, moved=False)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return bool(torch.allclose(gradient, -advantages, rtol=0.05))


def _is_ours(part: Part[object]) -> bool:
    return part.function.__module__.startswith(f"{__package__}.")


def _check_fit(algorithm: Algorithm, advantage: str, loss: str, select: str) -> None:
    """Refuse parts that do not fit together."""
    if "pairs" in algorithm.loss.needs and not algorithm.selects_pairs:
        raise ConfigError(
            f"algorithm.loss = {loss} compares pairs and algorithm.select = {select} makes none",
            "give algorithm.select = pairs",
        )
    if "pairs" in algorithm.loss.needs and not _advantage_orders_pairs(algorithm):
        raise ConfigError(
            f"algorithm.loss = {loss} finds the better of a pair by the sign of the advantage, which "
            f"algorithm.advantage = {advantage} does not provide",
            "give algorithm.advantage = dr_grpo",
        )
    rewarded = "token_rewards" if algorithm.is_token_level else "rewards"
    if algorithm.kl_in_reward and rewarded not in algorithm.advantage.needs:
        raise ConfigError(
            f"algorithm.advantage = {advantage} does not use the reward that algorithm.kl_in = reward changes",
            "give kl_in = loss",
        )
    if algorithm.kl_in_reward and "part_weights" in algorithm.advantage.needs:
        raise ConfigError(
            f"algorithm.advantage = {advantage} weighs the parts of a reward, which algorithm.kl_in = reward does not "
            "change",
            "give kl_in = loss",
        )
    if algorithm.kl_in_reward and not algorithm.is_token_level and select != "all":
        raise ConfigError(
            f"algorithm.select = {select} selects by rewards before algorithm.kl_in = reward changes them",
            "give kl_in = loss, select = all, or an advantage made of token rewards, such as reinforce_pp",
        )


def _check_correction(algorithm: Algorithm, correction: str, loss: str) -> None:
    """Refuse corrections that do not fit together, or do not fit the loss."""
    corrections = algorithm.correction
    duplicates = [part for part in corrections.parts if not part.rules.rejects and "old_log_probs" in part.needs]
    if algorithm.bypasses and len(duplicates) > 1:
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


def _check_options(algorithm: Algorithm, options: Mapping[str, float], separate_keys: Mapping[str, object]) -> None:
    """Refuse numbers that no part takes, and parts that lack one. separate_keys: options that are separate keys."""
    accepted = [option for function in algorithm.functions for option in options_of(function).items()]
    names = {name for name, _ in accepted}
    for name, value in separate_keys.items():
        unset = _UNUSED.get(name)
        if name not in names and value != unset:
            raise ConfigError(
                f"algorithm.{name} = {value}: none of the chosen functions takes it",
                f"give {'unset' if unset is None else unset}",
            )
    for name, number in options.items():
        if name in separate_keys:
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
    for name, default in accepted:
        if default is inspect.Parameter.empty and name not in algorithm.options:
            raise ConfigError(f"algorithm.options.{name} is not given", "the chosen functions have no default")


def _try_loss(algorithm: Algorithm, name: str) -> None:
    """Refuse a loss that fails or has no gradient on a few tokens, before a model is loaded: it may be user code."""
    try:
        loss = trial_loss(algorithm, torch.ones(4, dtype=torch.float64))[1]
    except RlcliError:
        raise  # it names the column that is not declared
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.loss = {name} fails on four tokens: {why}",
            "it takes LossInputs and returns a TokenLoss of float [R]; see docs/your_own_algorithm.md",
        ) from error
    if not loss.requires_grad:
        raise ConfigError(f"algorithm.loss = {name} has no gradient", "let it depend on log_probs, not detached")


def _try_advantage(algorithm: Algorithm, name: str) -> None:
    """Refuse an advantage that returns anything but one finite number a response, turn or token, tested on a group of
    two responses of one token."""
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.int64)
    inputs = AdvantageInputs(
        rewards=rewards,
        groups=ones - 1,
        lengths=ones,
        baselines=rewards,
        parts=rewards[:, None],
        part_weights=[1.0],
        turns=ones,
        turn_rewards=rewards[:, None],
        turn_states=ones[:, None],
        token_rewards=rewards,
        values=rewards / 2,
        process_rewards=rewards,
        old_log_probs=rewards - 1.0,
        teacher_log_probs=rewards - 2.0,
        sequence=torch.arange(2),
        group_count=1,
    )
    try:
        if algorithm.is_token_level:
            result = algorithm.token_advantages(inputs).advantages
            assert result.shape == rewards.shape, f"{tuple(result.shape)} advantages of {tuple(rewards.shape)} tokens"
        else:
            result = algorithm.response_advantages(inputs)
        assert bool(torch.isfinite(result).all()), f"{result.tolist()} is not finite"
    except RlcliError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.advantage = {name} fails on two rewards: {why}",
            "it returns a finite number for each of them; see docs/your_own_algorithm.md",
        ) from error


def _try_on_tokens(part: Part[object], *, takes_values: bool) -> None:
    """Refuse a KL estimate, a correction or, with takes_values, an aggregation that fails on a few tokens."""
    inputs = trial_inputs(torch.ones(4, dtype=torch.float64))
    try:
        if takes_values:
            part(inputs.advantages, inputs, Denominators(tokens=4, sequences=2, max_length=2))
        else:
            part(inputs)
    except RlcliError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{part.title} fails on four tokens: {type(error).__name__}: {error}", "see docs/your_own_algorithm.md"
        ) from error


def _advantage_orders_pairs(algorithm: Algorithm) -> bool:
    """True if A > 0 for the best of a group and A < 0 for its worst, tested on two groups of unequal lengths."""
    if algorithm.is_token_level or algorithm.is_turn_level:
        return False
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=rewards,
        groups=torch.tensor([0, 0, 0, 1, 1]),
        lengths=torch.tensor([1, 9, 9, 1, 1]),
        baselines=torch.zeros_like(rewards),
        parts=-rewards[:, None],  # parts need not rise with the reward
        part_weights=[1.0],
    )
    return bool((algorithm.response_advantages(inputs).sign() == torch.where(rewards > 0, 1.0, -1.0)).all())
