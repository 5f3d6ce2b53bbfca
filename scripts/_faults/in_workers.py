"""Faults of a worker, planted in its process before the first step. `worker` is the actor's own object."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from patches import patch

Weights = Iterable[tuple[str, Any]]


def _from_second(worker: Any, name: str, second: Callable[..., Any]) -> None:
    """From its second call on, a method of the engine is replaced by `second`; the first sync is sound."""
    calls, first = itertools.count(1), getattr(worker.engine, name)
    patch(worker.engine, name, lambda *args: first(*args) if next(calls) == 1 else second(first, *args))


def _drain(_: Any, weights: Weights) -> None:
    for _named in weights:  # gathered from all ranks, which would wait for this one
        pass


def load_nothing(worker: Any) -> None:
    _from_second(worker, "load_weights", _drain)


def load_no_adapter(worker: Any) -> None:
    _from_second(worker, "load_adapter", lambda *_: None)


def leave_one_tensor(worker: Any) -> None:
    def without(load: Any, weights: Weights) -> None:
        load((name, tensor) for name, tensor in weights if name != "model.layers.1.mlp.down_proj.weight")

    _from_second(worker, "load_weights", without)


def swap_two_tensors(worker: Any) -> None:
    names = {
        f"model.layers.{layer}.mlp.up_proj.weight": f"model.layers.{1 - layer}.mlp.up_proj.weight" for layer in (0, 1)
    }

    def swapped(load: Any, weights: Weights) -> None:
        load([(names.get(name, name), tensor.clone()) for name, tensor in weights])

    _from_second(worker, "load_weights", swapped)


def leave_the_head(worker: Any) -> None:
    """The copy of a tied head that the CPU's kernels read stays as it was."""
    from rlcli.rollout.vllm.hooks import cpu_kernels

    patch(cpu_kernels, "repack", lambda model: None)


def keep_prefix_cache(worker: Any) -> None:
    patch(worker.engine._llm, "reset_prefix_cache", lambda *_, **__: True)


def temperature_of_one(worker: Any) -> None:
    patch(worker.policy, "temperature", 1.0)


def scale_logits(worker: Any) -> None:
    """The trainer's logits are 1.02 times as large as the engine's."""
    patch(worker.policy, "temperature", worker.policy.temperature / 1.02)


def scale_by_the_part_not_rotated(worker: Any) -> None:
    """The trainer divides the scores of latent attention by the root of the width that keys have without their rotated
    part."""
    for layer in worker.policy.policy.model.lm.base_model.layers:
        patch(layer.self_attn, "scaling", layer.self_attn.qk_nope_head_dim**-0.5)


