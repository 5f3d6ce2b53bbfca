"""Parameters of a vision encoder, bytes that autograd keeps of its pass, and its operations.

With b bytes per number in compute dtype, width h, inner width f and a decoder of width o, torch keeps for each position
(a patch, and InternVL's class token of a tile), in a block,

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
tests/unit/packages/planner/test_planner_vision_encoder.py compares this with what torch keeps, and the operations with
what it counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PretrainedConfig

FLOAT = 4
"""Bytes of a float32."""
PARTS = frozenset({"encoder", "projector"})


@dataclass(frozen=True)
class SavedBytes:
    """Saved tensors: numbers in compute dtype, and bytes that do not depend on it.

    >>> (SavedBytes(64, 8) + 2 * SavedBytes(16)).bytes(2)
    200.0
    """

    numbers: float = 0.0
    """Numbers in compute dtype."""
    fixed_bytes: float = 0.0
    """Bytes that do not depend on the compute dtype."""

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(self.numbers + other.numbers, self.fixed_bytes + other.fixed_bytes)

    def __rmul__(self, times: float) -> SavedBytes:
        return SavedBytes(times * self.numbers, times * self.fixed_bytes)

    def bytes(self, each: int) -> float:
        """Total bytes. each: bytes of a number in compute dtype."""
        return float(each * self.numbers + self.fixed_bytes)


@dataclass(frozen=True)
class Blocks:
    """The blocks of the encoder. A position is a patch, or the class token of a tile."""

    layers: int
    """Number of blocks."""
    full: int
    """Blocks whose attention covers the whole image."""
    window: int
    """Positions that the attention of the others covers."""
    hidden: int
    """Width."""
    weights: int
    """Weights of one block that each position is multiplied with."""
    saved: SavedBytes
    """Bytes that autograd saves of a position in one block, all of whose weights train."""
    working: tuple[SavedBytes, ...]
    """Candidates for the peak of a position in one block without a gradient."""


@dataclass(frozen=True)
class Projectors:
    """All projectors together, for each patch."""

    weights: float
    """Weights that a patch is multiplied with."""
    trained: SavedBytes
    """Bytes that are saved if encoder and projectors train."""
    trained_alone: SavedBytes
    """Bytes that are saved if only the projectors train."""
    frozen: SavedBytes
    """Bytes that are saved if only the encoder trains."""

    def saved(self, frozen: Collection[str]) -> SavedBytes:
        if set(frozen) >= PARTS:
            return SavedBytes()
        return self.trained_alone if "encoder" in frozen else self.frozen if "projector" in frozen else self.trained


@dataclass(frozen=True)
class VisionEncoder:
    """A vision encoder with its projectors."""

    encoding: Blocks
    """Blocks of the encoder."""
    projecting: Projectors
    """Projectors into the decoder."""
    patch: int
    """Pixels of a patch's side."""
    frames: int
    """Frames that a patch holds."""
    unit: int
    """Patches of a token."""
    ends: SavedBytes
    """Bytes that are saved of a patch outside the blocks if they train."""
    positions: float = 1.0
    """Positions per patch: more than one if tiles have class tokens."""
    encoder: int = 0
    """Parameters of the encoder."""
    projector: int = 0
    """Parameters of the projectors."""
    block: int = 0
    """Parameters of one block."""

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
        """Pixels of a token."""
        return self.unit * self.patch**2

    def frozen(self, parts: Collection[str]) -> int:
        """Parameters of these parts (`encoder`, `projector`)."""
        return self.encoder * ("encoder" in parts) + self.projector * ("projector" in parts)


def vision_encoder_of(config: PretrainedConfig | SimpleNamespace) -> VisionEncoder:
    """The vision encoder of a model, from its config."""
    from accelerate import init_empty_weights

    from rlcli.model.io.frozen_weights import vision_part
    from rlcli.model.io.model_config import auto_class

    with init_empty_weights():
        lm = auto_class(config).from_config(config)
    sizes = {name: weight.numel() for name, weight in lm.named_parameters()}
    parts = {part: [name for name in sizes if vision_part(lm, name) == part] for part in ("encoder", "projector")}
    first = re.compile(r"\.(blocks|layer)\.0\.")
    return replace(
        FAMILIES[config.model_type](config),
        encoder=sum(sizes[name] for name in parts["encoder"]),
        projector=sum(sizes[name] for name in parts["projector"]),
        block=sum(sizes[name] for name in parts["encoder"] if first.search(name)),
    )


