"""The interface between the trainer and an inference engine: tokens in, tokens and log-probs out; weights in.

`Engine` is the protocol of a class that generates for a run. `rollout.engine` names one of the entry-point group
`rlcli.engines`:

    [project.entry-points."rlcli.engines"]
    mine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from rlcli.errors import ConfigError
from rlcli.registry import Registry
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32, UInt, UInt8
    from torch import Tensor

    from rlcli.config.schema import RunConfig
    from rlcli.context import RunContext
    from rlcli.images.image_rule import ImageRule
    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch of responses."""

    temperature: float
    """0: greedy."""
    max_tokens: int
    """Maximum number of tokens of a response, the end token included."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; 1: from all tokens."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate."""

    key: int
    """Index that the caller chooses."""
    prompt: Int32[np.ndarray, " T"]
    """Ids of the prompt."""
    seed: int
    """Seed of this response, so that its samples do not depend on the rest of the batch."""
    greedy: bool = False
    """Take the most likely token each time, whatever the temperature of the batch."""
    response_prefix: Int32[np.ndarray, " R"] | None = None
    """Ids of the response so far, if it was aborted: only the tokens that follow them are returned, and they count
    towards `Sampling.max_tokens`."""
    max_tokens: int | None = None
    """Limit of this response, if lower than that of the batch."""
    conversation: int | None = None
    """Conversation of which it is a turn: the turns share a prefix, so one server should get all of them."""
    images: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()
    """Images of the prompt, from `ImageRule.preprocess`. For each the prompt has as many placeholders as it has
    tokens."""

    def limit(self, sampling: Sampling) -> int:
        """Number of tokens that may still be generated."""
        limit = sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)
        return limit - (0 if self.response_prefix is None else len(self.response_prefix))


@dataclass(frozen=True, slots=True)
class Generation:
    """One response."""

    key: int
    """Key of its request."""
    tokens: Int32[np.ndarray, " R"]
    """Ids of the response, including the end token if there is one."""
    log_probs: Float32[np.ndarray, " R"]
    """Log-probs of the tokens under the distribution that was sampled from: after temperature (at 1 if the response is
    greedy) and after top-p, which raises the probability of the tokens that it keeps."""
    finish_reason: FinishReason | None
    """None if it was aborted."""
    routes: UInt[np.ndarray, "T layers chosen"] | None = None
    """With `EngineSpec.routes`: the experts of prompt and response without its last token, as far as they are known
    (`rlcli.data.expert_routes`)."""


def shared_memory_prefix(group_id: str) -> str:
    """Prefix of all files of a run in /dev/shm, to distinguish them from those of other runs and to remove them."""
    return f"rlcli-{group_id}-"


Sleep = Literal["all", "cache", "none"]
"""Memory that an engine releases while a trainer uses the device: weights and KV cache, the cache alone, or nothing."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the engine `server`."""

    urls: tuple[str, ...] = ()
    """Running servers, of which each engine uses its share; empty: each engine starts `count` servers."""
    count: int = 1
    """Servers that each engine starts."""
    folder: str = ""
    """Folder through which servers get weights; empty: in memory of this machine."""
    logs: str = ""
    """Folder of the run's logs, if there is a run."""
    answer_s: float = 600.0
    """Longest time for an answer to anything but a generation."""

    @classmethod
    def of(cls, config: RunConfig, logs: str) -> ServerSettings:
        """The settings of a run with its logs in the folder `logs`. A silent server is lost before the watchdog ends
        the worker that waits for it."""
        rollout = config.rollout
        return cls(
            urls=tuple(dict.fromkeys(url.rstrip("/") for url in rollout.server_urls)),
            count=rollout.servers if isinstance(rollout.servers, int) else 0,
            folder=rollout.servers_folder,
            logs=logs,
            answer_s=config.fault_tolerance.stall_s / 2,
        )


