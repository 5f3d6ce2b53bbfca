from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from rlcli_planner.model_shape import shape_of
from transformers import AutoConfig

from rlcli.images.families import KINDS
from rlcli.images.qwen_patches import PatchRule
from rlcli.model.io.weight_files import WeightFiles
from rlcli.model.logprobs import token_log_probs
from rlcli.model.lora import LoraSpec, add_lora, is_adapter
from rlcli.model.packed import PackedBatch, dummy, pack
from rlcli.model.policy import PolicyModel
from rlcli.model.tensor_names import named_weights, vision_modules
from tests.vision_fixtures import ImageRow, images_for, model_and_rule, padded_log_probs, row_of

CPU = torch.device("cpu")


def policy_of(lm: torch.nn.Module) -> PolicyModel:
    return PolicyModel(copy.deepcopy(lm), dtype=torch.float32, source="tiny")


def packed(rule: object, rows: list[ImageRow]) -> PackedBatch:
    return pack([(tokens, prompt) for tokens, prompt, _ in rows], CPU, images=[p for *_, p in rows], rule=rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_padded_with_images_and_without(kind: str) -> None:
    lm, rule = model_and_rule(kind)
    first, second, other, last = images_for(rule, (2, 3), (3, 2), (2, 3), (1, 1))
    # Two samples of one prompt; another image of the same size, so with the same tokens; two images; none.
    sets = [(first,), (first,), (other,), (second, last), ()]
    rows = [row_of(rule, images, 3 + number) for number, images in enumerate(sets)]
    batch = packed(rule, rows)
    for name, values in rule.inputs([first, other, second, last]).items():
        same = torch.equal(batch.image_inputs[name], torch.tensor(values))
        assert same, "a shared prompt's image is seen once; one that only looks alike by itself"
    policy = policy_of(lm)
    expected = padded_log_probs(lm, rule, rows)
    log_probs = policy(batch).log_probs
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=5e-6)
    expected.square().sum().backward()
    log_probs.square().sum().backward()
    for (name, parameter), plain in zip(policy.lm.named_parameters(), lm.parameters(), strict=True):
        if plain.grad is not None:
            torch.testing.assert_close(parameter.grad, plain.grad, rtol=1e-3, atol=1e-4, msg=name)
    for part in vision_modules(policy.lm):
        assert any(weight.grad is not None and weight.grad.any() for weight in part.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_come_later_are_each_samples_own(kind: str) -> None:
    """In a conversation: two samples share a prompt with an image, and each is shown another one after its turn."""
    lm, rule = model_and_rule(kind)
    first_image, *later_images = images_for(rule, (2, 3), (1, 2), (1, 2), (2, 2))
    rows: list[ImageRow] = []
    masks = []
    for images in ((later_images[0],), (later_images[1], later_images[2]), ()):
        tokens, prompt, _ = row_of(rule, (first_image,), 3)
        image_tokens = [row_of(rule, (image,), 2)[0] for image in images]
        sequence = np.concatenate([tokens, *image_tokens])
        mask: np.ndarray = np.zeros(len(sequence), bool)
        ends = np.cumsum([len(tokens), *map(len, image_tokens)])
        for end, count in zip(ends, [3, *[2] * len(image_tokens)], strict=True):
            mask[end - count : end] = True
        rows.append((sequence, prompt, (first_image, *images)))
        masks.append(mask)
    token_rows = [(tokens, prompt) for tokens, prompt, _ in rows]
    batch = pack(token_rows, CPU, masks, images=[images for *_, images in rows], rule=rule)
    assert batch.tokens == sum(map(len, masks)) - 2 * rows[0][1], "their prompt is stored once"
    for name, values in rule.inputs([first_image, *later_images]).items():
        assert torch.equal(batch.image_inputs[name], torch.tensor(values))
    every = [padded_log_probs(lm, rule, [row])[mask[row[1] :]] for row, mask in zip(rows, masks, strict=True)]
    torch.testing.assert_close(policy_of(lm)(batch).log_probs, torch.cat(every), rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_another_image_gives_other_log_probs(kind: str) -> None:
    lm, rule = model_and_rule(kind)
    first, other = images_for(rule, (2, 3), (2, 3))
    log_probs = [policy_of(lm)(packed(rule, [row_of(rule, (image,), 6)])).log_probs for image in (first, other)]
    assert (log_probs[0] - log_probs[1]).abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_without_images_gives_the_vision_encoder_a_gradient_of_0(kind: str) -> None:
    """Ranks that share its weights reduce their gradients in each pass, whatever each of them sees."""
    lm, rule = model_and_rule(kind)
    policy, row = policy_of(lm), row_of(rule, (), 5)
    log_probs = policy(packed(rule, [row])).log_probs
    torch.testing.assert_close(log_probs, padded_log_probs(lm, rule, [row]), rtol=0, atol=5e-6)
    log_probs.sum().backward()
    for weight in (weight for part in vision_modules(policy.lm) for weight in part.parameters()):
        assert weight.grad is not None
        assert not weight.grad.any()
    assert policy(dummy(CPU, rule)).log_probs.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_in_the_decoder_alone(kind: str) -> None:
    lm, _ = model_and_rule(kind)
    shape = shape_of(lm.config)
    assert shape.parameters == sum(weight.numel() for weight in lm.parameters())
    add_lora(lm, LoraSpec(2, 4.0), "base", meta=False)
    adapted = [weight.numel() for name, weight in lm.named_parameters() if is_adapter(name)]
    assert not any(is_adapter(name) for part in vision_modules(lm) for name, _ in part.named_parameters())
    assert sum(adapted) == shape.adapter_parameters(2, "all-linear")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_by_the_names_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    lm, _ = model_and_rule(kind)
    lm.save_pretrained(tmp_path)
    files = WeightFiles.find(str(tmp_path), tied=True, kind=kind)
    assert files is not None
    for name, weight in named_weights(lm):
        assert files.hold(name, weight.shape)
        assert torch.equal(files.rows(name, 0, len(weight), CPU), weight)


def test_tiles_are_seen_beside_either_text_model() -> None:
    lm, rule = model_and_rule("internvl")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(lm.config.text_config, name) for name in names}
    config = copy.deepcopy(lm.config)
    config.text_config = AutoConfig.for_model("qwen3", **sizes, intermediate_size=64, head_dim=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = type(lm)(config).eval()
    first, second = images_for(rule, (2, 3), (1, 1))
    rows = [row_of(rule, images, 5) for images in ((first,), (first, second), ())]
    log_probs = policy_of(lm)(packed(rule, rows)).log_probs
    torch.testing.assert_close(log_probs, padded_log_probs(lm, rule, rows), rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", [kind for kind, rule in KINDS.items() if rule is PatchRule])
def test_positions_are_those_of_transformers(kind: str) -> None:
    lm, rule = model_and_rule(kind)
    for sizes in ([(2, 3)], [(4, 1), (1, 4)], [(1, 1), (3, 3), (2, 5)]):
        tokens, _, images = row_of(rule, tuple(images_for(rule, *sizes)), 4)
        grid = torch.tensor(rule.inputs(images)["image_grid_thw"])
        types = torch.tensor(tokens == rule.token).int()[None]
        wanted, _ = lm.base_model.get_rope_index(torch.tensor(tokens).long()[None], types, grid)
        assert np.array_equal(rule.positions(tokens, images), wanted[:, 0].numpy())


def test_what_is_never_drawn_has_no_probability_and_no_gradient() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets, never = torch.tensor([0, 1, 2, 9, 10]), torch.tensor([3, 7])
    log_probs, entropy = token_log_probs(hidden, weight, targets, 0.7, 2, True, never)
    drawable = [token for token in range(11) if token not in (3, 7)]
    plain = (hidden @ weight[drawable].t() / 0.7).log_softmax(-1)
    indices = torch.tensor([drawable.index(int(target)) for target in targets])
    torch.testing.assert_close(log_probs, plain.gather(-1, indices[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1))
    wanted = torch.autograd.grad((plain.gather(-1, indices[:, None])[:, 0] - plain.exp().sum(-1)).sum(), hidden)[0]
    got = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    torch.testing.assert_close(got[0], wanted, rtol=1e-4, atol=1e-5)
    assert not got[1][never].any()
