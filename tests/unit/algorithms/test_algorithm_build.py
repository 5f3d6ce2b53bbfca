"""Which parts an algorithm may be made of, what it then asks of the trainer, and how it is refused."""

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
from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.losses import TokenLoss, selectors
from rlcli.algorithms.ranks import ALONE, Ranks
from rlcli.config.schema import Algorithm as Section
from rlcli.errors import ConfigError, RlcliError, UnknownName

Register = Callable[[Any, str, Callable[..., Any]], None]


def build(**changes: Any) -> Algorithm:
    """The algorithm of the configuration's defaults, with some keys changed."""
    return build_algorithm(**(Section().model_dump() | changes))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Offers a function by name for the length of a test."""

    def register(kind: Any, name: str, function: Callable[..., Any]) -> None:
        table = kind.get.__self__._functions
        monkeypatch.setitem(table, name, function)

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
        assert build(advantage=advantage).advantage is advantages.get(advantage)
    for loss in losses.names():
        for name in aggregation.names():
            select = "pairs" if loss == "dpo" else "all"
            options = {"beta": 0.5} if loss in ("dro", "dpo") else {}
            assert build(loss=loss, aggregation=name, select=select, options=options).loss is losses.get(loss)


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
    made = algorithm.response_advantages({"rewards": REWARDS, "groups": GROUPS})
    permuted = algorithm.response_advantages({"rewards": REWARDS[order], "groups": GROUPS[order]})
    torch.testing.assert_close(permuted, made[order])


def test_options_reach_the_functions_that_take_them() -> None:
    inputs = {"rewards": REWARDS, "groups": GROUPS}
    plain = build(advantage="dr_grpo").response_advantages(inputs)
    assert torch.equal(build(scale="none").response_advantages(inputs), plain)
    taken = build(select="right", options={"right_above": 0.2})
    generator = torch.Generator()
    assert taken.select_samples(REWARDS, GROUPS, generator).tolist() == [0, 4, 3]
    assert build(select="right").select_samples(REWARDS, GROUPS, generator).tolist() == [0, 3]


def test_a_selection_draws_from_the_given_generator() -> None:
    algorithm = build(select="best_random")
    drawn = [algorithm.select_samples(REWARDS, GROUPS, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 5


def test_token_advantages_take_what_they_ask_for_and_no_more() -> None:
    inputs = {
        "token_rewards": torch.tensor([0.0, 1.0, 0.0]),
        "values": torch.full((3,), 0.5),
        "sequence": torch.tensor([0, 0, 1]),
        "lengths": torch.tensor([2, 1]),
        "ranks": ALONE,
    }
    made = build(advantage="gae").token_advantages(inputs)
    assert made.returns is not None
    assert made.returns.tolist() == [1.0, 1.0, 0.0]
    assert build(advantage="gae", gamma=0.0).token_advantages(inputs).advantages[0].item() < 0  # V alone is taken off
    assert build(advantage="reinforce_pp").token_advantages(inputs).returns is None


def test_moments_are_taken_over_all_ranks() -> None:
    """The other rank holds a response of one token and reward 4."""
    both = Ranks(
        add=lambda t: t + torch.stack([t.new_tensor(1.0), t.new_tensor(4.0)]) if t.ndim else t + (4.0 - 4 / 3) ** 2,
        gather=lambda t: torch.zeros(1, dtype=t.dtype),
    )
    inputs = {"token_rewards": torch.tensor([0.0, 0.0], dtype=torch.float64), "sequence": torch.tensor([0, 1])}
    made = build(advantage="reinforce_pp").token_advantages(inputs | {"ranks": both})
    assert made.advantages.tolist() == pytest.approx([-(4 / 3) / (16 / 3) ** 0.5] * 2)  # mean 4/3, variance 16/3


def test_selected_tokens_come_from_the_selector_of_the_losss_name() -> None:
    algorithm = build(loss="kl_cov", options={"cov_share": 0.5})
    inputs = {
        "old_log_probs": torch.tensor([-4.0, -3.0, -1.0, 0.0]),
        "advantages": torch.tensor([-1.0, 1.0, -1.0, 1.0]),
        "noise": torch.rand(4),
        "ranks": ALONE,
    }
    assert algorithm.select_tokens(inputs).tolist() == [True, False, False, True]


def test_a_broken_invariant_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        build().response_advantages({"rewards": torch.tensor([1.0, float("nan")]), "groups": torch.tensor([0, 0])})
    with pytest.raises(AssertionError):
        build(advantage="gae").response_advantages({"rewards": torch.zeros(1)})
    with pytest.raises(AssertionError):
        build().token_advantages({})
    with pytest.raises(AssertionError):
        build().select_tokens({})


def asks(name: str) -> Callable[..., Any]:
    """A function of one input."""
    namespace: dict[str, Any] = {}
    exec(f"def function({name}): ...", namespace)
    function: Callable[..., Any] = namespace["function"]
    return function


@pytest.mark.parametrize(
    ("kind", "key", "asked", "says"),
    [
        (advantages, "advantage", "reward", "the advantage 'mine' asks for 'reward', which is not available; did you"),
        (advantages, "advantage", "values", "the advantage 'mine' asks for 'values'"),  # a token's, without sequence
        (losses, "loss", "old_logprobs", "the policy loss 'mine' asks for 'old_logprobs'"),
        (losses, "loss", "rewards", "the policy loss 'mine' asks for 'rewards'"),
        (selection, "select", "scores", "the selection 'mine' asks for 'scores'"),
        (aggregation, "aggregation", "losses", "the aggregation 'mine' asks for 'losses'"),
        (correction, "correction", "rewards", "the rollout correction 'mine' asks for 'rewards'"),
        (kl, "kl_estimator", "ref_log_probs", "'ref_log_probs', which is not available; did you mean log_probs, ref"),
    ],
)
def test_a_function_that_asks_for_an_unknown_input_is_refused(
    kind: Any, key: str, asked: str, says: str, register: Register
) -> None:
    register(kind, "mine", asks(asked))
    with pytest.raises(ConfigError) as refused:
        build(**{key: "mine"})
    assert says in str(refused.value)


def test_a_token_level_advantage_may_ask_for_what_tokens_have(register: Register) -> None:
    register(advantages, "mine", lambda sequence, values, baselines: None)
    with pytest.raises(ConfigError, match="the advantage 'mine' asks for 'baselines'"):
        build(advantage="mine")


def selecting(log_probs: Tensor, advantages: Tensor, selected: Tensor) -> TokenLoss:
    return losses.covariance.kl_cov(log_probs, log_probs.detach(), advantages, selected)


def test_a_loss_of_selected_tokens_needs_a_selector_of_its_name(register: Register) -> None:
    register(losses, "mine", selecting)
    with pytest.raises(UnknownName, match="no token selection is called 'mine'; known: clip_cov, kl_cov"):
        build(loss="mine")


def test_the_selector_too_is_refused_for_an_unknown_input(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register(losses, "mine", selecting)
    monkeypatch.setitem(selectors._functions, "mine", asks("rewards"))
    with pytest.raises(ConfigError, match="the token selection 'mine' asks for 'rewards'"):
        build(loss="mine")


def test_a_loss_of_pairs_needs_pairs() -> None:
    with pytest.raises(ConfigError) as refused:
        build(loss="dpo")
    assert str(refused.value) == (
        "algorithm.loss = dpo compares pairs and algorithm.select = all makes none; give algorithm.select = pairs"
    )


def test_a_loss_of_pairs_needs_an_advantage_whose_sign_tells_the_better() -> None:
    """One that gives both the same sign, or one of them none, would prefer the wrong response or compare nothing."""
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


def test_a_rejection_is_made_before_there_are_advantages(register: Register) -> None:
    register(correction, "mine", correction.rejects(asks("advantages")))
    with pytest.raises(ConfigError, match="the rollout correction 'mine' asks for 'advantages'"):
        build(correction="token_tis * mine")


@pytest.mark.parametrize(
    ("name", "one", "several"),
    [
        ("token_tis", False, True),
        ("bypass", False, False),
        ("token_mask", True, True),
        ("bypass * token_mask", True, True),
    ],
)
def test_old_log_probs_are_computed_where_something_looks_at_them(name: str, one: bool, several: bool) -> None:
    algorithm = build(correction=name)
    assert (algorithm.needs_old_log_probs(1), algorithm.needs_old_log_probs(4)) == (one, several)
    assert algorithm.rejects == algorithm.works_on_tokens == ("mask" in name)
    assert algorithm.skips_zero_advantages == ("mask" not in name)


def test_an_option_without_a_default_must_be_given(register: Register) -> None:
    with pytest.raises(ConfigError) as refused:
        build(loss="dro")
    assert str(refused.value) == "algorithm.options.beta is not given; the chosen functions have no default"
    assert build(loss="dro", options={"beta": 0.5})

    def mine(rewards: Tensor, *, beta: float) -> Tensor:
        return beta * rewards

    register(advantages, "mine", mine)
    register(kl, "twice", lambda log_probs, reference_log_probs, *, beta=2.0: beta * log_probs)
    with pytest.raises(ConfigError, match="beta is not given"):  # the default of another function is not its own
        build(advantage="mine", kl_estimator="twice")


def test_a_kl_estimate_of_ones_own_is_given_by_name_and_with_its_options(register: Register) -> None:
    def mine(reference_log_probs: Tensor, log_probs: Tensor, *, power: float = 1.0) -> Tensor:
        return (log_probs - reference_log_probs).abs() ** power

    register(kl, "mine", mine)
    given = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0])
    assert build(kl_estimator="mine", options={"power": 2.0}).divergence(*given).tolist() == [1.0, 4.0]
    assert build(kl_estimator="k1").divergence(*given).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("loss", "skips"),
    [
        (lambda advantages, log_probs: losses.plain.gpg(log_probs, advantages), True),
        (lambda log_probs, advantages: losses.base.unclipped(advantages + 0 * log_probs), True),
        (lambda log_probs: losses.base.unclipped(-log_probs), False),
        (lambda log_probs, advantages: losses.base.unclipped(advantages * log_probs + log_probs.exp()), False),
    ],
)
def test_whether_a_loss_of_ones_own_vanishes_is_tried(
    loss: Callable[..., TokenLoss], skips: bool, register: Register
) -> None:
    register(losses, "mine", loss)
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
    def forgets(log_probs: Tensor, advantages: Tensor) -> Tensor:
        return -log_probs * advantages

    register(losses, "forgets", forgets)
    with pytest.raises(ConfigError, match=r"algorithm\.loss = forgets fails on four tokens: AttributeError: .*'loss'"):
        build_algorithm(loss="forgets")


def test_an_input_that_there_is_not_may_have_a_default(register: Register) -> None:
    def weighs(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
        return rewards if weights is None else rewards * weights

    register(advantages, "weighs", weighs)
    rewards = torch.tensor([1.0, 2.0])
    assert build_algorithm(advantage="weighs").response_advantages({"rewards": rewards}) is rewards


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
    register(losses, "still", lambda log_probs, advantages: losses.unclipped(-advantages * log_probs.detach()))
    with pytest.raises(ConfigError, match=r"algorithm\.loss = still has no gradient"):
        build_algorithm(loss="still")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda rewards: rewards.mean(), "advantages of (2,) rewards"),
        (lambda rewards: rewards / 0, "is not finite"),
        (lambda rewards: rewards.tolist(), "AttributeError"),
    ],
)
def test_an_advantage_that_is_no_number_a_response_is_refused(
    register: Register, function: Callable[..., Any], says: str
) -> None:
    register(advantages, "odd", function)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = odd fails on two rewards") as refused:
        build_algorithm(advantage="odd")
    assert says in str(refused.value)


@pytest.mark.parametrize(("kind", "module"), [("loss", losses), ("advantage", advantages)])
def test_without_trials_only_functions_of_others_are_tried(register: Register, kind: str, module: Any) -> None:
    def ours() -> Tensor:
        raise ArithmeticError

    def theirs() -> Tensor:
        raise ArithmeticError

    ours.__module__ = module.__name__
    register(module, "ours", ours)
    register(module, "theirs", theirs)
    build_algorithm(**{kind: "ours"}, tried=False)
    with pytest.raises(ConfigError, match="ours fails"):
        build_algorithm(**{kind: "ours"})
    with pytest.raises(ConfigError, match="theirs fails"):
        build_algorithm(**{kind: "theirs"}, tried=False)
