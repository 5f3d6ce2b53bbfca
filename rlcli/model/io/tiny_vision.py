"""Makes a tiny vision-language model with random weights: a Qwen2.5-VL, Qwen3-VL, Qwen3.5 or InternVL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from rlcli.images.families import rule_of
from rlcli.images.image_rule import ImageRule
from rlcli.model.io.tiny_families import CHOSEN, EXPERTS, LINEAR_HEAD
from rlcli.model.io.tiny_model import EOS, MARKERS, MAX_POSITIONS, PAD, UNK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

IMAGE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
"""Image tokens of Qwen's models."""
TILE_IMAGE, TILE_VIDEO, TILE_BEGIN, TILE_END = "<IMG_CONTEXT>", "<video>", "<img>", "</img>"
"""Image tokens of InternVL."""
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16, "qwen3_5_moe": 16}
"""Pixels of a patch's side, by `model_type`; two by two patches are one token."""
MOST_TOKENS = 256
"""Most tokens of an image that is cut into patches."""
TILE, TILE_TOKENS = 56, 4
"""Pixels of a tile's side, and its tokens."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- 'IMAGE_TOKEN' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
"""IMAGE_TOKEN is replaced by the family's image token."""


@dataclass(frozen=True)
class Family:
    """A family of vision-language models."""

    image_token: str
    """Text of an image in the chat template."""
    markers: tuple[str, ...]
    """Tokens around and within images."""
    names: Mapping[str, str]
    """Attributes of the tokenizer by which the processor finds some of the markers."""
    config: Callable[[str, int, int, PreTrainedTokenizerBase], PreTrainedConfig]
    """Makes a config from the `model_type`, width, layers and tokenizer."""
    processor: Callable[[PreTrainedConfig, PreTrainedTokenizerBase], ProcessorMixin]
    """Makes a processor from a config and a tokenizer."""


def vision_tokenizer(kind: str = "qwen2_5_vl") -> Qwen2Tokenizer:
    """A tokenizer with one token per byte; each chat marker and each image marker is one token."""
    family = FAMILIES[kind]
    markers = [*MARKERS, *family.markers]
    vocabulary = [PAD, EOS, UNK, *markers, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(vocabulary)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=markers,
        chat_template=CHAT_TEMPLATE.replace("IMAGE_TOKEN", family.image_token),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        **family.names,
    )


def vision_model(
    kind: str = "qwen2_5_vl",
    *,
    hidden: int = 128,
    layers: int = 2,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """A model of random weights, in float32, for a tokenizer (None: `vision_tokenizer`). No global random state is
    touched."""
    config = vision_config(kind, hidden=hidden, layers=layers, tokenizer=tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_config(config)


def vision_config(
    kind: str, *, hidden: int = 128, layers: int = 2, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """The configuration of such a model."""
    return FAMILIES[kind].config(kind, hidden, layers, tokenizer or vision_tokenizer(kind))


def image_rule(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> ImageRule:
    """The image rule of a model of this config."""
    with TemporaryDirectory() as folder:
        processor(config, tokenizer).save_pretrained(folder)
        rule = rule_of(folder, config)
    assert rule is not None, "these models see"
    return rule


def save_vision_model(model: PreTrainedModel, folder: Path) -> None:
    """Save `model` with its tokenizer and image processor to a folder."""
    processor(model.config).save_pretrained(folder)
    model.save_pretrained(folder)


def processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> ProcessorMixin:
    """transformers' processor of texts and images for a model of `vision_model`."""
    kind = config.model_type
    return FAMILIES[kind].processor(config, tokenizer or vision_tokenizer(kind))


def _patch_processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    patch = config.vision_config.patch_size
    unit = (2 * patch) ** 2
    images = Qwen2VLImageProcessor(patch_size=patch, merge_size=2, min_pixels=unit, max_pixels=unit * MOST_TOKENS)
    if config.model_type != "qwen2_5_vl":
        return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(patch_size=patch, merge_size=2))
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(patch_size=patch, merge_size=2))


def _tile_processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import InternVLProcessor
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    size = {"height": TILE, "width": TILE}
    images, films = GotOcr2ImageProcessor(size=size), InternVLVideoProcessor(size=size)
    return InternVLProcessor(images, tokenizer, films, image_seq_length=config.image_seq_length)


def _text(hidden: int, layers: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ids, heads = tokenizer.get_vocab(), hidden // 32
    return {
        "vocab_size": len(ids),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "bos_token_id": None,
    }


def _patch_config(kind: str, hidden: int, layers: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    from transformers import AutoConfig

    ids, text = tokenizer.get_vocab(), _text(hidden, layers, tokenizer)
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
    special |= {"vision_end_token_id": END}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH[kind],
        "spatial_merge_size": 2,
        "out_hidden_size": hidden,
    }
    # Sections of the rotation: halves of a head's width, for time, height and width.
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 8 * PATCH[kind], "fullatt_block_indexes": [1]}
    else:
        text["head_dim"] = 32
        vision |= {"num_position_embeddings": 64}
        rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0]}
    elif kind != "qwen2_5_vl":
        text |= _linear_attention(kind, text)
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    return AutoConfig.for_model(
        kind,
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=True,
        **{name: ids[token] for name, token in special.items()},
    )


def _linear_attention(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """Further settings of Qwen3.5's text models: only the last layer has full attention."""
    sizes: dict[str, Any] = {
        "layer_types": [*["linear_attention"] * (text["num_hidden_layers"] - 1), "full_attention"],
        "linear_num_key_heads": text["num_key_value_heads"],
        "linear_num_value_heads": text["num_attention_heads"],
        "linear_key_head_dim": LINEAR_HEAD,
        "linear_value_head_dim": LINEAR_HEAD,
    }
    if kind == "qwen3_5_moe":
        width = text["hidden_size"]
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": width}
        sizes |= {"shared_expert_intermediate_size": width}
    return sizes


def _tile_config(kind: str, hidden: int, layers: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    from transformers import AutoConfig

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "image_size": [TILE, TILE],
        "patch_size": [14, 14],
    }
    return AutoConfig.for_model(
        kind,
        text_config={"model_type": "qwen2"} | _text(hidden, layers, tokenizer),
        vision_config=vision,
        tie_word_embeddings=True,
        image_seq_length=TILE_TOKENS,
        image_token_id=tokenizer.get_vocab()[TILE_IMAGE],
    )


PATCHES = Family(f"{BEGIN}{IMAGE}{END}", (BEGIN, END, IMAGE, VIDEO), {}, _patch_config, _patch_processor)
TILES = Family(
    f"{TILE_IMAGE}\n",
    (TILE_BEGIN, TILE_END, TILE_IMAGE, TILE_VIDEO),
    {
        "start_image_token": TILE_BEGIN,
        "end_image_token": TILE_END,
        "context_image_token": TILE_IMAGE,
        "video_token": TILE_VIDEO,
    },
    _tile_config,
    _tile_processor,
)
FAMILIES = {
    "internvl": TILES,
    "qwen2_5_vl": PATCHES,
    "qwen3_vl": PATCHES,
    "qwen3_5": PATCHES,
    "qwen3_5_moe": PATCHES,
}
"""By `model_type`."""
