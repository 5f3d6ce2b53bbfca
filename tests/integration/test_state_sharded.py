"""Saving and loading on real gloo groups of one process, this one, and of two, launched once for all tests; each waits
for what the other saves. The two shard one model, and then hold a copy each."""

from __future__ import annotations

import itertools
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlcli.errors import RunFailed
from rlcli.model.lora import LoraSpec
from tests.model_fixtures import ragged_rows, save_tiny

pytestmark = pytest.mark.timeout(600)
CPU = torch.device("cpu")
ROWS = ragged_rows(8, longest=30, seed=3)
LORA = LoraSpec(rank=3, alpha=8.0)
"""Three rows do not divide over two ranks, nor do the 101 of the vocabulary; of the critic's head one rank has none."""
VOCABULARY = 101
KINDS = ("lora", "with a critic")
SHAPES = {"1x1": (1, 1), "1x2": (2, 1), "2x1": (2, 2)}
"""replicate × shard: number of ranks, and of copies."""


class Learning:
    """A policy or value model and its optimizer; a step trains it on this rank's share of the rows."""

    def __init__(self, base: str, mesh: Any, *, lora: LoraSpec | None = None, value: bool = False) -> None:
        from rlcli.model.io.loading import load_policy, load_value
        from rlcli.model.optim import build_optimizer

        options = {"dtype": torch.float32, "device": CPU, "mesh": mesh}
        self.value, self.rank, self.world = value, mesh.get_rank(), mesh.size()
        self.model = load_value(base, **options) if value else load_policy(base, lora=lora, **options)
        self.optimizer = build_optimizer(self.model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)

    def step(self) -> float:
        from rlcli.model.packed import pack

        rows = ROWS[self.rank :: self.world]
        output = self.model(pack(rows, CPU))
        loss = (output.values - 1).square().sum() if self.value else output.log_probs.sum()
        loss = loss / sum(len(tokens) - prompt for tokens, prompt in ROWS)
        (loss * self.world).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()


Owners = dict[str, Learning]


def build(kind: str, base: str, mesh: Any) -> Owners:
    torch.manual_seed(0)
    if kind == "lora":
        return {"policy": Learning(base, mesh, lora=LORA)}
    return {"policy": Learning(base, mesh), "critic": Learning(base, mesh, value=True)}


def trained(owners: Owners) -> dict[str, tuple[Any, Any]]:
    return {name: (learning.model, learning.optimizer) for name, learning in owners.items()}


def whole(owners: Owners) -> dict[str, torch.Tensor]:
    from rlcli.model.io.model_state import trained_state

    state = trained_state(trained(owners))
    return {name: getattr(t, "full_tensor", t.clone)().clone() for name, t in state.items()}


def steps(owners: Owners, count: int = 2) -> list[float]:
    return [learning.step() for _ in range(count) for learning in owners.values()]


def save_and_go_on(owners: Owners, writer: Any, folder: Path, rank: int) -> dict[str, Any]:
    """The saved state, and the losses of training while it is written: both threads run collectives at once."""
    from rlcli.model.io.model_state import copied, rng_state, trained_state

    result: dict[str, Any] = {"saved": whole(owners)}
    torch.manual_seed(100 + rank)
    rng = rng_state()
    result["drawn"] = torch.rand(3)
    writer.start(copied(trained_state(trained(owners))), rng, folder)
    result["losses"] = steps(owners)
    result["files"] = writer.files(wait=True)
    result["after"] = whole(owners)
    return result


def load_and_go_on(kind: str, base: str, mesh: Any, folder: Path) -> dict[str, Any]:
    from rlcli.model.io.model_state import load_own, load_state, set_rng_state

    owners = build(kind, base, mesh)
    steps(owners, 1)
    load_state(trained(owners), folder)
    rank_state = load_own(folder, mesh.get_rank())
    result: dict[str, Any] = {"loaded": whole(owners), "known": rank_state is not None}
    if rank_state:
        set_rng_state(rank_state)
        result["drawn"] = torch.rand(3)
    return result | {"losses": steps(owners), "after": whole(owners)}


