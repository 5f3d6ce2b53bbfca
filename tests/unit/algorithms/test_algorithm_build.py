"""Building an algorithm: valid combinations of parts, their requirements on the trainer, and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcli.algorithms import advantages, aggregation, correction, kl, losses, selection
from rlcli.algorithms.advantages import TokenAdvantages
from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.inputs import AdvantageInputs, LossInputs
from rlcli.algorithms.losses import TokenLoss
from rlcli.algorithms.ranks import ALONE, Ranks
from rlcli.config.schema import Algorithm as Section
from rlcli.errors import ConfigError, RlcliError, UnknownName

Register = Callable[..., None]


def build(**changes: Any) -> Algorithm:
    """The algorithm of the configuration's defaults, with some keys changed."""
    return build_algorithm(**(Section().model_dump() | changes))


@pytest.fixture
def register(forget_algorithms: None) -> Register:
    """Offers a function by name for the length of a test."""

    def register(kind: Any, name: str, function: Callable[..., Any], **declared: Any) -> None:
        kind.register(name, **declared)(function)

    return register


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert build_algorithm() == build()


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("advantage", "advantage"),
        ("loss", "policy loss"),
        ("select", "selection"),
        ("aggregation", "aggregation"),
        ("correction", "rollout correction"),
        ("kl_estimator", "KL estimator"),
    ],
)
def test_every_part_is_looked_up_by_name(key: str, kind: str) -> None:
    with pytest.raises(UnknownName, match=f"no {kind} is called 'nonesuch'; "):
        build(**{key: "nonesuch"})


def test_near_names_are_offered() -> None:
    with pytest.raises(UnknownName, match="no advantage is called 'grop'; did you mean grpo"):
        build(advantage="grop")


def test_every_advantage_and_loss_can_be_built_with_every_aggregation() -> None:
    for advantage in advantages.names():
        assert build(advantage=advantage).advantage.function is advantages.get(advantage)
    for loss in losses.names():
        for name in aggregation.names():
            select = "pairs" if loss == "dpo" else "all"
            options = {"beta": 0.5} if loss in ("dro", "dpo") else {}
            assert build(loss=loss, aggregation=name, select=select, options=options).loss.function is losses.get(loss)


def test_each_advantage_says_what_it_needs() -> None:
    needs = {
        name
        for name in advantages.names()
        if build(advantage=name).needs_critic
        or build(advantage=name).needs_process_rewards
        or build(advantage=name).needs_baselines
    }
    assert needs == {"gae", "vapo", "prime", "remax"}
    assert build(advantage="gae").needs_critic
    assert build(advantage="vapo").needs_critic
    assert build(advantage="prime").needs_process_rewards
    assert not build(advantage="prime").needs_critic
    assert build(advantage="remax").needs_baselines
    token_level = {name for name in advantages.names() if build(advantage=name).is_token_level}
    assert token_level == {"gae", "vapo", "prime", "reinforce_pp", "opd"}


def test_kl_process_rewards_and_reference_losses_need_a_reference() -> None:
    assert not build().needs_reference
    assert build(kl_coef=0.1).needs_reference
    assert build(kl_coef=0.1, kl_in="reward").needs_reference
    assert build(advantage="prime").needs_reference
    assert build(loss="dpo", select="pairs").needs_reference


def test_what_needs_old_log_probs() -> None:
    assert [build().needs_old_log_probs(updates) for updates in (1, 2, 4)] == [False, True, True]
    assert not build(kl_coef=0.1).needs_old_log_probs(1)
    assert build(kl_coef=0.1, kl_in="reward").needs_old_log_probs(1)
    assert build(loss="kl_cov").needs_old_log_probs(1)


def test_advantages_are_known_before_tokens_when_rewards_alone_make_them() -> None:
    assert build().advantages_before_tokens
    assert build(kl_in="reward").advantages_before_tokens  # without a coefficient there is no KL
    assert not build(kl_in="reward", kl_coef=0.1).advantages_before_tokens
    assert not build(advantage="reinforce_pp").advantages_before_tokens


def test_coefficients_are_handed_to_their_controllers() -> None:
    algorithm = build(kl_coef=0.1, kl_target=0.05, entropy_coef=0.01, entropy_target=0.2, mismatch_warning=0.3)
    assert (algorithm.kl.coef, algorithm.kl.target) == (0.1, 0.05)
    assert (algorithm.entropy.coef, algorithm.entropy.target) == (0.01, 0.2)
    assert algorithm.mismatch_warning == 0.3


REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3]), torch.tensor([0, 1, 0, 1, 0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_permuting_responses_permutes_their_advantages(name: str) -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    algorithm = build(advantage=name)
    advantages = algorithm.response_advantages(AdvantageInputs(rewards=REWARDS, groups=GROUPS))
    permuted = algorithm.response_advantages(AdvantageInputs(rewards=REWARDS[order], groups=GROUPS[order]))
    torch.testing.assert_close(permuted, advantages[order])


def test_options_reach_the_functions_that_take_them() -> None:
    inputs = AdvantageInputs(rewards=REWARDS, groups=GROUPS)
    plain = build(advantage="dr_grpo").response_advantages(inputs)
    assert torch.equal(build(scale="none").response_advantages(inputs), plain)
    algorithm = build(select="right", options={"right_above": 0.2})
    generator = torch.Generator()
    assert algorithm.select_samples(REWARDS, GROUPS, generator).tolist() == [0, 4, 3]
    assert build(select="right").select_samples(REWARDS, GROUPS, generator).tolist() == [0, 3]


def test_a_selection_draws_from_the_given_generator() -> None:
    algorithm = build(select="best_random")
    selections = [
        algorithm.select_samples(REWARDS, GROUPS, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1)
    ]
    assert selections[0] == selections[1]
    assert len(selections[0]) == 5


def test_token_advantages_take_what_they_ask_for_and_no_more() -> None:
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([0.0, 1.0, 0.0]),
        values=torch.full((3,), 0.5),
        sequence=torch.tensor([0, 0, 1]),
        lengths=torch.tensor([2, 1]),
    )
    token_advantages = build(advantage="gae").token_advantages(inputs)
    assert token_advantages.returns is not None
    assert token_advantages.returns.tolist() == [1.0, 1.0, 0.0]
    assert build(advantage="gae", gamma=0.0).token_advantages(inputs).advantages[0].item() < 0  # V alone is taken off
    assert build(advantage="reinforce_pp").token_advantages(inputs).returns is None


def test_moments_are_taken_over_all_ranks() -> None:
    """The other rank holds a response of one token and reward 4."""
    ranks = Ranks(
        add=lambda t: t + torch.stack([t.new_tensor(1.0), t.new_tensor(4.0)]) if t.ndim else t + (4.0 - 4 / 3) ** 2,
        gather=lambda t: torch.zeros(1, dtype=t.dtype),
    )
    rewards, sequence = torch.tensor([0.0, 0.0], dtype=torch.float64), torch.tensor([0, 1])
    inputs = AdvantageInputs(token_rewards=rewards, sequence=sequence, ranks=ranks)
    token_advantages = build(advantage="reinforce_pp").token_advantages(inputs)
    assert token_advantages.advantages.tolist() == pytest.approx(
        [-(4 / 3) / (16 / 3) ** 0.5] * 2
    )  # mean 4/3, variance 16/3


def test_selected_tokens_come_from_the_selector_of_the_losss_name() -> None:
    algorithm = build(loss="kl_cov", options={"cov_share": 0.5})
    old_log_probs, advantages = torch.tensor([-4.0, -3.0, -1.0, 0.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    assert algorithm.select_tokens(old_log_probs, advantages, torch.rand(4), ALONE).tolist() == [
        True,
        False,
        False,
        True,
    ]


def test_a_broken_invariant_is_an_error() -> None:
    rewards = torch.tensor([1.0, float("nan")])
    with pytest.raises(AssertionError, match="not finite"):
        build().response_advantages(AdvantageInputs(rewards=rewards, groups=torch.tensor([0, 0])))
    with pytest.raises(AssertionError):
        build(advantage="gae").response_advantages(AdvantageInputs(rewards=torch.zeros(1)))
    with pytest.raises(AssertionError):
        build().token_advantages(AdvantageInputs())
    with pytest.raises(AssertionError):
        build().select_tokens(rewards, rewards, rewards, ALONE)


@pytest.mark.parametrize(
    ("kind", "declared", "says"),
    [
        (
            advantages,
            {"needs": ["reward"]},
            "the advantage 'mine' needs 'reward', which is not available; did you mean",
        ),
        (advantages, {"needs": ["values"]}, "the advantage 'mine' needs 'values'"),  # a token's
        (advantages, {"needs": ["values", "baselines"], "level": "token"}, "the advantage 'mine' needs 'baselines'"),
        (
            advantages,
            {"needs": ["rewards"], "level": "turn"},
            "needs 'rewards', which is not available; did you mean turn",
        ),
        (
            losses,
            {"needs": ["old_logprobs"]},
            "'mine' needs 'old_logprobs', which is not available; did you mean old_log",
        ),
        (losses, {"needs": ["rewards"]}, "the policy loss 'mine' needs 'rewards'"),
        (aggregation, {"needs": ["advantages"]}, "the aggregation 'mine' needs 'advantages'"),
        (correction, {"needs": ["rewards"]}, "the rollout correction 'mine' needs 'rewards'"),
        (correction, {"needs": ["advantages"], "rejects": True}, "'mine' needs 'advantages'"),  # there are none yet
        (kl, {"needs": ["ref_log_probs"]}, "'ref_log_probs', which is not available; did you mean log_probs, ref"),
        (selection, {"needs": ["rewards"]}, "the selection 'mine' needs 'rewards'"),
    ],
)
def test_a_need_that_there_is_not_is_refused_where_it_is_declared(
    kind: Any, declared: dict[str, Any], says: str, register: Register
) -> None:
    with pytest.raises(RlcliError) as refused:
        register(kind, "mine", lambda inputs: None, **declared)
    assert says in str(refused.value)


READS = {
    "advantage": (advantages, lambda inputs: inputs.rewards - inputs.lengths, "lengths"),
    "loss": (
        losses,
        lambda inputs: losses.unclipped(inputs.log_probs - inputs.reference_log_probs),
        "reference_log_probs",
    ),
    "aggregation": (aggregation, lambda values, inputs, counts: values[inputs.sequence].sum(), "sequence"),
    "kl_estimator": (kl, lambda inputs: inputs.log_probs - inputs.old_log_probs, "old_log_probs"),
    "correction": (correction, lambda inputs: inputs.advantages, "advantages"),
}


@pytest.mark.parametrize("key", READS)
def test_a_column_that_is_read_but_not_declared_is_named_with_the_fix(key: str, register: Register) -> None:
    kind, function, column = READS[key]
    register(kind, "mine", function, needs=["rewards"] if key == "advantage" else NEEDED.get(key, []))
    with pytest.raises(RlcliError) as refused:
        build(**{key: "mine"}, kl_coef=0.1)
    assert str(refused.value) == (
        f"{kind.part('mine').title} reads '{column}', which it does not declare; "
        f"add '{column}' to the needs that it is registered with"
    )
    register(kind, "mine", function, needs=[*kind.part("mine").needs, column])
    assert build(**{key: "mine"}, kl_coef=0.1)


NEEDED = {"loss": ["log_probs"], "kl_estimator": ["log_probs"]}


def test_a_declared_column_that_a_batch_lacks_is_named() -> None:
    inputs = LossInputs(log_probs=REWARDS, sequence=GROUPS, lengths=GROUPS)
    with pytest.raises(RlcliError) as refused:
        losses.part("dpo")(inputs)
    assert str(refused.value) == "the policy loss 'dpo' needs 'pairs', which this batch does not have"
    with pytest.raises(RlcliError) as refused:
        losses.get("dpo")(inputs)
    assert str(refused.value) == "'pairs' is not given; give it: LossInputs(pairs=…)"


@pytest.mark.parametrize("key", ["kl_estimator", "aggregation"])
def test_a_function_of_ones_own_that_fails_is_refused(key: str, register: Register) -> None:
    kind = {"kl_estimator": kl, "aggregation": aggregation}[key]
    function = {
        "kl_estimator": lambda inputs: inputs.log_probs + None,
        "aggregation": lambda values, inputs, denominators: values + None,
    }[key]
    register(kind, "mine", function, needs=["log_probs"] if kind is kl else [])
    with pytest.raises(ConfigError, match=r"'mine' fails on four tokens: TypeError: .*; see docs/your_own"):
        build(**{key: "mine"})


def test_parts_of_a_reward_cannot_be_weighed_after_a_kl(register: Register) -> None:
    needs = ["rewards", "parts", "part_weights"]
    register(advantages, "mine", lambda inputs: inputs.rewards, needs=needs)
    assert build(advantage="mine")
    with pytest.raises(ConfigError, match=r"= mine weighs the parts of a reward, which .*; give kl_in = loss"):
        build(advantage="mine", kl_in="reward", kl_coef=0.1)


def test_a_token_level_advantage_of_ones_own_is_tried_too(register: Register) -> None:
    def mine(inputs: AdvantageInputs) -> TokenAdvantages:
        return TokenAdvantages(inputs.token_rewards - inputs.values, None)

    register(advantages, "mine", mine, level="token", needs=["token_rewards"])
    with pytest.raises(RlcliError, match="the advantage 'mine' reads 'values', which it does not declare"):
        build(advantage="mine")
    register(advantages, "mine", mine, level="token", needs=["token_rewards", "values"])
    assert build(advantage="mine").needs_critic


@pytest.mark.parametrize(
    ("kind", "function", "says"),
    [
        (
            losses,
            lambda log_probs, advantages, *, beta=1.0: None,
            "the policy loss 'mine' takes (log_probs, advantages), and is called with (inputs); declare the columns",
        ),
        (
            selection,
            lambda rewards, groups: None,
            "'mine' takes (rewards, groups), and is called with (rewards, groups, g",
        ),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused(
    kind: Any, function: Callable[..., Any], says: str, register: Register
) -> None:
    with pytest.raises(RlcliError) as refused:
        register(kind, "mine", function)
    assert says in str(refused.value)


def selecting(inputs: LossInputs) -> TokenLoss:
    return losses.covariance.kl_cov(inputs)


SELECTING = {"needs": ["log_probs", "old_log_probs", "advantages", "selected"]}


def test_a_loss_of_selected_tokens_needs_a_selector_of_its_name(register: Register) -> None:
    register(losses, "mine", selecting, **SELECTING)
    with pytest.raises(UnknownName, match="no token selection is called 'mine'; known: clip_cov, kl_cov"):
        build(loss="mine")


def test_a_loss_of_pairs_needs_pairs() -> None:
    with pytest.raises(ConfigError) as refused:
        build(loss="dpo")
    assert str(refused.value) == (
        "algorithm.loss = dpo compares pairs and algorithm.select = all makes none; give algorithm.select = pairs"
    )


def test_a_loss_of_pairs_needs_an_advantage_whose_sign_tells_the_better() -> None:
    """An advantage with the same sign for both, or zero for one, would prefer the wrong response or compare nothing."""
    fits = {"grpo", "dr_grpo", "rloo", "gpg", "maxrl", "opo", "win_rate"}
    for name in fits:
        assert build(loss="dpo", select="pairs", advantage=name)
    for name in set(advantages.names()) - fits:
        with pytest.raises(ConfigError, match=f"= {name} does not provide; give algorithm.advantage = dr_grpo"):
            build(loss="dpo", select="pairs", advantage=name)


def test_a_selection_by_rewards_that_a_kl_has_yet_to_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.select = pairs selects by rewards before algorithm\.kl_in"):
        build(select="pairs", kl_in="reward", kl_coef=0.1)
    assert build(select="pairs", kl_in="reward", kl_coef=0.0)
    assert build(select="pairs", kl_in="loss", kl_coef=0.1)
    # There the KL goes to the reward of the token; the verdict is what the selection sees.
    assert build(select="pairs", kl_in="reward", kl_coef=0.1, advantage="reinforce_pp")


@pytest.mark.parametrize("advantage", ["prime", "gdpo"])
def test_a_kl_in_a_reward_that_the_advantage_does_not_look_at_is_refused(advantage: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(advantage=advantage, kl_in="reward", kl_coef=0.1)
    assert str(refused.value) == (
        f"algorithm.advantage = {advantage} does not use the reward that algorithm.kl_in = reward changes; "
        "give kl_in = loss"
    )
    assert build(advantage=advantage, kl_in="loss", kl_coef=0.1)


def test_an_option_that_no_part_takes_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        build(options={"tau_positve": 1.0}, loss="sapo")
    assert str(refused.value) == (
        "algorithm.options.tau_positve: none of the chosen functions takes it; did you mean tau_positive, tau_negative?"
    )
    with pytest.raises(ConfigError, match=r"algorithm\.options\.beta: none of the chosen functions takes it"):
        build(options={"beta": 0.1})


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "vapo", "options": {"alpha": 0.1}},
        {"loss": "gmpo", "clip_low": 0.3},
        {"loss": "clip_cov", "options": {"cov_low": 0.5}},  # of the choice of tokens
        {"select": "right", "options": {"right_above": 0.9}},
        {"correction": "icepop", "options": {"correction_high": 4.0}},
        {"advantage": "prime", "options": {"beta": 0.1}},  # of the process rewards
        {"kl_coef": 0.1, "kl_target": 0.01, "options": {"kl_horizon": 500.0}},  # of the controller
        {"correction": "token_tis * off_policy_mask", "options": {"correction_cap": 3.0, "off_policy_threshold": 0.2}},
    ],
)
def test_options_of_every_part_are_taken(changes: dict[str, Any]) -> None:
    assert build(**changes).options.items() >= changes.get("options", {}).items()


def test_the_horizon_reaches_the_controller_and_is_refused_without_one() -> None:
    assert build(kl_coef=0.1, kl_target=0.01, options={"kl_horizon": 500.0}).kl.horizon == 500
    assert build(kl_coef=0.1, kl_target=0.01).kl.horizon == 10_000
    with pytest.raises(ConfigError, match=r"options\.kl_horizon: none of the chosen functions takes it"):
        build(kl_coef=0.1, options={"kl_horizon": 500.0})
    with pytest.raises(ConfigError, match=r"options\.kl_horizon = 0; give more than 0"):
        build(kl_coef=0.1, kl_target=0.01, options={"kl_horizon": 0.0})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"correction": "bypass * token_tis"}, "bypass * token_tis corrects for the engine twice"),
        ({"correction": "token_mask", "loss": "dpo", "select": "pairs", "advantage": "dr_grpo"}, "response of a pair"),
        ({"correction": "token_tis * token_mas"}, "no rollout correction is called 'token_mas'; did you mean token_ma"),
        ({"correction": "token_tis *"}, "no rollout correction is called ''"),
    ],
)
def test_corrections_that_do_not_go_together_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RlcliError) as refused:
        build(**changes)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "single", "several"),
    [
        ("token_tis", False, True),
        ("bypass", False, False),
        ("token_mask", True, True),
        ("bypass * token_mask", True, True),
    ],
)
def test_old_log_probs_are_computed_where_something_looks_at_them(name: str, single: bool, several: bool) -> None:
    algorithm = build(correction=name)
    assert (algorithm.needs_old_log_probs(1), algorithm.needs_old_log_probs(4)) == (single, several)
    assert algorithm.rejects == algorithm.works_on_tokens == ("mask" in name)
    assert algorithm.skips_zero_advantages == ("mask" not in name)


