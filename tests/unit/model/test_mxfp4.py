"""Weights in MXFP4: what they are read as, against transformers' own conversion; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.errors import ModelError
from rlcli.model.io.loading import read_policy
from rlcli.model.io.model_checks import check_model, check_weights
from rlcli.model.io.model_config import read_config
from rlcli.model.io.mxfp4 import dequantized, quantization
from rlcli.model.io.weight_files import WeightFiles
from tests.model_fixtures import save_tiny
from tests.mxfp4_files import store_in_mxfp4

UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As GPT-OSS is published: experts in MXFP4, all else in bfloat16."""
    folder = save_tiny(tmp_path_factory.mktemp("mxfp4") / "model", "gpt_oss")
    store_in_mxfp4(folder)
    return folder


def test_all_numbers_and_scales_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8)
    blocks[0, 0, 0] = torch.arange(16).to(torch.uint8) * 17  # each number in both halves
    scales = torch.randint(100, 150, (3, 5, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)
    weights = torch.stack([dequantized(*expert) for expert in zip(blocks, scales, strict=True)])
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, expected)


def test_each_worker_reads_its_experts(model: Path) -> None:
    files = WeightFiles.find(str(model), tied=False, kind="gpt_oss")
    assert files is not None
    stored = load_file(model / "model.safetensors")
    for name, shape in ((UP, (6, 128, 128)), (DOWN, (6, 64, 128))):
        assert files.hold(name, torch.Size(shape))
        assert not files.hold(name, torch.Size((*shape[:2], 64)))
        part = files.rows(name, 2, 3, torch.device("cpu"))
        tensors = [stored[name + end][2:5] for end in ("_blocks", "_scales")]
        assert torch.equal(part, torch.stack([dequantized(*expert) for expert in zip(*tensors, strict=True)]))
    bias = f"{UP}_bias"
    assert torch.equal(files.rows(bias, 1, 2, torch.device("cpu")), stored[bias][1:3])


def test_a_whole_model_is_read_as_transformers_does(model: Path) -> None:
    config = read_config(str(model))
    assert not hasattr(config, "quantization_config"), "what is built by it, and its export, are not quantised"
    read = read_policy(str(model), config, None)
    files = WeightFiles.find(str(model), tied=False, kind="gpt_oss")
    assert files is not None
    for name, tensor in read.items():
        assert torch.equal(tensor, files.rows(name, 0, len(tensor), torch.device("cpu"))), name
    assert read[UP].float().std() > 0.01


def test_a_whole_model_has_the_precision_that_is_asked_for(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rlcli.model.io.loading import read_model

    config = read_config(str(model))
    read = read_model(AutoModelForCausalLM, str(model), config, dtype=torch.float32)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.float32}
    stored = load_file(model / "model.safetensors")
    expert = dequantized(*(stored[UP + end][3] for end in ("_blocks", "_scales")))
    assert torch.equal(read.get_parameter(UP)[3], expert.float())


def test_its_files_are_checked_before_a_run(model: Path) -> None:
    facts = check_model(str(model))
    assert facts.parameters == sum(
        tensor.numel() for tensor in read_policy(str(model), read_config(str(model)), None).values()
    )
    check_weights(str(model))
    assert quantization(str(model)) == {"quant_method": "mxfp4"}


@pytest.mark.parametrize("change", ["missing", "short"])
def test_blocks_without_their_scales_are_refused_by_name(model: Path, tmp_path: Path, change: str) -> None:
    import shutil

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    scales = weights.pop(f"{UP}_scales")
    if change == "short":
        weights[f"{UP}_scales"] = scales[:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"gate_up_proj_blocks \[6, 128, 4, 16\] has no scales of shape \[6, 128, 4\]"):
        check_model(str(folder))
    files = WeightFiles.find(str(folder), tied=False, kind="gpt_oss")
    assert files is not None
    with pytest.raises(ModelError, match="has no scales of shape"):
        files.hold(UP, torch.Size((6, 128, 128)))


def test_the_engine_gets_a_model_that_is_not_quantised(model: Path) -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    from rlcli.errors import SetupError
    from rlcli.rollout.vllm.vllm_arguments import engine_arguments, server_arguments
    from tests.unit.rollout.test_vllm_settings import spec

    class Config(SimpleNamespace):
        def update(self, values: dict[str, object]) -> None:
            vars(self).update(values)

    engine_spec = replace(spec("cpu"), model=str(model), float_head=True)
    config = engine_arguments(engine_spec)["hf_overrides"](Config(quantization_config={}))
    assert vars(config) == {"head_dtype": "float32"}
    assert callable(engine_arguments(engine_spec)["hf_overrides"])
    assert not callable(engine_arguments(replace(engine_spec, weights_follow=False))["hf_overrides"])
    with pytest.raises(SetupError, match="are in MXFP4"):
        server_arguments(engine_spec)
