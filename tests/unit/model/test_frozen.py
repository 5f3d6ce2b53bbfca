"""`model.freeze`: what it names has no gradient, no optimizer state and no activations, and stays in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcli.images.families import KINDS
from rlcli.model.io.loading import load_policy
from rlcli.model.io.model_state import copied, load_state, save_state, trained_state
from rlcli.model.io.tiny_vision import save_vision_model
from rlcli.model.optim import build_optimizer, clip_grad_norm
from rlcli.model.packed import PackedBatch, pack
from rlcli.model.parallel import fsdp_sharding
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.model.tensor_names import named_weights, vision_modules
from tests.vision_fixtures import images_for, model_and_rule, row_of

CPU = torch.device("cpu")
PARTS = {"vision": ("encoder", "projector"), "encoder": ("encoder",), "projector": ("projector",)}


@pytest.fixture(scope="module", params=KINDS)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A folder with a model, and its image preprocessing."""
    lm, rule = model_and_rule(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    save_vision_model(lm, folder)
    return str(folder), rule


def part_of(name: str) -> str:
    """`encoder`, `projector`, or empty for what reads text."""
    if ".merger." in name or ".deepstack_merger_list." in name or ".multi_modal_projector." in name:
        return "projector"
    return "encoder" if ".visual." in name or ".vision_tower." in name else ""


def batch_of(rule: Any, seed: int = 0) -> PackedBatch:
    first, second = images_for(rule, (2, 3), (2, 2), seed=seed)
    rows = [row_of(rule, (first,), 4), row_of(rule, (first,), 5), row_of(rule, (second,), 3)]
    return pack([(t, p) for t, p, _ in rows], CPU, images=[images for *_, images in rows], rule=rule)


def backward(policy: Any, batch: PackedBatch) -> dict[str, torch.Tensor]:
    outputs = policy(batch)
    (outputs.log_probs.sum() + 0.1 * outputs.entropy.sum()).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_frozen_has_no_gradient_and_the_rest_the_same(
    mesh: Any, model_folder: tuple[str, Any], part: str, dtype: torch.dtype
) -> None:
    path, rule = model_folder
    options = {"dtype": dtype, "device": CPU, "mesh": mesh}
    full, frozen = load_policy(path, **options), load_policy(path, frozen=(part,), **options)
    frozen_names = {name for name, p in frozen.named_parameters() if not p.requires_grad}
    assert (
        frozen_names == frozen.frozen == {name for name, _ in frozen.named_parameters() if part_of(name) in PARTS[part]}
    )
    assert frozen_names
    assert {p.dtype for name, p in frozen.named_parameters() if name in frozen_names} == {dtype}
    expected, grads = backward(full, batch_of(rule)), backward(frozen, batch_of(rule))
    assert grads.keys() == expected.keys() - frozen_names
    for name, gradient in grads.items():
        assert torch.equal(local(gradient), local(expected[name])), name
    alone = sum(float(local(gradient).double().square().sum()) for gradient in grads.values()) ** 0.5
    assert clip_grad_norm(frozen, 1e-3) == pytest.approx(alone, rel=1e-5)
    sent = [(name, tensor.clone()) for name, tensor in full.stream_weights()]
    for (name, full_weight), (other, frozen_weight) in zip(sent, frozen.stream_weights(), strict=True):
        assert name == other
        assert torch.equal(full_weight, frozen_weight), f"{name} is sent to engines and exported as if it were trained"


def local(tensor: Any) -> torch.Tensor:
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autograd_keeps_nothing_of_a_frozen_vision_encoder(
    mesh: Any, model_folder: tuple[str, Any], checkpointing: bool
) -> None:
    path, rule = model_folder

    def kept(*parts: str) -> int:
        """Storages that autograd saves within the vision encoder's modules before its projector."""
        options: Any = {"dtype": torch.float32, "device": CPU, "mesh": mesh, "gradient_checkpointing": checkpointing}
        policy = load_policy(path, frozen=parts, **options)
        resident = {p.untyped_storage().data_ptr() for p in [*policy.parameters(), *policy.buffers()]}
        within, saved = [False], set[int]()
        vision_encoder, *_ = vision_modules(policy.lm)
        first = vision_encoder.patch_embed if hasattr(vision_encoder, "patch_embed") else vision_encoder.embeddings  # type: ignore[union-attr]
        for block in [
            first,
            *(submodule for submodule in vision_encoder.modules() if isinstance(submodule, GradientCheckpointingLayer)),
        ]:
            block.register_forward_pre_hook(lambda *_: within.__setitem__(0, True))
            block.register_forward_hook(lambda *_: within.__setitem__(0, False))

        def note(tensor: torch.Tensor) -> torch.Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if within[0] and pointer not in resident:
                saved.add(pointer)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = policy(batch_of(rule))
        assert outputs.log_probs.requires_grad
        return len(saved)

    assert kept("vision") == kept("encoder") == 0
    assert kept("projector") == kept() > 0


class Learning:
    """A model with a frozen vision encoder and its optimizer; `step` trains it on a batch."""

    def __init__(self, path: str, mesh: Any, dtype: torch.dtype) -> None:
        self.model = load_policy(path, dtype=dtype, device=CPU, mesh=mesh, frozen=("vision",))
        self.optimizer = build_optimizer(self.model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        self.trained = {"policy": (self.model, self.optimizer)}

    def step(self, batch: PackedBatch) -> None:
        backward(self.model, batch)
        clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.stream_weights(torch.float32)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_what_is_frozen_and_resumes_to_the_bit(
    mesh: Any, model_folder: tuple[str, Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    path, rule = model_folder
    original = Learning(path, mesh, dtype)
    original.step(batch_of(rule))
    state = trained_state(original.trained)
    weight_names = {f"policy.model.lm.{name}" for name, _ in named_weights(original.model.lm)}
    assert weight_names <= state.keys()
    assert not [name for name in state if name.startswith("policy.optimizer.") and part_of(name)]
    save_state(copied(state), {}, tmp_path / "saved", dist.group.WORLD)
    other = Learning(path, mesh, dtype)
    with torch.no_grad():
        for parameter in other.model.parameters():
            local(parameter).add_(1.0)
    load_state(other.trained, tmp_path / "saved")
    for learning in (original, other):
        learning.step(batch_of(rule, seed=1))
    expected, restored = original.whole(), other.whole()
    assert [name for name in expected if not torch.equal(restored[name], expected[name])] == []


def sharded(rank: int, path: str, rule: Any, folder: str) -> None:
    """Two steps of two ranks, whose model is gathered layer by layer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    fsdp_sharding.WHOLE_BYTES = 0
    for dtype in (torch.float32, torch.bfloat16):
        learning = Learning(path, ParallelDims.of(2, replicate=1).mesh("cpu"), dtype)
        initial = learning.whole()
        for seed in (0, 1):
            learning.step(batch_of(rule, seed=seed))
        if (updated := learning.whole()) and rank == 0:
            torch.save((initial, updated), Path(folder) / f"{dtype}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_ranks(model_folder: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(sharded, (*model_folder, str(folder)), nprocs=2)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "model_folder",
    [kind if kind == next(iter(KINDS)) else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS],
    indirect=True,
)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-2), (torch.bfloat16, 0.3)])
def test_ranks_that_share_a_frozen_vision_encoder_train_as_one(
    mesh: Any, model_folder: tuple[str, Any], of_two_ranks: Path, dtype: torch.dtype, off: float
) -> None:
    path, rule = model_folder
    initial, updated = torch.load(of_two_ranks / f"{dtype}.pt")
    alone = Learning(path, mesh, dtype)
    for seed in (0, 1):
        alone.step(batch_of(rule, seed=seed))
    expected = alone.whole()
    assert {name for name in updated if torch.equal(initial[name], updated[name])} == set(filter(part_of, updated))
    error = sum((updated[name] - expected[name]).square().sum() for name in updated)
    assert (error / sum((updated[name] - initial[name]).square().sum() for name in updated)).sqrt() < off
