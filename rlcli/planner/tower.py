"""What a tower that sees pictures takes: parameters, bytes that autograd keeps of its pass, and operations.

With b bytes per number in compute dtype, width h and inner width f, torch keeps for each patch, in a block,

    norm            Qwen2.5-VL: 4 h (its input in float32) + 4, and if its weight is trained b h; Qwen3-VL: b h + 8
    linear          b w: its input, once for those that share it, if it is trained
    attention       b (query h + key h + query, key and value in one 3 h + output h) + 4 heads
    inner layer     Qwen2.5-VL: 3 b f (gate, its activation, up), Qwen3-VL: b f (what is activated)

before the first block b times the numbers of a patch, and cosines and sines in float32; and in each projector a norm,
two linear layers and what is activated, all h wide, since m² patches of width h become one token of width m² h.
tests/unit/planner/test_planner_tower.py compares this with what torch keeps, and the operations with what it counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

FLOAT = 4
"""Bytes of a float32."""
PARTS = frozenset({"encoder", "projector"})


@dataclass(frozen=True)
class Tower:
    """gated: as Qwen2.5-VL's, whose inner layers have gates and whose norms are in float32. layers: blocks, of which
    `full` attend to the whole picture, and others to `window` patches. hidden, intermediate: widths. outputs: width of
    the decoder. patch: pixels of a patch's side. frames: that a patch holds. unit: patches of a token. deep: projectors
    beside the last one. encoder, projector, block: parameters, the last of one block."""

    gated: bool
    layers: int
    full: int
    window: int
    hidden: int
    intermediate: int
    heads: int
    outputs: int
    patch: int
    frames: int
    unit: int
    deep: int
    encoder: int
    projector: int
    block: int

    @property
    def parameters(self) -> int:
        return self.encoder + self.projector

    @property
    def blocks(self) -> int:
        """Parameters of all blocks, which FSDP2 gathers one by one; the rest belongs to the root."""
        return self.layers * self.block

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: three channels of each frame."""
        return 3 * self.frames * self.patch**2

    @property
    def pixels(self) -> int:
        """Of a token."""
        return self.unit * self.patch**2

    def frozen(self, parts: Collection[str]) -> int:
        """Parameters of these parts (`encoder`, `projector`)."""
        return self.encoder * ("encoder" in parts) + self.projector * ("projector" in parts)


def tower_of(config: Any) -> Tower:
    """From the config of a model that sees pictures."""
    from accelerate import init_empty_weights

    from rlcli.model.io.config import auto_class
    from rlcli.model.io.frozen import tower_part

    with init_empty_weights():
        lm = auto_class(config).from_config(config)
    sizes = {name: weight.numel() for name, weight in lm.named_parameters()}
    parts = {part: [name for name in sizes if tower_part(lm, name) == part] for part in ("encoder", "projector")}
    first = re.compile(r"\.(blocks|layer)\.0\.")
    return Tower(
        **(_tiles(config) if hasattr(config, "downsample_ratio") else _patches(config.vision_config)),
        encoder=sum(sizes[name] for name in parts["encoder"]),
        projector=sum(sizes[name] for name in parts["projector"]),
        block=sum(sizes[name] for name in parts["encoder"] if first.search(name)),
    )


def _patches(config: Any) -> dict[str, Any]:
    window = getattr(config, "window_size", 0) // config.patch_size
    return {
        "gated": bool(window),
        "layers": config.depth,
        "full": len(config.fullatt_block_indexes) if window else config.depth,
        "window": window**2,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.num_heads,
        "outputs": config.out_hidden_size,
        "patch": config.patch_size,
        "frames": config.temporal_patch_size,
        "unit": config.spatial_merge_size**2,
        "deep": len(getattr(config, "deepstack_visual_indexes", ())),
    }


def _tiles(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "gated": False,
        "layers": vision.num_hidden_layers,
        "full": vision.num_hidden_layers,
        "window": 0,
        "hidden": vision.hidden_size,
        "intermediate": vision.intermediate_size,
        "heads": vision.num_attention_heads,
        "outputs": config.text_config.hidden_size,
        "patch": vision.patch_size[0],
        "frames": 1,
        "unit": round(config.downsample_ratio**-2),
        "deep": 0,
    }


