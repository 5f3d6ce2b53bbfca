"""Checks that the chosen engine fits the run and its data, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcli.config.schema import Rollout, RunConfig
from rlcli.data.prompts.prompt_table import images_per_prompt
from rlcli.errors import ConfigError, ModelError, SetupError
from rlcli.images.families import KINDS
from rlcli.images.image_rule import ImageRule
from rlcli.model.io.model_config import LATENT, has_recurrent_layers
from rlcli.rollout.engine import ENGINE_KEYS, Colocated, Keeping, engine_named
from rlcli.rollout.vllm.vllm_engine import check_version
from rlcli.support.extras import INSTALL, missing
from rlcli.types import Prompt

NOT_ADAPTED = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Vision-language models of which vLLM 0.32 computes none with an adapter: an error in the first pass. (Those of
Qwen3.5 inherit it; not run.)"""

NEEDS_MERGED_ADAPTER = dict.fromkeys(
    LATENT, "vLLM's latent attention computes with kv_b_proj as it was loaded, without adapters"
)
"""`model_type` → why an engine needs adapters merged into the weights, as a run in float32 sends them."""
NEEDS_MERGED_ADAPTER_ON_CPUS = {
    "gpt_oss": "beside an adapter vLLM computes its experts with Triton, which has no code for CPUs"
}
"""The same on CPUs."""


def check_engine(config: RunConfig, *, train: bool) -> None:
    """Raise `ConfigError` for an engine that does not exist or does not implement what is set, `SetupError` for one
    that is not installed."""
    name = config.rollout.engine
    engine = engine_named(name)
    if train and config.data.response and not config.evaluation.data:
        return
    if absent := missing(*engine.requires):
        raise SetupError(
            f"rollout.engine = {name}: not installed: {', '.join(absent)}", f"{INSTALL}; or give another rollout.engine"
        )
    for key in ENGINE_KEYS:
        section, _, field = key.partition(".")
        settings = getattr(config, section)
        value = getattr(settings, field)
        if key not in engine.settings and value != type(settings).model_fields[field].default:
            raise ConfigError(f"{key} = {value}, but rollout.engine = {name} has no such setting", "leave it out")
    if train and config.async_.on_update == "keep" and not issubclass(engine, Keeping):
        raise ConfigError(
            f"async.on_update = keep, but rollout.engine = {name} cannot change its weights while responses run",
            "give async.on_update = recompute",
        )
    if train and not config.rollout.workers and not issubclass(engine, Colocated):
        raise ConfigError(
            f"rollout.engine = {name} cannot share devices with the trainer",
            "give engines separate workers: rollout.workers = 1 or more",
        )

    if name == "server":
        _check_servers(config.rollout)
    if name == "vllm" or (name == "server" and not config.rollout.server_urls):
        check_version()


def _check_servers(rollout: Rollout) -> None:
    """Raise `ConfigError` for an address that is no URL or a folder that does not exist, `SetupError` if the run cannot
    start servers itself."""
    from rlcli.support.json_link import checked_url

    for url in rollout.server_urls:
        checked_url(url)
    if rollout.servers_folder and not Path(rollout.servers_folder).is_dir():
        raise ConfigError(
            f"rollout.servers_folder = {rollout.servers_folder}: no such folder", "make it where servers see it too"
        )
    if not rollout.server_urls and missing("vllm"):
        raise SetupError(
            f"rollout.servers = {rollout.servers} servers are to be started, but vllm is not installed",
            f"{INSTALL}; or give URLs of servers",
        )


def check_adapter(config: RunConfig, dtype: str, device: str, adapter: str) -> None:
    """Raise `ConfigError` for a LoRA adapter that the engine would have to load besides the weights, and cannot.
    adapter: the folder of one that is evaluated, or empty."""
    name = config.rollout.engine
    if not _is_adapter_separate(config, dtype, adapter):
        return
    if "lora" in engine_named(name).settings:
        if config.lora.on_experts and device == "cpu":
            raise ConfigError(
                f"{adapter or f'lora.targets = {config.lora.targets}'}: vLLM computes no adapter on experts beside "
                f"their weights on CPUs{'' if adapter else f', as it would in {dtype}'}",
                _adapter_hint(adapter),
            )
        return
    if adapter:
        raise ConfigError(
            f"rollout.engine = {name} does not load LoRA adapters, and {adapter} is one",
            "merge it first (rlcli export RUN --merge), or give rollout.engine = vllm",
        )
    raise ConfigError(
        f"lora.rank = {config.lora.rank} in {dtype}: rollout.engine = {name} does not load LoRA adapters, and only in "
        "float32 can one be added to the weights exactly",
        "give model.dtype = float32, or rollout.engine = vllm",
    )


def _is_adapter_separate(config: RunConfig, dtype: str, adapter: str) -> bool:
    """True if the engine computes a LoRA adapter beside the weights: that of an evaluation, or of a run in a dtype in
    which it cannot be added to the weights exactly."""
    return bool(config.lora.rank) and (bool(adapter) or dtype != "float32")


def _adapter_hint(adapter: str) -> str:
    """Hint that says how to avoid a separate adapter. adapter: as in `check_adapter`."""
    return "merge it first: rlcli export RUN --merge" if adapter else "give model.dtype = float32"


