from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.images.qwen_patches import PatchRule
from rlcli.model.io.tiny_vision import processor, vision_model

RULE = PatchRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 18)


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_fitted_size_stays_as_it_is(width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    size = RULE.fitted(width, height)
    assert RULE.fitted(*size) == size
    assert size[0] % RULE.side == size[1] % RULE.side == 0
    assert RULE.tokens(*size) * RULE.side**2 == size[0] * size[1]


@pytest.mark.parametrize("size", [(84, 56), (100, 61), (30, 400)])
def test_what_was_prepared_is_what_the_models_processor_sees(size: tuple[int, int]) -> None:
    config = vision_model("qwen2_5_vl").config
    theirs = processor(config)
    rule = PatchRule(
        9, (9,), 14, 2, 2, 784, 200704, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    )
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    processed = rule.preprocess(Image.fromarray(noise))
    inputs = rule.inputs([processed])
    seen = theirs.image_processor([Image.fromarray(processed)], return_tensors="np")
    assert np.array_equal(inputs["image_grid_thw"], seen["image_grid_thw"])
    np.testing.assert_allclose(inputs["pixel_values"], seen["pixel_values"], atol=2e-6)
    text = theirs(text="<|image_pad|>", images=[Image.fromarray(processed)])["input_ids"]
    assert len(np.ravel(text)) == rule.tokens(processed.shape[1], processed.shape[0])


def test_ids_with_a_token_for_each_patch_and_back() -> None:
    images = [np.zeros((56, 84, 3), np.uint8), np.zeros((112, 28, 3), np.uint8)]
    expanded = RULE.expanded([1, 9, 2, 9], [(p.shape[1], p.shape[0]) for p in images])
    assert expanded == [1, *[9] * 6, 2, *[9] * 4]
    assert RULE.collapsed(np.array(expanded), images).tolist() == [1, 9, 2, 9]


def test_a_shard_knows_which_span_shows_an_image() -> None:
    first, second, third = (np.full((28, 28, 3), value, np.uint8) for value in (1, 2, 3))
    ids, response, log_probs = np.array([9], np.int32), np.array([4], np.int32), np.array([-1.0], np.float32)
    trajectory = Trajectory.of_prompt(ids, [first]).extended("policy", response, log_probs, 0, "stop")
    trajectory = trajectory.extended("environment", np.array([9, 9], np.int32), images=[second, third])
    trajectory = trajectory.extended("policy", response, log_probs, 1, "stop").extended("prompt", ids, images=[third])
    builder = ShardBuilder()
    builder.add(Trajectory.of_prompt(ids))
    builder.add(trajectory)
    back = builder.build().row(1)
    assert back.spans == trajectory.spans
    assert [int(image[0, 0, 0]) for image in back.images] == [1, 2, 3, 3]
    assert [[int(p[0, 0, 0]) for p in branch.images] for branch in back.branches] == [[1, 2, 3], [3]]
    assert [int(image[0, 0, 0]) for image in back.branch_images] == [3]
    assert len(back.until_turn(1).images) == 1
    assert len(back.branches[0].without_last(1).images) == 3


def test_a_shard_holds_an_image_of_several_rows_once() -> None:
    repeated_image, other_image = (np.full((28, 56, 3), value, np.uint8) for value in (1, 2))
    builder = ShardBuilder()
    prompt, response, log_probs = np.array([9, 9], np.int32), np.array([4], np.int32), np.array([-1.0], np.float32)
    for images in ((repeated_image,), (), (repeated_image, other_image), (other_image,)):
        builder.add(Trajectory.of_prompt(prompt, images).extended("policy", response, log_probs, 0, "stop"))
    shard = builder.build()
    assert len(shard.pixels) == repeated_image.size + other_image.size
    arrays = {name: getattr(shard, name) for name in shard.__dataclass_fields__}
    older = {name: values for name, values in arrays.items() if name != "span_pictures"}
    for held in (shard, SampleShard.of_arrays(arrays), SampleShard.of_arrays(older)):
        assert [[span.image_count for span in held.row(row).spans] for row in range(4)] == [
            [1, 0],
            [0, 0],
            [2, 0],
            [1, 0],
        ]
        rows = [held.row(row).images for row in range(4)]
        assert [[int(image[0, 0, 0]) for image in row] for row in rows] == [[1], [], [1, 2], [2]]
        assert rows[2][1].shape == other_image.shape
