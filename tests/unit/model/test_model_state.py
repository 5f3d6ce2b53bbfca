"""Saving and loading models with their optimizers, on one rank: bit for bit, and in spite of a full disk."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.errors import CheckpointError, RunFailed
from rlcli.model.io.model_state import copied, load_own, load_state, rng_state, set_rng_state, trained_state
from rlcli.model.lora import LoraSpec
from rlcli.support.files import described
from rlcli.training.worker.state_writer import StateWriter, read_waiting, write_waiting
from tests.hostile_pickles import Runs
from tests.model_fixtures import save_tiny

LORA = LoraSpec(rank=4, alpha=8.0)


class Learning:
    """A model and its optimizer; `step` trains it on random gradients."""

    def __init__(self, mesh: Any, path: str, seed: int, lora: LoraSpec | None = None, value: bool = False) -> None:
        from rlcli.model.io.loading import load_policy, load_value
        from rlcli.model.optim import build_optimizer

        torch.manual_seed(seed)
        options = {"dtype": torch.float32, "device": torch.device("cpu"), "mesh": mesh}
        self.model = load_value(path, **options) if value else load_policy(path, lora=lora, **options)
        self.optimizer = build_optimizer(self.model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()


Owners = dict[str, Learning]


def trained(owners: Owners) -> dict[str, tuple[Any, Any]]:
    return {name: (learning.model, learning.optimizer) for name, learning in owners.items()}


def whole(owners: Owners) -> dict[str, torch.Tensor]:
    state = trained_state(trained(owners))
    return {name: getattr(t, "full_tensor", t.clone)().clone() for name, t in state.items()}


def places(owners: Owners) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in trained_state(trained(owners)).items() if tensor.ndim}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def save(owners: Owners, folder: Path, writer: StateWriter | None = None) -> dict[str, Any]:
    writer = writer or StateWriter()
    writer.start(copied(trained_state(trained(owners))), rng_state(), folder)
    files = writer.files(wait=True)
    assert files is not None
    return files


def build(kind: str, mesh: Any, base: str, seed: int) -> Owners:
    match kind:
        case "lora":
            return {"policy": Learning(mesh, base, seed, LORA)}
        case "with a critic":
            return {"policy": Learning(mesh, base, seed), "critic": Learning(mesh, base, seed + 1, value=True)}
        case "with a process reward model":
            return {"policy": Learning(mesh, base, seed), "critic": Learning(mesh, base, seed + 1)}
        case _:
            return {"policy": Learning(mesh, base, seed)}


@pytest.mark.parametrize("kind", ["full", "lora", "with a critic", "with a process reward model"])
def test_what_is_loaded_is_what_was_saved_and_training_goes_on_alike(
    mesh: Any, base: str, tmp_path: Path, kind: str
) -> None:
    owners = build(kind, mesh, base, seed=0)
    for learning in owners.values():
        learning.step()
    expected = whole(owners)
    save(owners, tmp_path / "policy")
    for learning in owners.values():
        learning.step()
    updated = whole(owners)

    others = build(kind, mesh, base, seed=7)
    for learning in [*others.values(), *others.values()]:
        learning.step()  # what it learned has to be forgotten
    initial_pointers = places(others)
    load_state(trained(others), tmp_path / "policy")
    assert_same(whole(others), expected)
    assert places(others) == initial_pointers, "no second model"
    rng_state = load_own(tmp_path / "policy", 0)
    assert rng_state is not None
    set_rng_state(rng_state)
    for learning in others.values():
        learning.step()
    assert_same(whole(others), updated)


def test_a_checkpoint_of_the_unfused_optimizer_resumes_unchanged(mesh: Any, base: str, tmp_path: Path) -> None:
    """Its `step` lay on the CPU, and its arithmetic rounds otherwise."""
    former = Learning(mesh, base, seed=0)
    former.optimizer = torch.optim.AdamW(
        [{**group, "fused": False, "foreach": True} for group in former.optimizer.param_groups]
    )
    former.step()
    save({"policy": former}, tmp_path / "policy")
    fused = Learning(mesh, base, seed=7)
    load_state(trained({"policy": fused}), tmp_path / "policy")
    assert_same(whole({"policy": fused}), whole({"policy": former}))
    for learning in (former, fused):
        torch.manual_seed(1)
        learning.step()
    expected = whole({"policy": former})
    for name, weight in whole({"policy": fused}).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7)
    assert all(group["fused"] for group in fused.optimizer.param_groups)


def test_an_adapter_is_saved_without_its_base_and_tied_weights_once(mesh: Any, base: str, tmp_path: Path) -> None:
    adapter, full = build("lora", mesh, base, 0), build("full", mesh, base, 0)
    assert all(".lora_" in name for name in whole(adapter))
    assert "policy.model.lm.lm_head.weight" not in whole(full)
    assert "policy.model.lm.model.embed_tokens.weight" in whole(full)
    size = {}
    for name, owners in {"adapter": adapter, "full": full}.items():
        size[name] = save(owners, tmp_path / name)[f"{name}/__0_0.distcp"]["size"]
    parameters = sum(p.numel() for p in full["policy"].model.parameters())
    assert size["full"] < 4 * parameters * 1.1
    assert size["adapter"] < size["full"] / 5


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_what_is_fixed_is_saved_with_the_weights(mesh: Any, tmp_path: Path, kind: str) -> None:
    """A checkpoint of such a mixture has its routers' biases, so that it can be exported by itself."""
    path = str(save_tiny(tmp_path / "base", kind))
    first, other = (Learning(mesh, path, seed=seed) for seed in (0, 7))
    expected = whole({"policy": first})
    fixed = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert len(fixed) == 2
    save({"policy": first}, tmp_path / "policy")
    for layer in (1, 2):
        other.model.lm.model.layers[layer].mlp.gate.e_score_correction_bias.zero_()
    load_state(trained({"policy": other}), tmp_path / "policy")
    weights = whole({"policy": other})
    assert all(expected[name].any() and torch.equal(weights[name], expected[name]) for name in fixed)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_policy_that_had_not_stepped_has_not_stepped_after_loading(
    mesh: Any, base: str, tmp_path: Path, steps: int
) -> None:
    owners = build("full", mesh, base, 0)
    save(owners, tmp_path / "policy")
    assert not owners["policy"].optimizer.state
    others = build("full", mesh, base, 1)
    for _ in range(steps):
        others["policy"].step()
    load_state(trained(others), tmp_path / "policy")
    assert not others["policy"].optimizer.state
    for models in (owners, others):
        torch.manual_seed(3)
        models["policy"].step()
    assert_same(whole(others), whole(owners))


