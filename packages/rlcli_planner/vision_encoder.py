"""What a tower that sees pictures takes: parameters, bytes that autograd keeps of its pass, and operations.

With b bytes per number in compute dtype, width h, inner width f and a decoder of width o, torch keeps for each place (a
patch, and InternVL's class token of a tile), in a block,

    norm            LayerNorm: b h (its input) + 8; RMSNorm: 4 h (its input in float32) + 4, and if its weight is
                    trained b h. Qwen2.5-VL has the second, Qwen3-VL the first, InternVL either (`norm_type`)
    linear          b w: its input, once for those that share it, if it is trained
    attention       Qwen: b (query h + key h + query, key and value in one 3 h + output h) + 4 heads; InternVL: b (query
                    h + key h + value h) + 4 heads, and the output as the next linear's input; with `use_qk_norm` two
                    norms more
    inner layer     Qwen2.5-VL: 3 b f (gate, its activation, up), others: b f (what is activated)
    scales          InternVL: 2 b h (what lambda_1 and lambda_2 multiply)

outside the blocks b times the numbers of a patch, and in Qwen's cosines and sines in float32; and in each projector a
norm, two linear layers and what is activated. Since m² patches of width h become one token of width m² h, that is for
each patch h wide in Qwen's; InternVL's first linear layer leads to width o, so what follows it is o / m² wide.
tests/unit/packages/planner/test_planner_tower.py compares this with what torch keeps, and the operations with
what it counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

FLOAT = 4
"""Bytes of a float32."""
PARTS = frozenset({"encoder", "projector"})


@dataclass(frozen=True)
class Kept:
    """So many numbers in compute dtype, and bytes beside them whatever that is.

    >>> (Kept(64, 8) + 2 * Kept(16)).bytes(2)
    200.0
    """

    numbers: float = 0.0
    beside: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.numbers + other.numbers, self.beside + other.beside)

    def __rmul__(self, times: float) -> Kept:
        return Kept(times * self.numbers, times * self.beside)

    def bytes(self, each: int) -> float:
        """each: bytes of a number in compute dtype."""
        return float(each * self.numbers + self.beside)


@dataclass(frozen=True)
class Blocks:
    """The encoder's. layers: blocks, of which `full` attend to the whole picture, and others to `window` places.
    hidden: width. weights: that each place is multiplied with in one block. kept: of a place in one block, all of whose
    weights train. working: of a place, what a block may hold at once without a gradient."""

    layers: int
    full: int
    window: int
    hidden: int
    weights: int
    kept: Kept
    working: tuple[Kept, ...]


@dataclass(frozen=True)
class Projectors:
    """All of them together, for each patch. weights: that it is multiplied with. both: what is kept if the encoder
    trains too; alone: if it does not; passed: if it does and they do not."""

    weights: float
    both: Kept
    alone: Kept
    passed: Kept

    def kept(self, frozen: Collection[str]) -> Kept:
        if set(frozen) >= PARTS:
            return Kept()
        return self.alone if "encoder" in frozen else self.passed if "projector" in frozen else self.both


@dataclass(frozen=True)
class Tower:
    """patch: pixels of a patch's side. frames: that a patch holds. unit: patches of a token. ends: what is kept of a
    patch outside the blocks if they train. places: of a patch; more than one if tiles have class tokens. encoder,
    projector, block: parameters, the last of one block."""

    encoding: Blocks
    projecting: Projectors
    patch: int
    frames: int
    unit: int
    ends: Kept
    places: float = 1.0
    encoder: int = 0
    projector: int = 0
    block: int = 0

    @property
    def parameters(self) -> int:
        return self.encoder + self.projector

    @property
    def blocks(self) -> int:
        """Parameters of all blocks, which FSDP2 gathers one by one; the rest belongs to the root."""
        return self.encoding.layers * self.block

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

    from rlcli.model.io.frozen_weights import tower_part
    from rlcli.model.io.model_config import auto_class

    with init_empty_weights():
        lm = auto_class(config).from_config(config)
    sizes = {name: weight.numel() for name, weight in lm.named_parameters()}
    parts = {part: [name for name in sizes if tower_part(lm, name) == part] for part in ("encoder", "projector")}
    first = re.compile(r"\.(blocks|layer)\.0\.")
    return replace(
        FAMILIES[config.model_type](config),
        encoder=sum(sizes[name] for name in parts["encoder"]),
        projector=sum(sizes[name] for name in parts["projector"]),
        block=sum(sizes[name] for name in parts["encoder"] if first.search(name)),
    )


def _layer_norm(width: int) -> Kept:
    return Kept(width, 2 * FLOAT)


def _rms_norm(width: int) -> Kept:
    """With a trained weight."""
    return Kept(width, FLOAT * width + FLOAT)


def _qwen2_5(config: Any) -> Tower:
    vision = config.vision_config
    h, f, window = vision.hidden_size, vision.intermediate_size, vision.window_size // vision.patch_size
    blocks = _qwen_blocks(vision, _rms_norm(h), matrices=3, activated=3 * f, held=Kept())
    blocks = replace(blocks, full=len(vision.fullatt_block_indexes), window=window**2)
    # After a frozen encoder the norm keeps only what its weight multiplies.
    passed = Kept(0, FLOAT * h + FLOAT) + Kept(h)
    return _qwen(vision, blocks, Projectors(_merged(vision), _rms_norm(h) + Kept(3 * h), Kept(4 * h), passed))


def _qwen3(config: Any) -> Tower:
    vision = config.vision_config
    h, f, unit = vision.hidden_size, vision.intermediate_size, vision.spatial_merge_size**2
    deep = len(getattr(vision, "deepstack_visual_indexes", ()))  # Qwen3.5 has none
    # Its position's vector in float32, and what the deep projectors have made.
    held = Kept(deep * vision.out_hidden_size / unit, FLOAT * h)
    blocks = _qwen_blocks(vision, _layer_norm(h), matrices=2, activated=f, held=held)
    norms = _layer_norm(h) + deep * Kept(0, 2 * FLOAT / unit)  # those of the deep ones are of tokens
    both = norms + (1 + deep) * Kept(3 * h)
    alone = both + deep * Kept(h)  # the deep ones' inputs, which a trained encoder keeps
    passed = norms + (1 + deep) * Kept(h)
    return _qwen(vision, blocks, Projectors((1 + deep) * _merged(vision), both, alone, passed))


def _qwen(vision: Any, blocks: Blocks, projectors: Projectors) -> Tower:
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    return Tower(
        blocks,
        projectors,
        patch=vision.patch_size,
        frames=vision.temporal_patch_size,
        unit=vision.spatial_merge_size**2,
        ends=Kept(values) + _rotations(vision),
    )


def _qwen_blocks(vision: Any, norm: Kept, *, matrices: int, activated: int, held: Kept) -> Blocks:
    """matrices: of an inner layer. activated: numbers that it keeps, without its last matrix's input. held: of a place,
    without a gradient too, beside what its block makes."""
    h, f = vision.hidden_size, vision.intermediate_size
    # Beside a block's input: a norm's output, queries, keys and values, then keys being rotated in float32, or the
    # rotated ones with the output of each window, of all and of the last linear layer; or the inner layer.
    working = Kept(5 * h, 6 * FLOAT * h), Kept(10 * h), Kept(3 * h + matrices * f)
    return Blocks(
        layers=vision.depth,
        full=vision.depth,
        window=0,
        hidden=h,
        weights=4 * h**2 + matrices * h * f,
        kept=2 * norm + Kept(3 * h + f) + Kept(6 * h, FLOAT * vision.num_heads) + Kept(activated),
        working=tuple(held + _rotations(vision) + one for one in working),
    )


def _rotations(vision: Any) -> Kept:
    """A patch's cosines and sines."""
    return Kept(0, 2 * FLOAT * vision.hidden_size / vision.num_heads)