def drop_sinks(worker: Any) -> None:
    """The trainer attends without sinks."""
    from rlcli.model import attention

    def without(kernel: Any, query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return original(kernel, query, key, value, sinks * 0 - 60.0)

    original = patch(attention, "attend_with_sinks", without)


def leave_sinks(worker: Any) -> None:
    """From the second sync on vLLM's own loader gets what it does not load."""
    from rlcli.rollout.vllm.hooks.written_weights import WrittenWeights

    def by_vllm(load: Any, weights: Weights) -> None:
        patch(WrittenWeights, "others", lambda written, parameters: parameters)
        load(weights)

    _from_second(worker, "load_weights", by_vllm)


def _rotary_base(worker: Any, factor: float) -> None:
    """The trainer's rotary embeddings have `factor` times the base: θ_i = base^(−2i/D)."""
    rotary = worker.policy.policy.model.lm.base_model.rotary_emb
    frequencies, rotated = rotary.inv_freq, 2 * len(rotary.inv_freq)
    steps = np.arange(0, rotated, 2) / rotated
    patch(rotary, "inv_freq", frequencies * frequencies.new_tensor(factor**-steps))


def rotary_base_off_by_a_percent(worker: Any) -> None:
    _rotary_base(worker, 1.01)


def rotary_base_doubled(worker: Any) -> None:
    _rotary_base(worker, 2.0)


def leak_states(worker: Any) -> None:
    """The trainer computes a pack's layers of linear attention as if it were one sample."""
    from rlcli.model.recurrence import Pieces

    def one_piece(lengths: Any, source: Any) -> Pieces:
        tokens = sum(lengths) if source is None else int(source.max()) + 1
        return Pieces(np.array([0]), np.array([tokens]), np.array([-1]), tokens)

    patch(Pieces, "of", staticmethod(one_piece))


def round_one_layer(worker: Any) -> None:
    """The trainer computes one layer with matrices of 8 bits, one scale each; what it sends is exact."""
    import torch

    def rounded(linear: Any) -> Callable[[Any], Any]:
        def forward(inputs: Any) -> Any:
            weight = linear.weight
            scale = weight.detach().abs().max() / 127
            return torch.nn.functional.linear(inputs, (weight / scale).round() * scale, linear.bias)

        return forward

    for module in worker.policy.policy.model.lm.base_model.layers[2].modules():
        if isinstance(module, torch.nn.Linear):
            patch(module, "forward", rounded(module))


def shift_positions_of_a_percent(worker: Any) -> None:
    """In every hundredth sample that the trainer packs, the response is one position further from its prompt."""
    from rlcli.training.worker.train_batch import TrainBatch

    numbers = itertools.count(90)

    def shifted(batch: Any, *args: Any) -> Any:
        micro = original(batch, *args)
        for sample in range(len(micro.rows)):
            if next(numbers) % 100 == 0:
                # The drawn tokens but the last: each predicts the one after it.
                positions = micro.packed.response_index[micro.packed.sequence == sample][1:]
                micro.packed.position_ids[..., positions] += 1
        return micro

    original = patch(TrainBatch, "_pack", shifted)


def shift_log_probs(worker: Any) -> None:
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    def shifted(*args: Any) -> Any:
        generation = original(*args)
        return replace(generation, log_probs=np.roll(generation.log_probs, 1))

    original = patch(VllmEngine, "_generation", shifted)


def mask_begins_early(worker: Any) -> None:
    from rlcli.data.sample_shard import SampleShard

    def early(shard: Any, index: int) -> Any:
        row = original(shard, index)
        spans = tuple(
            replace(s, **{"end" if s.speaker == "prompt" else "start": row.prompt_tokens - 1}) for s in row.spans
        )
        return replace(row, spans=spans, log_probs=np.concatenate([row.log_probs[:1], row.log_probs]))

    original = patch(SampleShard, "row", early)


def reduce_nothing(worker: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def keep(_: Any, output_tensor: Any, input_tensor: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size())[dist.get_rank()])

    patch(DefaultReduceScatter, "__call__", keep)


def divide_by_own_tokens(worker: Any) -> None:
    from rlcli.training.worker.train_batch import TrainBatch

    def divided(batch: Any, *args: Any) -> None:
        original(batch, *args)
        batch.policy_counts = [
            replace(work, tokens=max(1, sum(int(micro.lengths.sum()) for micro in micros)))
            for work, micros in zip(batch.policy_counts, batch.minibatches, strict=True)
        ]

    original = patch(TrainBatch, "__init__", divided)


def multiply_the_loss(worker: Any) -> None:
    from rlcli.algorithms.algorithm import Algorithm

    def larger(*args: Any, **kwargs: Any) -> Any:
        objective = original(*args, **kwargs)
        return replace(objective, loss=objective.loss * worker.world)

    original = patch(Algorithm, "objective", larger)


def flip_advantages(worker: Any) -> None:
    """Where the controller's advantages arrive."""
    from rlcli.training.worker.train_batch import TrainBatch

    def flipped(batch: Any, *args: Any) -> None:
        original(batch, *args)
        batch.columns.advantages = -batch.columns.advantages
        batch.spread("advantages", batch.columns.advantages)

    original = patch(TrainBatch, "__init__", flipped)


def flip_token_advantages(worker: Any) -> None:
    """Where the loss reads them."""
    from rlcli.training.worker.train_batch import TrainBatch

    def flipped(batch: Any, name: str, column: Any) -> None:
        original(batch, name, -column if name == "advantages" else column)

    original = patch(TrainBatch, "spread", flipped)


def never_step(worker: Any) -> None:
    patch(worker.policy.policy.optimizer, "step", lambda *_: None)


def reference_is_policy(worker: Any) -> None:
    def compute(batch: Any) -> None:
        role = worker.policy
        for micro in batch:
            micro.tokens.reference_log_probs = role.policy.log_probs(micro.packed, role.temperature)

    patch(worker.policy, "compute_reference_log_probs", compute)


def one_seed_a_sample(worker: Any) -> None:
    """The seed knows neither the step nor the prompt."""
    from rlcli.rollout.worker import rollout_role

    patch(rollout_role, "sample_seed", lambda run, purpose, step, prompt, sample: 1000 * worker.rank + sample + 1)


def same_seeds_each_step(worker: Any) -> None:
    from rlcli.rollout.worker import rollout_role
    from rlcli.rollout.worker.rollout_role import RolloutRole

    seeds: dict[tuple[int, str, int], int] = {}

    def seed(run: int, purpose: str, step: int, prompt: str, sample: int) -> int:
        index = sum(key[0] == step for key in seeds)
        return seeds.setdefault((step, prompt, sample), 1 + index + 10_000 * worker.rank)

    patch(rollout_role, "sample_seed", seed)
    assert RolloutRole


def _endless(worker: Any, selects: Callable[[int], bool]) -> None:
    """Nothing ends the responses whose seeds `selects` holds for."""

    def endless(request: Any) -> Any:
        params = original(request)
        if selects(request.seed):
            params.ignore_eos, params.stop_token_ids = True, []
            params._all_stop_token_ids = set()
        return params

    original = patch(worker.engine, "_params", endless)


def never_end(worker: Any) -> None:
    _endless(worker, lambda seed: True)


def _verdicts(worker: Any, change: Callable[[int, Any, Any], Any]) -> None:
    """`change(number, trajectory, scored)` of each sample that this worker verifies."""
    numbers = itertools.count()

    def submit(verification: Any, task: Any, trajectory: Any, *fields: Any) -> Future[Any]:
        scored, number, changed = original(verification, task, trajectory, *fields), next(numbers), Future[Any]()
        scored.add_done_callback(lambda done: changed.set_result(change(number, trajectory, done.result())))
        return changed

    original = patch(type(worker.rollout_role.verification), "submit", submit)


def time_out_half(worker: Any) -> None:
    from rlcli.types import Outcome, Verdict

    late = Verdict(0.0, Outcome.TIMEOUT, detail="killed")
    _verdicts(worker, lambda number, _, scored: scored._replace(verdict=late) if number % 2 else scored)


def reward_truncated(worker: Any) -> None:
    """Half of the responses do not end, and are rewarded for it."""
    _endless(worker, lambda seed: seed % 2 == 0)

    def rewarded(_: int, trajectory: Any, scored: Any) -> Any:
        cut_off = trajectory.stop_reason == "length"
        return scored._replace(verdict=replace(scored.verdict, score=1.0)) if cut_off else scored

    _verdicts(worker, rewarded)


def reward_everything(worker: Any) -> None:
    _verdicts(worker, lambda _, __, scored: scored._replace(verdict=replace(scored.verdict, score=1.0)))


def verdicts_of_others(worker: Any) -> None:
    """Each sample gets the verdict on the one before it."""
    batches: list[Any] = []

    def other(_: int, __: Any, scored: Any) -> Any:
        batches.append(scored)
        return batches[-2] if len(batches) > 1 else scored

    _verdicts(worker, other)