def _layer_norm(width: int) -> SavedBytes:
    return SavedBytes(width, 2 * FLOAT)


def _rms_norm(width: int) -> SavedBytes:
    """Bytes that an RMSNorm with a trained weight saves."""
    return SavedBytes(width, FLOAT * width + FLOAT)


def _qwen2_5(config: PretrainedConfig) -> VisionEncoder:
    vision = config.vision_config
    h, f, window = vision.hidden_size, vision.intermediate_size, vision.window_size // vision.patch_size
    blocks = _qwen_blocks(vision, _rms_norm(h), matrices=3, activated=3 * f, held=SavedBytes())
    blocks = replace(blocks, full=len(vision.fullatt_block_indexes), window=window**2)
    # After a frozen encoder the norm keeps only what its weight multiplies.
    frozen = SavedBytes(0, FLOAT * h + FLOAT) + SavedBytes(h)
    return _qwen(
        vision, blocks, Projectors(_merged(vision), _rms_norm(h) + SavedBytes(3 * h), SavedBytes(4 * h), frozen)
    )


def _qwen3(config: PretrainedConfig) -> VisionEncoder:
    vision = config.vision_config
    h, f, unit = vision.hidden_size, vision.intermediate_size, vision.spatial_merge_size**2
    deep = len(getattr(vision, "deepstack_visual_indexes", ()))  # Qwen3.5 has none
    # Its position's vector in float32, and what the deep projectors have made.
    held = SavedBytes(deep * vision.out_hidden_size / unit, FLOAT * h)
    blocks = _qwen_blocks(vision, _layer_norm(h), matrices=2, activated=f, held=held)
    norms = _layer_norm(h) + deep * SavedBytes(0, 2 * FLOAT / unit)  # those of the deep ones are of tokens
    trained = norms + (1 + deep) * SavedBytes(3 * h)
    trained_alone = trained + deep * SavedBytes(h)  # the deep ones' inputs, which a trained encoder keeps
    frozen = norms + (1 + deep) * SavedBytes(h)
    return _qwen(vision, blocks, Projectors((1 + deep) * _merged(vision), trained, trained_alone, frozen))


def _qwen(vision: PretrainedConfig, blocks: Blocks, projectors: Projectors) -> VisionEncoder:
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    return VisionEncoder(
        blocks,
        projectors,
        patch=vision.patch_size,
        frames=vision.temporal_patch_size,
        unit=vision.spatial_merge_size**2,
        ends=SavedBytes(values) + _rotations(vision),
    )


def _qwen_blocks(
    vision: PretrainedConfig, norm: SavedBytes, *, matrices: int, activated: int, held: SavedBytes
) -> Blocks:
    """matrices: of an inner layer. activated: numbers that it keeps, without its last matrix's input. held: of a
    position, without a gradient too, beside what its block makes."""
    h, f = vision.hidden_size, vision.intermediate_size
    # Beside a block's input: a norm's output, queries, keys and values, then keys being rotated in float32, or the
    # rotated ones with the output of each window, of all and of the last linear layer; or the inner layer.
    working = SavedBytes(5 * h, 6 * FLOAT * h), SavedBytes(10 * h), SavedBytes(3 * h + matrices * f)
    return Blocks(
        layers=vision.depth,
        full=vision.depth,
        window=0,
        hidden=h,
        weights=4 * h**2 + matrices * h * f,
        saved=2 * norm + SavedBytes(3 * h + f) + SavedBytes(6 * h, FLOAT * vision.num_heads) + SavedBytes(activated),
        working=tuple(held + _rotations(vision) + operation for operation in working),
    )


def _rotations(vision: PretrainedConfig) -> SavedBytes:
    """A patch's cosines and sines."""
    return SavedBytes(0, 2 * FLOAT * vision.hidden_size / vision.num_heads)


def _merged(vision: PretrainedConfig) -> float:
    """Weights of a projector that a patch is multiplied with."""
    h = vision.hidden_size
    return float(h * (vision.spatial_merge_size**2 * h + vision.out_hidden_size))


