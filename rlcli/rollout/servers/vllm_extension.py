"""Extension of vLLM's server: `--worker-extension-cls rlcli.rollout.servers.vllm_extension.Extension`.

vLLM adds these methods to each of its workers, and `/collective_rpc` calls them by name, with texts as arguments. They
do what `VllmEngine` does in its own process: draw by counter, load weights, and compute the checksums of what is held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.weight_check.engine_weights import Elements
    from rlcli.rollout.vllm.vllm_types import ModelConfig, ModelRunner

CONFIGURED = (
    *("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)
"""Fields of a model's configuration that servers and run must have in common."""


class Attached(TypedDict):
    """Result of `rlcli_attach`: what the server has."""

    configured: dict[str, object]
    """Its model's values of `CONFIGURED`."""
    by_counter: bool
    """True if draws depend on (seed, position) only, by our sampler."""
    by_place: bool
    """True if they do so by vLLM's own sampler."""


class LoadResult(TypedDict, total=False):
    """Result of `rlcli_load`: one of these."""

    loaded: int
    """Number of tensors."""
    error: str
    """Why the weights cannot be loaded."""


class HeldParts(TypedDict):
    """Result of `rlcli_parts`: the weights that a worker holds."""

    parts: list[tuple[str, Elements, int, int | None]]
    """Fields of each `Part`, whose tuples are lists in JSON."""
    untouched: list[str]
    """Parameters that no load has changed."""


class Extension:
    """Methods of a vLLM worker."""

    device: torch.device
    """The worker's device."""
    model_config: ModelConfig
    """vLLM's config of the model."""
    model_runner: ModelRunner
    """vLLM's model runner."""
    reload_weights: Callable[..., object]
    """vLLM's method that reloads weights from an iterator."""

    def rlcli_attach(self) -> Attached:
        """Draw by counter from now on, if this worker can."""
        from rlcli.rollout import sampling
        from rlcli.rollout.vllm.hooks import cpu_kernels

        by_counter = bool(getattr(self, "rlcli_by_counter", False)) or sampling.install(self)
        if not hasattr(self, "rlcli_by_counter") and self.device.type == "cpu":
            cpu_kernels.install(self.model_runner.get_model())
        self.rlcli_by_counter = by_counter
        config = self.model_config.hf_text_config
        configured = {name: getattr(config, name, None) for name in CONFIGURED}
        configured["architectures"] = self.model_config.hf_config.architectures
        return {"configured": configured, "by_counter": by_counter, "by_place": sampling.draws_by_position(self)}

    def rlcli_load(self, folder: str) -> LoadResult:
        """Load all safetensors files of a folder, under checkpoint names."""
        from rlcli.model.tensor_names import for_vllm
        from rlcli.model.weight_check.engine_weights import LayoutRecorder
        from rlcli.rollout.vllm.hooks.cpu_kernels import repack
        from rlcli.rollout.vllm.hooks.written_weights import WrittenWeights

        files, model, loaded = sorted(Path(folder).glob("*.safetensors")), self.model_runner.get_model(), list[str]()
        kind = self.model_config.hf_config.model_type
        if not files:
            return {"error": f"this server sees no weights in {folder}"}
        try:
            written = WrittenWeights.of(model)
            if hasattr(self, "rlcli_layout"):
                self.reload_weights(weights_iterator=written.others(for_vllm(_tensors(files, loaded), kind)))
            else:
                with LayoutRecorder(model) as recorder:
                    recorded = recorder.observe(_tensors(files, loaded), written.parameters, written.empty)
                    self.reload_weights(weights_iterator=written.others(for_vllm(recorded, kind)))
                self.rlcli_layout = recorder.layout()
            if self.device.type == "cpu":
                repack(model)
        except Exception as error:  # of any loader: the caller is in another process
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        return {"loaded": len(loaded)}

    def rlcli_parts(self, sent: str) -> HeldParts:
        """Checksums of this worker's parts of the sent tensors. sent: JSON, name → [checksum, elements, dtype]."""
        import torch

        from rlcli.model.weight_check.checksum import TensorChecksum
        from rlcli.model.weight_check.engine_weights import Layout, weights_of

        tensors = {
            name: TensorChecksum(values[0], values[1], getattr(torch, values[2]))
            for name, values in json.loads(sent).items()
        }
        layout = getattr(self, "rlcli_layout", None) or Layout()
        parts = layout.parts(weights_of(self.model_runner.get_model()), tensors)
        return {
            "parts": [(part.name, part.elements, part.numel, part.checksum) for part in parts],
            "untouched": layout.untouched,
        }


def _tensors(files: list[Path], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files; each name is appended to `names`."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, not a dict
                names.append(name)
                yield name, opened.get_tensor(name)
