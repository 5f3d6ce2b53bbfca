"""An algorithm is a composition: an advantage, a policy loss, a KL term, an aggregation and a correction, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcli.algorithms import advantages, kl, selection
from rlcli.algorithms.advantages import TokenAdvantages
from rlcli.algorithms.aggregation import AggregationFunction, Denominators, token_mean
from rlcli.algorithms.controllers import EntropyController, KlController, kl_controller
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.correction.mismatch import mismatch_sums
from rlcli.algorithms.correction.weights import bypass
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import LossFunction, ratio
from rlcli.algorithms.losses.critic import process_rewards
from rlcli.algorithms.named import call, inputs_of


@dataclass(frozen=True)
class Objective:
    """The contribution of one micro-batch to the objective of its minibatch.

    loss: scalar, ready for `.backward()`; summed over micro-batches and ranks it is the minibatch's loss. (A backend
    that averages gradients over ranks must multiply it by their number.)

    sums: detached float64 scalars, each a sum over this micro-batch's drawn tokens. Add them up over micro-batches
    and ranks, then divide by `tokens` for means. The keys depend on the algorithm and on the inputs, never on the data:
        tokens           number of forwarded drawn tokens
        policy_loss      the policy loss, corrected, without the other terms
        clip_low_tokens  tokens whose gradient the lower clip zeroed
        clip_high_tokens tokens whose gradient the upper clip or the dual clip zeroed
        ratio_abs_dev    |ρ − 1|: how far the policy has moved since generation
        kl               the KL estimate, not multiplied by its coefficient (only with a reference)
        entropy          the policy's entropy (only if given)
        teacher_kl       log π − log ν of the drawn tokens: their mean estimates KL(π ‖ teacher) (only with a teacher)
        teacher_agreement  drawn tokens that are the teacher's likeliest (only with a teacher)
        mismatch_…       see `correction.mismatch_sums` (only with the engine's log-probs)
    """

    loss: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the GRPO family, composed of functions.

    >>> from rlcli.algorithms.build import build_algorithm
    >>> algorithm = build_algorithm(advantage="grpo", loss="ppo", clip_high=0.28)
    >>> A = algorithm.response_advantages({"rewards": torch.tensor([1.0, 0.0]), "groups": torch.tensor([0, 0])})
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])  # responses of two tokens and of one
    >>> inputs = {
    ...     "log_probs": torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), "advantages": A[sequence],
    ...     "sequence": sequence, "lengths": lengths,
    ... }
    >>> objective = algorithm.objective(inputs, Denominators(tokens=3, sequences=2, max_length=4))
    >>> f"{objective.loss.item():.4f}"  # A = ±1/√2 and ρ = 1: −(2 − 1) / √2 / 3
    '-0.2357'
    """

    advantage: advantages.AdvantageFunction
    loss: LossFunction
    token_selector: Callable[..., Tensor] | None
    select: selection.SelectionFunction
    aggregation: AggregationFunction
    correction: Corrections
    kl_estimator: kl.KlFunction
    options: Mapping[str, Any]
    kl: KlController
    kl_in_reward: bool
    entropy: EntropyController
    nll_coef: float
    mismatch_warning: float
    selects_pairs: bool

    @property
    def parts(self) -> list[Callable[..., Any]]:
        """The functions of which it is composed; options reach these."""
        parts = [self.advantage, self.loss, self.select, self.aggregation, self.kl_estimator]
        parts += self.correction.functions
        parts += [self.token_selector] if self.token_selector is not None else []
        parts += [kl_controller] if self.kl.target is not None else []
        return parts + ([process_rewards] if self.needs_process_rewards else [])

    @property
    def is_token_level(self) -> bool:
        """Whether advantages differ within a response, so that they are computed where its tokens are."""
        return bool(inputs_of(self.advantage) & {"sequence", "teacher_log_probs"})

    @property
    def is_turn_level(self) -> bool:
        """Whether advantages differ between the turns of a response, as the rewards of its turns do."""
        return "turn_rewards" in inputs_of(self.advantage) and not self.is_token_level

    @property
    def needs_critic(self) -> bool:
        return "values" in inputs_of(self.advantage)

    @property
    def needs_process_rewards(self) -> bool:
        return "process_rewards" in inputs_of(self.advantage)

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt is also answered greedily."""
        return "baselines" in inputs_of(self.advantage)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are computed."""
        return self.kl.coef > 0 or self.needs_process_rewards or "reference_log_probs" in inputs_of(self.loss)

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's log-probs are computed."""
        return "teacher_log_probs" in inputs_of(self.advantage) | inputs_of(self.loss) or self.needs_teacher_top

    @property
    def needs_teacher_top(self) -> bool:
        """Whether the loss compares the teacher's likeliest tokens."""
        return "teacher_top_log_probs" in inputs_of(self.loss)

    def needs_old_log_probs(self, updates_per_step: int) -> bool:
        """Whether old log-probs must be computed before the first update.

        π_old is the policy at the start of the step; with one update that is the detached π. The correction accounts
        for samples generated by an earlier policy. With the correction `bypass` π_old is the engine's, which is known;
        functions that need the policy at the start of the step still need these log-probs.
        """
        several = updates_per_step > 1 and not self.bypasses
        distils = "old_log_probs" in inputs_of(self.advantage)
        return several or distils or self.rejects or self.kl_in_reward or self.token_selector is not None

    @property
    def bypasses(self) -> bool:
        """Whether π_old of the loss is the engine's policy."""
        return bypass in self.correction.functions

    @property
    def rejects(self) -> bool:
        """Whether tokens may leave a minibatch before its first update."""
        return bool(self.correction.rejecting)

    @property
    def advantages_before_tokens(self) -> bool:
        """Whether advantages depend on rewards alone, so that they are known before any forward pass."""
        return not self.is_token_level and not self.kl_in_reward

    @property
    def works_on_tokens(self) -> bool:
        """Whether the batch's tokens are needed before the first update: for advantages, a selection or a rejection."""
        return not self.advantages_before_tokens or self.token_selector is not None or self.rejects

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a response whose advantage is 0 has a gradient of exactly 0, so that it needs no forward pass."""
        others = self.kl.coef > 0 or self.entropy.coef > 0 or self.entropy.target is not None or self.nll_coef > 0
        # A token selection and a rejection use all tokens, including those of such responses.
        others = others or self.token_selector is not None or self.rejects
        return self.advantages_before_tokens and not others and loss_vanishes(self)

    def response_advantages(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Advantage of each response, float [N], or of each of its turns, float [N, K]. inputs: `rewards`, or of a
        turn-level function `turn_rewards` (finite), and any other available input."""
        assert not self.is_token_level
        rewards = inputs["turn_rewards" if self.is_turn_level else "rewards"]
        assert bool(torch.isfinite(rewards).all()), "a reward is not finite"
        result: Tensor = call(self.advantage, inputs, self.options)
        assert result.shape == rewards.shape, f"{tuple(result.shape)} advantages of {tuple(rewards.shape)} rewards"
        return result

    def select_samples(self, rewards: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
        """Indexes, int64, of the samples to train on; repeats are allowed."""
        inputs = {"rewards": rewards, "groups": groups, "generator": generator}
        return call(self.select, inputs, self.options)

    def token_advantages(self, inputs: Mapping[str, Any]) -> TokenAdvantages:
        """Advantage and return of each token. inputs: as named in `advantages.tokens`."""
        assert self.is_token_level
        return TokenAdvantages(*call(self.advantage, inputs, self.options))

    def select_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        """The tokens of a minibatch that the loss treats separately, bool [T]."""
        assert self.token_selector is not None
        return call(self.token_selector, inputs, self.options)

    def keep_tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The tokens of a minibatch that no rejection removes, bool [T]. inputs: as named in `correction`."""
        return self.correction.kept(inputs, self.options)

    def divergence(self, log_probs: Tensor, reference_log_probs: Tensor, old_log_probs: Tensor | None = None) -> Tensor:
        """Estimate of the KL to the reference at each token, float [T]. old_log_probs: of the policy from which the
        tokens were sampled; None: π itself."""
        inputs = {"log_probs": log_probs, "reference_log_probs": reference_log_probs, "old_log_probs": old_log_probs}
        return call(self.kl_estimator, inputs, self.options)

    def pull(self, inputs: Mapping[str, Tensor], denominators: Denominators) -> Tensor:
        """−Σ A · ∂loss/∂log π of a first update, whose policy is still π_old: aggregate(A² · correction), float scalar.

        Holds for losses whose gradient at ρ = 1 is −A, as for most (`checks.pulls_by_advantage`), without their KL and
        entropy terms. inputs: as for `objective`.
        """
        given, _ = self._corrected(inputs)
        values = given["advantages"].double().square()
        if "weights" in given:
            values = values * given["weights"]
        return call(self.aggregation, given | {"values": values, "denominators": denominators}, self.options)

    def objective(
        self,
        inputs: Mapping[str, Tensor],
        denominators: Denominators,
        *,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        right_tokens: int = 0,
        on_policy_input: Callable[[Tensor], None] | None = None,
    ) -> Objective:
        """The share of one micro-batch in aggregate(policy loss + KL − entropy) + nll.

        inputs, packed over its T drawn tokens: `log_probs` (float [T], carries the gradient), `advantages` [T],
        `sequence` int64 [T], `lengths` int64 [S], and if available `old_log_probs` (else the detached `log_probs`),
        `reference_log_probs`, `teacher_log_probs` with `teacher_agrees` (bool [T]), `candidate_log_probs` and
        `teacher_top_log_probs` [T, K], `rollout_log_probs` (the engine's), `entropy`, `selected` [T], `pairs`, `right`
        (bool [S]), `group_tokens` [S] and `kept` (bool [T], from `keep_tokens`: the others are treated as absent, in
        the denominators too), with `kept_places` (int64), where it is true, if they are known. kl_coef, entropy_coef:
        their values at this step. right_tokens: tokens of right responses in the whole minibatch. on_policy_input:
        receives the log-probs that only the policy loss reads, kept tokens only, so their gradient lacks the other
        terms. T = 0 is allowed and gives a loss of 0.
        """
        given, mismatch = self._corrected(inputs)
        given["denominators"] = denominators
        log_probs, old = given["log_probs"], given["old_log_probs"]
        read = log_probs.view_as(log_probs)
        if on_policy_input is not None:
            on_policy_input(read)
        policy = call(self.loss, given | {"log_probs": read}, self.options)
        weighted = "weights" in given and "weights" not in inputs_of(self.loss)
        terms = policy.loss * given["weights"] if weighted else policy.loss
        sums = {
            "tokens": torch.ones_like(log_probs),
            "policy_loss": terms,
            "clip_low_tokens": policy.clipped_low,
            "clip_high_tokens": policy.clipped_high,
            "ratio_abs_dev": (ratio(log_probs.detach(), old) - 1).abs(),
        }
        if "reference_log_probs" in given:
            sums["kl"] = self.divergence(log_probs, given["reference_log_probs"], old)
            if not self.kl_in_reward:
                terms = terms + kl_coef * sums["kl"]
        if "teacher_log_probs" in given:
            sums["teacher_kl"] = log_probs - given["teacher_log_probs"]
            sums["teacher_agreement"] = given["teacher_agrees"]
        if "entropy" in given:
            sums["entropy"] = given["entropy"]
            terms = terms - entropy_coef * given["entropy"] if entropy_coef else terms
        loss = call(self.aggregation, given | {"values": terms}, self.options)
        if self.nll_coef:
            right = given["right"][given["sequence"]]
            nll = torch.where(right, -log_probs, 0.0)
            share = Denominators(right_tokens, denominators.sequences, denominators.max_length)
            loss = loss + self.nll_coef * token_mean(nll, given["sequence"], given["lengths"], share)
        totals = {name: values.detach().sum(dtype=torch.float64) for name, values in sums.items()}
        return Objective(loss, totals | mismatch)

    def _corrected(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inputs of the loss, with π_old, with the `weights` of the correction, and of the kept tokens only; and
        the sums of the mismatch over all tokens."""
        log_probs = inputs["log_probs"]
        trainer = inputs.get("old_log_probs", log_probs.detach())
        given: dict[str, Any] = {**inputs, "old_log_probs": trainer}
        mismatch: dict[str, Tensor] = {}
        if "rollout_log_probs" in inputs:
            engine = inputs["rollout_log_probs"]
            policies = {"log_probs": trainer, "policy_log_probs": log_probs.detach()}
            given["weights"] = self.correction.weights(given | policies, self.options)
            mismatch = mismatch_sums(trainer, engine, given["weights"], inputs["sequence"], inputs["lengths"])
            given["old_log_probs"] = engine if self.bypasses else trainer
        return (only_kept(given) if "kept" in inputs else given), mismatch


TOKEN_LEVEL = (
    *("log_probs", "old_log_probs", "reference_log_probs", "advantages", "weights", "entropy", "selected"),
    *("teacher_log_probs", "teacher_agrees", "candidate_log_probs", "teacher_top_log_probs"),
)


def only_kept(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs for only the `kept` tokens (bool [T]): [T] become shorter, and `lengths` smaller.

    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> found = only_kept({"kept": torch.tensor([True, False, False]), "sequence": sequence, "lengths": lengths})
    >>> found["sequence"], found["lengths"]
    (tensor([0]), tensor([1, 0]))
    """
    kept, sequence = inputs["kept"], inputs["sequence"]
    places = inputs["kept_places"] if "kept_places" in inputs else kept.nonzero()[:, 0]
    lengths = torch.zeros_like(inputs["lengths"]).index_add(0, sequence, kept.to(inputs["lengths"].dtype))
    tokens = {name: inputs[name].index_select(0, places) for name in TOKEN_LEVEL if name in inputs}
    return {**inputs, **tokens, "sequence": sequence.index_select(0, places), "lengths": lengths}


def loss_vanishes(algorithm: Algorithm) -> bool:
    """Whether the policy loss has no gradient if A = 0, tested on a few tokens."""
    log_probs, loss = loss_of_four(algorithm, torch.zeros(4, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return not bool(gradient.any())


def loss_of_four(algorithm: Algorithm, advantages: Tensor, *, moved: bool = True) -> tuple[Tensor, Tensor]:
    """log π of four tokens of two responses, and the sum of their losses. advantages: float64 [4]. moved: π differs
    from π_old and from the reference, and some tokens are selected."""
    drawn = [-0.5, -1.0, -2.0, -0.1] if moved else [-1.0] * 4
    log_probs = torch.tensor(drawn, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.6, -3.0, -1.0, -0.1], dtype=torch.float64) if moved else log_probs.detach()
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "reference_log_probs": old.flip(0),
        "advantages": advantages,
        "sequence": torch.tensor([0, 0, 1, 1]),
        "lengths": torch.tensor([2, 2]),
        "pairs": torch.tensor([0, 0]),
        "selected": torch.tensor([moved, False, moved, False]),
        "teacher_log_probs": old.flip(0),
        "candidate_log_probs": torch.stack([log_probs - 1.0, log_probs - 2.0], dim=1),
        "teacher_top_log_probs": torch.tensor([[-0.5, -1.5]] * 4, dtype=torch.float64),
    }
    return log_probs, call(algorithm.loss, inputs, algorithm.options).loss.sum()