@dataclass(frozen=True)
class EngineSpec:
    """Settings of an engine."""

    model: str
    """Folder or hub id of the model."""
    dtype: str
    """Dtype of weights and activations, by torch's name."""
    device: str
    """`cuda` or `cpu`."""
    max_length: int
    """Maximum number of tokens of prompt and response together."""
    max_concurrent: int
    """Responses that are generated at once."""
    tensor_parallel: int
    """Ranks that share one engine."""
    lora_rank: int
    """Rank of the adapter; 0: none."""
    weights_follow: bool
    """True if `load_weights` is called before the first use, so that the checkpoint need not be read."""
    kv_cache_bytes: int | None
    """Size of the KV cache; None: the engine takes its share of the GPU's memory."""
    gpu_memory_utilization: float
    """Share of the GPU's memory, as in `rollout.gpu_memory_utilization`."""
    enforce_eager: bool
    """As `rollout.enforce_eager`."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    group_id: str
    """Id of the run on this machine, in the names of its files in shared memory."""
    quantization: str = ""
    """As `rollout.quantization`; empty: none."""
    exact_steps: bool = False
    """True if `step` returns all tokens that it has scheduled, because weights change between two steps."""
    servers: ServerSettings = ServerSettings()
    """Settings of the engine `server`."""
    speculate: int = 0
    """As `rollout.speculate`."""
    routes: bool = False
    """True if generations have their experts."""
    float_head: bool = False
    """True if logits are computed in float32."""
    lora_targets: str = "all-linear"
    """As `lora.targets`."""
    lora_experts: bool = False
    """True if the adapter is on experts too."""
    sleep: Sleep = "all"
    """Memory that `Colocated.sleep` releases."""
    image_rule: ImageRule | None = None
    """Preprocessing of images, for a model that takes images."""
    max_images: int = 0
    """Maximum number of images of a prompt."""

    @classmethod
    def of(cls, context: RunContext, group_id: str, logs: str) -> EngineSpec:
        """The settings of a run's engines. group_id: of the run on this machine. logs: folder of its logs."""
        config, facts, rollout = context.config, context.facts, context.config.rollout
        sleep = "all" if rollout.sleep == "auto" else rollout.sleep  # auto: where the planner knew too little to choose
        return cls(
            model=config.model.path,
            dtype=facts.dtype,
            device=facts.device,
            max_length=facts.max_length,
            max_concurrent=rollout.max_concurrent,
            tensor_parallel=rollout.tensor_parallel,
            lora_rank=config.lora.rank if context.separate_adapter else 0,
            lora_targets=config.lora.targets,
            lora_experts=context.separate_adapter and config.lora.on_experts,
            sleep="none" if context.engine_alone else sleep,
            weights_follow=context.trains and not context.separate_adapter,
            kv_cache_bytes=facts.kv_cache_bytes,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            quantization=rollout.quantization,
            stop_token_ids=tuple(facts.stop_tokens),
            group_id=group_id,
            exact_steps=context.keeps or (config.in_flight and config.counts_steps),
            speculate=rollout.speculate,
            routes=rollout.replay_routes,
            float_head=config.model.head_dtype == "float32" and facts.dtype != "float32",
            image_rule=facts.image_rule,
            max_images=facts.max_images,
            servers=ServerSettings.of(config, logs) if rollout.engine == "server" else ServerSettings(),
        )


