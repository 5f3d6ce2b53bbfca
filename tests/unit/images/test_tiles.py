from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from rlcli.errors import ModelError
from rlcli.images.families import rule_of
from rlcli.images.internvl_tiles import TileRule
from rlcli.model.io.model_config import read_config
from rlcli.model.io.tiny_vision import TILE, TILE_TOKENS, processor, vision_model

CONFIG = vision_model("internvl").config
SIZES = [(84, 56), (56, 56), (41, 30), (300, 20), (1000, 700), (7, 7)]


def saved(folder: Path, **changes: Any) -> TileRule:
    theirs = processor(CONFIG)
    for name, value in changes.items():
        setattr(theirs.image_processor, name, value)
    theirs.save_pretrained(folder)
    rule = rule_of(str(folder), CONFIG)
    assert isinstance(rule, TileRule)
    return rule


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_patches", [1, 4, 12])
def test_an_image_becomes_the_tiles_of_the_models_processor(
    size: tuple[int, int], max_patches: int, tmp_path: Path
) -> None:
    rule = saved(tmp_path, max_patches=max_patches)
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    processed = rule.preprocess(Image.fromarray(noise))
    assert processed.shape == (*rule.fitted(*size)[::-1], 3)
    theirs = GotOcr2ImageProcessorPil.from_pretrained(tmp_path, crop_to_patches=True)
    seen = theirs([Image.fromarray(noise)], return_tensors="np")
    assert np.array_equal(rule.inputs([processed])["pixel_values"], seen["pixel_values"])
    text = processor(CONFIG)
    text.image_processor.max_patches = max_patches
    processed_ids = text(text="a<IMG_CONTEXT>b", images=[Image.fromarray(noise)])["input_ids"]
    ids = text.tokenizer("a<IMG_CONTEXT>b")["input_ids"]
    assert np.ravel(processed_ids).tolist() == rule.expanded(ids, [rule.fitted(*size)])


def test_ids_with_the_tokens_of_tiles_and_back(tmp_path: Path) -> None:
    rule = saved(tmp_path)
    images = [np.zeros((TILE * tiles, TILE, 3), np.uint8) for tiles in (1, 3)]
    placed = [[rule.begin, *[rule.token] * (TILE_TOKENS * tiles), rule.end] for tiles in (1, 3)]
    expanded = rule.expanded([20, rule.token, rule.token, 21], [(TILE, len(image_tiles)) for image_tiles in images])
    assert expanded == [20, *placed[0], *placed[1], 21]
    assert rule.collapsed(np.array(expanded), images).tolist() == [20, rule.token, rule.token, 21]
    assert rule.positions(np.array(expanded), images).tolist() == [*range(len(expanded))]


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its tiles have 28 x 28 pixels, and its vision encoder reads"):
        saved(tmp_path, size={"height": 28, "width": 28})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": -2}, "does not read the vision encoder's last layer"),
        ({"text_config": {"model_type": "llama"}}, "its text model 'llama' is not supported beside a vision encoder"),
    ],
)
def test_what_vllm_does_not_compute_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = type(CONFIG)(**copy.deepcopy(CONFIG.to_dict()) | changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_config(str(tmp_path))
