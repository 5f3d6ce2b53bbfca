"""The policy on this worker, and its reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli.data.messages import Coefficients
from rlcli.images.image_rule import ImageRule
from rlcli.training.worker.backend import Loader
from rlcli.training.worker.log_prob_record import LogProbRecord
from rlcli.training.worker.plan_integrity import signature_weights, sum_over_turns, watch_grad_dot_advantage
from rlcli.training.worker.train_batch import MicroBatch, TrainBatch

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor

    from rlcli.algorithms.aggregation import Denominators
    from rlcli.algorithms.inputs import LossInputs
    from rlcli.model.policy import TokenOutputs


class PolicyRole:
    """Computes log-probs for a batch's tokens, and updates the policy on it, minibatch by minibatch. image_rule: image
    preprocessing of the model, if it takes images."""

    def __init__(
        self, config: RunConfig, device: torch.device, load: Loader, image_rule: ImageRule | None = None
    ) -> None:
        from rlcli.algorithms.build import build_algorithm, is_weighted_by_advantage
        from rlcli.model.lora import LoraSpec

        self.temperature = config.rollout.temperature
        self.sampled = not config.data.response
        self.device, self.image_rule = device, image_rule
        self.algorithm = build_algorithm(**config.algorithm.model_dump())
        lora = LoraSpec(config.lora.rank, config.lora.alpha, config.lora.targets) if config.lora.rank else None
        replays = config.rollout.replay_routes
        self.policy = load("policy", config.model.path, lora=lora, replays=replays)
        self.checks_loss = self.sampled and is_weighted_by_advantage(self.algorithm)
        # With LoRA the reference is the policy without its adapter; otherwise it is a second, frozen copy.
        needs_copy = self.algorithm.needs_reference and lora is None
        self.reference = load("policy", config.model.path, trained=False, replays=replays) if needs_copy else None
        self.on_outputs: Callable[[MicroBatch, TokenOutputs], None] = lambda micro, outputs: None
        """Called with the outputs of each micro-batch of an update."""
        self.log_prob_record = LogProbRecord()
        # With top-p the engine's log-probs are those of a cut distribution: not the trainer's, by design.
        self.compares_samples = self.sampled and config.rollout.top_p == 1.0 and config.rollout.log_prob_check != "off"

    def begin(self, batch: TrainBatch, version: int) -> None:
        """Start a step on `batch`. version: of the weights, as a number of weight syncs."""
        self.log_prob_record.begin(version)
        self.log_prob_record.remember([row for micro in batch for row in micro.rows])

    def compute_old_log_probs(self, batch: TrainBatch) -> None:
        for micro in batch:
            micro.tokens.old_log_probs = self.policy.log_probs(micro.packed, self.temperature)
            if self.compares_samples:
                self.log_prob_record.record(micro, micro.tokens.old_log_probs)

    def compute_reference_log_probs(self, batch: TrainBatch) -> None:
        model = self.reference or self.policy
        with nullcontext() if self.reference else model.adapter_disabled():
            for micro in batch:
                micro.tokens.reference_log_probs = model.log_probs(micro.packed, self.temperature)

    def update(self, batch: TrainBatch, index: int, coefficients: Coefficients) -> dict[str, float]:
        """One optimizer step. Returns sums over this rank's response tokens (see `Objective.sums`), `grad_norm`, which
        is global and so divided by the number of ranks, and `compared_tokens`, for the log-prob check."""
        minibatch = batch.minibatches[index]
        if self.algorithm.needs_teacher_top:
            for micro in minibatch:
                if not micro.empty:
                    micro.packed = replace(micro.packed, candidates=micro.tokens.teacher_top)
        for micro, outputs in self.policy.forward(minibatch, temperature=self.temperature, want_entropy=True):
            loss, sums = self._loss(batch, index, coefficients, micro, outputs)
            self.policy.backward(loss, sums)
        totals = self.policy.step(coefficients.lr)
        compared = {"compared_tokens": float(self.log_prob_record.tokens)}
        self.log_prob_record.weights_changed()
        return totals | compared | self._checks(batch, index) if totals and "bad" not in totals else totals

    def probe_log_probs(self, tokens: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " R"]:
        """Log-probs of all tokens but the first, at temperature 1, as the engine's `prompt_log_probs`."""
        from rlcli.model.packed import pack

        # The engine's log-probs of a prompt are over all tokens, also those that it never samples.
        packed = replace(pack([(tokens, 1)], self.device, rule=self.image_rule), never=None)
        log_probs: np.ndarray = self.policy.log_probs(packed, temperature=1.0).float().cpu().numpy()
        return log_probs

    def rows_log_probs(
        self, rows: Sequence[tuple[Int32[np.ndarray, " T"], int]], unit: float = 0.0, seed: int = 0
    ) -> list[Float32[np.ndarray, " R"]]:
        """Log-probs at temperature 1 of the tokens behind each row's prompt. rows: tokens, and how many of them are the
        prompt. unit: not 0, layers round their outputs once more, by this relative amount (`rlcli.model.rounding`)."""
        from rlcli.model.packed import pack

        packed = replace(pack(rows, self.device, rule=self.image_rule), never=None)
        with self.policy.rounded_again(unit, seed) if unit else nullcontext():
            log_probs = self.policy.log_probs(packed, temperature=1.0).float().cpu()
        return [part.numpy() for part in log_probs.split([len(tokens) - prompt for tokens, prompt in rows])]

    def _loss(
        self, batch: TrainBatch, index: int, coefficients: Coefficients, micro: MicroBatch, outputs: TokenOutputs
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss of a micro-batch from the model's outputs, and sums for metrics and checks."""
        from rlcli.algorithms.aggregation import Denominators
        from rlcli.algorithms.inputs import LossInputs

        self.on_outputs(micro, outputs)
        if self.compares_samples and not micro.tokens.has("old_log_probs"):
            self.log_prob_record.record(micro, outputs.log_probs)
        assert outputs.entropy is not None, "want_entropy"
        counts = batch.policy_counts[index]
        tokens, columns = micro.tokens, batch.columns
        inputs = LossInputs(
            log_probs=outputs.log_probs,
            old_log_probs=tokens.get("old_log_probs"),
            rollout_log_probs=tokens.rollout_log_probs if self.sampled else None,  # else no engine sampled them
            reference_log_probs=tokens.get("reference_log_probs"),
            teacher_log_probs=tokens.get("teacher_log_probs"),
            teacher_agrees=tokens.get("teacher_agrees"),
            teacher_top_log_probs=tokens.get("teacher_top_log_probs"),
            candidate_log_probs=outputs.candidate_log_probs,
            advantages=tokens.advantages,
            entropy=outputs.entropy if coefficients.entropy else outputs.entropy.detach(),
            selected=tokens.get("selected"),
            kept=tokens.get("kept"),
            kept_indexes=tokens.get("kept_indexes"),
            sequence=micro.packed.sequence,
            lengths=micro.lengths,
            pairs=columns.pairs[micro.samples] if columns.has("pairs") else None,
            right=columns.right[micro.samples] if columns.has("right") else None,
            group_tokens=columns.group_tokens[micro.samples] if columns.has("group_tokens") else None,
        )
        denominators = Denominators(
            tokens=counts.tokens, sequences=counts.sequences, max_length=counts.max_length, groups=counts.groups
        )
        checks, watch = self._row_sums(batch, micro, inputs, denominators)
        objective = self.algorithm.objective(
            inputs,
            denominators,
            kl_coef=coefficients.kl,
            entropy_coef=coefficients.entropy,
            right_tokens=counts.right_tokens,
            policy_input_hook=watch,
        )
        return objective.loss, objective.sums | checks

    def _row_sums(
        self, batch: TrainBatch, micro: MicroBatch, inputs: LossInputs, denominators: Denominators
    ) -> tuple[dict[str, Tensor], Callable[[Tensor], None] | None]:
        """Sums of one micro-batch that the controller compares with its plan: `check_rows`, of the signatures;
        `check_advantages`, of the advantages, each weighted by its signature; where advantages determine the loss,
        `check_expected_grad_dot_advantage`, and `check_grad_dot_advantage`, which the backward pass fills
        (`watch_grad_dot_advantage`). Also a hook for the input of the policy loss."""
        import torch

        sums: dict[str, Tensor] = {}
        watch: Callable[[Tensor], None] | None = None  # for losses that advantages do not determine
        columns = batch.columns
        planned = columns.advantages[micro.samples] if columns.has("advantages") else None
        if columns.has("signatures"):
            signatures = columns.signatures[micro.samples]
            sums["check_rows"] = signatures.double().sum()
            if planned is not None:
                sums["check_advantages"] = (sum_over_turns(planned.double()) * signature_weights(signatures)).sum()
        if self.checks_loss:
            tokens = micro.tokens.advantages if planned is None else micro.spread(planned)
            read = (tokens.index_select(0, inputs.kept_indexes) if inputs.has("kept") else tokens).double()
            expected = self.algorithm.grad_dot_advantage(inputs.replace(advantages=tokens), denominators)
            sums["check_expected_grad_dot_advantage"] = expected.double()
            sums["check_grad_dot_advantage"] = total = torch.zeros_like(sums["check_expected_grad_dot_advantage"])
            watch = partial(watch_grad_dot_advantage, advantages=read, total=total, world=self.policy.data_ranks)
        return {name: value.detach() for name, value in sums.items()}, watch

    def _checks(self, batch: TrainBatch, index: int) -> dict[str, float]:
        """`check_denominator`: this rank's share of the policy's denominator. Empty if a correction rejects tokens,
        which the plan cannot predict."""
        if self.algorithm.rejects:
            return {}
        return {"check_denominator": batch.policy_counts[index].tokens / self.policy.data_ranks}
