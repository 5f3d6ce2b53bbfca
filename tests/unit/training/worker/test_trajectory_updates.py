"""Updates on trajectories with several responses, against plain loops over their tokens, in whatever split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.algorithm import Algorithm
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.ranks import ALONE
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Coefficients, RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.signature import signature, tokens_digest
from rlcli.data.trajectories import Trajectory
from rlcli.model.packed import pack
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.loop.batch_selection import build_train_rows, plan_step, select_batch
from rlcli.training.worker.fsdp_backend import FsdpBackend, FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.token_advantages import fill_advantages, fill_kept
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict

CPU = torch.device("cpu")
RUNS = ((2, 3), (2, 2, 3, 1), (2, 1, 1, 2, 2, 1), (2, 4, 2), (2, 0), (2, 1, 2, 3), (2, 2, -2, 3), (2, 2, 1, 2))
"""Tokens of each of two samples of four prompts: the prompt's, then drawn and not drawn in turn; negative: those of a
second branch's prompt."""
SCORES = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
SPLITS = (11, 24, 200)
"""Tokens of a micro-batch: about one sample, some, all."""
KL, LIMIT = 0.1, 6
POLICY, OLD, ENGINE, REFERENCE, VALUES = 5, 4, 2, 6, 3


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


def of_tokens(ids: Any, salt: int) -> Any:
    """A log-prob or value of each token by its id, exact in float32."""
    return -((ids * salt) % 7 + 1) / 8