def _merged(vision: Any) -> float:
    """Weights of a projector that a patch is multiplied with."""
    h = vision.hidden_size
    return float(h * (vision.spatial_merge_size**2 * h + vision.out_hidden_size))


def _internvl(config: Any) -> Tower:
    """Its tiles are windows of as many patches, and a class token."""
    vision, o = config.vision_config, config.text_config.hidden_size
    h, unit, patch = vision.hidden_size, round(config.downsample_ratio**-2), vision.patch_size[0]
    tile = (vision.image_size[0] // patch) ** 2
    places = 1 + 1 / tile
    passed = Kept(h, 2 * FLOAT / unit) + Kept(o / unit)
    both = passed + Kept(h + o / unit)
    last = Kept() if vision.use_mean_pooling else places * _layer_norm(h)
    return Tower(
        _internvl_blocks(vision, tile + 1),
        Projectors((unit * h + o) * o / unit, both, both, passed),
        patch=patch,
        frames=1,
        unit=unit,
        ends=Kept(3 * patch**2) + last,
        places=places,
    )


def _internvl_blocks(vision: Any, window: int) -> Blocks:
    h, f = vision.hidden_size, vision.intermediate_size
    norm = _rms_norm(h) if vision.norm_type == "rms_norm" else _layer_norm(h)
    attention = Kept(4 * h, FLOAT * vision.num_attention_heads) + 2 * vision.use_qk_norm * _rms_norm(h)
    return Blocks(
        layers=vision.num_hidden_layers,
        full=0,
        window=window,
        hidden=h,
        weights=4 * h**2 + 2 * h * f,
        kept=2 * norm + Kept(2 * h + f) + attention + Kept(f) + Kept(2 * h),
        # With the tower's and a block's input: a norm's output and attention, or what both have led to.
        working=(Kept(8 * h), Kept(5 * h + 2 * f)),
    )


FAMILIES: Mapping[str, Callable[[Any], Tower]] = {
    "internvl": _internvl,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
}
"""By `model_type`; without the parameters."""


def frozen_parts(named: Collection[str], lora_rank: int) -> frozenset[str]:
    """The parts that do not train. named: `model.freeze`."""
    return PARTS if lora_rank or "vision" in named else frozenset(named)


def tower_bytes(tower: Tower, each: int, frozen: Collection[str], patches: float, *, checkpointing: bool) -> float:
    """Bytes kept of a forward pass of so many patches until its backward pass. each: of a number in compute dtype.
    checkpointing: only each block's input is kept."""
    kept, blocks = tower.projecting.kept(frozen), tower.encoding
    if "encoder" not in frozen:
        of_a_place = Kept(blocks.hidden) if checkpointing else blocks.kept
        kept += tower.ends + tower.places * blocks.layers * of_a_place
    return patches * kept.bytes(each)


def block_bytes(tower: Tower, each: int) -> float:
    """Bytes kept of a patch in one block, all of whose weights train."""
    return tower.places * tower.encoding.kept.bytes(each)


def working_bytes(tower: Tower, each: int, patches: float) -> float:
    """The most that a block takes at once without a gradient."""
    return patches * tower.places * max(kept.bytes(each) for kept in tower.encoding.working)


def tower_flops(tower: Tower, patches: float, picture: float) -> tuple[float, float]:
    """Operations of one forward pass: of the encoder, and of the projectors. picture: patches of one picture, of all
    its tiles."""
    blocks = tower.encoding
    whole = picture * tower.places
    attended = blocks.full * whole + (blocks.layers - blocks.full) * min(blocks.window, whole)
    a_place = 2 * blocks.layers * blocks.weights + 4 * blocks.hidden * attended
    encoder = tower.places * a_place + _first(tower)
    return patches * encoder, patches * 2 * tower.projecting.weights


def _first(tower: Tower) -> float:
    """Operations that make a vector of a patch."""
    return 2.0 * tower.patch_values * tower.encoding.hidden


def backward_flops(tower: Tower, patches: float, picture: float, frozen: Collection[str]) -> float:
    """Operations of the backward pass: two products of a trained matrix, one of a frozen one, and of what makes
    vectors of patches, before which nothing needs a gradient; none before the first trained weight."""
    encoder, projector = tower_flops(tower, patches, picture)
    if "encoder" in frozen:
        return 0.0 if "projector" in frozen else 2 * projector
    return 2 * encoder - _first(tower) * patches + projector * (1 + ("projector" not in frozen))
