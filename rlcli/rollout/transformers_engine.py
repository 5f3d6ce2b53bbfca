"""The engine on transformers, in the worker's own process: a plain decode loop over its models and KV caches.

For platforms without vLLM, for debugging, and as a reference in tests. It is slower than vLLM, and has no tensor
parallelism, no prefix cache and no separate adapters. The noise of a sampled token depends on the response's seed and
the token's position only (`rlcli.rollout.sampling`), so that responses do not depend on the batch, and an aborted
response that is resumed gets the same tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rlcli.errors import ConfigError
from rlcli.rollout.decode_batch import DecodeBatch, Row
from rlcli.rollout.engine import EngineSpec, Generation, GenerationRequest, Sampling

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified
    from rlcli.types import FinishReason

T = TypeVar("T")

PREFILL_TOKENS = 4096
"""Most tokens of a prefill, padding included, unless a single prompt is longer."""
ADMIT_SHARE = 8
"""Waiting responses are admitted once 1/8 of the slots are free: each time the running caches are copied."""


class TransformersEngine:
    """The `Engine` on transformers."""

    requires: ClassVar[tuple[str, ...]] = ("transformers",)
    settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        self.spec = spec
        self.on_step: Callable[[], None] = lambda: None
        self._lm = _model(spec)
        self._shapes = {name: parameter.shape for name, parameter in self._lm.named_parameters()}

        self._sampling = Sampling(temperature=1.0, max_tokens=1)
        self._waiting: list[Row] = []
        self._batch = DecodeBatch(self._lm, torch.device(spec.device))

    @staticmethod
    def preload() -> None:
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM

    @staticmethod
    def check_beside_trainer(capability: tuple[int, int]) -> None:
        """All GPUs are supported."""

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._batch)

    @property
    def slots(self) -> int:
        return self.spec.max_concurrent

    def begin(self, sampling: Sampling) -> None:
        assert not self.unfinished, "the last generation is not over"
        self._sampling = sampling

    def add(self, request: GenerationRequest) -> None:
        sampling = self._sampling
        prefix = [] if request.response_prefix is None else request.response_prefix.tolist()
        context = [*request.prompt.tolist(), *prefix]
        self._waiting.append(
            Row(
                key=request.key,
                context=context,
                seed=request.seed,
                temperature=0.0 if request.greedy else sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=min(request.limit(sampling), self.spec.max_length - len(context)),
            )
        )

    def step(self) -> list[Generation]:
        import torch

        self.on_step()
        with torch.inference_mode():
            self._admit()
            done = self._batch.take(lambda row: self._finish_reason(row) is not None)
            self._batch.decode()
            done += self._batch.take(lambda row: self._finish_reason(row) is not None)
        return [_generation(row, self._finish_reason(row)) for row in done]

    def abort(self) -> list[Generation]:
        rows = [*self._batch.take(lambda row: True), *self._waiting]
        self._waiting = []
        return [_generation(row, None) for row in rows]

    def peek(self) -> list[Generation]:
        return [_generation(row, None) for row in [*self._batch.rows, *self._waiting]]

    def so_far(self, key: int) -> list[int]:
        return self._batch.tokens_of(key)

    def agree(self, value: T) -> T:
        return value

    def prompt_log_probs(self, tokens: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T-1"]:
        import torch

        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.spec.device)
        with torch.inference_mode():
            logits = self._lm(input_ids=ids[None], use_cache=False).logits[0, :-1]
            log_probs = logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        result: np.ndarray = log_probs.cpu().numpy()
        return result

    def cached_tokens(self, prompt: Int32[np.ndarray, " T"]) -> int:
        return 0

    def probe(self, tokens: Int32[np.ndarray, " T"]) -> tuple[int, Float32[np.ndarray, " T-1"]]:
        return 0, self.prompt_log_probs(tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        import torch

        from rlcli.model.tensor_names import named_weights

        parameters = dict(named_weights(self._lm))
        with torch.no_grad():
            for name, tensor in weights:
                if name in parameters:  # `verify` reports unknown ones
                    parameters[name].copy_(tensor)

    def load_adapter(self, folder: str) -> None:
        raise ConfigError(
            f"rollout.engine = transformers cannot load the LoRA adapter {folder}",
            "merge it first: rlcli export --merge; or give rollout.engine = vllm",
        )

    def verify(self, sent: Mapping[str, TensorChecksum]) -> Verified:
        """Compare each tensor exactly: the engine holds all tensors as they are sent."""
        from rlcli.model.tensor_names import named_weights
        from rlcli.model.weight_check.checksum import Checksums
        from rlcli.model.weight_check.engine_weights import Verified

        sums = Checksums()
        for _ in sums.of(named_weights(self._lm)):
            pass
        held = sums.sent()
        differences = [f"{name} was not loaded" for name in sent if name not in held]
        differences += [f"{name} was not sent" for name in held if name not in sent]
        differences += [f"{name} differs" for name, tensor in sent.items() if name in held and held[name] != tensor]
        equal = sum(held.get(name) == tensor for name, tensor in sent.items())
        return Verified(equal, 0, differences)

    def sleep(self) -> None:
        """Free the weights, if the next sync sends them again. No cache is left between generations."""
        if self.spec.weights_follow and self.spec.sleep == "all":
            for parameter in self._lm.parameters():
                parameter.data = parameter.data.new_empty(0)

    def wake_weights(self) -> None:
        for name, parameter in self._lm.named_parameters():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.data.new_empty(self._shapes[name])

    def wake_cache(self) -> None:
        """The cache is allocated as responses grow."""

    def close(self) -> None:
        self._batch.take(lambda row: True)
        del self._lm

    def _admit(self) -> None:
        """Start waiting rows, in prefills of limited size, if enough slots are free."""
        free = self.slots - len(self._batch)
        if free * ADMIT_SHARE < self.slots and len(self._batch):
            return
        while self._waiting and free:
            count, longest = 0, 0
            for row in self._waiting[:free]:
                longest = max(longest, len(row.context))
                if count and longest * (count + 1) > PREFILL_TOKENS:
                    break
                count += 1
            self._batch.admit(self._waiting[:count])
            self._waiting, free = self._waiting[count:], free - count

    def _finish_reason(self, row: Row) -> FinishReason | None:
        if row.tokens and row.tokens[-1] in self.spec.stop_token_ids:
            return "stop"
        return "length" if len(row.tokens) >= row.max_tokens else None


def _model(spec: EngineSpec) -> PreTrainedModel:
    """The model of `spec.model`, with uninitialised weights if `weights_follow`."""
    import torch
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoModelForCausalLM

    from rlcli.model.as_engine import adjusted
    from rlcli.model.io.loading import read_model
    from rlcli.model.io.model_config import read_config

    config, dtype = copy.deepcopy(read_config(spec.model)), getattr(torch, spec.dtype)
    if not spec.weights_follow:
        lm = read_model(AutoModelForCausalLM, spec.model, config, dtype=dtype)
    else:
        with init_empty_weights(include_buffers=False):
            lm = adjusted(AutoModelForCausalLM.from_config(config, dtype=dtype))
        for module in lm.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
        lm.tie_weights()
    return lm.to(spec.device).requires_grad_(False).eval()


def _generation(row: Row, reason: FinishReason | None) -> Generation:
    import numpy as np

    return Generation(
        key=row.key,
        tokens=np.asarray(row.tokens, dtype=np.int32),
        log_probs=np.asarray(row.log_probs, dtype=np.float32),
        finish_reason=reason,
    )
