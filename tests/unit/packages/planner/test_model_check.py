"""`rlcli model check` on configs of published models, and on files that do not fit together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlcli_planner.model_check import ModelReport, check_model_files, check_names, memory_of
from rlcli_planner.model_shape import read_shape

from rlcli.cli.main import main
from rlcli.errors import ModelError
from rlcli.model.io.tiny_model import make_tiny_model

Config = dict[str, Any]

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
LATENT: Config = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
GPT_OSS: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
HYBRID: Config = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
SEES: Config = {"model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152}
PUBLISHED: dict[str, Config] = {
    "Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            **HYBRID,
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "vocab_size": 248320,
        },
        "vision_config": {**SEES, "out_hidden_size": 5120},
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            **HYBRID,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 248320,
        },
        "vision_config": {**SEES, "model_type": "qwen3_5_moe_vision", "out_hidden_size": 2048},
    },
    "Qwen3-Next-80B-A3B": {
        **HYBRID,
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "DeepSeek-V3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "Kimi-K2": {
        **LATENT,
        "model_type": "deepseek_v3",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
        "rope_scaling": {**YARN, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}
"""The sizes of published models, in the form of their config.json."""

FULL, WINDOW, DELTA = "attention to all tokens", "attention within a window", "gated DeltaNet"
EXPECTED: dict[str, tuple[float, dict[str, int]]] = {
    "Qwen3.5-27B": (27e9, {DELTA: 48, FULL: 16, "feed-forward": 64}),
    "Qwen3.5-35B-A3B": (35e9, {DELTA: 30, FULL: 10, "256 experts, 8 of them chosen and shared ones": 40}),
    "Qwen3-Next-80B-A3B": (80e9, {DELTA: 36, FULL: 12, "512 experts, 10 of them chosen and shared ones": 48}),
    "gpt-oss-20b": (20_914_757_184, {WINDOW: 12, FULL: 12, "32 experts, 4 of them chosen": 24}),
    "gpt-oss-120b": (116_829_156_672, {WINDOW: 18, FULL: 18, "128 experts, 4 of them chosen": 36}),
    "DeepSeek-V3": (671e9, {"latent attention": 61, "feed-forward": 3}),
    "Kimi-K2": (1.03e12, {"latent attention": 61, "feed-forward": 1}),
    "GLM-4.7-Flash": (30e9, {"latent attention": 47, "feed-forward": 1}),
    "Qwen3-8B": (8_190_735_360, {FULL: 36, "feed-forward": 36}),
    "Llama-3.1-8B": (8_030_261_248, {FULL: 32, "feed-forward": 32}),
    "SmolLM2-135M": (134_515_008, {FULL: 30, "feed-forward": 30}),
    "gemma-3-1b": (999_885_952, {WINDOW: 22, FULL: 4, "feed-forward": 26}),
}
"""Parameters, exact or by the model's name, and layers."""
ROUND = 0.035
"""Relative error of the rounded number of parameters in a model's name."""
ACTIVE = {"Qwen3.5-35B-A3B": 3e9, "gpt-oss-20b": 3.6e9, "gpt-oss-120b": 5.1e9, "DeepSeek-V3": 37e9, "Kimi-K2": 32e9}
"""Published numbers of parameters that a token passes through; gpt-oss's are without the embedding."""


