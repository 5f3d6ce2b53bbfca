from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from rlcli.errors import ModelError
from rlcli.export.exported_weights import write_value
from rlcli.model.io.loading import load_value
from rlcli.model.io.model_checks import check_value_model
from rlcli.model.io.model_config import SUPPORTED
from rlcli.model.packed import dummy, pack
from rlcli.model.value_model import ValueModel
from tests.export_fixtures import stored
from tests.model_fixtures import VOCABULARY, Row, ragged_rows, save_tiny, save_tokenizer, tiny_config

CPU = torch.device("cpu")
ROWS = ragged_rows(9)


def classifier(kind: str = "qwen2", auto: Any = AutoModelForSequenceClassification, **changes: Any) -> Any:
    """A reward model with random weights, as transformers makes it."""
    torch.manual_seed(1)
    lm = auto.from_config(tiny_config(kind, **{"num_labels": 1, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():  # the usual small initialisation would hide differences
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return lm.eval()


def saved(folder: Path, **options: Any) -> Path:
    classifier(**options).save_pretrained(folder)
    return folder


def value_of(lm: Any) -> ValueModel:
    return ValueModel(lm, dtype=torch.float32, source="tiny")


def load(path: Path, mesh: Any, dtype: torch.dtype = torch.float32) -> ValueModel:
    return load_value(str(path), dtype=dtype, device=CPU, mesh=mesh)


def values(model: ValueModel, rows: list[Row] = ROWS) -> Tensor:
    with torch.no_grad():
        return model(pack(rows, CPU)).values


def values_one_by_one(lm: Any, rows: list[Row] = ROWS) -> Tensor:
    """Each sequence alone through transformers' own model and attention, at the token before each of the response."""
    parts = []
    for tokens, prompt in rows:
        hidden = lm.model(input_ids=torch.tensor(tokens)[None], use_cache=False).last_hidden_state[0]
        parts.append(lm.score(hidden)[prompt - 1 : -1, 0])
    return torch.cat(parts)


WITHOUT_A_CLASS = ("glm4_moe", "glm4_moe_lite", "qwen3_5_moe_text")


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if kind not in WITHOUT_A_CLASS])
def test_packed_values_equal_those_of_each_sequence_alone(kind: str) -> None:
    lm = classifier(kind)
    expected = values_one_by_one(lm)
    output = values(value_of(lm))
    assert output.dtype == torch.float32
    assert expected.std() > 0.1
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "olmo2"])
def test_packed_gradients_equal_those_of_each_sequence_alone(kind: str) -> None:
    lm = classifier(kind)
    reference = copy.deepcopy(lm)
    target = torch.linspace(-1, 1, sum(len(tokens) - prompt for tokens, prompt in ROWS))
    (values_one_by_one(reference) - target).square().sum().backward()
    (value_of(lm)(pack(ROWS, CPU)).values - target).square().sum().backward()
    for (name, ours), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * max(scale, 1.0), msg=name)


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    model = value_of(classifier())
    first, second = np.array([5, 6, 7, 8]), np.array([5, 6, 9, 8])
    first_values, second_values = values(model, [(first, 1)]), values(model, [(second, 1)])
    assert torch.equal(first_values[:2], second_values[:2])  # of token 6, and of the token that differs
    assert first_values[2] != second_values[2]


def test_a_dummy_gives_every_parameter_a_zero_gradient() -> None:
    model = value_of(classifier())
    output = model(dummy(CPU)).values
    assert output.shape == (0,)
    (output.sum() * 0).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_starts_at_zero_without_its_head_and_learns(tied: bool, tmp_path: Path, mesh: Any) -> None:
    folder = save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    model = load(folder, mesh)
    assert torch.equal(values(model), torch.zeros_like(values(model)))
    weights = dict(model.stream_weights())
    expected = load_file(folder / "model.safetensors")
    assert set(weights) == {"score.weight", *expected} - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items() if name != "score.weight")
    (model(pack(ROWS, CPU)).values - 1).square().sum().backward()
    assert model.lm.score.weight.grad.abs().max() > 0


