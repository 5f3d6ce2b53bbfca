"""Computations of the policy's role in an update, and those that it skips, in one process without Ray."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Coefficients, RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.loop.batch_selection import build_train_rows, plan_step, select_batch
from rlcli.training.worker.fsdp_backend import FsdpBackend, FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.token_advantages import fill_advantages, fill_kept, fill_selected
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict
from tests.model_fixtures import VOCABULARY

PROMPTS, SAMPLES, PROMPT_TOKENS = 3, 4, 6
CPU = torch.device("cpu")
HALF = Coefficients(lr=1e-3, kl=0.0, entropy=0.0)


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


def configured(path: str, **sections: dict[str, Any]) -> RunConfig:
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": path},
        "data": {"max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_response_tokens": 9},
        "train": {"tokens_per_microbatch": 64},
    }
    return RunConfig.model_validate(
        {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    )


def collected() -> RolloutBatch:
    """Of the three prompts one is always right, so that its samples have no advantage."""
    random, builder, samples = np.random.default_rng(1), ShardBuilder(), []
    for index in range(PROMPTS * SAMPLES):
        prompt, length = index // SAMPLES, 3 + index % 5
        tokens = random.integers(0, VOCABULARY, length, dtype=np.int32)
        prompt_ids = np.arange(PROMPT_TOKENS, dtype=np.int32) + prompt
        row = builder.add(Trajectory.single(prompt_ids, tokens, np.full(length, -4.6, np.float32)))
        right = prompt == 0 or index % 2 == 0
        verdict = Verdict(float(right), Outcome.OK if right else Outcome.WRONG)
        samples.append(Sample(prompt, index % SAMPLES, 0, row, PROMPT_TOKENS, length, "stop", verdict, 1))
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


def role_of(config: RunConfig, mesh: Any, dtype: torch.dtype = torch.float32) -> PolicyRole:
    return PolicyRole(config, CPU, FsdpLoader(config, dtype, CPU, ParallelDims.of(mesh.size(), 1)))


def fsdp(role: PolicyRole) -> FsdpBackend:
    assert isinstance(role.policy, FsdpBackend)
    return role.policy


def batch_of(role: PolicyRole, config: RunConfig, *, all_active: bool = False) -> TrainBatch:
    selected = select_batch(collected(), role.algorithm, config, seed=0)
    if all_active:
        object.__setattr__(selected, "active", None)
    plan = plan_step(selected, config, 1)
    batch = TrainBatch(plan.of_rank(0), build_train_rows(plan, selected, 0), CPU)
    fill_advantages(role.algorithm, batch, role.policy.ranks, 0.0)
    return batch


def updated(role: PolicyRole, batch: TrainBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The sums of an update, and its gradients. (AdamW divides them by their own size, rounding errors included.)"""
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update(
            (name, p.grad.clone()) for name, p in fsdp(role).model.named_parameters() if p.grad is not None
        )

    hook = fsdp(role).optimizer.register_step_pre_hook(keep)
    sums = role.update(batch, 0, HALF)
    hook.remove()
    return sums, gradients


def assert_alike(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def weights(role: PolicyRole) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in fsdp(role).model.named_parameters()}


def test_samples_without_advantage_are_not_forwarded_but_counted(mesh: Any, base: str) -> None:
    config = configured(base)
    results = []
    for all_active in (False, True):
        role = role_of(config, mesh)
        batch = batch_of(role, config, all_active=all_active)
        results.append((*updated(role, batch), batch))
    (skipped, sparse_gradients, few), (all_sums, reference, every) = results
    assert skipped["tokens"] < all_sums["tokens"]
    assert sum(len(micro.samples) for micro in few) == 2 * SAMPLES
    assert few.minibatch_counts[0].tokens == every.minibatch_counts[0].tokens == all_sums["tokens"]
    assert skipped["grad_norm"] == pytest.approx(all_sums["grad_norm"], rel=1e-5)
    assert_alike(sparse_gradients, reference)