def _internvl(config: PretrainedConfig) -> VisionEncoder:
    """InternVL: each tile is an attention window of its patches and a class token."""
    vision, o = config.vision_config, config.text_config.hidden_size
    h, unit, patch = vision.hidden_size, round(config.downsample_ratio**-2), vision.patch_size[0]
    tile = (vision.image_size[0] // patch) ** 2
    positions = 1 + 1 / tile
    frozen = SavedBytes(h, 2 * FLOAT / unit) + SavedBytes(o / unit)
    trained = frozen + SavedBytes(h + o / unit)
    last = SavedBytes() if vision.use_mean_pooling else positions * _layer_norm(h)
    return VisionEncoder(
        _internvl_blocks(vision, tile + 1),
        Projectors((unit * h + o) * o / unit, trained, trained, frozen),
        patch=patch,
        frames=1,
        unit=unit,
        ends=SavedBytes(3 * patch**2) + last,
        positions=positions,
    )


def _internvl_blocks(vision: PretrainedConfig, window: int) -> Blocks:
    h, f = vision.hidden_size, vision.intermediate_size
    norm = _rms_norm(h) if vision.norm_type == "rms_norm" else _layer_norm(h)
    attention = SavedBytes(4 * h, FLOAT * vision.num_attention_heads) + 2 * vision.use_qk_norm * _rms_norm(h)
    return Blocks(
        layers=vision.num_hidden_layers,
        full=0,
        window=window,
        hidden=h,
        weights=4 * h**2 + 2 * h * f,
        saved=2 * norm + SavedBytes(2 * h + f) + attention + SavedBytes(f) + SavedBytes(2 * h),
        # With the vision encoder's and a block's input: a norm's output and attention, or what both have led to.
        working=(SavedBytes(8 * h), SavedBytes(5 * h + 2 * f)),
    )


FAMILIES: Mapping[str, Callable[[PretrainedConfig], VisionEncoder]] = {
    "internvl": _internvl,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
}
"""`model_type` → vision encoder, without its parameters."""


def frozen_parts(freeze: Collection[str], lora_rank: int) -> frozenset[str]:
    """The frozen parts. freeze: as `model.freeze`."""
    return PARTS if lora_rank or "vision" in freeze else frozenset(freeze)


def vision_encoder_bytes(
    vision_encoder: VisionEncoder, each: int, frozen: Collection[str], patches: float, *, checkpointing: bool
) -> float:
    """Bytes kept of a forward pass of `patches` patches until its backward pass. each: of a number in compute dtype.
    checkpointing: only each block's input is kept."""
    saved, blocks = vision_encoder.projecting.saved(frozen), vision_encoder.encoding
    if "encoder" not in frozen:
        per_position = SavedBytes(blocks.hidden) if checkpointing else blocks.saved
        saved += vision_encoder.ends + vision_encoder.positions * blocks.layers * per_position
    return patches * saved.bytes(each)


def block_bytes(vision_encoder: VisionEncoder, each: int) -> float:
    """Bytes kept of a patch in one block, all of whose weights train."""
    return vision_encoder.positions * vision_encoder.encoding.saved.bytes(each)


def working_bytes(vision_encoder: VisionEncoder, each: int, patches: float) -> float:
    """Peak bytes of a block without a gradient."""
    return patches * vision_encoder.positions * max(held.bytes(each) for held in vision_encoder.encoding.working)


def vision_encoder_flops(vision_encoder: VisionEncoder, patches: float, image_patches: float) -> tuple[float, float]:
    """Operations of one forward pass: of the encoder, and of the projectors. image_patches: patches of one image, of
    all its tiles."""
    blocks = vision_encoder.encoding
    positions = image_patches * vision_encoder.positions
    attended = blocks.full * positions + (blocks.layers - blocks.full) * min(blocks.window, positions)
    per_position = 2 * blocks.layers * blocks.weights + 4 * blocks.hidden * attended
    encoder = vision_encoder.positions * per_position + _first(vision_encoder)
    return patches * encoder, patches * 2 * vision_encoder.projecting.weights


def _first(vision_encoder: VisionEncoder) -> float:
    """Operations that embed a patch."""
    return 2.0 * vision_encoder.patch_values * vision_encoder.encoding.hidden


def backward_flops(
    vision_encoder: VisionEncoder, patches: float, image_patches: float, frozen: Collection[str]
) -> float:
    """Operations of the backward pass: two products of a trained matrix, one of a frozen one, and of what makes
    vectors of patches, before which nothing needs a gradient; none before the first trained weight."""
    encoder, projector = vision_encoder_flops(vision_encoder, patches, image_patches)
    if "encoder" in frozen:
        return 0.0 if "projector" in frozen else 2 * projector
    return 2 * encoder - _first(vision_encoder) * patches + projector * (1 + ("projector" not in frozen))
