"""The interface between the trainer and an inference engine: tokens in, tokens and log-probs out; weights in.

`Engine` is what a class must have to generate for a run. `rollout.engine` names one of the entry-point group
`rlcli.engines`:

    [project.entry-points."rlcli.engines"]
    mine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from rlcli.errors import ConfigError
from rlcli.registry import Registry
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from rlcli.config.schema import RunConfig
    from rlcli.context import RunContext
    from rlcli.images.image_rule import ImageRule
    from rlcli.model.weight_check.checksum import Sent
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch of responses. temperature 0 is greedy; max_tokens limits the response, end token
    included; top_p: sample from the smallest set of most likely tokens with this total probability (1: from all)."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate. key: the caller's own index. prompt: int32 token ids. seed: of this response alone, so
    that its samples do not depend on what else is in the batch. greedy: take the most likely token each time, whatever
    the temperature of the batch. begun: int32 ids of the response so far, if it was aborted: only what follows them is
    returned, and they count towards `Sampling.max_tokens`. max_tokens: of this one, if fewer than of the batch.
    conversation: which one it is a turn of; its turns begin alike, so one server should have all of them. pictures: of
    the prompt, as `ImageRule.prepared` gives them; for each, the prompt has as many placeholders as it has tokens."""

    key: int
    prompt: np.ndarray
    seed: int
    greedy: bool = False
    begun: np.ndarray | None = None
    max_tokens: int | None = None
    conversation: int | None = None
    pictures: tuple[np.ndarray, ...] = ()

    def limit(self, sampling: Sampling) -> int:
        """Tokens that may still be generated."""
        most = sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)
        return most - (0 if self.begun is None else len(self.begun))


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. tokens: int32 `[n]`, including the end token if there is one. log_probs: float32 `[n]`, of those
    tokens under the distribution that was sampled from: after temperature (at 1 if the response is greedy) and after
    top-p, which gives the tokens that it keeps a higher probability than the model does. finish_reason: None if it was
    aborted. routes: of prompt and response without its last token, with `EngineSpec.routes`, as far as they are known
    (`rlcli.data.expert_routes`)."""

    key: int
    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason | None
    routes: np.ndarray | None = None


def shared_memory_prefix(group_id: str) -> str:
    """Prefix of everything that a run leaves in /dev/shm, to distinguish it from other runs' and to remove it."""
    return f"rlcli-{group_id}-"


Sleep = Literal["all", "cache", "none"]
"""What an engine releases while a trainer uses the device: weights and KV cache, the cache alone, or nothing."""


@dataclass(frozen=True)
class ServerSettings:
    """Of the engine `server`. urls: servers of others, of which each engine uses its share; none: each engine starts
    `count`. folder: where weights are put for servers to read; empty: in memory of this machine. logs: the run's logs,
    if there is a run. answer_s: longest time for an answer to anything but a generation."""

    urls: tuple[str, ...] = ()
    count: int = 1
    folder: str = ""
    logs: str = ""
    answer_s: float = 600.0

    @classmethod
    def of(cls, config: RunConfig, logs: str) -> ServerSettings:
        """Those of a run with its logs in the folder `logs`. A server that is silent is lost before the watchdog ends
        its worker, which waits for it."""
        rollout, silent_s = config.rollout, config.fault_tolerance.stall_s / 2
        urls, count = rollout.server_urls, rollout.servers if isinstance(rollout.servers, int) else 0
        return cls(tuple(dict.fromkeys(url.rstrip("/") for url in urls)), count, rollout.servers_folder, logs, silent_s)


