"""Low-rank adapters through peft: injected into the model in place, the base frozen (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.helpers import rescale_adapter_scale
from peft.tuners import lora
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcli.errors import ModelError
from rlcli.model.mixture.expert_adapters import PARAMETERS, adapters_on_experts, added, pass_through_factors
from rlcli.model.parallel.buckets import buckets
from rlcli.model.tensor_names import DECODER, DOWN, base_name, fixed_weights, has_experts, has_vision_encoder

if TYPE_CHECKING:
    from jaxtyping import Float

EXPERTS = "experts"
"""The target in `lora.targets` for both matrices of each expert."""
VISION_ENCODER = rf"model\.(?!{DECODER}\.).*"
"""Names of the modules of a vision encoder. They get no adapter: vLLM supports adapters on the decoder only."""
_PREFIX = "base_model.model."
"""The prefix of the base model's names in peft's saved files."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Settings of a LoRA adapter."""

    rank: int
    """Inner dimension of the two factors."""
    alpha: float
    """The adapter is scaled by alpha / rank."""
    targets: str = "all-linear"
    """Comma-separated names of linear modules (`q_proj,v_proj`), or `all-linear` for all but the head; and `experts`
    for the experts of a mixture."""


def target_names(lm: nn.Module, targets: str) -> list[str]:
    """The comma-separated names in `targets`. `ModelError` for one that is not a linear layer of `lm`'s decoder."""
    names = [name.strip() for name in targets.split(",") if name.strip()]
    outside = {"lm_head", "embed_tokens"}.intersection(names)
    if outside:
        raise ModelError(
            f"lora.targets: '{sorted(outside)[0]}' cannot have an adapter", "name linear layers inside the decoder"
        )
    linear = sorted(_linear_names(lm) - outside)
    missing = sorted(set(names) - set(linear) - {"all-linear", *([EXPERTS] if _adapts_experts(lm) else [])})
    if missing or not names:
        available = [name for name in linear if name != "lm_head"] + [EXPERTS] * _adapts_experts(lm)
        scope = "in attention" if has_experts(lm) else "of them"
        raise ModelError(
            f"lora.targets = '{targets}': the model has no linear layer '{missing[0] if missing else ''}'",
            f"there is: {', '.join(available)}, or all-linear for all {scope}",
        )
    return names


def _adapts_experts(lm: nn.Module) -> bool:
    """True if the experts can have adapters: peft and our expert kernels support none on experts with biases."""
    return has_experts(lm) and not any(name.endswith(f"{DOWN}_bias") for name, _ in lm.named_parameters())


def _linear_names(lm: nn.Module) -> set[str]:
    """Last parts of the names of linear layers that can have an adapter: in a mixture of experts only attention's."""
    mixture = has_experts(lm)
    linear = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear)]
    excluded = [r".*\.mlp\..*"] * mixture + [VISION_ENCODER] * has_vision_encoder(lm)
    return {name.rpartition(".")[2] for name in linear if not any(re.fullmatch(regex, name) for regex in excluded)}


def add_lora(lm: nn.Module, spec: LoraSpec, base: str, *, meta: bool) -> PeftModel:
    """Inject new adapters into `lm` and freeze the rest. `base` is recorded as the model to which they belong.

    The adapters are float32 whatever the base is; with `meta` they hold no memory. `ModelError` for an unknown target.
    """
    names = target_names(lm, spec.targets)
    linear: list[str] | str = [name for name in names if name != EXPERTS]
    if "all-linear" in names:  # of a mixture peft would adapt experts and routers, too
        linear = sorted(_linear_names(lm) - {"lm_head"}) if has_experts(lm) else "all-linear"
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=linear or None,
        target_parameters=PARAMETERS if EXPERTS in names else None,
        task_type="CAUSAL_LM",
        exclude_modules=VISION_ENCODER if has_vision_encoder(lm) else None,
    )
    peft = get_peft_model(lm, config, low_cpu_mem_usage=meta)
    # A relative path would mean another folder if the adapter is loaded elsewhere.
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    for name, parameter in lm.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    for layer in lm.modules():
        if isinstance(layer, lora.Linear):
            layer.forward = partial(_forward, layer)
    pass_through_factors(lm)
    return peft


