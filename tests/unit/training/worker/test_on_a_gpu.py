"""An update on a pretended GPU (`tests.pretend_gpu`): no tensors of two devices meet, the result is that on the CPU,
and the host waits for the device two or three times an update, never for a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rlcli.model.io.loading as loading
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Coefficients, RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.signature import signature, tokens_digest
from rlcli.data.trajectories import Trajectory
from rlcli.model.io.model_config import SUPPORTED
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.loop.batch_selection import build_train_rows, plan_step, select_batch
from rlcli.training.worker.critic_role import CriticRole
from rlcli.training.worker.fsdp_backend import FsdpBackend, FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.token_advantages import fill_advantages, fill_kept, fill_selected
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict
from tests.model_fixtures import MIXTURES, VOCABULARY, save_tiny
from tests.pretend_gpu import DEVICE, PretendGpu, Wait

PROMPTS, SAMPLES, PROMPT_TOKENS = 3, 4, 6
CPU = torch.device("cpu")
SMALL = 24
"""Tokens of a micro-batch, so that there are several."""
STEP = Coefficients(lr=1e-3, kl=0.1, entropy=0.01)

Waits = dict[str, list[Wait]]
"""Of the host, by what the trainer does."""

AN_UPDATE = 2
"""Waits: for the norm of the gradient, and for the update's figures."""
A_MIXTURES_UPDATE = 3
"""And for the tokens of each expert."""
A_LOAD = 1
"""For the rows as they are on the device, which are compared with their signatures."""


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


