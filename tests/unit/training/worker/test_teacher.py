"""Teachers score the batch's tokens: what they fill in, for which samples, and the update that follows."""

from __future__ import annotations

from pathlib import Path
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
from rlcli.training.worker.teacher import OF_TOKENS, OF_TOP, TeacherRole
from rlcli.training.worker.token_advantages import fill_advantages
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict
from tests.model_fixtures import VOCABULARY, save_tokenizer, tiny_lm

PROMPTS, SAMPLES, PROMPT_TOKENS = 4, 2, 6
SOURCES = ["sums", "words", "sums", "code"]
CPU = torch.device("cpu")
DRAWN = {"advantage": "opd"}
TOP = {"advantage": "one", "loss": "opd_reverse"}


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models of the policy's vocabulary; the last one has rows of the embedding that no token has."""
    folders = []
    for seed in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"teacher-{seed}")
        tiny_lm(seed=seed, vocab_size=VOCABULARY + 28 * (seed == 3)).save_pretrained(folder)
        save_tokenizer(folder)
        folders.append(str(folder))
    return folders


def configured(base: str, teacher: Any, algorithm: dict[str, Any], tokens: int = 64, top_k: int = 0) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": base},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_response_tokens": 9},
            "train": {"tokens_per_microbatch": tokens},
            "algorithm": algorithm,
            "teacher": {"path": teacher, "top_k": top_k},
        }
    )


def collected() -> RolloutBatch:
    """Ragged responses, one of them empty, to prompts of three data sources."""
    random, builder, samples = np.random.default_rng(1), ShardBuilder(), []
    for index in range(PROMPTS * SAMPLES):
        prompt, length = index // SAMPLES, (0, 3, 7, 1, 9, 4, 2, 8)[index]
        tokens = random.integers(0, VOCABULARY, length, dtype=np.int32)
        prompt_ids = np.arange(PROMPT_TOKENS, dtype=np.int32) + prompt
        row = builder.add(Trajectory.single(prompt_ids, tokens, np.full(length, -4.6, np.float32)))
        verdict = Verdict(0.0, Outcome.WRONG)
        samples.append(Sample(prompt, index % SAMPLES, 0, row, PROMPT_TOKENS, length, "stop", verdict, 1))
    return RolloutBatch(SampleTable.of(samples), [builder.build()], data_sources=SOURCES)


def taught(config: RunConfig, mesh: Any, ranks: int = 1) -> tuple[PolicyRole, TrainBatch]:
    """The policy and the step's batch on so many ranks, one after another, joined to one."""
    load = FsdpLoader(config, torch.float32, CPU, ParallelDims.of(mesh.size(), 1))
    role, teacher = PolicyRole(config, CPU, load), TeacherRole(config, load)
    selected = select_batch(collected(), role.algorithm, config, seed=0)
    plan = plan_step(selected, config, ranks)
    step = build_train_rows(plan, selected, 0)
    batches = [TrainBatch(plan.of_rank(rank), step, CPU) for rank in range(ranks)]
    for batch in batches:
        if role.algorithm.needs_old_log_probs(1):
            role.compute_old_log_probs(batch)
        for number in range(len(teacher.models)):
            teacher.infer(batch, number)
        fill_advantages(role.algorithm, batch, role.policy.ranks, 0.0)
    for other in batches[1:]:
        batches[0].minibatches[0] += other.minibatches[0]
    return role, batches[0]


def by_sample(batch: TrainBatch, name: str) -> dict[int, Any]:
    return {sample: torch.tensor(values) for sample, values in batch.export(name).items()}