def _forward(layer: lora.Linear, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
    """W x + scale · B A x, the second term added in place. peft's implementation has three intermediate tensors of the
    output's size, which cost time and fragment the C library's heap."""
    down, up, scale = layer.lora_A["default"], layer.lora_B["default"], layer.scaling["default"]
    rows = x.reshape(-1, x.shape[-1])  # with two dimensions the product is not a view, and can be added to in place
    output: Tensor = layer.base_layer(rows)
    low_rank = down(rows.to(down.weight.dtype))
    if low_rank.dtype == output.dtype:
        output.addmm_(low_rank, up.weight.t(), alpha=scale)
    else:
        output += (up(low_rank) * scale).to(output.dtype)
    return output.view(*x.shape[:-1], output.shape[-1])


@contextmanager
def scaled_to_zero(peft: PeftModel) -> Iterator[None]:
    """Context in which the adapter has no effect.

    Scaling by zero adds an exact 0 to each layer. peft's `disable_adapter` would switch `requires_grad` off and on,
    which parameters already gathered by FSDP2 do not follow.
    """
    with rescale_adapter_scale(peft, 0.0):
        yield


def merged(lm: nn.Module, scale: float) -> Iterator[tuple[str, Tensor]]:
    """All weights of `lm` with its adapter added, W + scale · B A in float32, under the base model's names and sharded
    like W. Collective: every rank iterates to the end, in step."""
    parameters = dict(lm.named_parameters())
    on_experts = {weight: (f"{name}.", module) for weight, name, module in adapters_on_experts(lm)}
    # In a linear layer a rank has the same rows of the weight and of B; for experts it may need any row of B.
    expert_factors = tuple(f"{name}lora_" for name, _ in on_experts.values())
    needed = ((name, p) for name, p in parameters.items() if ".lora_A." in name or name.startswith(expert_factors))
    factors = dict(chain.from_iterable(buckets(needed, torch.float32)))
    for name, parameter in parameters.items():
        weight_name = base_name(name)
        if weight_name in on_experts:
            layer, wrapper = on_experts[weight_name]
            down, up = factors[f"{layer}lora_A.default.weight"], factors[f"{layer}lora_B.default.weight"]
            yield weight_name, added(wrapper, parameter, (down, up), scale)
        elif name.endswith(".base_layer.weight"):
            layer = name.removesuffix("base_layer.weight")
            up = parameters[f"{layer}lora_B.default.weight"]
            yield weight_name, _added(parameter, up, factors[f"{layer}lora_A.default.weight"], scale)
        elif not is_adapter(name):
            yield weight_name, parameter
    yield from fixed_weights(lm)


def base_of(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of `lm` without its adapter, under the base model's names and with their sharding."""
    for name, parameter in lm.named_parameters():
        if not is_adapter(name):
            yield base_name(name), parameter
    yield from fixed_weights(lm)


def _added(base: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """base + scale · B A in float32. Each rank computes its rows of the base; it has the same rows of B."""
    if not isinstance(base, DTensor):
        return torch.addmm(base.detach().float(), up.detach().float(), down, alpha=scale)
    assert isinstance(up, DTensor), "it is in the same layer as its base"
    local = _added(base.to_local(), up.to_local(), down, scale)
    return DTensor.from_local(local, base.device_mesh, base.placements, shape=base.shape, stride=base.stride())


def saved_names(peft: PeftModel, gathered: dict[str, Tensor]) -> dict[str, Tensor]:
    """`gathered` (names as in the model's `named_parameters`) under the names of peft's adapter files."""
    state = {_PREFIX + name: tensor for name, tensor in gathered.items()}
    renamed: dict[str, Tensor] = get_peft_model_state_dict(peft, state_dict=state, save_embedding_layers=False)
    return renamed


def write_adapter(peft: PeftModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write `state`, gathered and under the names of peft's files, and the adapter's config in the format of peft and
    vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")
    config = peft.peft_config["default"]
    training, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = training


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's parameter."""
    return ".lora_" in name
