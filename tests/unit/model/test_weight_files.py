"""Each rank reads its own rows: what a model then holds is what transformers reads; what is not there is not taken."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.errors import ModelError
from rlcli.model.io import loading
from rlcli.model.io.model_config import read_config
from rlcli.model.io.weight_files import WeightFiles
from rlcli.model.lora import LoraSpec
from rlcli.model.tensor_names import fixed_weights
from rlcli.model.value_model import read_value_config, value_class
from tests.model_fixtures import MIXTURES, save_tiny, tiny_lm
from tests.pretend_gpu import DEVICE, OnGpu, PretendGpu

CPU = torch.device("cpu")


def loaded(folder: Path, mesh: Any) -> dict[str, torch.Tensor]:
    policy = loading.load_policy(str(folder), dtype=torch.float32, device=CPU, mesh=mesh)
    return weights_of(policy.lm)


def weights_of(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """With tied ones under each of their names."""
    weights = chain(lm.named_parameters(remove_duplicate=False), fixed_weights(lm))
    return {name: weight.detach() for name, weight in weights}


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that rank 0 reads as a whole."""
    paths: list[str] = []
    read = loading.read_policy

    def noted(path: str, *rest: Any) -> Any:
        paths.append(path)
        return read(path, *rest)

    monkeypatch.setattr(loading, "read_policy", noted)
    return paths


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("qwen2", {}), ("llama", {"tie_word_embeddings": False}), ("phi3", {}), *((kind, {}) for kind in MIXTURES)],
)
def test_a_model_holds_what_its_files_do(
    mesh: Any, tmp_path: Path, read_whole: list[str], kind: str, changes: dict[str, Any]
) -> None:
    loaded_weights = loaded(save_tiny(tmp_path / kind, kind, **changes), mesh)
    expected = weights_of(tiny_lm(kind, **changes))
    assert loaded_weights.keys() == expected.keys()
    assert all(torch.equal(loaded_weights[name], expected[name]) for name in expected)
    assert read_whole == []


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_weights_are_on_the_gpu_before_they_are_checked_and_cast(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import rlcli.model.io.weight_files as files

    tiny_lm(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    checked: set[tuple[torch.device, torch.dtype]] = set()
    check = files.check_finite

    def noted(path: str, tensors: Any) -> None:
        checked.update((tensor.device, tensor.dtype) for _, tensor in tensors)
        check(path, tensors)

    monkeypatch.setattr(files, "check_finite", noted)
    expected = loaded(tmp_path, mesh)
    checked.clear()
    with PretendGpu() as gpu, gpu.loading():
        policy = loading.load_policy(str(tmp_path), dtype=torch.float32, device=DEVICE, mesh=mesh)
        loaded_weights = weights_of(policy.lm)
    assert checked == {(DEVICE, torch.bfloat16)}
    assert loaded_weights.keys() == expected.keys()
    for name, weight in loaded_weights.items():
        assert isinstance(weight, OnGpu)
        assert torch.equal(weight.host, expected[name])


def test_files_in_half_precision_fill_float32(mesh: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "half")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded_weights = loaded(folder, mesh)
    assert all(loaded_weights[name].dtype == torch.float32 for name in weights)
    assert all(torch.equal(loaded_weights[name], tensor.float()) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_a_base_is_read_in_parts_and_its_adapters_begin_as_ever(
    mesh: Any, tmp_path: Path, read_whole: list[str], kind: str
) -> None:
    """The same values as where rank 0 reads all, after the same seed."""
    folder, spec = str(save_tiny(tmp_path / kind, kind)), LoraSpec(4, 8.0)
    torch.manual_seed(3)
    expected = loading.read_policy(folder, read_config(folder), spec)
    read_whole.clear()
    torch.manual_seed(3)
    policy = loading.load_policy(folder, dtype=torch.float32, device=CPU, mesh=mesh, lora=spec)
    parameters = dict(policy.lm.named_parameters(remove_duplicate=False))
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert any(parameter.any() for name, parameter in parameters.items() if ".lora_A." in name)
    assert read_whole == []


@pytest.mark.parametrize("head", ["new", "its own"])
def test_a_value_model_is_read_in_parts(mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    folder = save_tiny(tmp_path / "model")
    if head == "its own":
        config = read_value_config(str(folder))
        config.architectures = ["Qwen2ForSequenceClassification"]
        value_class(config).from_config(config).save_pretrained(folder)
    expected = loading.read_value(str(folder), read_value_config(str(folder)))
    monkeypatch.setattr(loading, "read_value", None)
    value = loading.load_value(str(folder), dtype=torch.float32, device=CPU, mesh=mesh)
    parameters = dict(value.lm.named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert bool(parameters["score.weight"].any()) == (head == "its own")


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.pop(name)


def shorter(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({name: weights[name][:-1]})


@pytest.mark.parametrize(
    "change", [without("model.norm.weight"), shorter("model.norm.weight"), without("model.embed_tokens.weight")]
)
def test_files_that_lack_something_are_not_read_in_parts(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    folder = save_tiny(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles.find(str(folder), tied=True)
    assert files is not None
    assert not all(files.hold(name, parameter.shape) for name, parameter in tiny_lm().named_parameters())


def test_an_untied_head_is_not_taken_from_the_embedding(tmp_path: Path) -> None:
    files = WeightFiles.find(str(save_tiny(tmp_path / "tied")), tied=False)
    assert files is not None
    assert not files.hold("lm_head.weight", tiny_lm().lm_head.weight.shape)


def test_other_files_are_read_whole(mesh: Any, tmp_path: Path, read_whole: list[str]) -> None:
    folder = save_tiny(tmp_path / "old")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert WeightFiles.find(str(folder), tied=True) is None
    loaded_weights, expected = loaded(folder, mesh), tiny_lm()
    assert all(torch.equal(loaded_weights[name], parameter) for name, parameter in expected.named_parameters())
    assert read_whole == [str(folder)]


def test_a_weight_that_is_not_finite_is_refused(mesh: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights of model\.layers\.1\.mlp\.up_proj\.weight are NaN or infinite"):
        loaded(folder, mesh)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        WeightFiles.find(str(folder), tied=True)


def test_experts_that_are_fused_in_the_files_too_are_read_as_they_are(tmp_path: Path) -> None:
    name, fused = "model.layers.0.mlp.experts.gate_up_proj", torch.randn(3, 4, 2)
    save_file({name: fused}, tmp_path / "model.safetensors")
    files = WeightFiles.find(str(tmp_path), tied=False, kind="qwen3_5_moe")
    assert files is not None
    assert files.hold(name, fused.shape)
    assert not files.hold(name, torch.Size((3, 8, 2)))
    assert torch.equal(files.rows(name, 1, 2, torch.device("cpu")), fused[1:])
    assert torch.equal(files.tensor(name), fused)
    assert files.shape(name) == [3, 4, 2]