def check_recurrent_layers(config: RunConfig, dtype: str, device: str, adapter: str = "") -> None:
    """Raise `ConfigError` for settings that models with recurrent layers do not support. adapter: as in
    `check_adapter`."""
    every = [config.model.path, config.critic.path, *(teacher.path for teacher in config.teacher.held)]
    for path in every if config.parallel.context > 1 else ():
        if path and has_recurrent_layers(path):
            raise ConfigError(
                f"parallel.context = {config.parallel.context} divides a sample's tokens over workers, and layers of "
                f"{path} carry a state from each token to the next",
                "give 1: such layers take little memory of long samples; or a lower train.tokens_per_microbatch",
            )
    if not has_recurrent_layers(config.model.path):
        return
    rollout, reason = config.rollout, f"{config.model.path} has layers that carry a state from token to token"
    if rollout.engine == "transformers":
        raise ConfigError(
            f"rollout.engine = transformers: {reason}, which this engine does not keep", "give rollout.engine = vllm"
        )
    if rollout.engine == "server" and not rollout.server_urls and device == "cpu":
        raise ConfigError(
            f"rollout.engine = server: {reason}, for which vLLM's servers have no kernels in {dtype} on CPUs"
            if dtype != "bfloat16"
            else f"rollout.engine = server: {reason}, which was not tried with vLLM's servers on CPUs",
            "give rollout.engine = vllm",
        )
    if rollout.speculate:
        raise ConfigError(
            f"rollout.speculate = {rollout.speculate}: {reason}, from which a rejected draft cannot be removed",
            "leave it out",
        )
    if rollout.replay_routes:
        raise ConfigError(
            f"rollout.replay_routes: {reason}; the engine's record of routes does not cover its caches", "leave it out"
        )
    if device == "cpu" and _is_adapter_separate(config, dtype, adapter):
        raise ConfigError(
            f"{adapter or f'lora.rank = {config.lora.rank}'}: vLLM computes no adapter beside the weights of gated "
            f"DeltaNet layers on CPUs{'' if adapter else f', as it would in {dtype}'}",
            _adapter_hint(adapter),
        )


def check_separate_adapter(config: RunConfig, dtype: str, device: str, kind: str, adapter: str) -> None:
    """Raise `ConfigError` for a LoRA adapter that vLLM would have to compute beside the weights of a model of this
    `model_type`, and does not: see `NEEDS_MERGED_ADAPTER`. adapter: the folder of one that is evaluated, or empty."""
    why = NEEDS_MERGED_ADAPTER | (NEEDS_MERGED_ADAPTER_ON_CPUS if device == "cpu" else {})
    if config.rollout.engine != "transformers" and kind in why and _is_adapter_separate(config, dtype, adapter):
        raise ConfigError(
            f"{adapter or f'lora.rank = {config.lora.rank} in {dtype}'}: {why[kind]}",
            _adapter_hint(adapter),
        )


def check_quantized(config: RunConfig, dtype: str, experts: int) -> None:
    """Raise `ConfigError` if a weight sync would leave vLLM's CUDA graphs with memory that it has freed
    (vllm-project/vllm#41670). A separate adapter leaves the quantized weights as they are. experts: of each layer."""
    rollout, separate_adapter = config.rollout, config.lora.rank and dtype != "float32"
    if rollout.quantization and experts and not rollout.enforce_eager and not separate_adapter:
        raise ConfigError(
            f"rollout.quantization = {rollout.quantization}: {config.model.path} is a mixture of experts, whose 8-bit "
            "kernels vLLM rebuilds at each weight sync, while its CUDA graphs still read the memory of the old ones",
            "give rollout.enforce_eager = true, or leave rollout.quantization out",
        )


def check_images(
    config: RunConfig, kind: str, rule: ImageRule | None, dtype: str, sets: Sequence[Sequence[Prompt]], *, train: bool
) -> int:
    """The maximum number of images that the engine gets with a prompt: of the rows, or any number with environments.
    Raises `RlcliError` for images or `model.freeze` with a text-only model, and for settings that a vision-language
    model does not support. kind: the model's `model_type`. rule: how it encodes images, if it does."""
    max_images = max((int(images_per_prompt(some).max(initial=0)) for some in sets), default=0)
    if train:
        check_frozen(config, has_vision_encoder=rule is not None)
    if rule is None:
        if max_images:
            raise ModelError(
                f"the data has images, and {config.model.path} is a model for text alone",
                f"give a vision-language model ({', '.join(KINDS)}), or data without images",
            )
        return 0
    engine = config.rollout.engine
    if "images" not in engine_named(engine).settings:
        raise ConfigError(
            f"rollout.engine = {engine} does not support images for {config.model.path}", "give rollout.engine = vllm"
        )
    if kind in NOT_ADAPTED and config.lora.rank and dtype != "float32":
        raise ConfigError(
            f"lora.rank = {config.lora.rank} in {dtype}: vLLM computes no {kind} with an adapter beside its weights",
            "give model.dtype = float32, or train all weights",
        )
    if config.environment.name:
        max_images = config.max_length  # each has a token
    if not train:
        return max_images
    for key, value, plain in _unsupported(config):
        if value != plain:
            raise ConfigError(
                f"{key} = {value}, but training of vision-language models does not support this yet",
                f"give {key} = {plain}",
            )
    return max_images


def check_frozen(config: RunConfig, *, has_vision_encoder: bool) -> None:
    """Raise `ConfigError` if parts are to be frozen that the model does not have. has_vision_encoder: it is a
    vision-language model."""
    if config.model.freeze and not has_vision_encoder:
        parts = ", ".join(config.model.freeze)
        raise ConfigError(
            f"model.freeze = {parts}: {config.model.path} reads text alone, and has no such part",
            f"leave it out, or give a vision-language model ({', '.join(KINDS)})",
        )


def _unsupported(config: RunConfig) -> list[tuple[str, object, object]]:
    """Keys, their values, and the only values that a model with a vision encoder is trained with."""
    return [
        ("parallel.context", config.parallel.context, 1),
        ("model.compile", config.model.compile, False),
        ("data.response", config.data.response, ""),
        ("async.on_update", config.async_.on_update, "recompute"),
    ]
