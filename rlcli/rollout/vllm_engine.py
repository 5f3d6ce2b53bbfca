"""vLLM, in the worker's own process. Every call that depends on vLLM's version is in this file."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import SetupError
from rlcli.rollout.engine import Generation, GenerationRequest, Sampling, shared_memory_prefix

SUPPORTED = ((0, 24), (0, 33))
"""vLLM releases this file was written for: at least the first, below the second."""

ADAPTER_ID = 1
CPU_BATCHED_TOKENS = 4096


@dataclass(frozen=True)
class EngineSpec:
    """What the engine needs to know. max_length: prompt and response together, in tokens. kv_cache_bytes: None lets
    vLLM take its share of the GPU's memory. lora_rank 0: no adapter. weights_follow: `load_weights` is called before
    the first use, so the checkpoint need not be read."""

    model: str
    dtype: str
    device: str
    max_length: int
    max_concurrent: int
    tensor_parallel: int
    lora_rank: int
    weights_follow: bool
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    stop_token_ids: tuple[int, ...]
    group_id: str


class VllmEngine:
    """The RolloutEngine on vLLM. torch.distributed is initialised before this is built: vLLM joins that world, and
    consecutive ranks form the tensor-parallel groups. `on_step` is called before each step of a generation."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.on_step: Callable[[], None] = lambda: None
        check_version()
        if spec.device == "cpu" and spec.tensor_parallel > 1:
            _unique_shared_memory_names(spec.group_id)
        with _global_state_kept():
            from vllm import LLM

            self._llm = LLM(
                spec.model,
                dtype=spec.dtype,
                load_format="dummy" if spec.weights_follow else "auto",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=spec.tensor_parallel,
                max_model_len=spec.max_length,
                max_num_seqs=spec.max_concurrent,
                kv_cache_memory_bytes=spec.kv_cache_bytes,
                gpu_memory_utilization=spec.gpu_memory_utilization,
                enforce_eager=spec.enforce_eager or spec.device == "cpu",
                enable_sleep_mode=spec.device == "cuda",
                enable_prefix_caching=True,
                **(_whole_prompts(spec) if spec.device == "cpu" else {}),
                logprobs_mode="processed_logprobs",
                skip_tokenizer_init=True,
                enable_lora=spec.lora_rank > 0,
                max_lora_rank=_allowed_rank(spec.lora_rank),
                max_loras=1,
                seed=0,
                disable_log_stats=True,
            )
        # All ranks of the engine have joined it by now; without its name it goes when they do, however they end.
        for segment in Path("/dev/shm").glob(f"{shared_memory_prefix(spec.group_id)}*-cpushm*"):
            segment.unlink(missing_ok=True)
        self._engine = self._llm.llm_engine
        self._adapter: Any = None
        self._requests = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        import numpy as np

        # What an earlier call has left there would be history: a run that goes on from a checkpoint has none.
        self._llm.reset_prefix_cache()
        keys: dict[str, int] = {}
        for request in requests:
            keys[self._add(request.prompt, self._params(sampling, request))] = request.key
        while self._engine.has_unfinished_requests():
            self.on_step()
            for output in self._engine.step():
                if not output.finished:
                    continue
                response = output.outputs[0]
                yield Generation(
                    key=keys.pop(output.request_id),
                    tokens=np.asarray(response.token_ids, dtype=np.int32),
                    log_probs=np.asarray(response.logprobs.logprobs, dtype=np.float32),
                    finish_reason="length" if response.finish_reason == "length" else "stop",
                )
        assert not keys, f"{len(keys)} requests vanished from the engine"

    def prompt_log_probs(self, tokens: Any) -> Any:
        import numpy as np
        from vllm import SamplingParams

        self._add(tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False))
        found: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                    found = [entry[int(token)].logprob for token, entry in pairs]
        return np.asarray(found, dtype=np.float32)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self.spec.device == "cpu":
            # A tied head was repacked at load time into a layout of its own, and the reload leaves that copy stale.
            self._llm.apply_model(_repack_head)
        self._llm.reset_prefix_cache()

    def load_adapter(self, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("policy", ADAPTER_ID, folder, load_inplace=True)
        self._engine.add_lora(request)
        # Requests name the adapter that is loaded; asking for load_inplace again would read it anew for each of them.
        self._adapter = LoRARequest("policy", ADAPTER_ID, folder)
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self.spec.device == "cuda":
            # Level 2 drops the weights too, since the next sync brings all of them. With LoRA the base must survive.
            self._llm.sleep(level=2 if self.spec.weights_follow else 1)

    def wake_weights(self) -> None:
        self._wake("weights")

    def wake_cache(self) -> None:
        self._wake("kv_cache")

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _wake(self, what: str) -> None:
        if self.spec.device == "cuda" and self._engine.is_sleeping():
            import torch

            # What the trainer's tensors leave in torch's cache is memory that the engine could not map.
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=[what])

    def _add(self, prompt: Any, params: Any) -> str:
        from vllm import TokensPrompt

        self._requests += 1
        name = str(self._requests)
        self._engine.add_request(
            request_id=name,
            prompt=TokensPrompt(prompt_token_ids=prompt.tolist()),
            params=params,
            lora_request=self._adapter,
        )
        return name

    def _params(self, sampling: Sampling, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if request.greedy else sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=list(self.spec.stop_token_ids),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def check_version() -> str:
    """The installed vLLM's version; SetupError where this file was not written for it."""
    import vllm

    version = vllm.__version__
    parts = version.split(".")
    numbers = (int(parts[0]), int(parts[1])) if parts[0].isdigit() and parts[1].isdigit() else None
    # A development build may say "dev"; it is let through.
    if numbers is not None and not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise SetupError(f"vLLM {version} is not supported", "install vllm>=0.24,<0.33: pip install 'rlcli[gpu]'")
    return str(version)


def _whole_prompts(spec: EngineSpec) -> dict[str, Any]:
    """No prompt is prefilled in pieces: for each unfinished piece vLLM takes a random number back, which the CPU's
    generators cannot do (`CPU Generator does not use offset`)."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, spec.max_length)}


def _allowed_rank(rank: int) -> int:
    """The least rank that vLLM's LoRA kernels are built for and that holds `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _repack_head(model: Any) -> None:
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def _unique_shared_memory_names(group_id: str) -> None:
    """vLLM's CPU tensor parallelism names its shared memory by a constant, so that two jobs on one machine collide."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name

    def unique(communicator: Any) -> str:
        return shared_memory_prefix(group_id) + str(original(communicator)).strip("/").replace(":", "-")

    _CPUSHMDistributed.make_group_name = staticmethod(unique)


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """vLLM reseeds the global generators and sets LD_PRELOAD, which children would inherit: put both back."""
    import torch

    state, torch_state, preload = random.getstate(), torch.get_rng_state(), os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(torch_state)
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload
