"""A trained policy or value model as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rlcli.errors import ModelError, RunFailed
from rlcli.files import by_umask
from rlcli.model.decoder import Decoder
from rlcli.model.facts import read_config
from rlcli.model.policy import PolicyModel, write_adapter
from rlcli.model.value import ValueModel, read_value_config


def save_pretrained(policy: PolicyModel, tokenizer_path: str, out: Path) -> None:
    """Write the model, its config, generation config and tokenizer to the new folder `out`.

    With LoRA: the adapter and the tokenizer (`adapter_config.json` names the base model). Collective: every rank calls
    it, rank 0 writes. `out` appears whole or not at all; `ModelError` on rank 0 where it exists already.
    """
    state = policy.adapter_state() if policy.has_adapter else _gathered(policy)

    def fill(folder: Path) -> None:
        if policy.has_adapter:
            write_adapter(policy, state, folder)
        else:
            config = read_config(policy.source)
            _write_model(policy, state, config, folder)
            _write_generation_config(policy.source, config, folder)

    if _is_writer():
        _write(fill, tokenizer_path, out)


def save_value(model: ValueModel, tokenizer_path: str, out: Path) -> None:
    """Write the value model to the new folder `out`, as transformers' classification class of one label reads it: its
    weights, with the head as `score.weight`, config and tokenizer. Collective and whole, like `save_pretrained`.
    """
    state = _gathered(model)
    if _is_writer():
        config = read_value_config(model.source)
        _write(lambda folder: _write_model(model, state, config, folder), tokenizer_path, out)


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gathered(model: Decoder) -> dict[str, Tensor]:
    """All weights on rank 0: each rank gathers every tensor, but only the writer keeps them."""
    writer = _is_writer()
    # A copy: what does not divide evenly over the ranks is gathered as a view of more, which safetensors refuses.
    return {name: tensor.to("cpu", copy=True) for name, tensor in model.stream_weights() if writer}


def _write(fill: Callable[[Path], None], tokenizer_path: str, out: Path) -> None:
    """Let `fill` write to a folder beside `out`, add the tokenizer, and put it in place."""
    if out.exists():
        raise ModelError(f"{out} exists already", "remove it or give another folder")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        fill(partial)
        _write_tokenizer(tokenizer_path, partial)
        by_umask(partial)
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"cannot write {out}: {error}", "make room or give a folder that can be written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(model: Decoder, state: dict[str, Tensor], config: Any, folder: Path) -> None:
    """config: as the source has it; the live one has its dropout off and our attention."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(state, folder)
    config.architectures = [type(model.lm).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)


def _write_generation_config(source: str, config: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # the source has none
        generation = GenerationConfig.from_model_config(config)
    # save_pretrained would refuse files that are in use with published models (a temperature without sampling).
    generation.to_json_file(folder / "generation_config.json")


def _write_tokenizer(path: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
