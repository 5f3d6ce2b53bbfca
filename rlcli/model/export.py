"""A trained policy as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rlcli.errors import ModelError, RunFailed
from rlcli.files import by_umask
from rlcli.model.facts import read_config
from rlcli.model.policy import PolicyModel, write_adapter


def save_pretrained(policy: PolicyModel, tokenizer_path: str, out: Path) -> None:
    """Write the model, its config, generation config and tokenizer to the new folder `out`.

    With LoRA: the adapter and the tokenizer (`adapter_config.json` names the base model). Collective: every rank calls
    it, rank 0 writes. `out` appears whole or not at all; `ModelError` on rank 0 where it exists already.
    """
    writer = not dist.is_initialized() or dist.get_rank() == 0
    if policy.has_adapter:
        state = policy.adapter_state()
    else:
        # Each rank gathers every tensor, but only the writer keeps them.
        state = {name: tensor.cpu() for name, tensor in policy.stream_weights() if writer}
    if writer:
        _write(policy, state, tokenizer_path, out)


def _write(policy: PolicyModel, state: dict[str, Tensor], tokenizer_path: str, out: Path) -> None:
    if out.exists():
        raise ModelError(f"{out} exists already", "remove it or give another folder")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        if policy.has_adapter:
            write_adapter(policy, state, partial)
        else:
            _write_model(policy, state, partial)
        _write_tokenizer(tokenizer_path, partial)
        by_umask(partial)
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"cannot write {out}: {error}", "make room or give a folder that can be written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(policy: PolicyModel, state: dict[str, Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    save_torch_state_dict(state, folder)
    config = read_config(policy.source)  # the source's own: the live one has its dropout off and our attention
    config.architectures = [type(policy.lm).__name__]
    config.dtype = policy.dtype
    config.save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(policy.source)
    except OSError:  # the source has none
        generation = GenerationConfig.from_model_config(config)
    # save_pretrained would refuse files that are in use with published models (a temperature without sampling).
    generation.to_json_file(folder / "generation_config.json")


def _write_tokenizer(path: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