class Slow:
    """Lets the writer's thread start only on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import rlcli.model.io.model_state

        self.go, real = threading.Event(), rlcli.model.io.model_state.save_state

        def save_state(*args: Any) -> Any:
            assert self.go.wait(20)
            return real(*args)

        monkeypatch.setattr(rlcli.model.io.model_state, "save_state", save_state)


def test_what_is_learned_after_the_copy_does_not_reach_the_file(
    mesh: Any, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners, slow, writer = build("full", mesh, base, 0), Slow(monkeypatch), StateWriter()
    owners["policy"].step()
    expected = whole(owners)
    random_state = rng_state()
    writer.start(copied(trained_state(trained(owners))), rng_state(), tmp_path / "policy")
    owners["policy"].step()
    with torch.no_grad():
        for parameter in owners["policy"].model.parameters():
            parameter.zero_()
    assert writer.files(wait=False) is None
    slow.go.set()
    assert writer.files(wait=True) == writer.files(wait=False)
    load_state(trained(owners), tmp_path / "policy")
    assert_same(whole(owners), expected)
    rank_state = load_own(tmp_path / "policy", 0)
    assert rank_state is not None
    assert torch.equal(rank_state["torch"], random_state["torch"])


def test_another_save_waits_for_the_one_before(
    mesh: Any, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners, slow, writer = build("lora", mesh, base, 0), Slow(monkeypatch), StateWriter()
    writer.start(copied(trained_state(trained(owners))), rng_state(), tmp_path / "first")
    threading.Timer(0.3, slow.go.set).start()
    writer.start(copied(trained_state(trained(owners))), rng_state(), tmp_path / "second")
    assert slow.go.is_set()
    assert (tmp_path / "first" / ".metadata").is_file()
    assert writer.files(wait=True)


def test_the_copy_is_gone_by_when_it_is_written(
    mesh: Any, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever waited to copy again would have two in memory."""
    owners, slow, writer = build("full", mesh, base, 0), Slow(monkeypatch), StateWriter()
    owners["policy"].step()
    state = copied(trained_state(trained(owners)))
    copies = [weakref.ref(tensor) for tensor in state.values()]
    writer.start(state, rng_state(), tmp_path / "policy")
    del state
    assert writer._done is not None
    live_copies: list[int] = []
    writer._done.add_done_callback(lambda _: live_copies.append(sum(copy() is not None for copy in copies)))
    assert all(copy() is not None for copy in copies)
    slow.go.set()
    writer.wait()
    assert live_copies == [0]


