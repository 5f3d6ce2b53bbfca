"""The specification of a worker and of its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date

from rlcli.config.schema import RunConfig
from rlcli.data.messages import Role
from rlcli.images.image_rule import ImageRule
from rlcli.rollout.engine import EngineSpec, ServerSettings, Sleep, shared_memory_prefix
from rlcli.support.served_models import ENGINE_KEY, publish


@dataclass(frozen=True)
class WorkerSpec:
    """What every worker of a group is built from. dtype: of compute, `float32` and so on. roles: those it hosts; an
    engine without a policy reads the weights from `config.model.path` itself, unless `weights_follow` from other
    workers, and the LoRA adapter from the folder `adapter`, if any. logs: folder for the ranks' logs, `name`-0.log and
    so on. max_length: prompt and response, tokens. scoring_processes: on each machine; 0: by its cores. verifiers:
    names to preload. group_id: of this run on this machine. stop_token_ids: those that end a response. thinking:
    prompts end within an open <think>. environments: names of those that samples converse with. day: as the chat
    template's today, if it uses one. hub_token: the driver's, for workers on other machines; passed here, since Ray
    logs the environment variables that it is given. served: addresses of the models that are served for verifiers;
    served_key: what their servers ask for; engine_key: what those of rollout.servers ask for. images: how the model
    sees pictures, if it does; pictures: the most that a prompt has."""

    config: RunConfig
    device: str
    dtype: str
    roles: frozenset[Role]
    adapter: str
    logs: str
    name: str
    max_length: int
    kv_cache_bytes: int | None
    scoring_processes: int
    verifiers: tuple[str, ...]
    group_id: str
    stop_token_ids: tuple[int, ...]
    weights_follow: bool = False
    thinking: bool = False
    environments: tuple[str, ...] = ()
    day: date | None = None
    hub_token: str = field(default="", repr=False)
    served: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    served_key: str = field(default="", repr=False)
    engine_key: str = field(default="", repr=False)
    images: ImageRule | None = None
    pictures: int = 0

    def log_in(self) -> None:
        """Let this process read the same hub repositories as the driver, and find the served models."""
        if self.hub_token:
            os.environ.setdefault("HF_TOKEN", self.hub_token)
        if self.engine_key:
            os.environ.setdefault(ENGINE_KEY, self.engine_key)
        if self.served:
            publish(self.served, self.served_key)

    @property
    def replicate(self) -> int:
        """Copies of the trained models in this group: a critic in separate workers has one."""
        return self.config.parallel.replicate if "policy" in self.roles else 1

    @property
    def context(self) -> int:
        """Workers that divide a micro-batch's tokens: engines alone train nothing."""
        return self.config.parallel.context if self.roles - {"engine"} else 1

    @property
    def expert(self) -> int:
        """Workers that divide the experts of each layer of the trained models in this group."""
        return self.config.parallel.expert if "policy" in self.roles else 1

    @property
    def separate_adapter(self) -> bool:
        """Whether the engine gets a LoRA adapter separately, besides the base's weights, rather than merged weights.

        In float32 the merge is exact, and the engine, without the adapter's kernels, several times as fast. In bfloat16
        it would round most of a small adapter away. An adapter to be evaluated comes as a folder."""
        return bool(self.config.lora.rank) and (bool(self.adapter) or self.dtype != "float32")

    @property
    def sleep(self) -> Sleep:
        """What the engine releases while this worker trains: nothing where it only generates."""
        if self.roles == {"engine"}:
            return "none"
        chosen = self.config.rollout.sleep
        return "all" if chosen == "auto" else chosen  # where the planner knew too little to choose

    @property
    def keeps(self) -> bool:
        """Whether responses stay in the engine, with their keys and values, while its weights change."""
        return self.config.in_flight and self.config.async_.on_update == "keep"

    @property
    def adapter_prefix(self) -> str:
        """Prefix of the folders in /dev/shm that an adapter passes through on its way to an engine."""
        return f"{shared_memory_prefix(self.group_id)}adapter-"


def engine_spec(worker: WorkerSpec) -> EngineSpec:
    """The specification of such a worker's engine."""
    config, rollout = worker.config, worker.config.rollout
    return EngineSpec(
        model=config.model.path,
        dtype=worker.dtype,
        device=worker.device,
        max_length=worker.max_length,
        max_concurrent=rollout.max_concurrent,
        tensor_parallel=rollout.tensor_parallel,
        lora_rank=config.lora.rank if worker.separate_adapter else 0,
        lora_targets=config.lora.targets,
        sleep=worker.sleep,
        lora_experts=worker.separate_adapter and config.lora.on_experts,
        weights_follow=("policy" in worker.roles or worker.weights_follow) and not worker.separate_adapter,
        kv_cache_bytes=worker.kv_cache_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        quantization=rollout.quantization,
        stop_token_ids=worker.stop_token_ids,
        group_id=worker.group_id,
        exact_steps=worker.keeps or (config.in_flight and config.counts_steps),
        speculate=rollout.speculate,
        routes=rollout.replay_routes,
        float_head=config.model.head_dtype == "float32" and worker.dtype != "float32",
        images=worker.images,
        pictures=worker.pictures,
        servers=_servers(worker) if rollout.engine == "server" else ServerSettings(),
    )


def _servers(worker: WorkerSpec) -> ServerSettings:
    """A server that is silent is lost before the watchdog ends its worker, which waits for it."""
    rollout, silent_s = worker.config.rollout, worker.config.fault_tolerance.stall_s / 2
    urls, count = rollout.server_urls, rollout.servers if isinstance(rollout.servers, int) else 0
    return ServerSettings(
        tuple(dict.fromkeys(url.rstrip("/") for url in urls)), count, rollout.servers_folder, worker.logs, silent_s
    )
