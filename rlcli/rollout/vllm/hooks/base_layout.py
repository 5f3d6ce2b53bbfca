"""Locations of a base model's tensors in an engine that reads them from a checkpoint itself, besides an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from rlcli.model.weight_check.engine_weights import Layout


@contextmanager
def recorded() -> Iterator[list[Layout]]:
    """The layout of each model that vLLM loads inside the block; none for a model that a special loader reads. The
    names are those before vLLM wraps the model's layers in LoRA's."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from rlcli.model.weight_check.engine_weights import LayoutRecorder

    load, read = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights
    layouts: list[Layout] = []

    def load_weights(loader: DefaultModelLoader, model: nn.Module, config: ModelConfig) -> None:
        with LayoutRecorder(model) as recorder:
            loader.get_all_weights = lambda *about: recorder.observe(read(loader, *about))
            load(loader, model, config)
        del loader.get_all_weights
        layouts.append(recorder.layout())

    DefaultModelLoader.load_weights = load_weights
    try:
        yield layouts
    finally:
        DefaultModelLoader.load_weights = load
