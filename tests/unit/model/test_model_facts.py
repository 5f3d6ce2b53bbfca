from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from rlcli.errors import ModelError
from rlcli.images.families import KINDS as VISION_KINDS
from rlcli.model.io import tied_head
from rlcli.model.io.model_checks import check_model
from rlcli.model.io.model_config import SUPPORTED, read_config
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.tensor_names import named_weights, stored
from tests.model_fixtures import VOCABULARY, save_tiny, save_tokenizer, tiny_config, tiny_lm


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_facts_of_a_sound_model(model: Path) -> None:
    facts = check_model(str(model))
    assert facts.vocab_size == facts.tokenizer_size == VOCABULARY
    assert facts.max_positions == 512
    assert facts.parameters == sum(p.numel() for p in tiny_lm().parameters())


def test_weights_of_more_layers_than_the_configuration_are_refused(model: Path) -> None:
    """They would be left out without a word, and the run would train another model."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    change_config(model, num_hidden_layers=layers - 1, layer_types=None)
    with pytest.raises(ModelError, match=rf"config.json has {layers - 1} layers, and the weights 1 more, the first"):
        check_model(str(model))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_checkpoint_names_are_parameter_names(kind: str, tmp_path: Path) -> None:
    """Streamed weights have their names in memory: files must use the same names, except for experts."""
    from safetensors import safe_open

    lm = tiny_lm(kind)
    lm.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = dict(part for name, weight in named_weights(lm) for part in stored(name, weight, kind))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing", "no folder", "a/b/c"])
def test_a_path_that_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match="there is no such folder; give a model folder or a hub id"):
        check_model(path)


def test_an_unknown_hub_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'nobody/nothing' is neither a local folder nor available from the hub"):
        check_model("nobody/nothing")


def test_a_file_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="is a file; give the folder"):
        check_model(str(model / "config.json"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model(str(tmp_path))


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        check_model(str(model))


def test_a_missing_shard_is_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="1 weight files are missing, model-00002-of-00002"):
        check_model(str(model))


def test_a_truncated_weight_file_is_refused(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        check_model(str(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lfm2"}, "'lfm2' is not supported"),
        ({"model_type": "never_heard_of"}, "does not load"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "not full in every layer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"vocab_size": VOCABULARY - 1}, "ids up to 99, but the model's vocabulary ends at 98"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    change_config(model, **changes)
    with pytest.raises(ModelError, match=message):
        check_model(str(model))


@pytest.mark.parametrize(
    "kind", ["gemma3", "idefics3", "internvl_chat", "llava", "llava_next", "mllama", "paligemma", "qwen2_vl", "smolvlm"]
)
def test_other_vision_language_models_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    # As the hub has it: code of the model's own is not asked for.
    values = {"model_type": kind, "vision_config": {}, "auto_map": {"AutoConfig": "its_own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as refused:
        read_config(str(tmp_path))
    assert f"the architecture '{kind}' is not supported" in refused.value.message
    assert refused.value.hint == f"supported vision-language models: {', '.join(VISION_KINDS)}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": VOCABULARY + 28}, "embed_tokens.weight is .* in the weights and .* by config"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}, "_proj.weight is .* in the weights"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "layers.2.* is not in the weights"),
    ],
)
def test_weights_that_the_config_does_not_describe_are_refused(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(model, **changes)
    with pytest.raises(ModelError, match=f"{message}.*; use the config"):
        check_model(str(model))


def test_windows_are_taken_where_they_are_tested(tmp_path: Path) -> None:
    check_model(str(save_tiny(tmp_path / "phi3", "phi3", sliding_window=64)))
    with pytest.raises(ModelError, match="sliding_window = 0, and a token sees 1 or more"):
        check_model(str(save_tiny(tmp_path / "none", "mistral", sliding_window=0)))
    tiny_config("llama", sliding_window=64).save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelError, match="sliding_window = 64"):
        check_model(str(tmp_path / "llama"))


@pytest.mark.parametrize("text", ["{", "[]", "", '{"model_type": "qwen2", "hidden_size": "big"}'])
def test_a_broken_config_is_refused(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json does not load: .*; check that it is complete"):
        check_model(str(model))


def test_a_missing_tokenizer_is_refused(model: Path) -> None:
    for file in [*model.glob("token*"), *model.glob("chat_template*"), *model.glob("special*")]:
        file.unlink()
    # transformers makes up a tokenizer of special tokens alone, which turns every prompt into nothing.
    with pytest.raises(ModelError, match=r"tokenizer.*; add tokenizer\.json"):
        check_model(str(model))


def test_a_missing_chat_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    save_tokenizer(model, template=None)
    with pytest.raises(ModelError, match=r"no chat template.*; give one: --set model\.chat_template=chatml"):
        check_model(str(model))


@pytest.mark.parametrize("targets", ["lm_head", "q_proj, embed_tokens"])
def test_an_adapter_outside_the_decoder_is_refused(targets: str) -> None:
    with pytest.raises(ModelError, match="cannot have an adapter"):
        add_lora(tiny_lm(), LoraSpec(2, 4.0, targets), "base", meta=False)


@pytest.mark.parametrize("targets", ["q_porj", "", "q_proj,nothing"])
def test_an_unknown_adapter_target_lists_what_there_is(targets: str) -> None:
    with pytest.raises(ModelError, match="there is: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        add_lora(tiny_lm(), LoraSpec(2, 4.0, targets), "base", meta=False)


def test_named_targets_alone_get_an_adapter() -> None:
    lm = tiny_lm()
    add_lora(lm, LoraSpec(2, 4.0, "q_proj, v_proj"), "base", meta=False)
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert all(p.dtype == torch.float32 for name, p in lm.named_parameters() if name in trained)


def with_head(folder: Path, head: Callable[[torch.Tensor], torch.Tensor], *, kind: str = "safetensors") -> Path:
    """Put a head of its own, made of the embedding, into the files of a tied model."""
    from safetensors.torch import load_file, save_file

    weights_file = folder / "model.safetensors"
    weights = load_file(weights_file)
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = head(weights[name]).contiguous().clone()
    if kind == "safetensors":
        save_file(weights, weights_file, {"format": "pt"})
    elif kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
        weights_file.unlink()
    else:
        files = {"a.safetensors": [name], "b.safetensors": [other for other in weights if other != name]}
        for file, names in files.items():
            save_file({key: weights[key] for key in names}, folder / file, {"format": "pt"})
        index = {"weight_map": {key: file for file, names in files.items() for key in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights_file.unlink()
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "shards", "bin"])
def test_a_head_of_its_own_in_a_tied_model_is_refused(model: Path, kind: str) -> None:
    with_head(model, lambda embedding: embedding.roll(1, 0), kind=kind)
    with pytest.raises(ModelError, match=r"have a lm_head\.weight that is not its embedding") as caught:
        check_model(str(model))
    assert caught.value.hint.startswith('set "tie_word_embeddings": false in config.json')
    change_config(model, tie_word_embeddings=False)
    check_model(str(model))


def test_one_other_value_makes_a_head_of_its_own(model: Path) -> None:
    def last_changed(embedding: torch.Tensor) -> torch.Tensor:
        head = embedding.clone()
        head[-1, -1] += 1e-3
        return head

    with_head(model, last_changed)
    with pytest.raises(ModelError, match="not its embedding"):
        check_model(str(model))


@pytest.mark.parametrize("kind", ["safetensors", "shards", "bin"])
def test_a_head_that_repeats_the_embedding_is_no_other_head(model: Path, kind: str) -> None:
    with_head(model, lambda embedding: embedding, kind=kind)
    check_model(str(model))


def test_a_head_is_compared_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_head, "ROWS", 7)
    with_head(model, lambda embedding: embedding)
    check_model(str(model))
    with_head(model, lambda embedding: embedding.roll(1, 0))
    with pytest.raises(ModelError, match="not its embedding"):
        check_model(str(model))