def updated(role: PolicyRole, batch: TrainBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    gradients: dict[str, torch.Tensor] = {}
    policy = role.policy
    assert isinstance(policy, FsdpBackend)

    def keep(*_: Any) -> None:
        gradients.update((name, p.grad.clone()) for name, p in policy.model.named_parameters() if p.grad is not None)

    policy.optimizer.register_step_pre_hook(keep)
    sums = role.update(batch, 0, Coefficients(lr=1e-3, kl=0.0, entropy=0.0))
    return sums, gradients


def test_a_policy_that_equals_its_teacher_learns_nothing(mesh: Any, base: str) -> None:
    role, batch = taught(configured(base, base, DRAWN), mesh)
    assert all(not micro.tokens.advantages.any() for micro in batch)
    sums, gradients = updated(role, batch)
    assert sums["teacher_kl"] == 0.0
    assert not any(gradient.any() for gradient in gradients.values())


def test_advantages_are_the_difference_to_the_teachers_own_log_probs(mesh: Any, base: str, teachers: list[str]) -> None:
    _, batch = taught(configured(base, teachers[0], DRAWN), mesh)
    lm = tiny_lm(seed=1)
    advantages, old = by_sample(batch, "advantages"), by_sample(batch, "old_log_probs")
    shard = collected().shards[0]
    for sample, actual in advantages.items():
        tokens = torch.tensor(np.array(shard.row(sample).tokens), dtype=torch.int64)
        log_p = lm(tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
        theirs = log_p[:-1].gather(-1, tokens[1:, None])[PROMPT_TOKENS - 1 :, 0]
        torch.testing.assert_close(actual.double(), theirs - old[sample].double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("algorithm", "top_k"), [(DRAWN, 0), (TOP, 4)], ids=["drawn", "top"])
def test_each_teacher_scores_the_samples_of_its_sources(
    mesh: Any, base: str, teachers: list[str], algorithm: dict[str, Any], top_k: int
) -> None:
    several = [{"path": teachers[0], "sources": ["sums"]}, {"path": teachers[1], "sources": ["words"]}, teachers[2]]
    _, together = taught(configured(base, several, algorithm, top_k=top_k), mesh)
    alone = [taught(configured(base, teacher, algorithm, top_k=top_k), mesh)[1] for teacher in teachers]
    for name in OF_TOKENS + OF_TOP * bool(top_k):
        actual = by_sample(together, name)
        for sample, values in actual.items():
            source = SOURCES[sample // SAMPLES]
            number = {"sums": 0, "words": 1, "code": 2}[source]
            expected = by_sample(alone[number], name)[sample]
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-5 if values.is_floating_point() else 0)
    if top_k:
        assert all(int(micro.tokens.teacher_top.max()) < VOCABULARY for micro in together)


@pytest.mark.parametrize(("algorithm", "top_k"), [(DRAWN, 0), (TOP, 4)], ids=["drawn", "top"])
def test_any_split_over_ranks_and_microbatches_gives_the_same_update(
    mesh: Any, base: str, teachers: list[str], algorithm: dict[str, Any], top_k: int
) -> None:
    several = [{"path": teachers[0], "sources": ["sums"]}, teachers[1]]
    results = []
    for ranks, tokens in ((1, 400), (1, 24), (2, 64)):
        role, batch = taught(configured(base, several, algorithm, tokens, top_k), mesh, ranks)
        results.append((len(list(batch)), *updated(role, batch)))
    (few, sums, gradients), *others = results
    assert sums["teacher_agreement"] <= sums["tokens"]
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-4
    for count, other_sums, other in others:
        assert count > few
        assert other_sums == pytest.approx(sums, rel=1e-4, abs=1e-4)
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_what_separate_workers_export_is_what_the_policy_imports(mesh: Any, base: str, teachers: list[str]) -> None:
    """In another layout, as on another number of ranks; the update is the same."""
    config = configured(base, teachers[0], TOP, top_k=4)
    role, batch = taught(config, mesh)
    _, far = taught(configured(base, teachers[0], TOP, tokens=24, top_k=4), mesh, ranks=2)
    original = {name: by_sample(batch, name) for name in OF_TOKENS + OF_TOP}
    for name in OF_TOKENS + OF_TOP:
        exported = far.export(name)
        batch.fill(name, exported)
        for sample, values in by_sample(batch, name).items():
            assert values.dtype == original[name][sample].dtype
            torch.testing.assert_close(values, original[name][sample], rtol=0, atol=1e-5)
    assert updated(role, batch)[0]["policy_loss"] > 0


def test_a_saved_batch_holds_what_the_teacher_gave(mesh: Any, base: str, teachers: list[str], tmp_path: Path) -> None:
    _, batch = taught(configured(base, teachers[0], TOP, top_k=4), mesh)
    batch.save(0, tmp_path / "bad.pt")
    saved = torch.load(tmp_path / "bad.pt", weights_only=True)
    assert all(set(OF_TOKENS + OF_TOP) <= set(micro["tokens"]) for micro in saved["micros"])