def test_an_option_without_a_default_must_be_given(register: Register) -> None:
    with pytest.raises(ConfigError) as refused:
        build(loss="dro")
    assert str(refused.value) == "algorithm.options.beta is not given; the chosen functions have no default"
    assert build(loss="dro", options={"beta": 0.5})

    def mine(inputs: AdvantageInputs, *, beta: float) -> Tensor:
        return beta * inputs.rewards

    register(advantages, "mine", mine, needs=["rewards"])
    register(kl, "twice", lambda inputs, *, beta=2.0: beta * inputs.log_probs, needs=["log_probs"])
    with pytest.raises(ConfigError, match="beta is not given"):  # the default of another function is not its own
        build(advantage="mine", kl_estimator="twice")


def test_a_kl_estimate_of_ones_own_gets_its_options(register: Register) -> None:
    def mine(inputs: LossInputs, *, power: float = 1.0) -> Tensor:
        return (inputs.log_probs - inputs.reference_log_probs).abs() ** power

    register(kl, "mine", mine, needs=["log_probs", "reference_log_probs"])
    log_probs = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0])
    assert build(kl_estimator="mine", options={"power": 2.0}).divergence(*log_probs).tolist() == [1.0, 4.0]
    assert build(kl_estimator="k1").divergence(*log_probs).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("loss", "skips"),
    [
        (losses.plain.gpg, True),
        (lambda inputs: losses.base.unclipped(inputs.advantages + 0 * inputs.log_probs), True),
        (lambda inputs: losses.base.unclipped(-inputs.log_probs), False),
        (lambda inputs: losses.base.unclipped(inputs.advantages * inputs.log_probs + inputs.log_probs.exp()), False),
    ],
)
def test_whether_a_loss_of_ones_own_vanishes_is_tried(
    loss: Callable[..., TokenLoss], skips: bool, register: Register
) -> None:
    register(losses, "mine", loss, needs=["log_probs", "advantages"])
    assert build(loss="mine").skips_zero_advantages is skips


