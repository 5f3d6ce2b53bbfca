"""Master weights of computation in 16 bits: their noise is invisible at first, and shows small updates on average."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlcli.model import dithering
from rlcli.model.dithering import dither
from rlcli.model.io.loading import load_policy, load_value
from rlcli.model.lora import LoraSpec
from tests.model_fixtures import save_tiny, tiny_lm

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def dithered(weights: Tensor, dtype: torch.dtype, name: str = "weight") -> Tensor:
    parameter = nn.Parameter(weights.clone())
    dither([(name, parameter)], dtype)
    return parameter.detach()


def bits(weights: Tensor, dtype: torch.dtype) -> Tensor:
    return weights.to(dtype).view(torch.int16)


def numbers_of(dtype: torch.dtype) -> Tensor:
    """All finite numbers of `dtype`, both zeros included, in float32."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    return numbers[numbers.isfinite()]


@DTYPES
def test_every_number_of_the_dtype_still_rounds_to_itself(dtype: torch.dtype) -> None:
    numbers = numbers_of(dtype).repeat(20, 1)
    masters = dithered(numbers, dtype)
    assert torch.equal(bits(masters, dtype), bits(numbers, dtype))
    zero = numbers == 0
    assert torch.equal(masters[zero].view(torch.int32), numbers[zero].view(torch.int32))
    assert (masters != numbers)[~zero].double().mean() > 0.99


@DTYPES
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0205078125, -0.75, 2.0**-9])
def test_noise_fills_the_interval_that_rounds_to_the_number(dtype: torch.dtype, value: float) -> None:
    """Evenly on each side of it, also where the spacing of the numbers changes (at powers of two)."""
    masters = dithered(torch.full((100_000,), value), dtype).abs().double()
    number = torch.tensor(abs(value), dtype=dtype)
    above, below = (torch.nextafter(number, torch.tensor(end, dtype=dtype)) for end in (torch.inf, 0.0))
    for share, side in (
        ((masters - abs(value)) / (above.double() - abs(value)), masters > abs(value)),
        ((abs(value) - masters) / (abs(value) - below.double()), masters < abs(value)),
    ):
        shares = share[side]
        assert abs(side.double().mean() - 0.5) < 0.01
        assert shares.max() < 0.5
        for quarter in range(4):
            inside = (shares > quarter / 8) & (shares <= (quarter + 1) / 8)
            assert abs(inside.double().mean() - 0.25) < 0.01


@DTYPES
@pytest.mark.parametrize("change", [1e-6, -1e-6, 1e-5, -1e-4])
def test_rounded_weights_move_by_as_much_as_their_masters_on_average(dtype: torch.dtype, change: float) -> None:
    torch.manual_seed(0)
    published = (torch.randn(2_000_000) * 0.02).bfloat16().float()
    visible = (dithered(published, dtype) + change).to(dtype).double() - published.double()
    error = visible.std() / len(visible) ** 0.5
    assert abs(visible.mean() - change) < 4 * error
    assert error < abs(change) / 10
    if (dtype, abs(change)) == (torch.bfloat16, 1e-6):  # what the noise is for
        assert abs((published + change).to(dtype).double().sub(published.double()).mean()) < 0.05 * abs(change)


@DTYPES
def test_other_weights_stay(dtype: torch.dtype) -> None:
    """Those that are no numbers of the dtype already lie inside their intervals; frozen ones are not trained."""
    torch.manual_seed(0)
    exact, other = torch.randn(500).to(dtype).float(), torch.randn(500) + 0.1
    other = other[other != other.to(dtype)]
    parameter = nn.Parameter(torch.cat([exact, other]))
    frozen = nn.Parameter(exact.clone(), requires_grad=False)
    half = nn.Parameter(exact.to(dtype))
    dither([("parameter", parameter), ("frozen", frozen), ("half", half), ("empty", nn.Parameter(exact[:0]))], dtype)
    assert torch.equal(parameter[500:], other)
    assert not torch.equal(parameter[:500], exact)
    assert torch.equal(frozen, exact)
    assert torch.equal(half, exact.to(dtype))


def test_no_noise_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(100_000)
    first, second = (dithered(ones, torch.bfloat16, name) for name in ("first", "second"))
    for other in (second, *(first.roll(shift) for shift in (1, 2, 3, 4, 576, 1 << 15))):
        assert abs(torch.corrcoef(torch.stack([first, other]).double())[0, 1]) < 0.02  # 6 standard errors
    monkeypatch.setattr(dithering, "CHUNK", {"cpu": 1001})
    assert torch.equal(dithered(ones, torch.bfloat16, "first"), first)


@pytest.fixture
def published(tmp_path: Path) -> str:
    """A model whose weights are bfloat16 numbers."""
    folder = save_tiny(tmp_path / "published")
    tiny_lm().bfloat16().save_pretrained(folder)
    return str(folder)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.lm.named_parameters()}


@pytest.mark.parametrize("load", [load_policy, load_value])
def test_a_loaded_model_computes_with_the_published_weights(mesh: Any, published: str, load: Any) -> None:
    options = {"device": CPU, "mesh": mesh}
    masters = weights_of(load(published, dtype=torch.bfloat16, **options))
    exact = dict(load(published, dtype=torch.float32, **options).lm.named_parameters())
    assert masters.keys() == exact.keys()
    for name, weight in masters.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.bfloat16(), exact[name].bfloat16())
        if exact[name].any():  # a new value head is zero
            assert not torch.equal(weight, exact[name])


def test_a_reference_and_an_adapter_have_no_noise(mesh: Any, published: str) -> None:
    options = {"device": CPU, "mesh": mesh}
    exact = dict(load_policy(published, dtype=torch.float32, **options).lm.named_parameters())
    reference = weights_of(load_policy(published, dtype=torch.bfloat16, trainable=False, **options))
    assert all(torch.equal(weight.float(), exact[name]) for name, weight in reference.items())
    adapters = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        policy = load_policy(published, dtype=dtype, lora=LoraSpec(rank=4, alpha=8.0, targets="all-linear"), **options)
        adapters.append(policy.adapter_state())
    full, *halves = adapters
    assert len(full) > 20
    assert all(torch.equal(half[name], weight) for half in halves for name, weight in full.items())


def test_masters_do_not_depend_on_the_files_format(mesh: Any, published: str, tmp_path: Path) -> None:
    """Rank 0 reads files of torch's format."""
    folder = Path(shutil.copytree(published, tmp_path / "bin"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    options = {"dtype": torch.bfloat16, "device": CPU, "mesh": mesh}
    expected, masters = (weights_of(load_policy(str(path), **options)) for path in (published, folder))
    assert masters.keys() == expected.keys()
    assert all(torch.equal(masters[name], weight) for name, weight in expected.items())
