"""The planner's account of vision encoders that see images, against what torch keeps and counts of tiny ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rlcli_planner.activations import Pack, Pass, kept_bytes, vision_bytes
from rlcli_planner.engine_memory import weights
from rlcli_planner.forecast import forecast
from rlcli_planner.model_shape import ModelShape, shape_of
from rlcli_planner.phase_memory import PINNED, checkpoint_bytes, host_bytes
from rlcli_planner.plan_input import ImageStats, RunPlanInput
from rlcli_planner.step_time import model_flops, times
from rlcli_planner.vision_encoder import (
    PARTS,
    VisionEncoder,
    backward_flops,
    vision_encoder_flops,
    vision_encoder_of,
    working_bytes,
)
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForImageTextToText

from rlcli.images.families import KINDS
from rlcli.model.io.frozen_weights import freeze
from rlcli.model.io.tiny_vision import image_rule, vision_config
from rlcli.model.packed import pack
from rlcli.model.policy import PolicyModel
from tests.kept_bytes import kept_by_torch
from tests.live_bytes import LiveBytes
from tests.planner_settings import qwen_7b, setting, totals
from tests.vision_fixtures import images_for, model_and_rule, row_of

FROZEN: list[frozenset[str]] = [frozenset(), frozenset({"encoder"}), frozenset({"projector"}), PARTS]
NEARLY = 0.01
"""Left out: an image's places in Qwen3-VL's embedding of them, and masks. A LayerNorm in bfloat16 keeps four bytes of
a place on CPUs, not eight as on GPUs."""
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def trainable(kind: str, dtype: torch.dtype, frozen: frozenset[str]) -> tuple[PolicyModel, Any]:
    lm, rule = model_and_rule(kind)
    lm = lm.to(dtype).train()
    if frozen:
        freeze(lm, frozen, dtype)
    return PolicyModel(lm, dtype=dtype, source="tiny"), rule


def image_inputs(rule: Any, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in rule.inputs(images_for(rule, *sizes)).items()}


def patches_of(vision_encoder: VisionEncoder, inputs: dict[str, torch.Tensor]) -> float:
    return float(inputs["pixel_values"].numel() / vision_encoder.patch_values)


def variant(**vision: Any) -> tuple[Any, Any]:
    """An InternVL with other norms than the usual ones."""
    config = vision_config("internvl")
    config.vision_config.update(vision)
    return AutoModelForImageTextToText.from_config(config), image_rule(config)


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda parts: " ".join(sorted(parts)) or "none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_kept_of_a_vision_encoder_is_accounted_for(
    kind: str, dtype: torch.dtype, frozen: frozenset[str]
) -> None:
    policy, rule = trainable(kind, dtype, frozen)
    predicted, measured = predicted_and_found(policy, rule, dtype, frozen)
    assert predicted == pytest.approx(measured, rel=NEARLY)
    assert bool(measured) == (frozen != PARTS)


def predicted_and_found(
    policy: PolicyModel, rule: Any, dtype: torch.dtype, frozen: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """Bytes kept of a vision encoder's pass over two images."""
    inputs = image_inputs(rule, (6, 6), (4, 8))
    shape, run = shape_of(policy.lm.config), Pass(dtype.itemsize, on_cpu=True, frozen=frozen)
    assert shape.vision_encoder is not None
    images = patches_of(shape.vision_encoder, inputs) / shape.vision_encoder.unit
    measured = kept_by_torch(policy, lambda: policy.lm.base_model.get_image_features(**inputs))
    return vision_bytes(shape, run, Pack(0, 0, 0, images=images)), measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "vision", [{"norm_type": "rms_norm"}, {"use_qk_norm": True}, {"use_mean_pooling": False}], ids=" ".join
)
def test_internvl_s_other_norms_are_accounted_for(vision: dict[str, Any], dtype: torch.dtype) -> None:
    lm, rule = variant(**vision)
    predicted, measured = predicted_and_found(PolicyModel(lm.to(dtype), dtype=dtype, source="tiny"), rule, dtype)
    assert predicted == pytest.approx(measured, rel=NEARLY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_a_gradient_holds_what_is_predicted(kind: str, dtype: torch.dtype) -> None:
    lm, rule = model_and_rule(kind)
    lm, inputs, vision_encoder = lm.to(dtype), image_inputs(rule, (8, 8), (4, 12)), vision_encoder_of(lm.config)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    live = LiveBytes()
    live.mark([*lm.parameters(), *lm.buffers(), *inputs.values()])
    live_before = live.live
    with live, torch.no_grad():
        lm.base_model.get_image_features(**inputs)
    predicted = working_bytes(vision_encoder, dtype.itemsize, patches_of(vision_encoder, inputs))
    assert predicted == pytest.approx(live.peak - live_before, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_pass_with_images_keeps_what_is_predicted(kind: str) -> None:
    policy, rule = trainable(kind, torch.float32, frozenset())
    rows = [row_of(rule, tuple(images_for(rule, (4, 6), seed=number)), 40, first=40) for number in range(3)]
    batch = pack(
        [(t, p) for t, p, _ in rows], torch.device("cpu"), images=[row_images for *_, row_images in rows], rule=rule
    )
    images = sum(int((tokens == rule.token).sum()) for tokens, *_ in rows)
    sizes = Pack(batch.tokens, batch.tokens, len(batch.targets), images=images)
    predicted = kept_bytes(shape_of(policy.lm.config), Pass(4, on_cpu=True), sizes)
    assert predicted == pytest.approx(kept_by_torch(policy, lambda: policy(batch)), rel=0.03)


def counted(run: Any) -> float:
    """Operations as torch counts them; attention on CPUs, which it leaves out, with two products in the forward pass
    and four in the backward pass."""
    mapping = {
        ATTENTION: lambda query, key, value, *_, out_shape=None, **__: sdpa_flop_count(query, key, value),
        ATTENTION_BACKWARD: lambda grad, query, key, value, *_, out_shape=None, **__: (
            2 * sdpa_flop_count(query, key, value)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return float(counter.get_total_flops())


ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda parts: " ".join(sorted(parts)) or "none")
@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_a_vision_encoder_are_those_that_torch_counts(kind: str, frozen: frozenset[str]) -> None:
    policy, rule = trainable(kind, torch.float32, frozen)
    inputs = image_inputs(rule, (8, 8), (8, 8))  # in whole windows
    vision_encoder = vision_encoder_of(policy.lm.config)
    patches = patches_of(vision_encoder, inputs)
    image_patches = patches / 2
    outputs_of_encoder: list[Any] = []
    forward = counted(lambda: outputs_of_encoder.append(policy.lm.base_model.get_image_features(**inputs)))
    assert sum(vision_encoder_flops(vision_encoder, patches, image_patches)) == pytest.approx(forward, rel=1e-12)
    deep = getattr(outputs_of_encoder[0], "deepstack_features", None) or []
    outputs = [tensor for several in (outputs_of_encoder[0].pooler_output, *deep) for tensor in several]
    if frozen == PARTS:
        assert not any(output.requires_grad for output in outputs)
        assert backward_flops(vision_encoder, patches, image_patches, frozen) == 0
        return
    backward = counted(lambda: sum(output.sum() for output in outputs).backward())
    assert backward_flops(vision_encoder, patches, image_patches, frozen) == pytest.approx(backward, rel=1e-12)


QWEN_VL_7B = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}


def qwen_vl_7b() -> ModelShape:
    from transformers import AutoConfig

    return shape_of(AutoConfig.for_model(**QWEN_VL_7B))


def with_images(gpus: str, *sets: str, tokens: float = 1369.0, prompt: float = 1500.0) -> RunPlanInput:
    """Prompts with one image of about a megapixel."""
    run = setting(qwen_vl_7b(), gpus, "data.max_prompt_tokens=2048", *sets)
    return replace(run, prompt_tokens=prompt, image_stats=ImageStats(tokens, 1.0 if tokens else 0.0))


def test_a_vision_encoder_s_parameters_are_those_of_the_model() -> None:
    shape = qwen_vl_7b()
    assert shape.parameters == 8_292_166_656  # Qwen2.5-VL-7B-Instruct's
    assert shape.vision_encoder is not None
    assert shape.vision_encoder.parameters == pytest.approx(676.6e6, rel=1e-3)


def test_weights_that_no_sync_can_bring_back_are_in_host_memory_in_sleep() -> None:
    plain, adapted = setting(qwen_7b(), "h100:8"), setting(qwen_7b(), "h100:8", "lora.rank=8")
    assert with_images("h100:8").keeps_weights_in_sleep
    assert adapted.keeps_weights_in_sleep
    assert not plain.keeps_weights_in_sleep
    assert host_bytes(adapted) > PINNED * weights(adapted)


def test_images_take_memory_time_and_room() -> None:
    text_only, vlm = with_images("h100:8", tokens=0), with_images("h100:8")
    image_bytes = totals(vlm)["update"] - totals(text_only)["update"]
    vision_encoder, images = vlm.policy.vision_encoder, vlm.pack.images
    assert vision_encoder is not None
    # 32 blocks that keep about 11 widths and 4 inner widths of each patch in 16 bits, and norms in float32.
    a_patch = 32 * (2 * (11 * 1280 + 4 * 3420) + 8 * 1280)
    assert image_bytes == pytest.approx(images * 4 * a_patch, rel=0.1)
    assert model_flops(vlm) > model_flops(text_only)
    assert {p.name: p.seconds for p in times(vlm)}["update"] > {p.name: p.seconds for p in times(text_only)}["update"]
    # 32 prompts a step, each image's tokens 28 × 28 pixels; patches hold each pixel twice, in float32.
    assert vlm.pixel_bytes == 32 * 1369 * 28 * 28 * 3
    assert host_bytes(vlm) - host_bytes(text_only) == pytest.approx(vlm.patch_bytes)
    assert 1 <= 8 * vlm.patch_bytes / (8 * vlm.pixel_bytes) < 2  # of eight workers; a group may be divided
    assert forecast(vlm).as_dict()["pictures"]["tokens"] == 1369
    assert forecast(text_only).as_dict()["pictures"] is None


@pytest.mark.parametrize("part", ["vision", "encoder", "projector"])
def test_what_is_frozen_has_no_optimizer_state_and_keeps_less(part: str) -> None:
    trainable, frozen = with_images("h100:8"), with_images("h100:8", f'model.freeze=["{part}"]')
    vision_encoder = trainable.policy.vision_encoder
    assert vision_encoder is not None
    frozen_parameters = {
        "vision": vision_encoder.parameters,
        "encoder": vision_encoder.encoder,
        "projector": vision_encoder.projector,
    }[part]
    assert trainable.trained_parameters() - frozen.trained_parameters() == frozen_parameters
    assert checkpoint_bytes(trainable) - checkpoint_bytes(frozen) == frozen_parameters * (12 - 2)
    assert trainable.weight_bytes() - frozen.weight_bytes() == frozen_parameters * (4 - 2)
    assert totals(frozen)["update"] < totals(trainable)["update"]
    assert model_flops(frozen) < model_flops(trainable)


def test_without_data_a_prompt_is_one_image() -> None:
    run = setting(qwen_vl_7b(), "h100:8")
    assert run.image_stats == ImageStats(run.prompt_tokens, 1.0)
    assert np.isfinite(forecast(run).step_seconds)
