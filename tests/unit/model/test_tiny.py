from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from rlcli_quickstart.tiny_model_command import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rlcli.errors import ConfigError, ModelError
from rlcli.model.io.model_checks import check_model
from rlcli.model.io.tiny_families import DENSE, EXPERTS, MODEL_TYPES
from rlcli.model.io.tiny_model import make_tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=3)


def test_the_folder_loads_and_generates_as_any_hub_model_does(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (model.config.model_type, model.dtype) == ("qwen2", torch.float32)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings >= 2048
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


def test_the_loaded_tokenizer_equals_the_made_one(tiny: Path) -> None:
    # transformers builds its own class for qwen2 models, whatever was saved: it must come to the same tokens.
    text = "<|user|>Tom's 3 cats\n  cost £5 (é)?<|assistant|>"
    loaded = AutoTokenizer.from_pretrained(tiny)
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.chat_template == TOKENIZER.chat_template


def test_each_ascii_character_and_each_marker_is_one_token() -> None:
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert len(TOKENIZER(text)["input_ids"]) == len(text)
    assert len(TOKENIZER("<|system|><|user|><|assistant|><eos><pad>")["input_ids"]) == 5


def test_a_tiny_model_with_tools_has_a_template_for_every_conversation(tmp_path: Path) -> None:
    from rlcli.environments.calls import format_of
    from rlcli.environments.template_contract import Agreement, check

    model = make_tiny_model(tmp_path / "tools", tools=True, hidden=64, layers=1, heads=2, kv_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == json.loads((model / "config.json").read_text())["vocab_size"] == len(TOKENIZER) + 3
    assert format_of(tokenizer.chat_template) == "hermes"
    findings = check(tokenizer, [tokenizer.eos_token_id])
    assert {each.name: str(each.agreement) for each in findings if each.agreement is not Agreement.EXACT} == {}


@given(st.text())
def test_every_text_is_encoded_without_loss(text: str) -> None:
    import unicodedata

    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)


def test_the_chat_template_opens_and_closes_turns() -> None:
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Add.<|user|>1+1=<|assistant|>2<eos><|user|>2+2=<|assistant|>"


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_weights_depend_on_the_seed_and_leave_the_callers_random_state(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert weights(make_tiny_model(tmp_path / "same", seed=3)) == weights(tiny)
    assert torch.equal(torch.rand(1), expected)
    assert weights(make_tiny_model(tmp_path / "other", seed=4)) != weights(tiny)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 96}, "--hidden = 96 over 4 heads gives 24 per head.*--hidden 128"),
        ({"hidden": 160}, "--hidden = 160 over 4 heads gives 40 per head.*--hidden 192"),
        ({"layers": 0}, "--layers = 0"),
        ({"kv_heads": 3}, "--kv-heads = 3 does not divide --heads = 4"),
    ],
)
def test_sizes_that_no_engine_takes_are_refused(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_model(tmp_path / "tiny", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_folder_is_overwritten_unless_forced(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=1)
    first = weights(folder)
    make_tiny_model(folder, seed=2)
    assert weights(folder) != first
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    (foreign / "mine.txt").write_text("keep")
    with pytest.raises(ModelError, match=r"is not empty and was not made by rlcli tiny-model; .*--force"):
        make_tiny_model(foreign)
    assert (foreign / "config.json").read_text() == "{}"
    make_tiny_model(foreign, seed=2, force=True)
    assert weights(foreign) == weights(folder)
    assert (foreign / "mine.txt").read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "tiny"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        make_tiny_model(tmp_path / "file")
    with pytest.raises(ModelError, match="cannot write"):
        make_tiny_model(tmp_path / "file" / "tiny")


def test_the_command_makes_the_model_it_was_asked_for(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(tiny_model)
    folder = tmp_path / "tiny"
    result = CliRunner().invoke(
        app, ["--out", str(folder), "--hidden", "256", "--layers", "3", "--seed", "5", "--json"]
    )
    assert json.loads(result.stdout) == {"path": str(folder), "hidden": 256, "layers": 3, "seed": 5}
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (256, 3)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_tiny_hybrid_is_made(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / kind, kind=kind, hidden=64, heads=2, kv_heads=1, layers=5)
    check_model(str(folder))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == MODEL_TYPES.get(kind, kind)
    linear, full = "linear_attention", "full_attention"
    assert config["layer_types"] == [linear, linear, linear, full, full]
    assert config.get("num_experts", 0) == (0 if kind in DENSE else EXPERTS)
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "<|user|>Tom's 3 cats cost £5?<|assistant|>"
    assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    steps = torch.nn.functional.softplus(load_file(folder / "model.safetensors")["model.layers.0.linear_attn.dt_bias"])
    assert (steps >= 0.99e-3).all()
    assert (steps <= 1.01e-1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "qwen"}, "--kind = qwen: no tiny model of this kind is made"),
        ({"kind": "qwen3_5", "experts": 4}, "--experts = 4: a qwen3_5 has none"),
        ({"kind": "qwen3_5", "layers": 1}, "--layers = 1: such a model has layers of two kinds"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_model(tmp_path / "tiny", **options)
