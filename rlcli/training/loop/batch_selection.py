"""From verified samples to the training batch: remove samples that do not count, shape rewards, select samples,
compute advantages.

All of it needs only scores and lengths, so it runs on the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.packer import Plan, plan_batches
from rlcli.data.step_files import Recording
from rlcli.data.train_rows import MinibatchCounts, SampleColumns, TrainRows
from rlcli.errors import RunFailed
from rlcli.rollout.scheduler.sample_filter import compares_group, correct_mask, exclusion_reasons, rewarded
from rlcli.training.worker.plan_integrity import sum_over_turns
from rlcli.types import is_reward

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64, Int8, Int64, Shaped
    from ray import ObjectRef
    from torch import Tensor

    from rlcli.data.sample_shard import SampleShard


@dataclass(frozen=True)
class SelectedSamples:
    """The S samples that a step trains on, of the N that it has; some possibly twice."""

    samples: SampleTable
    """The controller's columns, S rows."""
    groups: list[int]
    """The group of each, dense: 0 … G − 1."""
    columns: SampleColumns[np.ndarray]
    """The columns for the ranks, without `shard` and `row`."""
    shards: list[ObjectRef[SampleShard] | None]
    """References to the `SampleShard`s, indexed by `samples.shard`."""
    active: list[bool] | None
    """True for those that have a gradient; None: all have one."""
    mean_shaped_reward: float
    """Mean shaped reward of all samples of the step that count, selected or not; NaN if none does."""
    exclusion_reasons: Int8[np.ndarray, " N"]
    """Reason to exclude each sample of the step, 0 if it counts (`sample_filter.exclusion_reasons`)."""
    one_prompt: bool
    """Samples of a group begin with the same prompt; those of an agent begin as it likes."""
    indexes: Int64[np.ndarray, " S"]
    """Index of each among all samples of the step."""
    shaped_rewards: Float64[np.ndarray, " N"]
    """The shaped reward of each sample of the step; NaN if it does not count."""


def select_batch(batch: RolloutBatch, algorithm: Algorithm, config: RunConfig, seed: int) -> SelectedSamples:
    """The samples to train on and their columns. seed: for random choices."""
    import numpy as np
    import torch

    rule = config.train.truncated
    reasons = exclusion_reasons(batch.samples, rule, batch.baselines, compared=compares_group(algorithm))
    samples = rewarded(batch.samples, rule)
    samples = samples.take(reasons == 0) if reasons.any() else samples
    groups = torch.tensor(samples.prompt)
    rewards = shaped_rewards(samples, groups, config)
    scores = torch.tensor(batch.samples.score[reasons == 0])  # as in their signatures
    columns = _columns_before_forward(batch, samples, rewards, scores, algorithm, config)
    indexes = algorithm.select_samples(rewards, groups, torch.Generator().manual_seed(seed))
    selected = columns.map(lambda values: values[indexes])
    _, dense = torch.unique(selected.groups, return_inverse=True)
    selected.groups = dense
    selected.group_tokens = torch.zeros(len(dense)).index_add_(0, dense, selected.lengths.float())[dense]
    if algorithm.selects_pairs:
        selected.pairs = torch.arange(len(indexes)) // 2
    skips = algorithm.skips_zero_advantages
    counted, shaped = np.flatnonzero(reasons == 0), np.full(len(reasons), np.nan)
    shaped[counted] = rewards.numpy()
    return SelectedSamples(
        samples=samples.take(indexes.numpy()),
        groups=dense.tolist(),
        columns=SampleColumns(**{name: values.numpy() for name, values in selected.present().items()}),
        shards=batch.shards,
        active=(sum_over_turns(selected.advantages.abs()) != 0).tolist() if skips else None,
        mean_shaped_reward=float(rewards.mean()),
        exclusion_reasons=reasons,
        one_prompt=not config.environment.is_command,
        indexes=counted[indexes.numpy()],
        shaped_rewards=shaped,
    )


def _columns_before_forward(
    batch: RolloutBatch,
    samples: SampleTable,
    rewards: Float64[Tensor, " S"],
    scores: Float64[Tensor, " S"],
    algorithm: Algorithm,
    config: RunConfig,
) -> SampleColumns[Tensor]:
    """The columns of `samples`, those of `batch` that count, which are known before a forward pass. rewards: shaped."""
    import torch

    parts, part_weights = _parts(samples, rewards, batch.part_weights)
    columns: SampleColumns[Tensor] = SampleColumns(
        rewards=rewards,
        groups=torch.tensor(samples.prompt),
        lengths=torch.tensor(samples.response_tokens),
        right=torch.tensor(correct_mask(samples, config)),
        scores=scores,
        signatures=torch.tensor(samples.signature),
        parts=parts,
    )
    if algorithm.is_turn_level or samples.turn_rewards.size:
        columns.turn_rewards = turn_rewards(samples, rewards)
    if algorithm.needs_baselines:
        baselines = [batch.baselines[prompt].score for prompt in samples.prompt.tolist()]
        columns.baselines = torch.tensor(baselines, dtype=torch.float64)
    if len(config.teacher.models) > 1:
        numbers = [config.teacher.number_of(source) for source in batch.data_sources]
        columns.teacher = torch.tensor([numbers[group] for group in samples.prompt.tolist()], dtype=torch.int64)
    if algorithm.advantages_before_tokens:
        columns.advantages = algorithm.response_advantages(
            AdvantageInputs(
                rewards=rewards,
                groups=columns.groups,
                lengths=columns.lengths,
                baselines=columns.get("baselines"),
                parts=parts,
                part_weights=part_weights,
                turn_rewards=columns.get("turn_rewards"),
                turn_states=turn_states(samples),
                turns=torch.tensor(samples.turns),
            )
        )
    return columns


