"""The output that an adapter adds to a linear layer, compared with peft's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.model.lora import LoraSpec, add_lora, scaled_to_zero

IN, OUT, RANK = 12, 20, 3


class Model(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
        self.config = {"model_type": "none", "tie_word_embeddings": False}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.q_proj(x)
        return result

    def prepare_inputs_for_generation(self) -> None: ...


def adapted(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Model, Any, lora.Linear]:
    """A layer with an adapter that is not zero; all of it of `dtype` where that is float64."""
    torch.manual_seed(0)
    model = Model(bias, dtype)
    peft = add_lora(model, LoraSpec(RANK, 6.0), "base", meta=False)
    layer = model.q_proj
    assert isinstance(layer, lora.Linear)
    nn.init.normal_(layer.lora_B["default"].weight)
    if dtype == torch.float64:
        layer.double()
    return model, peft, layer


def passed(layer: lora.Linear, x: Tensor, *, through_peft: bool) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of the input and of both factors. through_peft: by the forward of peft."""
    x = x.clone().requires_grad_()
    y = type(layer).forward(layer, x) if through_peft else layer(x)
    layer.zero_grad()
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    gradients = [x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
    assert all(grad is not None for grad in gradients)
    assert layer.get_base_layer().weight.grad is None
    return y.detach(), [grad.clone() for grad in gradients if grad is not None]


@pytest.mark.parametrize("shape", [(7, IN), (1, 7, IN), (2, 5, IN), (0, IN), (1, 0, IN)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_what_pefts_own_gives_gradients_too(bias: bool, shape: tuple[int, ...]) -> None:
    _, _, layer = adapted(bias)
    x = torch.randn(shape, dtype=torch.float64)
    (ours, grads), (theirs, expected) = passed(layer, x, through_peft=False), passed(layer, x, through_peft=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    base = layer.get_base_layer()
    if x.numel():
        assert (ours - base(x)).abs().max() > 0.01


def test_float32_factors_beside_a_bfloat16_base_give_what_pefts_own_give() -> None:
    _, _, layer = adapted(True, torch.bfloat16)
    assert layer.lora_A["default"].weight.dtype == torch.float32
    x = torch.randn(1, 9, IN, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, theirs = layer(x), type(layer).forward(layer, x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_scaled_to_zero_it_gives_what_the_base_gives_bit_for_bit() -> None:
    model, peft, layer = adapted(True)
    x = torch.randn(1, 9, IN, dtype=torch.float64)
    with scaled_to_zero(peft):
        alone = model(x)
    assert torch.equal(alone, layer.get_base_layer()(x))
    assert not torch.equal(model(x), alone)


class Made(TorchDispatchMode):
    """Keeps every tensor that is made, so that none takes the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.tensors += [output] if isinstance(output, Tensor) else []
        return output


def test_nothing_of_the_layers_width_is_made_but_what_it_gives() -> None:
    _, _, layer = adapted(False)
    x = torch.randn(1, 9, IN, dtype=torch.float64)
    counts = []
    for forward in (layer, lambda x: type(layer).forward(layer, x)):
        with torch.no_grad(), Made() as recorder:
            forward(x)
        wide = [tensor for tensor in recorder.tensors if tensor.numel() == x.shape[1] * OUT]
        counts.append(len({tensor.untyped_storage().data_ptr() for tensor in wide}))
    assert counts == [1, 4]
