"""Compiles decoder layers with torch, which fuses their element-wise operations into few kernels."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface

from rlcli.errors import SetupError
from rlcli.model.attention import ATTENTION, packed_attention
from rlcli.model.delta_net import delta_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile each decoder layer of `lm` at its first use, once for any number of tokens, except attention.

    Call it before FSDP2 wraps the layers: gathering their weights is not compiled. `SetupError` without a C compiler.
    """
    compilers = [os.environ.get("CXX", ""), os.environ.get("CC", ""), "g++", "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise SetupError(
            "model.compile = true, but this machine has no C compiler, which torch needs to compile",
            "install gcc, or leave model.compile out",
        )
    # The layout of attention differs between packs, and its kernels are fused already.
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for delta in delta_layers(lm):
        delta.forward = torch.compiler.disable(delta.forward)
    for layer in lm.base_model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