def written(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def indexed(folder: Path, config: Mapping[str, Any], names: list[str]) -> str:
    path = written(folder, config)
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_supported_with_its_layers_and_parameters(name: str, tmp_path: Path) -> None:
    report = check_model_files(written(tmp_path / name, PUBLISHED[name]))
    parameters, layers = EXPECTED[name]
    exact = isinstance(parameters, int)
    assert report.parameters == (parameters if exact else pytest.approx(parameters, rel=ROUND))
    assert report.layers.items() >= layers.items()
    if name in ACTIVE:
        assert report.active == pytest.approx(ACTIVE[name], rel=0.35)
    recurrent = DELTA in report.layers
    assert {"flash-linear-attention", "causal-conv1d"} <= {kernel.package for kernel in report.kernels} or not recurrent
    assert report.memory.adamw == 16 * report.parameters
    assert 12 * report.parameters <= report.memory.muon < report.memory.adamw
    assert bool(report.memory.state_per_request) is recurrent
    assert any("no weights are there" in note for note in report.notes)
    assert any("MXFP4" in note for note in report.notes) is name.startswith("gpt")


REFUSED: list[tuple[Config, str]] = [
    ({**PUBLISHED["DeepSeek-V3"], "quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
    ({**PUBLISHED["Kimi-K2"], "model_type": "kimi_k2"}, "transformers has its code as 'deepseek_v3'"),
    ({"model_type": "gemma3", "text_config": PUBLISHED["gemma-3-1b"], "vision_config": {}}, "see those that follow"),
    ({"model_type": "gemma4_text"}, "its heads are of two sizes"),
    ({"model_type": "lfm2"}, "its convolutions would read the tokens of the sample before in a pack"),
    ({"model_type": "nemotron_h"}, "its Mamba layers would pass the state of a sample on"),
    (
        {**PUBLISHED["Qwen3-Next-80B-A3B"], "layer_types": ["linear_attention", "mamba"] * 24},
        "24 of its 48 layers are of a kind unknown here, 'mamba' (layer_types)",
    ),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_config_that_cannot_be_trained_is_refused_in_one_line(
    config: Config, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "model", config)
    assert main(["model", "check", path, "--json"]) == 2
    output, err = capsys.readouterr()
    assert json.loads(output)["supported"] is False
    assert reason in json.loads(output)["reason"]
    assert reason in err.strip().splitlines()[-1]


def hybrid_names(layers: int) -> list[str]:
    mixers = ["self_attn.q_proj" if (layer + 1) % 4 == 0 else "linear_attn.in_proj_ba" for layer in range(layers)]
    return [f"model.layers.{layer}.{mixer}.weight" for layer, mixer in enumerate(mixers)]


def test_layers_that_are_missing_too_many_or_of_another_kind_are_named(tmp_path: Path) -> None:
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    config = {**PUBLISHED["Qwen3-Next-80B-A3B"], "layer_types": types}
    names = hybrid_names(48)
    path = indexed(tmp_path / "model", config, [*names, "mtp.layers.0.mlp.gate.weight"])
    assert not any("no weights" in note for note in check_model_files(path).notes)
    shape = read_shape(path)
    with pytest.raises(ModelError, match="48 layers, and the weights have none for 2 of them, the first being layer 7"):
        check_names(path, shape, types, [*names[:7], *names[8:47]])
    with pytest.raises(ModelError, match="48 layers, and the weights 1 more, the first being layer 48"):
        check_names(path, shape, types, [*names, "model.layers.48.mlp.gate.weight"])
    with pytest.raises(ModelError, match=r"layer 3 is of full_attention by config.json, and none .* self_attn"):
        check_names(path, shape, types, [*names[:3], names[2].replace("2", "3"), *names[4:]])
    predicting = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(62)]
    assert check_model_files(indexed(tmp_path / "V3", PUBLISHED["DeepSeek-V3"], predicting)).kind == "deepseek_v3"


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    config = PUBLISHED["gpt-oss-20b"]
    names = [f"model.layers.{layer}.mlp.experts.down_proj_{end}" for layer in range(24) for end in ("blocks", "scales")]
    assert check_model_files(indexed(tmp_path / "whole", config, names)).kind == "gpt_oss"
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.down_proj_blocks has no scales .* mean nothing"):
        check_model_files(indexed(tmp_path / "part", config, [name for name in names if name != names[1]]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "gpt_oss", hidden=64, heads=2, kv_heads=1, kind="gpt_oss")


def test_a_whole_folder_is_shown_with_template_stop_tokens_and_kernels(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_model_files(str(tiny))
    assert isinstance(report, ModelReport)
    assert report.template is not None
    assert report.template.thinking == "harmony's analysis channel"
    assert "single answers work" in report.template.conversations
    assert "<|return|>" in report.stop_tokens.values()
    assert report.notes == ()
    assert report.memory == memory_of(read_shape(str(tiny)))
    assert main(["model", "check", str(tiny)]) == 0
    shown = capsys.readouterr().out
    for word in ("supported", "1 × attention within a window", "8 experts, 2 of them chosen", "vllm", "<|return|>"):
        assert word in shown


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_the_template_of_another_family_is_refused_or_noted(tiny: Path, tmp_path: Path) -> None:
    """Harmony is the only format of its models; others may have been trained on markers of several tokens."""
    import shutil

    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(ModelError, match=r"answers in harmony's channels, and the chat template writes no <\|start\|>"):
        check_model_files(str(other))
    plain = make_tiny_model(tmp_path / "plain")
    (plain / "chat_template.jinja").write_text(CHATML)
    report = check_model_files(str(plain))
    assert isinstance(report, ModelReport)
    (note,) = [note for note in report.notes if "chat template" in note]
    assert note.startswith("the chat template writes <|im_start|>, <|im_end|>, which the tokenizer divides")