def test_importing_the_algorithms_loads_no_engine_and_no_config() -> None:
    unwanted = {"ray", "vllm", "transformers", "pydantic", "rlcli.config"}
    code = f"import sys, rlcli.algorithms.algorithm;print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"loss": "gpg", "clip_high": 0.3},
            "algorithm.clip_high = 0.3: none of the chosen functions takes it; give unset",
        ),
        ({"advantage": "rloo", "scale": "batch"}, "algorithm.scale = batch: none .* give group"),
        ({"gamma": 0.9}, "algorithm.gamma = 0.9: none .* give 1.0"),
    ],
)
def test_a_key_that_none_of_the_parts_takes_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_algorithm(**keys)


def test_a_loss_that_fails_is_refused_before_a_model_is_loaded(register: Register) -> None:
    def forgets(inputs: LossInputs) -> Tensor:
        return -inputs.log_probs * inputs.advantages

    register(losses, "forgets", forgets, needs=["log_probs", "advantages"])
    with pytest.raises(ConfigError, match=r"algorithm\.loss = forgets fails on four tokens: AttributeError: .*'loss'"):
        build_algorithm(loss="forgets")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"options": {"clip_low": 0.3}},
            "algorithm.options.clip_low is a separate key; give algorithm.clip_low = 0.3",
        ),
        ({"options": {"correction_cap": 0.0}}, "algorithm.options.correction_cap = 0; give more than 0"),
        (
            {"correction": "icepop", "options": {"correction_low": -1.0}},
            "algorithm.options.correction_low = -1; give 0 or more",
        ),
        (
            {"correction": "icepop", "options": {"correction_low": 5.0, "correction_high": 0.5}},
            "correction_low = 5 is more than correction_high = 0.5; swap the two",
        ),
        ({"loss": "dro", "options": {"beta": -1.0}}, "algorithm.options.beta = -1; give more than 0"),
    ],
)
def test_a_number_with_which_nothing_good_is_learnt_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_algorithm(**keys)


