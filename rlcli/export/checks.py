"""Checks of an exported folder: its weights differ from the base's, and its log-probs equal the trainer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlcli.model.io.config import read_config
from rlcli.model.io.loading import read_model


@dataclass(frozen=True, slots=True)
class Change:
    """How much weights differ from the base's. tensors: how many were compared (for an adapter, the adapted layers);
    moved: how many differ at all. largest, mean: of the absolute differences of all elements."""

    tensors: int
    moved: int
    largest: float
    mean: float

    def __str__(self) -> str:
        return (
            f"{self.moved} of {self.tensors} tensors differ from the base, by {self.mean:.2g} on average and "
            f"{self.largest:.2g} at most"
        )


def change_of_model(folder: Path, base: Mapping[str, Tensor]) -> Change:
    """Change of the weights in `folder` from `base`, in the folder's dtype, so that rounding does not count."""
    return _change((tensor.float() - base[name].to(tensor.dtype).float()) for name, tensor in _tensors(folder))


def change_of_adapter(folder: Path) -> Change:
    """The change that the adapter in `folder` makes to its base: scale · B · A of each layer."""
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(folder))
    scale = config.lora_alpha / config.r
    factors = dict(_tensors(folder))
    layers = [name.removesuffix("lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    return _change(
        scale * factors[f"{layer}lora_B.weight"].float() @ factors[f"{layer}lora_A.weight"].float() for layer in layers
    )


def log_probs_of_folder(folder: Path, base: str, tokens: Sequence[int]) -> list[float]:
    """log π of each of `tokens` except the first, computed only with transformers in float32. base: the base model of
    the adapter in `folder`; empty if the folder holds a whole model."""
    source = base or str(folder)
    lm: Any = read_model(AutoModelForCausalLM, source, read_config(source), dtype=torch.float32)
    if base:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, str(folder))
    ids = torch.tensor(tokens, dtype=torch.int64)[None]
    with torch.no_grad():
        log_probs = lm.eval()(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    found: list[float] = log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _change(differences: Iterator[Tensor]) -> Change:
    tensors = moved = elements = 0
    largest = total = 0.0
    for difference in differences:
        size = difference.abs_()
        tensors += 1
        elements += size.numel()
        moved += bool(size.any())
        # Python's max() would lose a NaN.
        largest = float(torch.tensor([largest, float(size.max())]).max())
        total += float(size.sum(dtype=torch.float64))
    return Change(tensors, moved, largest, total / max(elements, 1))