def test_a_reward_model_keeps_its_head(tmp_path: Path, mesh: Any) -> None:
    """The score that transformers gives a sequence is the value of its last state."""
    folder = saved(tmp_path / "rm", kind="llama")
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [np.random.default_rng(n).integers(2, VOCABULARY, n) for n in (3, 17, 30)]
    expected = [reward_model(input_ids=torch.tensor(row)[None]).logits[0, 0].item() for row in rows]
    scores = values(load(folder, mesh), [(np.append(row, 1), len(row)) for row in rows])
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_token_classifier_keeps_its_head_and_bias(tmp_path: Path, mesh: Any) -> None:
    lm = classifier(auto=AutoModelForTokenClassification)
    lm.score.bias.data.fill_(3.0)
    lm.save_pretrained(tmp_path)
    expected = torch.cat([lm(input_ids=torch.tensor(row)[None]).logits[0, n - 1 : -1, 0] for row, n in ROWS])
    assert expected.mean() > 2
    model = load(tmp_path, mesh)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=1e-5)
    save_tokenizer(tmp_path)
    (tmp_path / "out").mkdir()
    write_value(stored(model, tmp_path / "dcp"), str(tmp_path), str(tmp_path), torch.float32, tmp_path / "out")
    torch.testing.assert_close(values(load(tmp_path / "out", mesh)), expected, rtol=0, atol=1e-5)


def test_dropout_is_off(tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm", kind="phi3", resid_pdrop=0.5, attention_dropout=0.5)
    lm = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(values(load(folder, mesh)), values_one_by_one(lm), rtol=0, atol=1e-5)


def test_the_head_is_float32_where_the_layers_are_bfloat16(tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm")
    model = load(folder, mesh, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half, exact = values(model), values(load(folder, mesh))
    assert half.dtype == torch.float32
    assert not torch.equal(half, half.bfloat16().float())
    assert 0 < (half - exact).abs().max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_gives_the_same_values(dtype: torch.dtype, tmp_path: Path, mesh: Any) -> None:
    base = save_tiny(tmp_path / "base")
    model = load(base, mesh, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    (tmp_path / "critic").mkdir()
    write_value(stored(model, tmp_path / "dcp"), str(base), str(base), dtype, tmp_path / "critic")
    assert values(model).std() > 0.1
    assert torch.equal(values(load(tmp_path / "critic", mesh, dtype)), values(model))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == [type(lm).__name__]
    assert lm.dtype == dtype
    assert lm.score.weight.shape == (1, 128)
    if dtype == torch.float32:
        torch.testing.assert_close(values_one_by_one(lm), values(model), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "critic").get_vocab()


def change_weights(folder: Path, drop: str = "", **added: Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(drop, None)
    save_file({**weights, **added}, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, mesh: Any, match: str) -> None:
    """Both before a run and by the workers that load."""
    with pytest.raises(ModelError, match=match):
        check_value_model(str(folder), VOCABULARY)
    with pytest.raises(ModelError, match=match):
        load(folder, mesh)


def test_sound_value_models_are_passed(tmp_path: Path) -> None:
    check_value_model(str(saved(tmp_path / "rm")), VOCABULARY)
    check_value_model(str(saved(tmp_path / "token", auto=AutoModelForTokenClassification)), VOCABULARY)
    check_value_model(str(save_tiny(tmp_path / "base", tie_word_embeddings=False)), VOCABULARY)


def test_a_head_of_several_labels_is_refused(tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm", num_labels=3)
    refused(folder, mesh, r"score\.weight \[3, 128\], which is not a head of one number .*; give a reward model")


@pytest.mark.parametrize("name", ["score.2.weight", "v_head.summary.weight", "score.bias"])
def test_a_head_of_another_kind_is_refused(name: str, tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm")
    change_weights(folder, drop="" if name == "score.bias" else "score.weight", **{name: torch.zeros(1)})
    refused(folder, mesh, f"{name}.*not a head of one number")


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm")
    change_weights(folder, drop="score.weight")
    refused(folder, mesh, r"score\.weight.* is not in the weights")


def test_missing_and_misshapen_weights_are_refused(tmp_path: Path, mesh: Any) -> None:
    folder = saved(tmp_path / "rm")
    change_weights(folder, **{"model.norm.weight": torch.zeros(64)})
    refused(folder, mesh, r"model\.norm\.weight is \[64\] in the weights and \[128\] by config\.json")
    change_weights(folder, drop="model.norm.weight")
    refused(folder, mesh, r"model\.norm\.weight.* is not in the weights")


def test_a_smaller_vocabulary_than_the_policys_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "rm")
    with pytest.raises(ModelError, match="ids up to 100, but this model's vocabulary ends at 99; give a value model"):
        check_value_model(str(folder), VOCABULARY + 1)


def test_a_value_model_that_is_not_there_is_named_by_its_key() -> None:
    with pytest.raises(ModelError, match=r"critic\.path = '/no/such': there is no such folder"):
        check_value_model("/no/such", VOCABULARY)