def shaped_rewards(samples: SampleTable, groups: Int64[Tensor, " S"], config: RunConfig) -> Float64[Tensor, " S"]:
    """The verifier's scores plus the terms of `shaping`."""
    import numpy as np
    import torch

    from rlcli.algorithms.shaping import length_reward, overlong, soft_format

    shaping = config.shaping
    rewards, lengths = torch.tensor(samples.score), torch.tensor(samples.response_tokens)
    if shaping.overlong_buffer:
        rewards += overlong(
            lengths,
            max_length=config.rollout.max_response_tokens,
            buffer=shaping.overlong_buffer,
            penalty=shaping.overlong_penalty,
        )
    if shaping.length_weight:
        right = torch.tensor(correct_mask(samples, config))
        rewards += length_reward(right, lengths, groups, weight=shaping.length_weight)
    if shaping.format_weight:
        formats = samples.parts.get("format")
        if len(samples) and (formats is None or np.isnan(formats).all()):
            raise RunFailed(
                f"shaping.format_weight = {shaping.format_weight:g}, but no verdict has a part named format",
                "use a verifier that scores the format, or set it to 0",
            )
        scores = np.zeros(len(samples)) if formats is None else np.nan_to_num(formats, nan=0.0)
        rewards += soft_format(torch.tensor(scores), weight=shaping.format_weight)
    return rewards


def turn_rewards(samples: SampleTable, rewards: Float64[Tensor, " S"]) -> Float64[Tensor, "S K"]:
    """The reward of each turn, 0 behind the last one. The part of a sample's reward beyond the sum of its environment's
    rewards, from a verifier or from shaping, is added to its last turn."""
    import numpy as np
    import torch

    from_environment = np.nan_to_num(_padded(samples, samples.turn_rewards), nan=0.0)
    by_turn = torch.tensor(from_environment)
    # Added up one by one, as the verifier `environment` does, so that its score leaves exactly 0.
    by_turn[torch.arange(len(samples)), torch.tensor(samples.turns - 1)] += rewards - by_turn.cumsum(1)[:, -1]
    return by_turn


def turn_states(samples: SampleTable) -> Int64[Tensor, "S K"]:
    """The hash of the environment's message before each turn, 0 behind the last one and without an environment."""
    import torch

    return torch.tensor(_padded(samples, samples.turn_states))


def _padded(samples: SampleTable, column: Shaped[np.ndarray, "S _"]) -> Shaped[np.ndarray, "S K"]:
    """A column by turn with K entries a row, K the maximum number of turns of a sample and at least 1."""
    import numpy as np

    max_turns = max(1, int(samples.turns.max(initial=1)))
    return np.pad(column[:, :max_turns], ((0, 0), (0, max(0, max_turns - column.shape[1]))))


def plan_step(selected: SelectedSamples, config: RunConfig, ranks: int) -> Plan:
    """Assign samples to `ranks` and micro-batches."""
    return plan_batches(
        selected.samples.prompt_tokens.tolist(),
        selected.samples.response_tokens.tolist(),
        selected.groups,
        minibatches=config.train.minibatches,
        ranks=ranks,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        max_response_tokens=config.rollout.max_response_tokens,
        active=selected.active,
        pairs=selected.columns.pairs.tolist() if selected.columns.has("pairs") else None,
        prompts=selected.groups if selected.one_prompt else None,
        context_tokens=selected.samples.context_tokens.tolist(),
    )


def build_train_rows(
    plan: Plan, selected: SelectedSamples, seed: int, recording: Recording | None = None, version: int = 0
) -> TrainRows:
    """The `TrainRows` that all ranks share. seed: for random choices. recording: what they record of the step. version:
    of the trainer's weights."""
    right_tokens = selected.columns.lengths * selected.columns.right
    minibatches = [
        MinibatchCounts(
            tokens=mini.tokens,
            sequences=mini.sequences,
            groups=mini.groups,
            max_length=mini.max_length,
            right_tokens=int(right_tokens[list(mini.samples)].sum()),
        )
        for mini in plan.minibatches
    ]
    columns = selected.columns.replace(shard=selected.samples.shard, row=selected.samples.row)
    return TrainRows(minibatches, columns, seed, selected.shards, selected.one_prompt, recording, version)


def _parts(
    samples: SampleTable, rewards: Float64[Tensor, " S"], part_weights: Mapping[str, float]
) -> tuple[Float64[Tensor, "S K"], list[float]]:
    """The named parts of the rewards, sorted by name, 0 if a sample lacks one, and a last column for the remainder, if
    any: what shaping adds, and the reward of a sample without parts. Also the weight of each, 1 by default."""
    import torch

    rewarding = {name: values for name, values in sorted(samples.parts.items()) if is_reward(name)}
    known = {name: torch.tensor(values) for name, values in rewarding.items() if (values == values).any()}
    if not known:
        return rewards[:, None], [1.0]
    parts = torch.stack(list(known.values()), dim=1)
    weights = [part_weights.get(name, 1.0) for name in known]
    scored = torch.where(parts.isnan().all(dim=1), 0.0, torch.tensor(samples.score))
    parts, rest = parts.nan_to_num(nan=0.0), rewards - scored
    return (torch.cat([parts, rest[:, None]], dim=1), [*weights, 1.0]) if rest.any() else (parts, weights)