def test_every_file_is_listed_with_its_size_and_hash(mesh: Any, base: str, tmp_path: Path) -> None:
    files = save(build("lora", mesh, base, 0), tmp_path / "policy")
    descriptions = {f"policy/{path.name}": described(path) for path in (tmp_path / "policy").iterdir()}
    assert files == descriptions
    assert set(files) == {"policy/.metadata", "policy/__0_0.distcp", "policy/rank-0.pt"}


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        normal = [np.random.normal(), random.gauss(0, 1)]  # each keeps a second one back
        return [*normal, torch.rand(3).tolist()[0], random.random(), float(np.random.rand())]

    draw()
    torch.save(rng_state(), tmp_path / "rank-0.pt")
    expected = draw()
    assert draw() != expected
    rank_state = load_own(tmp_path, 0)
    assert rank_state is not None
    set_rng_state(rank_state)
    assert draw() == expected
    assert load_own(tmp_path, 1) is None


@pytest.mark.parametrize(
    ("saved", "loaded", "why"),
    [
        ("full", "lora", r"policy\.model\..*lora_A.* is not there"),
        ("lora", "full", r"policy\.model\.lm\.model\.embed_tokens\.weight is not there"),
        ("full", "with a critic", r"critic\.model\..* is not there"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    mesh: Any, base: str, tmp_path: Path, saved: str, loaded: str, why: str
) -> None:
    save(build(saved, mesh, base, 0), tmp_path / "policy")
    with pytest.raises(CheckpointError, match=rf"{why}: the checkpoint is of another model; use the model\.path"):
        load_state(trained(build(loaded, mesh, base, 0)), tmp_path / "policy")


def test_a_checkpoint_of_another_shape_is_refused(mesh: Any, base: str, tmp_path: Path) -> None:
    save(build("full", mesh, base, 0), tmp_path / "policy")
    wider = save_tiny(tmp_path / "wider", intermediate_size=320)
    with pytest.raises(CheckpointError, match=r"\[256, 128\], not \[320, 128\]: the checkpoint is of another model"):
        load_state(trained(build("full", mesh, str(wider), 0)), tmp_path / "policy")


def hindered(tmp_path: Path) -> Path:
    """A file where the folder should be."""
    (tmp_path / "policy").write_text("")
    return tmp_path / "policy"


def test_a_folder_that_cannot_be_written_is_named_and_the_next_save_works(mesh: Any, base: str, tmp_path: Path) -> None:
    owners, writer = build("lora", mesh, base, 0), StateWriter()
    with pytest.raises(RunFailed, match=r"^rank 0: cannot write the checkpoint .*/policy: .*; make room there") as e:
        save(owners, hindered(tmp_path), writer)
    assert not e.value.retry
    with pytest.raises(RunFailed):  # as often as it is asked for
        writer.files(wait=False)
    assert save(owners, tmp_path / "next", writer)
    load_state(trained(owners), tmp_path / "next")


FULL_DISK = """
import resource, signal, sys, torch, torch.distributed as dist
from pathlib import Path
from rlcli.model.io.model_state import copied, load_state, rng_state, trained_state
from rlcli.training.worker.state_writer import StateWriter

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
trained, writer = {"policy": (model, torch.optim.AdamW(model.parameters()))}, StateWriter()
for size in (0, 100, 10_000, 200_000, resource.RLIM_INFINITY):
    limit(size)
    writer.start(copied(trained_state(trained)), rng_state(), folder / f"at-{size}")
    try:
        files = writer.files(wait=True)
        limit(resource.RLIM_INFINITY)
        print("written", len(files))
    except Exception as error:
        limit(resource.RLIM_INFINITY)
        print(type(error).__name__, error)
load_state(trained, folder / "at--1")
print("loaded")
"""


@pytest.mark.long
def test_a_full_disk_is_one_line_at_any_byte_and_the_next_save_works(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    for line, size in zip(lines, (0, 100, 10_000, 200_000), strict=False):
        prefix = (
            f"RunFailed rank 0: cannot write the checkpoint {tmp_path}/at-{size}: File too large; make room there, or"
        )
        assert line.startswith(prefix), ran.stderr
    assert lines[4:] == ["written 3", "loaded"], ran.stderr


def test_a_failure_that_is_not_the_disks_is_left_to_whoever_can_judge_it(
    mesh: Any, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rlcli.model.io.model_state

    def lost(*_: Any) -> None:
        raise dist.DistNetworkError("connection closed by peer")

    monkeypatch.setattr(rlcli.model.io.model_state, "save_state", lost)
    with pytest.raises(dist.DistNetworkError):
        save(build("lora", mesh, base, 0), tmp_path / "policy")


@pytest.mark.long
def test_saving_does_not_end_with_what_training_is_told_to_end(tmp_path: Path) -> None:
    """A process that ends does not wait for the writer."""
    program = """
import threading, time, torch.distributed as dist
from pathlib import Path
import rlcli.model.io.model_state
from rlcli.training.worker.state_writer import StateWriter
rlcli.model.io.model_state.save_state = lambda *_: time.sleep(600)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
StateWriter().start({}, {}, Path("nowhere"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def shards() -> list[SampleShard | None]:
    full, empty = ShardBuilder(), ShardBuilder()
    for length in (3, 0, 5):
        prompt, response = np.arange(2, dtype=np.int32), np.arange(length, dtype=np.int32)
        full.add(
            Trajectory.single(prompt, response, np.linspace(-1, -1 / 3, length).astype(np.float32), version=length)
        )
    return [full.build(), None, empty.build()]


def test_tokens_that_wait_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "waiting.npz"
    assert write_waiting(path, shards()) == {"waiting.npz": described(path)}
    waiting = read_waiting(path)
    assert [shard is None for shard in waiting] == [False, True, False]
    for shard, expected in zip(waiting, shards(), strict=True):
        for name, value in vars(expected).items() if expected else ():
            back = getattr(shard, name)
            assert (back is None) == (value is None)
            assert back is None or back.dtype == value.dtype
            assert np.array_equal(back, value)


def test_waiting_tokens_that_cannot_be_written_or_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"cannot write .*waiting\.npz: No such file"):
        write_waiting(tmp_path / "absent" / "waiting.npz", shards())
    for content in (b"", b"x" * 100, b"PK\x03\x04" + b"x" * 100):
        (tmp_path / "waiting.npz").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot read .*waiting\.npz"):
            read_waiting(tmp_path / "waiting.npz")


HOSTILE_ARRAYS: dict[str, dict[str, Any]] = {
    "code": {"count": np.array(1), "0.tokens": np.array([Runs(Path("marker"))], dtype=object)},
    "no number of shards": {"0.tokens": np.zeros(2)},
    "many shards": {"count": np.array(1 << 60)},
    "a shard beyond them": {"count": np.array(1), "7.tokens": np.zeros(2)},
    "other fields": {"count": np.array(1), "0.others": np.zeros(2)},
    "other names": {"count": np.array(1), "tokens": np.zeros(2)},
}


@pytest.mark.parametrize("kind", HOSTILE_ARRAYS)
def test_waiting_tokens_of_another_kind_are_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "waiting.npz", **HOSTILE_ARRAYS[kind])
    with pytest.raises(CheckpointError, match=r"cannot read .*waiting\.npz"):
        read_waiting(tmp_path / "waiting.npz")
    assert not Path("marker").exists()


def test_waiting_tokens_are_not_unpacked_beyond_the_size_of_their_file(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "waiting.npz", count=np.array(1), **{"0.tokens": np.zeros(1 << 20)})
    with pytest.raises(CheckpointError, match="it is compressed"):
        read_waiting(tmp_path / "waiting.npz")


def test_moments_of_muon_are_saved_and_training_continues_with_them(mesh: Any, base: str, tmp_path: Path) -> None:
    from rlcli.model.optim import MuonSettings, build_optimizer

    def learning(seed: int) -> Learning:
        learner = Learning(mesh, base, seed)
        muon = MuonSettings(0.95, "match_rms_adamw")
        learner.optimizer = build_optimizer(learner.model, 1e-2, (0.9, 0.99), 0.1, muon)
        return learner

    owners = {"policy": learning(0)}
    owners["policy"].step()
    expected = whole(owners)
    assert {name.rpartition(".")[2] for name in expected} >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    save(owners, tmp_path / "policy")
    owners["policy"].step()
    updated = whole(owners)
    others = {"policy": learning(7)}
    load_state(trained(others), tmp_path / "policy")
    assert_same(whole(others), expected)
    rng_state = load_own(tmp_path / "policy", 0)
    assert rng_state is not None
    set_rng_state(rng_state)
    others["policy"].step()
    assert_same(whole(others), updated)
