"""Tiny vision-language models, and rows for them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from rlcli.images.image_rule import ImageRule
from rlcli.model.io.tiny_vision import FAMILIES, image_rule, vision_model, vision_tokenizer

TOOLS_TEMPLATE = """\
{%- for tool in tools or [] -%}{{- 'Call tools: ' ~ tool.function.name ~ ' <tool_call>' -}}{%- endfor -%}
{%- for message in messages -%}
{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' -}}
{%- if message.role == 'tool' -%}{{- message.name ~ ' gives ' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- 'IMAGE_TOKEN' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' -}}
{%- endfor -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
"""With tools, whose results may have images. IMAGE_TOKEN: as in the templates of `rlcli.model.io.tiny_vision`."""
ImageRow = tuple[np.ndarray, int, tuple[np.ndarray, ...]]
"""Tokens, how many of them are the prompt, and its images."""


def model_and_rule(kind: str, **sizes: Any) -> tuple[Any, ImageRule]:
    """A model whose log-probs depend on the images: random vision encoders say too little."""
    lm = vision_model(kind, **sizes).eval()
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "merger" in name or "projector" in name:
                weight.mul_(4)
    return lm, image_rule(lm.config)


def speaking(kind: str) -> Any:
    """A tokenizer of such a model, whose template has tools."""
    tokenizer = vision_tokenizer(kind)
    tokenizer.chat_template = TOOLS_TEMPLATE.replace("IMAGE_TOKEN", FAMILIES[kind].image_token)
    return tokenizer


def encoded(number: int, size: tuple[int, int] = (56, 84)) -> bytes:
    """A PNG of noise. size: height and width."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3)).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def images_for(rule: ImageRule, *sizes: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    """Noise of these sizes, height and width in tokens, or in tiles."""
    rng, side = np.random.default_rng(seed), len(rule.blank)
    return [
        rule.preprocess(Image.fromarray(rng.integers(0, 256, (side * height, side * width, 3)).astype(np.uint8)))
        for height, width in sizes
    ]


def row_of(rule: ImageRule, images: tuple[np.ndarray, ...], response: int, first: int = 50) -> ImageRow:
    """A prompt that shows the images between other tokens, and a response of so many tokens."""
    ids = [20, 21]
    for number in range(len(images)):
        ids += [5, rule.token, 6, 30 + number]
    prompt = rule.expanded(ids, [(image.shape[1], image.shape[0]) for image in images])
    return np.array([*prompt, *range(first, first + response)], np.int32), len(prompt), images


def padded_log_probs(lm: Any, rule: ImageRule, rows: list[ImageRow]) -> torch.Tensor:
    """By transformers alone, row by row, with the positions that the model makes itself."""
    log_probs = []
    for tokens, prompt, images in rows:
        lm.base_model.rope_deltas = None  # of the models with three positions
        inputs = {name: torch.tensor(values) for name, values in rule.inputs(images).items()} if images else {}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = torch.tensor(tokens == rule.token).int()[None]
        ids = torch.tensor(tokens).long()[None]
        logits = lm(input_ids=ids, **inputs).logits[0].index_fill(1, torch.tensor(rule.never), -1e9)
        log_probs.append(logits.log_softmax(-1)[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0])
    return torch.cat(log_probs)