def test_a_loss_without_a_gradient_is_refused(register: Register) -> None:
    register(losses, "still", lambda inputs: losses.unclipped(-inputs.log_probs.detach()), needs=["log_probs"])
    with pytest.raises(ConfigError, match=r"algorithm\.loss = still has no gradient"):
        build_algorithm(loss="still")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda inputs: inputs.rewards.mean(), "advantages of (2,) rewards"),
        (lambda inputs: inputs.rewards / 0, "is not finite"),
        (lambda inputs: inputs.rewards.tolist(), "AttributeError"),
    ],
)
def test_an_advantage_that_is_no_number_a_response_is_refused(
    register: Register, function: Callable[..., Any], says: str
) -> None:
    register(advantages, "odd", function, needs=["rewards"])
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = odd fails on two rewards") as refused:
        build_algorithm(advantage="odd")
    assert says in str(refused.value)


@pytest.mark.parametrize(("kind", "module"), [("loss", losses), ("advantage", advantages)])
def test_without_trials_only_functions_of_others_are_tried(register: Register, kind: str, module: Any) -> None:
    def ours(inputs: Any) -> Tensor:
        raise ArithmeticError

    def theirs(inputs: Any) -> Tensor:
        raise ArithmeticError

    ours.__module__ = module.__name__
    register(module, "ours", ours)
    register(module, "theirs", theirs)
    build_algorithm(**{kind: "ours"}, trial_calls=False)
    with pytest.raises(ConfigError, match="ours fails"):
        build_algorithm(**{kind: "ours"})
    with pytest.raises(ConfigError, match="theirs fails"):
        build_algorithm(**{kind: "theirs"}, trial_calls=False)
