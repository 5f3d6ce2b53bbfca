"""The planner's input for a run: its configuration, the shapes of its models, and the device of each worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli_planner.activations import FLOAT, Pack, Pass
from rlcli_planner.known_devices import Device
from rlcli_planner.model_shape import ModelShape, read_shape
from rlcli_planner.vision_encoder import frozen_parts

if TYPE_CHECKING:
    from rlcli.algorithms.algorithm import Algorithm

Parts = dict[str, float]
"""Name of a part of the memory → bytes."""

ConfigValue = bool | int | float | str
Keys = dict[str, ConfigValue]
"""Configuration keys such as `train.offload` → values."""
Sections = dict[str, dict[str, ConfigValue]]
"""The same by section: `{"train": {"offload": "all"}}`."""

SHARED_FROM = 1 / 16
"""As `rlcli.model.packed.WORTH_SHARING`, whose import would load transformers."""


def by_section(keys: Mapping[str, ConfigValue]) -> Sections:
    """Configuration keys by section.

    >>> by_section({"train.offload": "all", "train.steps": 2})
    {'train': {'offload': 'all', 'steps': 2}}
    """
    sections: Sections = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


@dataclass(frozen=True)
class ImageStats:
    """Images of a mean prompt."""

    tokens: float = 0.0
    """Image tokens."""
    images: float = 0.0
    """Images."""


@dataclass(frozen=True)
class PromptStats:
    """Lengths of the prompts of a dataset."""

    prompt_tokens: float
    """Mean tokens of a prompt."""
    image_stats: ImageStats = ImageStats()
    """Images of a mean prompt."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt."""
    given_response_tokens: float | None = None
    """Mean tokens of the responses that the data contains (`data.response`); None if it contains none."""