def trajectory(index: int, runs: Sequence[int]) -> Trajectory:
    lengths = np.abs(runs)
    ids = np.random.default_rng(index).integers(20, 90, lengths.sum(), dtype=np.int32)
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    built = Trajectory.of_prompt(np.array([5, 6 + index // 2], np.int32))
    for position, part in enumerate(parts[1:]):
        if position % 2:
            built = built.extended("prompt" if runs[position + 1] < 0 else "environment", part)
        else:
            built = built.extended("policy", part, of_tokens(part, ENGINE).astype(np.float32), 1, "stop")
    return built


TRAJECTORIES = [trajectory(index, runs) for index, runs in enumerate(RUNS)]
DRAWN = [
    [int(t) for t, of_policy in zip(item.tokens, item.response_mask, strict=True) if of_policy] for item in TRAJECTORIES
]


def batch_of(config: RunConfig, algorithm: Algorithm) -> TrainBatch:
    """All samples, on one rank, with the signatures that the batch is checked against."""
    builder, samples = ShardBuilder(), []
    for index, (trajectory, score) in enumerate(zip(TRAJECTORIES, SCORES, strict=True)):
        signed = signature(tokens_digest(trajectory), score)
        verdict = Verdict(score, Outcome.OK if score else Outcome.WRONG)
        context = len(trajectory.tokens) - trajectory.prompt_tokens - trajectory.response_tokens
        counts = (
            trajectory.prompt_tokens,
            trajectory.response_tokens,
            "stop",
            verdict,
            1,
            index,
            signed,
            context,
            trajectory.turns,
        )
        samples.append(Sample(index // 2, index % 2, 0, builder.add(trajectory), *counts))  # type: ignore[arg-type]
    selected = select_batch(RolloutBatch(SampleTable.of(samples), [builder.build()]), algorithm, config, seed=0)
    plan = plan_step(selected, config, 1)
    return TrainBatch(plan.of_rank(0), build_train_rows(plan, selected, 0), CPU)


def configured(budget: int, path: str = "none", **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": path},
            "algorithm": {"kl_coef": KL, **algorithm},
            "data": {"max_prompt_tokens": 2},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": LIMIT},
            "train": {"tokens_per_microbatch": budget, "max_grad_norm": 1e6},
        }
    )


def computed(budget: int, **options: Any) -> tuple[float, dict[str, float], dict[int, list[float]]]:
    """Loss, sums, and the gradient of the drawn tokens of each sample, over all micro-batches of this size."""
    config = configured(budget, **options)
    algorithm = build_algorithm(**config.algorithm.model_dump())
    batch = batch_of(config, algorithm)
    for micro in batch:
        for name, salt in (("old_log_probs", OLD), ("reference_log_probs", REFERENCE), ("values", VALUES)):
            micro.tokens.set(name, of_tokens(micro.packed.targets, salt))
    if algorithm.rejects:
        fill_kept(algorithm, batch, ALONE)
    fill_advantages(algorithm, batch, ALONE, 0.0)
    (work,) = batch.policy_counts
    loss, sums, gradients = 0.0, dict[str, float](), dict[int, list[float]]()
    for micro in batch:
        log_probs = of_tokens(micro.packed.targets, POLICY).double().requires_grad_()
        columns = {name: batch.columns.get(name)[micro.samples] for name in ("right", "group_tokens")}
        tokens = {name: values for name, values in micro.tokens.present().items() if name in LossInputs.columns()}
        inputs = LossInputs(
            **tokens, **columns, log_probs=log_probs, sequence=micro.packed.sequence, lengths=micro.lengths
        )
        denominators = Denominators(work.tokens, work.sequences, work.max_length, work.groups)
        objective = algorithm.objective(inputs, denominators, kl_coef=KL)
        objective.loss.backward()
        loss += objective.loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in objective.sums.items()}
        assert log_probs.grad is not None
        parts = log_probs.grad.split(micro.lengths.tolist())
        gradients |= {sample: part.tolist() for sample, part in zip(micro.samples.tolist(), parts, strict=True)}
    return loss, sums, gradients


def rloo() -> list[list[float]]:
    """The score less that of the other sample of the prompt, on each drawn token."""
    return [[SCORES[i] - SCORES[i ^ 1]] * len(ids) for i, ids in enumerate(DRAWN)]


def gae(gamma: float, lam: float) -> list[list[float]]:
    """From the last drawn token to the first: what an environment added in between is no state of its own."""
    rows = []
    for ids, score in zip(DRAWN, SCORES, strict=True):
        row, advantage, following = [], 0.0, 0.0
        for position in reversed(range(len(ids))):
            reward, value = score * (position == len(ids) - 1), of_tokens(ids[position], VALUES)
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            row.insert(0, advantage)
        rows.append(row)
    every = [advantage for row in rows for advantage in row]
    mean, deviation = np.mean(every), np.sqrt(np.var(every, ddof=1) + 1e-8)
    return [[float((advantage - mean) / deviation) for advantage in row] for row in rows]


def token_ratio(ids: list[int], position: int) -> float:
    return float(np.exp(of_tokens(ids[position], OLD) - of_tokens(ids[position], ENGINE)))


def capped(ids: list[int], position: int) -> float:
    return min(token_ratio(ids, position), 1.2)


def capped_product(ids: list[int], position: int) -> float:
    return min(float(np.prod([token_ratio(ids, at) for at in range(len(ids))])), 1.2)


def within(ids: list[int], position: int) -> float:
    return float(0.8 <= token_ratio(ids, position) <= 1.3)


def looped(
    advantages: list[list[float]], weight: Callable[[list[int], int], float], aggregation: str, rejects: bool
) -> tuple[float, dict[str, float], dict[int, list[float]]]:
    """The same as `computed`, token by token in float64. rejects: tokens of weight 0 are not there at all."""
    positions = [[at for at in range(len(ids)) if not rejects or weight(ids, at)] for ids in DRAWN]
    lengths = [len(row) for row in positions]
    sequences = sum(n > 0 or not DRAWN[i] for i, n in enumerate(lengths))  # an empty response counts
    of_group = [lengths[i] + lengths[i ^ 1] for i in range(len(DRAWN))]
    emptied = [all(DRAWN[j] and not lengths[j] for j in (i, i ^ 1)) for i in range(0, len(DRAWN), 2)]
    leaves = [[torch.tensor(of_tokens(t, POLICY), dtype=torch.float64, requires_grad=True) for t in d] for d in DRAWN]
    loss = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(("tokens", "policy_loss", "kl", "mismatch_tokens", "mismatch_ratio", "mismatch_kl"), 0.0)
    for i, ids in enumerate(DRAWN):
        for at in range(len(ids)):
            sums["mismatch_tokens"] += 1
            sums["mismatch_ratio"] += token_ratio(ids, at)
            sums["mismatch_kl"] -= float(np.log(token_ratio(ids, at)))
        for at in positions[i]:
            rho, advantage = (leaves[i][at] - of_tokens(ids[at], OLD)).exp(), advantages[i][at]
            policy = torch.max(-advantage * rho, -advantage * rho.clamp(0.8, 1.2)) * weight(ids, at)
            off = leaves[i][at] - of_tokens(ids[at], REFERENCE)
            divergence = (-off).exp() - 1 + off
            share = {
                "token-mean": sum(lengths),
                "seq-mean-token-sum": sequences,
                "seq-mean-token-mean": sequences * lengths[i],
                "seq-mean-token-sum-norm": sequences * LIMIT,
                "group-mean-token-mean": (len(emptied) - sum(emptied)) * of_group[i],
            }[aggregation]
            loss = loss + (policy + KL * divergence) / share
            sums["tokens"] += 1
            sums["policy_loss"] += policy.item()
            sums["kl"] += divergence.item()
    loss.backward()
    gradients = {i: [0.0 if leaf.grad is None else leaf.grad.item() for leaf in row] for i, row in enumerate(leaves)}
    return loss.item(), sums, gradients


TIS = {"correction": "token_tis", "options": {"correction_cap": 1.2}}
MASK = {"correction": "token_mask", "options": {"correction_low": 0.8, "correction_high": 1.3}}
SUMMED = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-mean-token-mean")


@pytest.mark.parametrize(
    ("options", "advantages", "weight", "rejects"),
    [
        ({"advantage": "rloo", **TIS}, rloo, capped, False),
        ({"advantage": "rloo", **TIS, "correction": "sequence_tis"}, rloo, capped_product, False),
        ({"advantage": "rloo", **MASK}, rloo, within, True),
        ({"advantage": "gae", "gamma": 0.9, "lam": 0.8, **TIS}, partial(gae, 0.9, 0.8), capped, False),
    ],
    ids=["token_tis", "sequence_tis", "token_mask", "gae"],
)
@pytest.mark.parametrize("aggregation", SUMMED)
def test_loss_gradient_and_sums_are_those_of_a_loop_over_drawn_tokens(
    options: dict[str, Any],
    advantages: Callable[[], list[list[float]]],
    weight: Callable[[list[int], int], float],
    rejects: bool,
    aggregation: str,
) -> None:
    loss, sums, gradients = looped(advantages(), weight, aggregation, rejects)
    for budget in SPLITS:
        result = computed(budget, aggregation=aggregation, **options)
        assert result[0] == pytest.approx(loss, rel=1e-5)
        assert {name: result[1][name] for name in sums} == pytest.approx(sums, rel=1e-5, abs=1e-7)
        assert result[2].keys() == gradients.keys()
        for sample, gradient in gradients.items():
            assert result[2][sample] == pytest.approx(gradient, rel=1e-5, abs=1e-8)


def updated(path: str, mesh: Any, budget: int) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """The sums of an update, its gradients, and those of a loss over each branch forwarded whole and alone."""
    config = configured(budget, path, advantage="rloo", correction="none", kl_coef=0.0)
    role = PolicyRole(config, CPU, FsdpLoader(config, torch.float32, CPU, ParallelDims.of(mesh.size(), 1)))
    assert isinstance(role.policy, FsdpBackend)
    model, recorded = role.policy.model, dict[str, Tensor]()

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    terms = []
    for trajectory, row in zip(TRAJECTORIES, rloo(), strict=True):
        branches = np.split(trajectory.tokens, trajectory.branch_starts[1:])
        packs = [pack([(tokens, 1)], CPU) for tokens in branches]
        found_alone = [model(branch, temperature=1.0, want_entropy=False).log_probs for branch in packs]
        log_probs = torch.cat([torch.cat([torch.zeros(1), branch]) for branch in found_alone])  # none of a first token
        positions = [at for at, is_drawn in enumerate(trajectory.response_mask) if is_drawn]
        terms += [-advantage * log_probs[at] for at, advantage in zip(positions, row, strict=True)]
    (torch.stack(terms).sum() / sum(map(len, DRAWN))).backward()
    expected = gradients()
    role.policy.optimizer.zero_grad()
    batch = batch_of(config, role.algorithm)
    fill_advantages(role.algorithm, batch, role.policy.ranks, 0.0)
    role.policy.optimizer.register_step_pre_hook(lambda *_: recorded.update(gradients()))
    return role.update(batch, 0, Coefficients(lr=1e-3, kl=0.0, entropy=0.0)), recorded, expected


@pytest.mark.parametrize("budget", SPLITS[::2])
def test_a_models_update_is_that_of_each_trajectory_by_itself(mesh: Any, base: str, budget: int) -> None:
    """The gradient of a first update is that of −Σ A log π over drawn tokens, divided by their number."""
    sums, gradients, expected = updated(base, mesh, budget)
    assert sums["check_denominator"] == sum(map(len, DRAWN))
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