def frozen_parts(named: Collection[str], lora_rank: int) -> frozenset[str]:
    """The parts that do not train. named: `model.freeze`."""
    return PARTS if lora_rank or "vision" in named else frozenset(named)


def tower_bytes(tower: Tower, each: int, frozen: Collection[str], patches: float, *, checkpointing: bool) -> float:
    """Bytes kept of a forward pass of so many patches until its backward pass. each: of a number in compute dtype.
    checkpointing: only each block's input is kept."""
    blocks = 0.0
    if "encoder" not in frozen:
        per_layer = each * tower.hidden if checkpointing else block_bytes(tower, each)
        blocks = tower.layers * per_layer + each * tower.patch_values + 2 * FLOAT * tower.hidden / tower.heads
    return patches * (blocks + _projectors(tower, each, frozen))


def block_bytes(tower: Tower, each: int) -> float:
    """Bytes kept of a patch in one block, all of whose weights train."""
    linear = each * (3 * tower.hidden + tower.intermediate)
    attention = each * 6 * tower.hidden + FLOAT * tower.heads
    inner = each * tower.intermediate * (3 if tower.gated else 1)
    return 2 * _norm(tower, each, trained=True) + linear + attention + inner


def working_bytes(tower: Tower, each: int, patches: float) -> float:
    """The most that a block takes at once without a gradient: beside the residual and the norm's output, queries, keys
    and values with what is made of them in float32, or the inner layer."""
    attention = 3 * each * tower.hidden + 2 * FLOAT * tower.hidden
    inner = each * tower.intermediate * (3 if tower.gated else 2)
    return patches * (2 * each * tower.hidden + max(attention, inner))


def _norm(tower: Tower, each: int, *, trained: bool) -> float:
    if tower.gated:
        return FLOAT * tower.hidden + FLOAT + each * tower.hidden * trained
    return each * tower.hidden + 2 * FLOAT


def _projectors(tower: Tower, each: int, frozen: Collection[str]) -> float:
    """Bytes kept of a patch in all projectors. A trained encoder keeps what those within it read; a norm in float32
    after a frozen one keeps only what its weight multiplies."""
    if set(frozen) >= PARTS:
        return 0.0
    alone, trained = "encoder" in frozen, "projector" not in frozen
    linear = each * tower.hidden * (1 + 2 * trained)
    norm = each * tower.hidden if alone and tower.gated else _norm(tower, each, trained=trained)
    deep = each * tower.hidden * alone + 2 * FLOAT / tower.unit + linear
    return norm + linear + tower.deep * deep


def tower_flops(tower: Tower, patches: float, picture: float) -> tuple[float, float]:
    """Operations of one forward pass: of the encoder, and of the projectors. picture: patches of one picture."""
    inner = (3 if tower.gated else 2) * tower.hidden * tower.intermediate
    attended = tower.full * picture + (tower.layers - tower.full) * min(tower.window, picture)
    matrices = tower.layers * (4 * tower.hidden**2 + inner) + tower.patch_values * tower.hidden
    encoder = 2 * matrices + 4 * tower.hidden * attended
    projector = 2 * tower.hidden * (tower.unit * tower.hidden + tower.outputs)
    return patches * encoder, patches * (1 + tower.deep) * projector


def backward_flops(tower: Tower, patches: float, picture: float, frozen: Collection[str]) -> float:
    """Operations of the backward pass: two products of a trained matrix, one of a frozen one, and of what makes
    vectors of patches, before which nothing needs a gradient; none before the first trained weight."""
    encoder, projector = tower_flops(tower, patches, picture)
    if "encoder" in frozen:
        return 0.0 if "projector" in frozen else 2 * projector
    first = 2 * tower.patch_values * tower.hidden * patches
    return 2 * encoder - first + projector * (1 + ("projector" not in frozen))