class Generator(Protocol):
    """Generates responses. Workers that share one engine (tensor parallel) make the same calls in the same order with
    the same arguments.

    One generation: `begin`, `add` and `step` until nothing is `unfinished`, or `abort`.
    """

    @property
    def unfinished(self) -> int:
        """Responses that were added and have not been returned."""
        ...

    @property
    def slots(self) -> int:
        """Number of responses that are generated at once; others wait within the engine."""
        ...

    def begin(self, sampling: Sampling) -> None:
        """Start a generation with these sampling parameters for all responses added from now on."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Add a response to the generation."""
        ...

    def step(self) -> Sequence[Generation]:
        """Generate one token or more for each running response; returns those that finished, in any order."""
        ...

    def abort(self) -> Sequence[Generation]:
        """Abort all unfinished responses; returns the tokens so far of each, possibly none. A response that had
        finished, but was not returned by `step`, has its finish reason."""
        ...

    def agree(self, value: T) -> T:
        """The value of the first of the workers that share this engine."""
        ...

    def prompt_log_probs(self, tokens: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T-1"]:
        """Log-prob of each token after the first, at temperature 1."""
        ...

    def cached_tokens(self, prompt: Int32[np.ndarray, " T"]) -> int:
        """Fill one block of the prefix cache with `prompt`, repeated; returns how many of its tokens were cached
        already. 0 if the engine sleeps, or has no prefix cache."""
        ...

    def probe(self, tokens: Int32[np.ndarray, " T"]) -> tuple[int, Float32[np.ndarray, " T-1"]]:
        """`cached_tokens` and `prompt_log_probs` of `tokens`, in one step of the engine."""
        ...

    def close(self) -> None:
        """Free all resources; the engine is not used again."""
        ...


class WeightReceiver(Protocol):
    """Receives the trained weights: `load_weights` or `load_adapter`, then `verify`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors under checkpoint names, in any order, and clear the prefix cache."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Load a LoRA adapter from a folder in peft's format; later calls replace it. Called only if `settings`
        contains "lora"."""
        ...

    def verify(self, sent: Mapping[str, TensorChecksum]) -> Verified:
        """Compare the weights in use with those that were sent: all weights, or the adapter's. Called after a load, by
        all workers that share the engine."""
        ...


@runtime_checkable
class Colocated(Protocol):
    """Shares a device with a trainer: `sleep` (the trainer uses the memory) → `wake_weights` → load and verify →
    `wake_cache`. An engine without these needs dedicated workers (`rollout.workers`)."""

    def sleep(self) -> None:
        """Release the device's memory, as far as `EngineSpec.sleep` says and the engine can."""
        ...

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again."""
        ...

    def wake_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """Allows weights to change between two steps while responses run (`async.on_update = keep`): in-flight responses
    continue with the KV cache of the earlier weights, which no response that is added later uses."""

    def peek(self) -> Sequence[Generation]:
        """As `abort`, but all responses continue. Not called during a step."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """Returns the tokens so far of a response that is not finished."""

    def so_far(self, key: int) -> Sequence[int]:
        """Ids of its tokens so far; empty if it waits or is unknown."""
        ...


@runtime_checkable
class Counting(Protocol):
    """Counts events of the engine: the metrics `engine/NAME`, summed over the engines."""

    def counts(self) -> Mapping[str, float]:
        """Counts since the last call, by name."""
        ...


@runtime_checkable
class Described(Protocol):
    """Describes the software that computes the responses."""

    def describe(self) -> str:
        """Library, version and variant, for the run's record: `vLLM 0.32.0, first model runner, …`."""
        ...


@runtime_checkable
class Speculating(Protocol):
    """Drafts tokens and verifies several of a response in one step (`rollout.speculate`)."""

    def speculated(self) -> tuple[int, int]:
        """Numbers of drafted and of accepted tokens since the engine was built."""
        ...


class Engine(Generator, WeightReceiver, Protocol):
    """An inference engine, named by an entry point of `rlcli.engines`. It is constructed from an `EngineSpec` in each
    worker, after torch.distributed is initialised. Importing its module must be cheap: the controller does so too."""

    requires: ClassVar[tuple[str, ...]]
    """Modules that must be installed."""
    settings: ClassVar[frozenset[str]]
    """Keys of `ENGINE_KEYS` that it implements; a run that sets another one is refused."""
    spec: EngineSpec
    """Its settings."""
    on_step: Callable[[], None]
    """Called before each step of a generation."""

    def __init__(self, spec: EngineSpec) -> None: ...

    @staticmethod
    def preload() -> None:
        """Import the modules that the first engine of a process would import."""
        ...

    @staticmethod
    def check_beside_trainer(capability: tuple[int, int]) -> None:
        """Raise `SetupError` if no model can be trained in a process with this engine, on GPUs of this compute
        capability."""
        ...


ENGINES: Registry[type[Engine]] = Registry("engine", "rlcli.engines")

ENGINE_KEYS = (
    *("rollout.tensor_parallel", "rollout.quantization", "rollout.gpu_memory_utilization", "rollout.kv_cache_mb"),
    *("rollout.enforce_eager", "rollout.speculate", "rollout.replay_routes", "model.head_dtype"),
)
"""Keys that an engine need not implement. (And "lora": an adapter besides the weights, in bfloat16;
"images": prompts with images.)"""


def engine_named(name: str) -> type[Engine]:
    """The class of the engine `name`. Raises `ConfigError` with the existing names."""
    if name not in ENGINES.names():
        raise ConfigError(f"rollout.engine = '{name}': there is no such engine", f"give {' or '.join(ENGINES.names())}")
    return ENGINES.get(name)


def finished(engine: Generator, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
    """Run one generation; yields each response as it finishes, in any order."""
    engine.begin(sampling)
    for request in requests:
        engine.add(request)
    while engine.unfinished:
        yield from engine.step()
