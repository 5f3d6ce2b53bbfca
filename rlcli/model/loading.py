"""From a folder or hub id to a sharded policy: rank 0 reads the weights, the others get their parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rlcli.errors import ModelError
from rlcli.model.facts import read_config
from rlcli.model.lora import LoraSpec, add_lora
from rlcli.model.policy import PolicyModel
from rlcli.model.sharding import fill_from_rank0, shard


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    lora: LoraSpec | None = None,
    gradient_checkpointing: bool = False,
    trainable: bool = True,
) -> PolicyModel:
    """The model at `path`, sharded over `mesh`. Collective: every rank of the mesh calls it alike.

    dtype: what it computes in. Trained parameters (all, or the adapters of `lora`) are float32; those that never change
    are kept in `dtype`. trainable=False: a reference, nothing requires a gradient. `ModelError` when it cannot be used.
    """
    config = read_config(path)
    frozen = lora is not None or not trainable
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(_without_dropout(config), dtype=dtype if frozen else torch.float32)
    lm.tie_weights()  # moving parameters to the meta device had parted them
    peft = add_lora(lm, lora, path, meta=True) if lora else None
    policy = PolicyModel(lm, dtype=dtype, source=path, peft=peft)
    if not trainable:
        policy.requires_grad_(False)
    policy.train(trainable)  # gradient checkpointing works in training mode only
    if gradient_checkpointing and trainable:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard(policy, mesh)
    fill_from_rank0(policy, _read_weights(path, config, lora) if dist.get_rank() == 0 else {}, device)
    return policy


def _read_weights(path: str, config: Any, lora: LoraSpec | None) -> dict[str, Tensor]:
    """Every parameter by its name, in the dtype of the files, with fresh adapters where asked for."""
    try:
        lm = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{path}: the weights do not load: {_first_line(error)}", "check or download them again"
        ) from error
    if lora:
        add_lora(lm, lora, path, meta=False)
    return dict(lm.state_dict())


def _without_dropout(config: Any) -> Any:
    """Rollout has no dropout: with it, the trainer's log-probs would be another policy's."""
    config = copy.deepcopy(config)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
