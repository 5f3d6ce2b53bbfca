"""Values exchanged by the controller and the workers, without Ray."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from rlcli.cluster.dispatch import dispatch, implements, sum_by_key
from rlcli.config.schema import RunConfig
from rlcli.data.messages import Coefficients, Role, sample_seed
from rlcli.errors import RunFailed
from rlcli.model.parallel.offload import KINDS, Offload
from rlcli.model.weight_check.engine_weights import Verified
from rlcli.rollout.engine import EngineSpec
from rlcli.training.worker.calls import WorkerCalls
from rlcli.training.worker.worker import Worker
from rlcli.training.worker.worker_spec import WorkerSpec
from tests.contexts import context_of


def test_a_seed_names_its_sample_and_nothing_else() -> None:
    seeds = {
        sample_seed(seed, purpose, step, prompt, sample)
        for seed in (0, 1)
        for purpose in ("train", "eval")
        for step in (1, 2, 11)
        for prompt in ("a:train:1", "a:train:11")
        for sample in range(8)
    }
    assert len(seeds) == 2 * 2 * 3 * 2 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "train", 1, "a", 0) == sample_seed(0, "train", 1, "a", 0)


def test_numbers_of_all_ranks_are_added_key_by_key() -> None:
    assert sum_by_key([{"tokens": 3.0, "kl": 0.5}, {}, {"tokens": 1.0}]) == {"tokens": 4.0, "kl": 0.5}


def test_the_worker_implements_every_call_as_it_is_declared() -> None:
    declared = {name: method for name, method in vars(WorkerCalls).items() if hasattr(method, "dispatch")}
    assert len(declared) > 40
    for name, method in declared.items():
        implemented = getattr(Worker, name)
        assert implemented is not method, f"{name} is only declared"
        assert implemented.dispatch is method.dispatch, f"{name} is not marked with @implements"
        assert [
            (parameter.name, parameter.default) for parameter in inspect.signature(implemented).parameters.values()
        ] == [(parameter.name, parameter.default) for parameter in inspect.signature(method).parameters.values()]
        assert inspect.getdoc(method), f"{name} is not documented"


def test_an_implementation_of_another_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="updates implements update"):

        @implements(WorkerCalls.update)
        def updates(self: Any, minibatch: int, coefficients: Coefficients) -> dict[str, float]:
            return {}


def test_a_parameter_that_is_shared_has_to_exist() -> None:
    with pytest.raises(AssertionError, match="load has no parameter"):

        @dispatch(send="data", shared=["steps"])
        def load(self: Any, bins: list[int], step: int) -> None: ...


def sound_engine() -> MagicMock:
    """A stand-in for an engine that passes the checks of a sync."""
    engine = MagicMock()
    engine.verify.return_value, engine.probe.return_value = Verified(3, 1, []), (0, np.float32([-1.0]))
    return engine


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """A worker whose roles are stand-ins. (`begin` would take this process's output.)"""
    instance = Worker(0, 1)
    instance.config = RunConfig()
    context = context_of(instance.config)
    instance.spec = WorkerSpec(context, context.facts.roles, "rank", str(tmp_path), "test")
    instance.device = torch.device("cpu")
    instance.offload = Offload(KINDS["none"], instance.device)
    instance.policy, instance.rollout_role = MagicMock(), MagicMock(version=0, engine=sound_engine())
    return instance


@pytest.mark.filterwarnings("ignore:invalid value")  # −∞ less −∞
@pytest.mark.parametrize(
    ("trainer", "engine", "difference"),
    [
        ([-1.0, -2.0], [-1.0, -2.5], 0.5),
        ([-1.0, -2.0], [-1.0, float("nan")], float("inf")),
        ([float("nan"), -2.0], [-1.0, -2.0], float("inf")),
        ([-1.0, float("-inf")], [-1.0, float("-inf")], float("inf")),
    ],
)
def test_a_probe_whose_log_probs_are_no_numbers_differs_infinitely(
    worker: Worker, trainer: list[float], engine: list[float], difference: float
) -> None:
    assert worker.policy is not None
    worker.policy.probe_log_probs.return_value = np.float32(trainer)  # type: ignore[attr-defined]
    assert worker.rollout_role is not None
    worker.rollout_role.engine.probe.return_value = 0, np.float32(engine)  # type: ignore[attr-defined]
    assert worker.sync_weights(np.arange(3, dtype=np.int32), version=1).difference == difference


def test_a_sync_fails_if_the_engine_has_other_weights_or_old_prefixes(worker: Worker) -> None:
    probe = np.arange(2, dtype=np.int32)
    assert worker.policy is not None
    assert worker.rollout_role is not None
    engine: Any = worker.rollout_role.engine
    worker.policy.probe_log_probs.return_value = np.float32([-1.0])  # type: ignore[attr-defined]
    assert worker.sync_weights(probe, version=1)[3:5] == (3, 1)
    engine.probe.assert_called_once_with(probe)
    worker.release_rollout_memory()
    assert engine.method_calls[-2:] == [call.cached_tokens(probe), call.sleep()], "the next sync will look for it"
    engine.verify.return_value = Verified(0, 0, [f"w{i} differs" for i in range(5)])
    with pytest.raises(RunFailed, match=r"worker 0 does not hold .*: w0 differs, w1 differs, w2 differs and 2 more"):
        worker.sync_weights(probe, version=2)
    engine.verify.return_value, engine.probe.return_value = Verified(5, 0, []), (32, np.float32([-1.0]))
    with pytest.raises(RunFailed, match="worker 0 still has prefixes cached that earlier weights computed: 32 tokens"):
        worker.sync_weights(probe, version=2)
    assert worker.rollout_role.version == 1, "nothing is generated with what has not been checked"


def test_a_worker_closes_everything_and_says_what_failed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.cluster import watchdog

    assert worker.rollout_role is not None
    role: Any = worker.rollout_role
    role.finish_saving.side_effect = OSError(28, "No space left on device")
    worker.engine = MagicMock()
    worker.engine.close.side_effect = RuntimeError("the engine's process is gone")
    stopped: list[str] = []
    monkeypatch.setattr(watchdog, "stop", lambda: stopped.append("watchdog"))
    with pytest.raises(RunFailed) as raised:
        worker.close()
    assert raised.value.message == (
        "samples of the last rollout may not be saved: OSError: [Errno 28] No space left on device; "
        "the engine may leave memory and servers behind: RuntimeError: the engine's process is gone"
    )
    assert "OSError: [Errno 28]" in capsys.readouterr().err, "its log has the traceback"
    role.scorer.close.assert_called_once_with()
    assert stopped == ["watchdog"]


class Moves:
    """Replaces an Offload: records what is on the device, and the events in order."""

    def __init__(self) -> None:
        self.on_device: set[str] = set()
        self.events: list[str] = []

    def to_device(self, *names: str, prefetch: bool = False) -> None:
        self.on_device |= set(names)

    def to_host(self, *names: str) -> None:
        self.on_device -= set(names)

    def see(self, event: str) -> Any:
        """A stub that records which models are on the device when it is called."""
        return lambda *_: self.events.append(f"{event}: {', '.join(sorted(self.on_device)) or 'nobody'}")


def test_models_are_on_the_device_when_needed_and_else_offloaded(worker: Worker) -> None:
    moves, policy, critic, engine = Moves(), MagicMock(), MagicMock(), sound_engine()
    worker.offload = moves  # type: ignore[assignment]
    worker.set_engine_active = lambda yes: moves.events.append(f"torch alone: {not yes}")  # type: ignore[method-assign]
    worker.policy, worker.critic, worker.batch = policy, critic, MagicMock()
    assert worker.rollout_role is not None
    worker.rollout_role.engine = engine
    for stands_in, method in (
        *((policy, name) for name in ("compute_old_log_probs", "compute_reference_log_probs", "update")),
        *((critic, name) for name in ("infer", "update")),
        *((engine, name) for name in ("sleep", "wake_weights", "load_weights", "wake_cache")),
    ):
        setattr(stands_in, method, moves.see(f"critic's {method}" if stands_in is critic else method))
    policy.probe_log_probs.return_value = np.float32([-1.0])

    worker.release_rollout_memory()
    worker.compute_old_log_probs()
    worker.compute_reference_log_probs()
    worker.infer_critic()
    worker.update_critic(0, 1.0)
    worker.update(0, MagicMock())
    worker.sync_weights(np.arange(2, dtype=np.int32), version=1)
    everyone = "critic, critic.optimizer, policy, policy.optimizer"
    assert moves.events == [
        "sleep: nobody",
        "torch alone: True",
        "compute_old_log_probs: policy",
        "compute_reference_log_probs: policy, reference",
        "critic's infer: critic, policy",
        "critic's update: critic, critic.optimizer, policy",
        f"update: {everyone}",
        "torch alone: False",
        "wake_weights: policy",
        "load_weights: policy",
        "wake_cache: nobody",
    ]


@pytest.mark.parametrize(
    ("roles", "configured", "released"),
    [
        ({"policy", "engine"}, "auto", "all"),
        ({"policy", "engine"}, "cache", "cache"),
        ({"policy", "engine"}, "none", "none"),
        ({"engine"}, "auto", "none"),
    ],
)
def test_an_engine_beside_a_trainer_alone_releases_memory(
    roles: set[Role], configured: str, released: str, worker: Worker
) -> None:
    config = worker.config.changed(rollout={"sleep": configured})
    assert EngineSpec.of(context_of(config, roles=frozenset(roles)), "test", "").sleep == released


@pytest.mark.parametrize(("sleep", "grows"), [("all", True), ("cache", True), ("none", False)])
def test_torchs_segments_grow_while_an_engine_sleeps(
    sleep: str, grows: bool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.model.parallel import offload

    calls: list[bool] = []
    monkeypatch.setattr(offload, "growing_segments", calls.append)
    config = worker.config.changed(rollout={"sleep": sleep})
    worker.spec, worker.device = replace(worker.spec, context=context_of(config)), torch.device("cuda")
    for takes_part in (True, False):
        worker.set_engine_active(takes_part)
    assert calls == [False, grows]


def test_the_hubs_token_travels_in_the_spec_and_is_shown_nowhere(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    spec = replace(worker.spec, hub_token="hf_planted")
    assert "hf_planted" not in repr(spec)
    worker.spec.log_in()
    assert "HF_TOKEN" not in os.environ
    spec.log_in()
    assert os.environ["HF_TOKEN"] == "hf_planted"
    replace(spec, hub_token="hf_other").log_in()
    assert os.environ["HF_TOKEN"] == "hf_planted", "a machine's own token stays"
    monkeypatch.delenv("HF_TOKEN")


def test_deterministic_runs_on_gpus_do_not_fill_new_tensors(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default with deterministic algorithms is NaN in each new tensor, of the engine in this process too."""
    import torch.distributed as dist

    from rlcli.cluster.process import peak_memory

    worker.config = worker.config.model_copy(
        update={"train": RunConfig.model_validate({"train": {"deterministic": True}}).train}
    )
    worker.spec = replace(worker.spec, context=context_of(worker.config, device="cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(peak_memory, "start", lambda _: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    initial = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        worker.join("127.0.0.1", 0)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(initial[0])
        torch.utils.deterministic.fill_uninitialized_memory = initial[1]