@pytest.fixture(autouse=True)
def meshes_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ParallelDims.mesh
    monkeypatch.setattr(ParallelDims, "mesh", lambda self, device_type: mesh(self, "cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models, by family, as they are asked for."""

    class Folders(dict[str, str]):
        def __missing__(self, kind: str) -> str:
            folder: Path = tmp_path_factory.mktemp(kind)
            self[kind] = str(save_tiny(folder, kind))
            return self[kind]

    return Folders()


def configured(path: str, tokens: int, **sections: dict[str, Any]) -> RunConfig:
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": path},
        "data": {"max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_response_tokens": 9},
        "train": {"tokens_per_microbatch": tokens},
    }
    return RunConfig.model_validate(
        {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    )


def collected() -> RolloutBatch:
    """Signed samples of ragged lengths; of each prompt's samples every other one is right."""
    random, builder, samples = np.random.default_rng(1), ShardBuilder(), []
    for index in range(PROMPTS * SAMPLES):
        prompt, length = index // SAMPLES, 3 + index % 5
        tokens = random.integers(0, VOCABULARY, length, dtype=np.int32)
        prompt_ids = np.arange(PROMPT_TOKENS, dtype=np.int32) + prompt
        trajectory = Trajectory.single(prompt_ids, tokens, np.full(length, -4.6, np.float32))
        row, right = builder.add(trajectory), index % 2 == 0
        verdict = Verdict(float(right), Outcome.OK if right else Outcome.WRONG)
        signed = signature(tokens_digest(trajectory), verdict.score)
        samples.append(
            Sample(prompt, index % SAMPLES, 0, row, PROMPT_TOKENS, length, "stop", verdict, 1, signature=signed)
        )
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


def role_of(config: RunConfig, device: torch.device) -> PolicyRole:
    return PolicyRole(config, device, FsdpLoader(config, torch.float32, device, ParallelDims.of(1, 1)))


def batch_of(role: PolicyRole, config: RunConfig, dtype: torch.dtype = torch.float32) -> TrainBatch:
    selected = select_batch(collected(), role.algorithm, config, seed=0)
    plan = plan_step(selected, config, 1)
    return TrainBatch(plan.of_rank(0), build_train_rows(plan, selected, 0), role.device, dtype=dtype)


def filled(role: PolicyRole, batch: TrainBatch) -> None:
    """The forward passes before an update, and what is made of them."""
    algorithm, ranks = role.algorithm, role.policy.ranks
    if algorithm.needs_old_log_probs(1):
        role.compute_old_log_probs(batch)
    if algorithm.needs_reference:
        role.compute_reference_log_probs(batch)
    for micro in batch:  # a teacher that finds each token half as likely
        if algorithm.needs_teacher:
            micro.tokens.teacher_log_probs = micro.tokens.rollout_log_probs - 0.7
            micro.tokens.teacher_agrees = micro.tokens.rollout_log_probs < -1
        if algorithm.needs_teacher_top:
            micro.tokens.teacher_top = torch.stack([micro.packed.targets, 1 - micro.packed.targets.clamp(max=1)], 1)
            micro.tokens.teacher_top_log_probs = micro.tokens.rollout_log_probs[:, None].expand(-1, 2) + 3
    if algorithm.rejects:
        fill_kept(algorithm, batch, ranks)
    fill_advantages(algorithm, batch, ranks, 0.0)
    if algorithm.token_selector is not None:
        fill_selected(algorithm, batch, ranks)


def updated(role: PolicyRole, batch: TrainBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The sums of an update, and its gradients."""
    gradients: dict[str, Tensor] = {}
    assert isinstance(role.policy, FsdpBackend)
    model = role.policy.model

    def keep(*_: Any) -> None:
        gradients.update(
            (name, parameter.grad.cpu()) for name, parameter in model.named_parameters() if parameter.grad is not None
        )

    hook = role.policy.optimizer.register_step_pre_hook(keep)
    sums = role.update(batch, 0, STEP)
    hook.remove()
    return sums, gradients


def waits_of(path: str, dtype: torch.dtype, **sections: dict[str, Any]) -> Waits:
    config, waits = configured(path, SMALL, **sections), Waits()
    with PretendGpu() as gpu:
        with gpu.loading():
            role = role_of(config, DEVICE)
        with gpu.recorded() as waits["load"]:
            batch = batch_of(role, config, dtype)
        assert len(batch.minibatches[0]) > 3
        with gpu.recorded() as waits["fill"]:
            filled(role, batch)
        with gpu.recorded() as waits["update"]:
            sums = role.update(batch, 0, STEP)
        assert "bad" not in sums
        with gpu.recorded() as waits["export"]:
            assert all(weight.device == DEVICE for _, weight in role.policy.stream_weights())
    return waits


def shown(waits: Sequence[Wait]) -> str:
    counts = Counter(waits)
    return "\n".join(f"{count} x {wait.kind} {wait.operation} {wait.where}" for wait, count in counts.most_common())


def in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have parameters in bfloat16, and no FSDP2, whose streams need a GPU: attention has its kernel."""
    without_weights = loading._without_weights
    monkeypatch.setattr(
        loading, "_without_weights", lambda kind, config, dtype: without_weights(kind, config, torch.bfloat16)
    )


def assert_few(waits: Waits, limits: dict[str, int]) -> None:
    for name, recorded in waits.items():
        assert len(recorded) <= limits.get(name, 0), f"{name}:\n{shown(recorded)}"


@pytest.mark.parametrize("kind", SUPPORTED)
def test_an_update_on_a_gpu_gives_what_it_gives_on_the_cpu(mesh: Any, folders: dict[str, str], kind: str) -> None:
    config, waits = configured(folders[kind], SMALL), Waits()
    role = role_of(config, CPU)
    batch = batch_of(role, config)
    filled(role, batch)
    expected, gradients = updated(role, batch)
    with PretendGpu() as gpu:
        with gpu.loading():
            role = role_of(config, DEVICE)
        with gpu.recorded() as waits["load"]:
            batch = batch_of(role, config)
        filled(role, batch)
        with gpu.recorded() as waits["update"]:
            sums, gpu_gradients = updated(role, batch)
    assert sums == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert gpu_gradients.keys() == gradients.keys()
    for name, gradient in gpu_gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-5, msg=name)
    waits["update"] = [wait for wait in waits["update"] if not wait.where.startswith("tests/")]
    assert_few(waits, {"load": A_LOAD, "update": A_MIXTURES_UPDATE if kind in MIXTURES else AN_UPDATE})


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_in_half_precision_the_host_waits_for_no_micro_batch(
    mesh: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    in_half(monkeypatch)
    waits = waits_of(folders[kind], torch.bfloat16)
    assert_few(waits, {"load": A_LOAD, "update": A_MIXTURES_UPDATE if kind in MIXTURES else AN_UPDATE})


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "entropy and KL": {"algorithm": {"kl_coef": 0.1}},
    "an adapter": {"lora": {"rank": 4}, "algorithm": {"kl_coef": 0.1}},
    "a rejection": {"algorithm": {"correction": "token_tis * token_mask"}},
    "a selection of tokens": {"algorithm": {"loss": "clip_cov"}},
    "a teacher": {"algorithm": {"loss": "opd_forward"}},
    "recomputed layers": {"model": {"gradient_checkpointing": True}},
    "a head in float32": {"model": {"head_dtype": "float32"}},
}
BEFORE_AN_UPDATE = {"a rejection": 4, "a selection of tokens": 12}
"""Waits of settings that work on the tokens of a whole minibatch, whatever the number of micro-batches."""


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_has_the_host_wait_for_a_micro_batch(
    mesh: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    in_half(monkeypatch)
    sections = {key: {"path": folders["qwen2"], **values} for key, values in SETTINGS[name].items() if key == "model"}
    sections |= {key: values for key, values in SETTINGS[name].items() if key != "model"}
    waits = waits_of(folders["qwen2"], torch.bfloat16, **sections)
    assert_few(waits, {"load": A_LOAD, "fill": BEFORE_AN_UPDATE.get(name, 0), "update": AN_UPDATE})


def test_a_critics_update_has_the_host_wait_for_no_micro_batch(mesh: Any, folders: dict[str, str]) -> None:
    config, waits = configured(folders["qwen2"], SMALL), Waits()
    with PretendGpu() as gpu:
        with gpu.loading():
            role = role_of(config, DEVICE)
            critic = CriticRole(config, FsdpLoader(config, torch.float32, DEVICE, ParallelDims.of(1, 1)))
        batch = batch_of(role, config)
        with gpu.recorded() as waits["infer"]:
            critic.infer(batch)
        for micro in batch:
            micro.tokens.returns = micro.tokens.values + 1
        with gpu.recorded() as waits["update"]:
            sums = critic.update(batch, 0, 1e-3)
    assert sums["loss"] > 0
    assert_few(waits, {"update": AN_UPDATE})


def test_pairs_of_samples_have_the_host_wait_twice() -> None:
    """For their number, and for whether each is whole: in each micro-batch."""
    from rlcli.algorithms.inputs import LossInputs
    from rlcli.algorithms.losses.sequence import dpo

    with PretendGpu() as gpu:
        tokens, sequence = torch.zeros(4, device=DEVICE), torch.tensor([0, 0, 1, 1], device=DEVICE)
        lengths, pairs = torch.tensor([2, 2], device=DEVICE), torch.tensor([5, 5], device=DEVICE)
        inputs = LossInputs(
            log_probs=tokens - 1,
            reference_log_probs=tokens,
            advantages=tokens + 1,
            sequence=sequence,
            lengths=lengths,
            pairs=pairs,
        )
        with gpu.recorded() as waits:
            dpo(inputs)
    assert len(waits) == 2, shown(waits)


def test_tensors_of_two_devices_are_found() -> None:
    with PretendGpu():
        x = torch.ones(3, device=DEVICE)
        with pytest.raises(AssertionError, match=r"aten\.add\.Tensor: tensors of two devices, at tests/unit"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3, "a number of the host may be beside them"


def test_waits_are_found_where_they_are() -> None:
    with PretendGpu() as gpu:
        x = torch.tensor([3, 0, 4], device=DEVICE)
        int(x[0])
        x.cpu()
        x[x > 0]
        x.nonzero()
        x[[0, 2]]
        torch.repeat_interleave(x, x)
        torch.repeat_interleave(x, x, output_size=7)
        x.to("cpu", non_blocking=True)
        torch.arange(3).pin_memory().to(DEVICE, non_blocking=True)
        x.copy_(torch.arange(3), non_blocking=True)
    kinds = [wait.kind for wait in gpu.waits]
    assert kinds == ["upload", "scalar", "download", "shape", "shape", "upload", "shape", "upload"]
    assert {wait.where.rpartition(":")[0] for wait in gpu.waits} == {"tests/unit/training/worker/test_on_a_gpu.py"}
