"""An algorithm is a composition: an advantage, a policy loss, a KL term, an aggregation and a correction, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlcli.algorithms.advantages import TokenAdvantages
from rlcli.algorithms.aggregation import Denominators, token_mean
from rlcli.algorithms.controllers import EntropyController, KlController, kl_controller
from rlcli.algorithms.correction.base import Corrections
from rlcli.algorithms.correction.mismatch import mismatch_sums
from rlcli.algorithms.correction.weights import bypass
from rlcli.algorithms.function_registry import Part
from rlcli.algorithms.inputs import AdvantageInputs, LossInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.losses.base import TokenLoss, ratio
from rlcli.algorithms.losses.critic import process_rewards
from rlcli.algorithms.ranks import Ranks


@dataclass(frozen=True)
class Objective:
    """The contribution of one micro-batch to the objective of its minibatch."""

    loss: Tensor
    """Scalar, ready for `.backward()`; summed over micro-batches and ranks it is the minibatch's loss. (A backend that
    averages gradients over ranks must multiply it by their number.)"""
    sums: dict[str, Tensor]
    """Detached float64 scalars, each a sum over this micro-batch's response tokens. Add them up over micro-batches and
    ranks, then divide by `tokens` for means. The keys depend on the algorithm and on the inputs, never on the data:
        tokens           response tokens in the loss, without rejected ones
        policy_loss      the policy loss, corrected, without the other terms
        clip_low_tokens  tokens whose gradient the lower clip zeroed
        clip_high_tokens tokens whose gradient the upper clip or the dual clip zeroed
        ratio_abs_dev    |ρ − 1|: distance of the policy from π_old
        kl               the KL estimate, not multiplied by its coefficient (only with a reference)
        entropy          the policy's entropy (only if given)
        teacher_kl       log π − log ν of the response tokens: its mean estimates KL(π ‖ teacher) (only with a teacher)
        teacher_agreement  response tokens that are the teacher's likeliest (only with a teacher)
        mismatch_…       see `correction.mismatch_sums` (only with the engine's log-probs)
    """


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the GRPO family, composed of functions.

    >>> from rlcli.algorithms.build import build_algorithm
    >>> algorithm = build_algorithm(advantage="grpo", loss="ppo", clip_high=0.28)
    >>> of_two = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), groups=torch.tensor([0, 0]))
    >>> A = algorithm.response_advantages(of_two)
    >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])  # responses of two tokens and of one
    >>> inputs = LossInputs(
    ...     log_probs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), advantages=A[sequence],
    ...     sequence=sequence, lengths=lengths,
    ... )
    >>> objective = algorithm.objective(inputs, Denominators(tokens=3, sequences=2, max_length=4))
    >>> f"{objective.loss.item():.4f}"  # A = ±1/√2 and ρ = 1: −(2 − 1) / √2 / 3
    '-0.2357'
    """

    advantage: Part[Tensor | TokenAdvantages]
    """Advantage function."""
    loss: Part[TokenLoss]
    """Policy loss."""
    token_selector: Part[Tensor] | None
    """Selects the tokens that the loss treats separately, if it does."""
    select: Part[Tensor]
    """Selects the samples of a step to train on."""
    aggregation: Part[Tensor]
    """Reduces token losses to a scalar."""
    correction: Corrections
    """Weights and rejections for the difference between engine and trainer."""
    kl_estimator: Part[Tensor]
    """Estimator of the KL to the reference model."""
    options: Mapping[str, object]
    """Numeric options of the configuration; each part got those that it takes when it was built."""
    kl: KlController
    """Coefficient of the KL."""
    kl_in_reward: bool
    """True if the KL is subtracted from the reward, not added to the loss."""
    entropy: EntropyController
    """Coefficient of the entropy bonus."""
    nll_coef: float
    """Weight of the negative log-likelihood of correct responses."""
    mismatch_warning: float
    """KL of engine to trainer above which a warning is logged, in nats a token."""
    selects_pairs: bool
    """True if `select` returns pairs."""

    @property
    def functions(self) -> list[Callable[..., object]]:
        """The functions of which it is composed, and which its options reach."""
        parts: list[Part[object]] = [self.advantage, self.loss, self.select, self.aggregation, self.kl_estimator]
        functions = [part.function for part in (*parts, *self.correction.parts)]
        functions += [self.token_selector.function] if self.token_selector is not None else []
        functions += [kl_controller] if self.kl.target is not None else []
        return functions + ([process_rewards] if self.needs_process_rewards else [])

    @property
    def is_token_level(self) -> bool:
        """True if advantages differ within a response, so that they are computed where its tokens are."""
        return self.advantage.rules.level == "token"

    @property
    def is_turn_level(self) -> bool:
        """True if advantages differ between the turns of a response, as the rewards of its turns do."""
        return self.advantage.rules.level == "turn"

    @property
    def needs_critic(self) -> bool:
        return "values" in self.advantage.needs

    @property
    def needs_process_rewards(self) -> bool:
        return "process_rewards" in self.advantage.needs

    @property
    def needs_baselines(self) -> bool:
        """True if each prompt is also answered greedily."""
        return "baselines" in self.advantage.needs

    @property
    def needs_reference(self) -> bool:
        """True if reference log-probs are computed."""
        return self.kl.coef > 0 or self.needs_process_rewards or "reference_log_probs" in self.loss.needs

    @property
    def needs_teacher(self) -> bool:
        """True if a teacher's log-probs are computed."""
        return "teacher_log_probs" in self.advantage.needs | self.loss.needs or self.needs_teacher_top

    @property
    def needs_teacher_top(self) -> bool:
        """True if the loss compares the teacher's likeliest tokens."""
        return "teacher_top_log_probs" in self.loss.needs

    def needs_old_log_probs(self, updates_per_step: int) -> bool:
        """True if old log-probs must be computed before the first update.

        π_old is the policy at the start of the step; with one update that is the detached π. The correction accounts
        for samples generated by an earlier policy. With the correction `bypass` π_old is the engine's, which is known;
        functions that need the policy at the start of the step still need these log-probs.
        """
        several = updates_per_step > 1 and not self.bypasses
        distils = "old_log_probs" in self.advantage.needs
        return several or distils or self.rejects or self.kl_in_reward or self.token_selector is not None

    @property
    def bypasses(self) -> bool:
        """True if π_old of the loss is the engine's policy."""
        return any(part.function is bypass for part in self.correction.parts)

    @property
    def rejects(self) -> bool:
        """True if tokens may leave a minibatch before its first update."""
        return bool(self.correction.rejecting)

    @property
    def advantages_before_tokens(self) -> bool:
        """True if advantages depend on rewards alone, so that they are known before any forward pass."""
        return not self.is_token_level and not self.kl_in_reward

    @property
    def works_on_tokens(self) -> bool:
        """True if the batch's tokens are needed before the first update: for advantages, a selection or a rejection."""
        return not self.advantages_before_tokens or self.token_selector is not None or self.rejects

    @property
    def skips_zero_advantages(self) -> bool:
        """True if a response whose advantage is 0 has a gradient of exactly 0, so that it needs no forward pass."""
        others = self.kl.coef > 0 or self.entropy.coef > 0 or self.entropy.target is not None or self.nll_coef > 0
        # A token selection and a rejection use all tokens, including those of such responses.
        others = others or self.token_selector is not None or self.rejects
        return self.advantages_before_tokens and not others and loss_vanishes(self)

    def response_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Advantage of each response, float [S], or of each of its turns, float [S, K]. inputs: `rewards`, or of a
        turn-level function `turn_rewards` (finite), and what else the function declares."""
        assert not self.is_token_level
        rewards = inputs.turn_rewards if self.is_turn_level else inputs.rewards
        assert bool(torch.isfinite(rewards).all()), "a reward is not finite"
        result = self.advantage(inputs)
        assert not isinstance(result, TokenAdvantages), "it is registered for responses or turns, and returns tokens'"
        assert result.shape == rewards.shape, f"{tuple(result.shape)} advantages of {tuple(rewards.shape)} rewards"
        return result

    def select_samples(self, rewards: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
        """Indexes, int64, of the samples to train on; repeats are allowed."""
        return self.select(rewards, groups, generator)

    def token_advantages(self, inputs: AdvantageInputs) -> TokenAdvantages:
        """Advantage and return of each token. inputs: what the function declares."""
        assert self.is_token_level
        return TokenAdvantages(*self.advantage(inputs))

    def select_tokens(self, old_log_probs: Tensor, advantages: Tensor, noise: Tensor, ranks: Ranks) -> Tensor:
        """The tokens of a minibatch that the loss treats separately, bool [R]. All float [R]; noise: uniform in
        (0, 1). Collective."""
        assert self.token_selector is not None
        return self.token_selector(old_log_probs, advantages, noise, ranks)

    def keep_tokens(self, inputs: LossInputs) -> Tensor:
        """The tokens of a minibatch that no rejection removes, bool [R]. inputs: `old_log_probs`, `rollout_log_probs`,
        `sequence` and `lengths`."""
        return self.correction.kept(inputs)

    def divergence(self, log_probs: Tensor, reference_log_probs: Tensor, old_log_probs: Tensor | None = None) -> Tensor:
        """Estimate of the KL to the reference at each token, float [R]. old_log_probs: of the policy from which the
        tokens were sampled; None: π itself."""
        return self.kl_estimator(
            LossInputs(log_probs=log_probs, reference_log_probs=reference_log_probs, old_log_probs=old_log_probs)
        )

    def grad_dot_advantage(self, inputs: LossInputs, denominators: Denominators) -> Tensor:
        """−Σ A · ∂loss/∂log π of a first update, whose policy is still π_old: aggregate(A² · correction), float scalar.

        Holds for losses whose gradient at ρ = 1 is −A, as for most (`build.is_weighted_by_advantage`), without their
        KL and entropy terms. inputs: as for `objective`.
        """
        corrected, _ = self._corrected(inputs)
        values = corrected.advantages.double().square()
        if corrected.has("weights"):
            values = values * corrected.weights
        return self.aggregation(values, corrected, denominators)

    def objective(
        self,
        inputs: LossInputs,
        denominators: Denominators,
        *,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        right_tokens: int = 0,
        policy_input_hook: Callable[[Tensor], None] | None = None,
    ) -> Objective:
        """The share of one micro-batch in aggregate(policy loss + KL − entropy) + nll.

        inputs: `log_probs`, `advantages`, `sequence`, `lengths`, and what else there is; the tokens that are not `kept`
        are treated as absent, in the denominators too. kl_coef, entropy_coef: their values at this step. right_tokens:
        tokens of right responses in the whole minibatch. policy_input_hook: receives the log-probs that only the policy
        loss reads, kept tokens only, so their gradient lacks the other terms. R = 0 is allowed and gives a loss of 0.
        """
        corrected, mismatch = self._corrected(inputs)
        log_probs, old = corrected.log_probs, corrected.old_log_probs
        policy_input = log_probs.view_as(log_probs)
        if policy_input_hook is not None:
            policy_input_hook(policy_input)
        weights = corrected.weights if corrected.has("weights") else torch.ones_like(log_probs)
        policy = self.loss(corrected.replace(log_probs=policy_input, weights=weights))
        terms = policy.loss if "weights" in self.loss.needs else policy.loss * weights
        sums = {
            "tokens": torch.ones_like(log_probs),
            "policy_loss": terms,
            "clip_low_tokens": policy.clipped_low,
            "clip_high_tokens": policy.clipped_high,
            "ratio_abs_dev": (ratio(log_probs.detach(), old) - 1).abs(),
        }
        if corrected.has("reference_log_probs"):
            sums["kl"] = self.divergence(log_probs, corrected.reference_log_probs, old)
            if not self.kl_in_reward:
                terms = terms + kl_coef * sums["kl"]
        if corrected.has("teacher_log_probs"):
            sums["teacher_kl"] = log_probs - corrected.teacher_log_probs
            sums["teacher_agreement"] = corrected.teacher_agrees
        if corrected.has("entropy"):
            sums["entropy"] = corrected.entropy
            terms = terms - entropy_coef * corrected.entropy if entropy_coef else terms
        loss = self.aggregation(terms, corrected, denominators)
        if self.nll_coef:
            nll = torch.where(corrected.right[corrected.sequence], -log_probs, 0.0)
            share = Denominators(right_tokens, denominators.sequences, denominators.max_length)
            loss = loss + self.nll_coef * token_mean(nll, corrected, share)
        totals = {name: values.detach().sum(dtype=torch.float64) for name, values in sums.items()}
        return Objective(loss, totals | mismatch)

    def _corrected(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """The inputs of the loss, with π_old, with the `weights` of the correction, and of the kept tokens only; and
        the sums of the mismatch over all tokens."""
        log_probs = inputs.log_probs
        trainer = inputs.old_log_probs if inputs.has("old_log_probs") else log_probs.detach()
        result, mismatch = inputs.replace(old_log_probs=trainer), dict[str, Tensor]()
        if inputs.has("rollout_log_probs"):
            engine = inputs.rollout_log_probs
            weights = self.correction.weights(result.replace(log_probs=log_probs.detach()))
            mismatch = mismatch_sums(trainer, engine, weights, inputs.sequence, inputs.lengths)
            result = result.replace(weights=weights, old_log_probs=engine if self.bypasses else trainer)
        return (result.without_rejected() if result.has("kept") else result), mismatch


def loss_vanishes(algorithm: Algorithm) -> bool:
    """True if the policy loss has no gradient if A = 0, tested on a few tokens."""
    log_probs, loss = trial_loss(algorithm, torch.zeros(4, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return not bool(gradient.any())


def trial_loss(algorithm: Algorithm, advantages: Tensor, *, moved: bool = True) -> tuple[Tensor, Tensor]:
    """log π of four tokens of two responses, and the sum of their losses. advantages: float64 [4]. moved: π differs
    from π_old and from the reference, and some tokens are selected."""
    inputs = trial_inputs(advantages, moved=moved)
    return inputs.log_probs, algorithm.loss(inputs).loss.sum()


def trial_inputs(advantages: Tensor, *, moved: bool = True) -> LossInputs:
    """Four tokens of two responses, with every column that a function may declare."""
    values = [-0.5, -1.0, -2.0, -0.1] if moved else [-1.0] * 4
    log_probs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.6, -3.0, -1.0, -0.1], dtype=torch.float64) if moved else log_probs.detach()
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=old,
        reference_log_probs=old.flip(0),
        advantages=advantages,
        weights=torch.ones_like(old),
        sequence=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([2, 2]),
        pairs=torch.tensor([0, 0]),
        group_tokens=torch.tensor([4.0, 4.0]),
        selected=torch.tensor([moved, False, moved, False]),
        teacher_log_probs=old.flip(0),
        candidate_log_probs=torch.stack([log_probs - 1.0, log_probs - 2.0], dim=1),
        teacher_top_log_probs=torch.tensor([[-0.5, -1.5]] * 4, dtype=torch.float64),
    )