def fail_on_one(owners: Owners, folder: Path, rank: int) -> list[str]:
    """The outcome that each rank gets when the disk of rank 1 is full, then when it has room again."""
    from rlcli.model.io.model_state import copied, rng_state, trained_state
    from rlcli.training.worker.state_writer import StateWriter

    writer, outcomes = StateWriter(), []
    for name, size in (("full", 20_000), ("room", resource.RLIM_INFINITY)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if rank else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.start(copied(trained_state(trained(owners))), rng_state(), folder / name)
        try:
            outcomes.append(f"{len(writer.files(wait=True) or {})} files")
        except RunFailed as error:
            outcomes.append(str(error))
    return outcomes


def act(rank: int, world: int, port: int, base: str, folder: Path) -> None:
    """The work of each rank of each group; its results are written to `shape`-`rank`.pt."""
    from rlcli.model.parallel.parallel_dims import ParallelDims
    from rlcli.training.worker.state_writer import StateWriter

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    writer = StateWriter()
    shapes = {shape: copies for shape, (ranks, copies) in SHAPES.items() if ranks == world}
    meshes = {shape: ParallelDims.of(world, copies).mesh("cpu") for shape, copies in shapes.items()}
    results: dict[str, dict[Any, Any]] = {shape: {} for shape in shapes}
    for shape, mesh in meshes.items():
        for kind in KINDS:
            owners = build(kind, base, mesh)
            steps(owners)
            results[shape][kind, "saved"] = save_and_go_on(owners, writer, folder / kind / shape, rank)
    if world == 2:
        results["1x2"]["told"] = fail_on_one(owners, folder, rank)
    for shape, mesh in meshes.items():
        for kind, saver in itertools.product(KINDS, SHAPES):
            until(folder / kind / saver / ".metadata")  # written last
            results[shape][kind, saver] = load_and_go_on(kind, base, mesh, folder / kind / saver)
    for shape, result in results.items():
        torch.save(result, folder / f"{shape}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def until(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


Results = dict[tuple[str, int], dict[Any, Any]]
"""(shape, rank) → results of that rank."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("state")
    base = str(save_tiny(root / "base", vocab_size=VOCABULARY))
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = (first.getsockname()[1], second.getsockname()[1])
    # Both fork from one process that has imported, which takes longer than all that is tested here.
    mp.get_context("forkserver").set_forkserver_preload(
        ["rlcli.model.io.loading", "rlcli.model.io.model_state", __name__]
    )
    pair = mp.start_processes(act, (2, ports[1], base, root), nprocs=2, join=False, start_method="forkserver")
    act(0, 1, ports[0], base, root)
    while not pair.join():
        pass
    return {
        (shape, rank): torch.load(root / f"{shape}-{rank}.pt", weights_only=False)
        for shape, (ranks, _) in SHAPES.items()
        for rank in range(ranks)
    }


def pairs(results: Results, kind: str) -> Iterator[tuple[str, int, dict[str, Any], str, dict[str, Any]]]:
    """(shape, rank, what it did after loading, the shape that had saved it, what that did after saving)."""
    for (shape, rank), result in results.items():
        for saver in SHAPES:
            yield shape, rank, result[kind, saver], saver, results[saver, 0][kind, "saved"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_what_was_saved_on_whatever_number_of_ranks(results: Results, kind: str) -> None:
    for _, _, loaded, _, saved in pairs(results, kind):
        assert loaded["loaded"].keys() == saved["saved"].keys()
        assert all(torch.equal(loaded["loaded"][name], tensor) for name, tensor in saved["saved"].items())


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_it_had_not_been_interrupted(results: Results, kind: str) -> None:
    for shape, _, loaded, saver, saved in pairs(results, kind):
        if shape == saver:
            assert loaded["losses"] == saved["losses"]
            assert all(torch.equal(loaded["after"][name], tensor) for name, tensor in saved["after"].items())
        else:
            assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-6)
            weights = [name for name in saved["after"] if name.split(".")[1] == "model"]
            difference = sum((loaded["after"][name] - saved["after"][name]).square().sum() for name in weights)
            assert difference.sqrt() <= 1e-6 * sum(saved["after"][name].square().sum() for name in weights).sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_resumes_its_random_state_and_a_new_one_keeps_its_seed(results: Results, kind: str) -> None:
    for _, rank, loaded, saver, _ in pairs(results, kind):
        assert loaded["known"] == (rank < SHAPES[saver][0])
        if loaded["known"]:
            assert torch.equal(loaded["drawn"], results[saver, rank][kind, "saved"]["drawn"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_lists_what_it_wrote(results: Results, kind: str) -> None:
    for shape in ("1x2", "2x1"):
        written = [set(results[shape, rank][kind, "saved"]["files"]) for rank in (0, 1)]
        first = {f"{shape}/.metadata", f"{shape}/__0_0.distcp", f"{shape}/rank-0.pt"}
        assert written == [first, {f"{shape}/__1_0.distcp", f"{shape}/rank-1.pt"}]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_write_each_tensor_once_and_share_the_work(results: Results, kind: str) -> None:
    def sizes(shape: str) -> list[int]:
        saved = [results[shape, rank][kind, "saved"]["files"] for rank in range(SHAPES[shape][0])]
        return [sum(file["size"] for name, file in files.items() if name.endswith(".distcp")) for files in saved]

    (alone,), copies = sizes("1x1"), sizes("2x1")
    assert sum(copies) == pytest.approx(alone, rel=0.01)
    assert max(copies) < 0.8 * alone


def test_a_full_disk_of_one_rank_is_told_by_all_and_the_next_save_works(results: Results) -> None:
    for rank, files in ((0, 3), (1, 2)):
        failed, worked = results["1x2", rank]["told"]
        assert failed.startswith("rank 1: cannot write the checkpoint ")
        assert "/full: File too large; make room there" in failed
        assert worked == f"{files} files"