@dataclass(frozen=True)
class RunPlanInput:
    """The planner's input."""

    config: RunConfig
    """Configuration of the run."""
    device: Device
    """Device of a worker."""
    policy: ModelShape
    """Shape of the policy."""
    critic: ModelShape | None
    """Shape of the critic; None if there is none. A process reward model has the shape of a policy."""
    algorithm: Algorithm
    """The algorithm, which determines the passes that a step needs."""
    prompt_tokens: float
    """Mean length of a prompt if the data was read, else the maximum."""
    kv_cache_bytes: int | None
    """KV cache of one engine, if it is set or sized to the workload; None: determined by gpu_memory_utilization."""
    teachers: tuple[ModelShape, ...] = ()
    """Shapes of the teachers."""
    image_stats: ImageStats = ImageStats()
    """Images of a mean prompt."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt; None if the data was not read."""
    given_response_tokens: float | None = None
    """Mean length of the responses that the data gives (`data.response`); None if it gives none, or was not read."""

    def with_keys(self, **sections: Mapping[str, ConfigValue]) -> RunPlanInput:
        """The same with other values: `with_keys(train={"tokens_per_microbatch": 4096})`."""
        return replace(self, config=self.config.changed(**sections))

    def with_dedicated_workers(self, workers: int) -> RunPlanInput:
        """The setting of dedicated workers of a critic or of teachers."""
        return self.with_keys(cluster={"workers": workers}, parallel={"replicate": 1, "expert": 1})

    @property
    def untimed(self) -> str:
        """Why no seconds are predicted; empty if they are."""
        if not self.device.has_rates:
            return "this machine could not be measured" if self.device.is_cpu else "give a GPU name: --gpus h100:8"
        if self.device.is_cpu and self.separate_adapter and self.config.rollout.engine != "transformers":
            return "vLLM's kernels for adapters in 16 bits were not measured on CPUs, and are slow there"
        return ""

    @property
    def separate_adapter(self) -> bool:
        """True if the engine gets the adapter separately; in float32 it gets merged weights."""
        return bool(self.config.lora.rank) and self.bytes_each < 4

    @property
    def keeps_weights_in_sleep(self) -> bool:
        """True if the engine's weights are in host memory while it sleeps (`sleep_level` of
        `rlcli.rollout.vllm.vllm_engine`)."""
        moves = self.config.rollout.sleep in ("auto", "all")
        return moves and (self.separate_adapter or self.policy.vision_encoder is not None)

    def sent_copy(self) -> float:
        """Bytes of a trainer's part of the weights as they were sent last."""
        delta = self.config.rollout.workers > 0 and "delta" in self.config.rollout.sync
        return delta * self.bytes_each * self.policy.parameters / self.shards

    @property
    def bytes_each(self) -> int:
        """Bytes of a number in compute dtype."""
        return 4 if self.dtype == "float32" else 2

    @property
    def dtype(self) -> str:
        """Dtype of computation."""
        wanted = self.config.model.dtype
        if wanted == "auto":
            return "float32" if self.device.is_cpu else "bfloat16"
        return str(wanted)

    @property
    def ranks(self) -> int:
        """Workers that train."""
        return self.config.cluster.workers

    @property
    def shards(self) -> int:
        """Workers that one copy of a trained model is sharded over."""
        return self.ranks // self.config.parallel.replicate

    def elsewhere(self, shape: ModelShape) -> float:
        """Parameters of a layer that a worker never has: the experts of others (`parallel.expert`)."""
        return shape.experts * shape.expert_parameters * (1 - 1 / self.config.parallel.expert)

    @property
    def data_ranks(self) -> int:
        """Parts that a step's rows are divided into."""
        return self.ranks // self.config.parallel.context

    @property
    def sharded(self) -> bool:
        """True if FSDP2 wraps the trained model: one rank in float32 has nothing to gather, cast or reduce."""
        return self.ranks > 1 or self.bytes_each < FLOAT

    @property
    def hosts_engine(self) -> bool:
        """True if the workers that train also host an engine."""
        return self.has_engine and not self.config.rollout.workers

    @property
    def has_engine(self) -> bool:
        return not self.config.data.response or bool(self.config.evaluation.data)

    @property
    def engines(self) -> int:
        return max(1, self.config.engine_workers // self.config.rollout.tensor_parallel)

    @property
    def hosted_critic(self) -> ModelShape | None:
        """The critic, if the policy's workers train it too."""
        return None if self.config.critic.workers else self.critic

    @property
    def hosted_teachers(self) -> tuple[ModelShape, ...]:
        """The teachers that the policy's workers hold."""
        return () if self.config.teacher.workers else self.teachers

    @property
    def reference_copy(self) -> bool:
        """True if a second, frozen copy of the model is held: with LoRA the policy without its adapter is used."""
        return self.algorithm.needs_reference and not self.config.lora.rank

    @property
    def updates(self) -> int:
        """Optimizer steps of the policy in one step."""
        return self.config.train.minibatches * self.config.train.passes

    @property
    def max_length(self) -> int:
        """Tokens that the configuration allows a sample."""
        return self.config.max_length

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that these prompts can have."""
        return self.config.longest_sample(self.longest_prompt)

    @property
    def response_tokens(self) -> float:
        """Response tokens of a sample: the maximum, or the given mean."""
        if self.given_response_tokens is None:
            return self.config.rollout.max_response_tokens
        return self.given_response_tokens

    @property
    def samples(self) -> int:
        """The maximum number of samples that a step trains on."""
        rollout = self.config.rollout
        if self.algorithm.selects_pairs:
            return 2 * rollout.prompts_per_step
        return rollout.prompts_per_step * rollout.samples_per_prompt

    @property
    def sample_tokens(self) -> float:
        """Prompt and response tokens of a sample with a response of maximum length, or with a mean given one."""
        return self.prompt_tokens + self.response_tokens

    @cached_property
    def pack(self) -> Pack:
        """A rank's tokens of the largest micro-batch: as many samples as fit train.tokens_per_microbatch and as a
        minibatch has for a data rank, every response of maximum length. Samples of one prompt are packed together and
        share it. (If all are that long, micro-batches may not be full; with some shorter ones they are.) With
        `parallel.context` each of its ranks has equally many; in attention it has all places, but fewer heads."""
        train, longest = self.config.train, self.response_tokens
        room, prompt = train.tokens_per_microbatch, self.prompt_tokens
        a_rank = self.samples / train.minibatches / self.data_ranks
        shared = prompt >= SHARED_FROM * self.sample_tokens
        of_a_prompt = self.samples / self.config.rollout.prompts_per_step if shared else 1.0
        together = min(of_a_prompt, max(1.0, (room - prompt) / longest))
        prompts = min(math.ceil(a_rank / together), room / (prompt + together * longest))
        samples, ranks = prompts * together, self.config.parallel.context
        sizes = prompts * prompt + samples * longest, samples * self.sample_tokens, samples * longest
        tokens, attention_tokens, responses = (size / ranks for size in sizes)
        return Pack(tokens, attention_tokens, responses, images=prompts * self.image_stats.tokens)

    @property
    def accumulates(self) -> bool:
        """True if a minibatch has several micro-batches, whose gradients accumulate."""
        return (
            self.pack.attention_tokens < self.samples / self.config.train.minibatches / self.ranks * self.sample_tokens
        )

    def passing(self, *, trained_whole: bool = False) -> Pass:
        """Settings of a pass through the policy; trained_whole: through the critic, which has no adapter."""
        config = self.config
        checkpointing = config.model.gradient_checkpointing
        return Pass(
            bytes_each=self.bytes_each,
            on_cpu=self.device.is_cpu,
            lora_rank=0 if trained_whole else config.lora.rank,
            lora_targets=config.lora.targets,
            checkpointing=bool(checkpointing),
            offload=checkpointing == "offload",
            float_head=config.model.head_dtype == "float32",
            frozen=self.frozen,
        )

    @property
    def frozen(self) -> frozenset[str]:
        """Frozen parts of the policy's vision encoder."""
        return frozen_parts(self.config.model.freeze, self.config.lora.rank)

    @property
    def frozen_parameters(self) -> int:
        """Parameters of the policy that do not train, without an adapter's base."""
        vision_encoder = self.policy.vision_encoder
        return 0 if vision_encoder is None or self.config.lora.rank else vision_encoder.frozen(self.frozen)

    def trained_parameters(self) -> int:
        """Trained parameters of the policy: all but the frozen ones, or its adapter's."""
        lora = self.config.lora
        if not lora.rank:
            return self.policy.parameters - self.frozen_parameters
        return self.policy.adapter_parameters(lora.rank, lora.targets)

    def moments(self) -> int:
        """Numbers that the optimizer keeps of the policy: AdamW two of each trained parameter, Muon one of those in
        hidden matrices."""
        return self._moments(self.policy, self.trained_parameters(), self.frozen_parameters)

    def critic_moments(self, critic: ModelShape) -> int:
        """The same of `critic`."""
        return self._moments(critic, critic.parameters, 0)

    def _moments(self, shape: ModelShape, trained: int, frozen: int) -> int:
        if self.config.train.optimizer == "adamw":
            return 2 * trained
        # What is frozen is the vision encoder's, nearly all of it in matrices.
        return 2 * trained - max(0, shape.hidden_matrices - frozen)

    def weight_bytes(self) -> float:
        """Weight bytes of one copy of the policy on its ranks together: trained ones in float32, frozen ones in compute
        dtype."""
        frozen = self.policy.parameters if self.config.lora.rank else self.frozen_parameters
        return FLOAT * self.trained_parameters() + frozen * self.bytes_each

    @property
    def packs(self) -> float:
        """Micro-batches of a step on all ranks together, if all are as full as the largest."""
        return self.samples * self.sample_tokens / self.pack.attention_tokens

    @property
    def patch_bytes(self) -> float:
        """Bytes of the patches of a data rank's rows of a step, in float32 and in host memory."""
        vision_encoder = self.policy.vision_encoder
        if vision_encoder is None:
            return 0.0
        return (
            self.packs / self.data_ranks * self.pack.images * vision_encoder.unit * vision_encoder.patch_values * FLOAT
        )

    @property
    def pixel_bytes(self) -> float:
        """Bytes of the resized images of a step, in 8 bits a channel: each once, in the object store."""
        vision_encoder = self.policy.vision_encoder
        return (
            0.0
            if vision_encoder is None
            else 3 * self.config.rollout.prompts_per_step * self.image_stats.tokens * vision_encoder.pixels
        )


def setting_of(
    config: RunConfig,
    device: Device,
    *,
    prompts: PromptStats | None = None,
    kv_cache_bytes: int | None = None,
    read: Callable[..., ModelShape] = read_shape,
) -> RunPlanInput:
    """The setting of a run. prompts: lengths of its data; None: prompts are as long as allowed, and consist of image
    tokens if the model accepts images. Raises an RlcliError that names a model or an algorithm that cannot be used."""
    policy = read(config.model.path)
    from rlcli.algorithms.build import build_algorithm

    algorithm = build_algorithm(**config.algorithm.model_dump(), trial_calls=False)
    critic = None
    if algorithm.needs_critic or algorithm.needs_process_rewards:
        critic = read(config.critic.path, "critic.path") if config.critic.path else policy
        critic = replace(critic, value=True) if algorithm.needs_critic else critic
    teachers = tuple(read(teacher.path, "teacher.path") for teacher in config.teacher.held)
    if prompts is None:
        longest = config.data.max_prompt_tokens
        prompts = PromptStats(longest, ImageStats(longest, 1.0) if policy.vision_encoder is not None else ImageStats())
    return RunPlanInput(
        config=config,
        device=device,
        policy=policy,
        critic=critic,
        algorithm=algorithm,
        prompt_tokens=prompts.prompt_tokens,
        kv_cache_bytes=kv_cache_bytes,
        teachers=teachers,
        image_stats=prompts.image_stats,
        longest_prompt=prompts.longest_prompt,
        given_response_tokens=prompts.given_response_tokens,
    )