@dataclass(frozen=True)
class EngineSpec:
    """The engine's settings. max_length: prompt and response together, in tokens. kv_cache_bytes: None lets the engine
    take its share of the GPU's memory. lora_rank 0: no adapter. weights_follow: `load_weights` is called before the
    first use, so the checkpoint need not be read. quantization: as `rollout.quantization`, or nothing. exact_steps:
    `step` returns all tokens that it has scheduled, since weights change between two of them. speculate: as
    `rollout.speculate`. routes: generations have them. float_head: logits are computed in float32. lora_experts: the
    adapter is on experts too. images: how the model sees pictures, if it does; pictures: the most that a prompt has."""

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
    quantization: str = ""
    exact_steps: bool = False
    servers: ServerSettings = ServerSettings()
    speculate: int = 0
    routes: bool = False
    float_head: bool = False
    lora_targets: str = "all-linear"
    """As `lora.targets`."""
    lora_experts: bool = False
    sleep: Sleep = "all"
    """What `Colocated.sleep` releases."""
    images: ImageRule | None = None
    pictures: int = 0

    @classmethod
    def of(cls, context: RunContext, group_id: str, logs: str) -> EngineSpec:
        """The engine of a run's workers. group_id: of the run on this machine. logs: folder of its logs."""
        config, facts, rollout = context.config, context.facts, context.config.rollout
        asked = "all" if rollout.sleep == "auto" else rollout.sleep  # where the planner knew too little to choose
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
            sleep="none" if context.engine_alone else asked,
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
            images=facts.images,
            pictures=facts.pictures,
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
        """Responses that are generated at once; others wait within the engine."""
        ...

    def begin(self, sampling: Sampling) -> None:
        """Start a generation with these sampling parameters for all responses added from now on."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Generate this response too."""
        ...

    def step(self) -> Sequence[Generation]:
        """Generate one token or more for each running response; returns those that finished, in any order."""
        ...

    def abort(self) -> Sequence[Generation]:
        """Abort everything unfinished; returns the tokens so far of each, possibly none. One that had finished already,
        but was not returned by `step`, has its finish reason."""
        ...

    def agree(self, value: T) -> T:
        """The value of the first of the workers that share this engine."""
        ...

    def prompt_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """float32 `[len(tokens) - 1]`: log-prob of each token after the first, at temperature 1."""
        ...

    def cached_tokens(self, prompt: np.ndarray) -> int:
        """Make the prefix cache hold one block, which repeats `prompt`; returns how many of its tokens were cached
        already. 0 if the engine sleeps, or has no prefix cache."""
        ...

    def probe(self, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """`cached_tokens` and `prompt_log_probs` of `tokens`, in one step of the engine."""
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...


class WeightReceiver(Protocol):
    """Takes over the trained weights: `load_weights` or `load_adapter`, then `verify`."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load full tensors under checkpoint names, in any order, and forget all cached prefixes."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Load a LoRA adapter from a folder in peft's format; later calls replace it. Called only if `settings`
        contains "lora"."""
        ...

    def verify(self, sent: Mapping[str, Sent]) -> Verified:
        """Compare the weights in use with what was sent: all weights, or the adapter's. Called after a load, by all
        workers that share the engine."""
        ...


@runtime_checkable
class Colocated(Protocol):
    """Shares a device with a trainer: `sleep` (the trainer uses the memory) → `wake_weights` → load and verify →
    `wake_cache`. An engine without these needs workers of its own (`rollout.workers`)."""

    def sleep(self) -> None:
        """Release the device's memory, as far as `EngineSpec.sleep` asks for it and the engine can."""
        ...

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again."""
        ...

    def wake_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """Its weights may change between two steps while responses run (`async.on_update = keep`): these go on with keys
    and values that the earlier weights computed, and no response that is added later uses any of those."""

    def peek(self) -> Sequence[Generation]:
        """As `abort`, but everything goes on. No step is under way then."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """Says what it has drawn of a response that is not finished."""

    def so_far(self, key: int) -> Sequence[int]:
        """The ids of its tokens so far; empty if it waits or is unknown."""
        ...


@runtime_checkable
class Counting(Protocol):
    """Counts what happens to it: the metrics `engine/NAME`, summed over the engines."""

    def counts(self) -> Mapping[str, float]:
        """By name, since the last call."""
        ...


@runtime_checkable
class Described(Protocol):
    """Says what computes the responses."""

    def describe(self) -> str:
        """Library, version and variant, for the run's record: `vLLM 0.32.0, first model runner, …`."""
        ...


@runtime_checkable
class Speculating(Protocol):
    """Drafts tokens and verifies several of a response in one step (`rollout.speculate`)."""

    def speculated(self) -> tuple[int, int]:
        """How many tokens were drafted since the engine was built, and how many of them were kept."""
        ...


class Engine(Generator, WeightReceiver, Protocol):
    """What an entry point of `rlcli.engines` names: a class that is constructed from an `EngineSpec` in each worker,
    after torch.distributed is initialised. Importing its module must be cheap: the controller does so too.

    requires: modules that must be installed. settings: which of `ENGINE_KEYS` it implements; a run that sets another
    one is refused. on_step: called before each step of a generation.
    """

    requires: ClassVar[tuple[str, ...]]
    settings: ClassVar[frozenset[str]]
    spec: EngineSpec
    on_step: Callable[[], None]

    def __init__(self, spec: EngineSpec) -> None: ...

    @staticmethod
    def preload() -> None:
        """Import what the first engine of a process would import."""
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
"""Keys that an engine may not implement. (And "lora": an adapter besides the weights, in bfloat16;
"images": prompts with pictures.)"""


def engine_named(name: str) -> type[Engine]:
    """The class of the engine `name`. Raises `ConfigError` with the existing names."""
    if name not in ENGINES.names():
        raise ConfigError(f"rollout.engine = '{name}': there is no such engine", f"give {' or '.join(ENGINES.names())}")
    return ENGINES.get(name)


def finished(engine: Generator, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
    """One whole generation: yields each response as it finishes, in any order."""
    engine.begin(sampling)
    for request in requests:
        engine.add(request)
    while engine.unfinished:
        yield from engine.step()