def test_logits_are_made_of_response_tokens_alone(mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlcli.model.policy

    config, projected = configured(base), []
    real = rlcli.model.policy.token_log_probs

    def seen(hidden: torch.Tensor, *rest: Any) -> Any:
        projected.append(len(hidden))
        return real(hidden, *rest)

    monkeypatch.setattr(rlcli.model.policy, "token_log_probs", seen)
    role = role_of(config, mesh)
    batch = batch_of(role, config)
    sums = role.update(batch, 0, HALF)
    assert sum(projected) == sums["tokens"]
    assert sum(projected) < sum(micro.packed.tokens for micro in batch)


def test_old_log_probs_of_a_single_update_are_its_own(mesh: Any, base: str) -> None:
    """A forward pass beforehand, as several updates need, would change nothing."""
    for correction in ("token_tis", "sequence_tis", "none"):
        config = configured(base, algorithm={"correction": correction})
        results = []
        for beforehand in (False, True):
            role = role_of(config, mesh)
            assert not role.algorithm.needs_old_log_probs(1)
            batch = batch_of(role, config)
            if beforehand:
                role.compute_old_log_probs(batch)
            results.append(updated(role, batch))
        (computed_sums, gradients), (defaults, expected) = results
        assert computed_sums == pytest.approx(defaults, rel=1e-5, abs=1e-6)
        assert_alike(gradients, expected)


@pytest.mark.parametrize(("kl", "rank", "copies"), [(0.0, 0, 1), (0.1, 0, 2), (0.1, 4, 1)])
def test_a_reference_is_loaded_only_for_a_kl_and_not_beside_an_adapter(
    mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch, kl: float, rank: int, copies: int
) -> None:
    import rlcli.model.io.loading

    loaded, real = [], rlcli.model.io.loading.load_policy

    def load(*args: Any, **options: Any) -> Any:
        loaded.append(options["trainable"])
        return real(*args, **options)

    monkeypatch.setattr(rlcli.model.io.loading, "load_policy", load)
    role = role_of(configured(base, algorithm={"kl_coef": kl}, lora={"rank": rank}), mesh)
    assert len(loaded) == copies
    assert role.algorithm.needs_reference == (kl > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapters_optimizer_knows_nothing_of_the_base(mesh: Any, base: str, dtype: torch.dtype) -> None:
    config = configured(base, lora={"rank": 4})
    role = role_of(config, mesh, dtype)
    initial_weights = weights(role)
    role.update(batch_of(role, config), 0, HALF)
    optimizer = fsdp(role).optimizer
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in fsdp(role).model.named_parameters():
        assert (id(parameter) in held) == (".lora_" in name)
        assert (parameter in optimizer.state) == (".lora_" in name)
        assert parameter.dtype == (torch.float32 if ".lora_" in name else dtype)
        moved = not torch.equal(_local(parameter), _local(initial_weights[name]))
        assert moved == (".lora_B" in name), "of fresh factors A has no gradient: B is 0"


def test_bf16_computes_and_masters_moments_and_gradients_are_float32(
    mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, hidden, gradients = configured(base), set(), set()
    role = role_of(config, mesh, torch.bfloat16)
    fsdp(role).model.lm.base_model.layers[0].register_forward_hook(lambda _m, _i, output: hidden.add(output.dtype))
    fsdp(role).optimizer.register_step_pre_hook(
        lambda optimizer, *_: gradients.update(p.grad.dtype for g in optimizer.param_groups for p in g["params"])
    )
    role.update(batch_of(role, config), 0, HALF)
    assert hidden == {torch.bfloat16}
    assert gradients == {torch.float32}
    assert {parameter.dtype for parameter in fsdp(role).model.parameters()} == {torch.float32}
    states = fsdp(role).optimizer.state.values()
    assert {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


def test_an_update_with_shared_prompts_is_that_of_samples_apart(
    mesh: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, results = configured(base), []
    for worth in (1 / 16, 2.0):
        monkeypatch.setattr("rlcli.model.packed.WORTH_SHARING", worth)
        role = role_of(config, mesh)
        batch = batch_of(role, config)
        results.append((sum(micro.packed.tokens for micro in batch), *updated(role, batch)))
    (few, sums, gradients), (many, expected, reference) = results
    assert few == many - PROMPT_TOKENS * (2 * SAMPLES - 2)
    assert sums == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_alike(gradients, reference)


class Together:
    """Ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.barrier, self.held = threading.Barrier(count), list[torch.Tensor]()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.barrier.wait() == 0:
            self.held = []
        self.barrier.wait()
        self.held.append(tensor)
        self.barrier.wait()
        total = torch.stack(self.held).sum(0)
        self.barrier.wait()
        return total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is gathered")


def rejected(role: PolicyRole, config: RunConfig, ranks: int) -> TrainBatch:
    """The whole batch after its rejections were made on so many ranks."""
    selected = select_batch(collected(), role.algorithm, config, seed=0)
    plan = plan_step(selected, config, ranks)
    step = build_train_rows(plan, selected, 0)
    batches = [TrainBatch(plan.of_rank(rank), step, CPU) for rank in range(ranks)]
    for batch in batches:
        role.compute_old_log_probs(batch)
        for micro in batch:  # the engine's are the trainer's but for every fifth token, and two whole samples
            sequence = micro.packed.sequence
            position = torch.arange(len(sequence)) - (micro.lengths.cumsum(0) - micro.lengths)[sequence]
            drift = (position + micro.samples[sequence]) % 5 == 0
            drift |= torch.isin(micro.samples, torch.tensor([3, 7]))[sequence]
            micro.tokens.rollout_log_probs = micro.tokens.old_log_probs - torch.where(drift, 1.0, 0.01)
    from rlcli.algorithms.ranks import Ranks  # here, since files that import algorithms are run for their coverage

    together = Together(ranks)
    threads = [
        threading.Thread(target=fill_kept, args=(role.algorithm, batch, Ranks(together.add, together.gather)))
        for batch in batches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged = batches[0]
    for other in batches[1:]:
        assert other.policy_counts == merged.policy_counts
        assert torch.equal(other.columns.group_tokens, merged.columns.group_tokens)
        merged.minibatches[0] += other.minibatches[0]
    return merged


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "group-mean-token-mean"])
def test_a_rejection_gives_the_same_update_in_any_split(mesh: Any, base: str, aggregation: str) -> None:
    results = []
    for ranks, tokens in ((1, 400), (2, 64)):
        algorithm = {"correction": "token_tis * token_mask", "aggregation": aggregation}
        config = configured(base, algorithm=algorithm, train={"tokens_per_microbatch": tokens})
        role = role_of(config, mesh)
        batch = rejected(role, config, ranks)
        results.append((batch.policy_counts, *updated(role, batch)))
    (works, sums, gradients), *others = results
    for other in others:
        assert other[0] == works
        assert other[1] == pytest.approx(sums, rel=1e-4, abs=1e-5)
        assert_alike(other[2], gradients)


def test_the_denominators_of_a_rejection_are_those_of_what_is_left(mesh: Any, base: str) -> None:
    config = configured(base, algorithm={"correction": "token_mask", "loss": "clip_cov"})
    role = role_of(config, mesh)
    batch = rejected(role, config, 1)
    kept_tokens: dict[int, int] = {}
    for micro in batch:
        for row, sample in enumerate(micro.samples.tolist()):
            kept_tokens[sample] = int(micro.tokens.kept[micro.packed.sequence == row].sum())
    assert kept_tokens[3] == kept_tokens[7] == 0
    planned, policy_counts = batch.minibatch_counts[0], batch.policy_counts[0]
    assert policy_counts.tokens == sum(kept_tokens.values()) < planned.tokens
    assert policy_counts.sequences == sum(count > 0 for count in kept_tokens.values()) == planned.sequences - 2
    assert policy_counts.groups == planned.groups == PROMPTS
    right = batch.columns.right.tolist()
    assert policy_counts.right_tokens == sum(count for sample, count in kept_tokens.items() if right[sample])
    groups = batch.columns.groups.tolist()
    of_groups = [sum(kept_tokens[s] for s in kept_tokens if groups[s] == group) for group in groups]
    assert batch.columns.group_tokens.tolist() == of_groups
    fill_selected(role.algorithm, batch, role.policy.ranks)
    for micro in batch:
        assert not (micro.tokens.selected & ~micro.tokens.kept).any()


def test_a_prompt_that_has_lost_all_of_its_responses_is_not_counted(mesh: Any, base: str) -> None:
    config = configured(base, algorithm={"correction": "sequence_mask"})
    role = role_of(config, mesh)
    batch = batch_of(role, config, all_active=True)
    role.compute_old_log_probs(batch)
    for micro in batch:
        far = (batch.columns.groups[micro.samples] == 1)[micro.packed.sequence]
        micro.tokens.rollout_log_probs = micro.tokens.old_log_probs - far.float()
    fill_kept(role.algorithm, batch, role.policy.ranks)
    assert batch.policy_counts[0].groups == PROMPTS - 1
    assert batch.policy_counts[0].sequences == (PROMPTS - 1) * SAMPLES


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def test_the_first_forward_pass_of_a_step_is_compared_with_the_engine(mesh: Any, base: str) -> None:
    """With several minibatches only the first one's, unless all of them are forwarded before the first step."""
    for old in (False, True):
        config = configured(base, train={"minibatches": 2, "tokens_per_microbatch": 64})
        role = role_of(config, mesh)
        batch = batch_of(role, config, all_active=True)
        role.begin(batch, version=0)
        if old:
            role.compute_old_log_probs(batch)
        parts = [sum(int(micro.lengths.sum()) for micro in micros) for micros in batch.minibatches]
        for index in range(2):
            role.update(batch, index, HALF)
        compared = role.log_prob_record.comparison()
        assert compared.moments.sums[0] == (sum(parts) if old else parts[0])


def test_samples_drawn_from_another_distribution_are_not_compared(mesh: Any, base: str) -> None:
    for rollout in ({"top_p": 0.9}, {"log_prob_check": "off"}):
        config = configured(base, rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, **rollout})
        role = role_of(config, mesh)
        batch = batch_of(role, config)
        role.begin(batch, version=0)
        role.compute_old_log_probs(batch)
        role.update(batch, 0, HALF)
        assert role.log_prob_record.comparison().moments.weights == 0
