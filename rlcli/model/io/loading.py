"""Loads a model from a folder or hub id, sharded: each rank reads its rows from safetensors files; files of other
formats are read by rank 0, which sends the other ranks their parts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig
from transformers.utils import logging

from rlcli.errors import ModelError, SetupError
from rlcli.model.as_engine import adjusted
from rlcli.model.compiling import compile_layers
from rlcli.model.decoder import Decoder
from rlcli.model.dithering import dither
from rlcli.model.io.frozen_weights import freeze
from rlcli.model.io.model_config import auto_class, read_config
from rlcli.model.io.mxfp4 import quantization
from rlcli.model.io.weight_files import WeightFiles
from rlcli.model.lora import LoraSpec, add_lora, is_adapter
from rlcli.model.parallel.context_parallel import ContextGroup
from rlcli.model.parallel.fsdp_sharding import fill_from_files, fill_from_rank0, shard
from rlcli.model.policy import PolicyModel
from rlcli.model.tensor_names import named_weights
from rlcli.model.value_model import HEAD, ValueModel, foreign_head, has_head, read_value_config, value_class
from rlcli.model.weight_check.finite_weights import check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing = bool | Literal["offload"]
"""True: activations are recomputed in the backward pass; offload: and the layers' inputs are kept in host memory."""


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    context: ContextGroup | None = None,
    lora: LoraSpec | None = None,
    frozen: Collection[str] = (),
    gradient_checkpointing: Checkpointing = False,
    compiled: bool = False,
    trainable: bool = True,
) -> PolicyModel:
    """The model at `path`, sharded over `mesh`. Collective: every rank of the mesh calls it with the same arguments.

    experts: mesh of the experts' weights, with expert parallelism. context: ranks that divide the tokens of each pack.
    dtype: of computation. Trained parameters (all but the parts `frozen`, or the adapters of `lora`) are float32 and
    round to the weights at `path`; those that never change are in `dtype`. trainable=False: a reference, nothing
    requires a gradient. `ModelError` if the model cannot be used.
    """
    config = read_config(path)
    unchanged = lora is not None or not trainable
    lm = _without_weights(auto_class(config), config, dtype if unchanged else torch.float32)
    peft = add_lora(lm, lora, path, meta=True) if lora else None
    policy = PolicyModel(lm, dtype=dtype, source=path, peft=peft)
    policy.context = context
    if not trainable:
        policy.requires_grad_(False)
    elif frozen and lora is None:  # an adapter does not train the vision encoder anyway
        policy.frozen = frozenset(f"lm.{name}" for name in freeze(lm, frozen, dtype))
    policy.train(trainable)  # gradient checkpointing works in training mode only
    checkpointing = gradient_checkpointing if trainable else False
    files = WeightFiles.find(path, tied=config.tie_word_embeddings, kind=config.model_type)
    if lora is not None and _on_all_ranks(files is not None):
        assert files is not None
        files.new = _new_adapters(path, config, lora)
    _load(policy, lambda: read_policy(path, config, lora), (mesh, experts), device, checkpointing, compiled, files)
    return policy


def load_value(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    context: ContextGroup | None = None,
    gradient_checkpointing: Checkpointing = False,
    compiled: bool = False,
) -> ValueModel:
    """The value model at `path`, sharded over `mesh`, fully trained, in float32. Collective, like `load_policy`.

    A reward model or any classification checkpoint with one label keeps its head. A causal language model gets a new
    head of zeros: V = 0 at first, so that the first advantages are Monte Carlo returns (later rewards, discounted by
    γλ) rather than differences of random values. `ModelError` if the model cannot be used.
    """
    config = read_value_config(path)
    model = ValueModel(_without_weights(value_class(config), config, torch.float32), dtype=dtype, source=path)
    model.context = context
    model.train()  # gradient checkpointing works in training mode only
    files = _value_files(path, config)
    _load(model, lambda: read_value(path, config), (mesh, experts), device, gradient_checkpointing, compiled, files)
    return model


def _value_files(path: str, config: PreTrainedConfig) -> WeightFiles | None:
    """The files of a value model; None if they have tensors that `read_value` would refuse."""
    files = WeightFiles.find(path, tied=False, kind=config.model_type)
    head = f"{HEAD}.weight"
    if files is None or not all(name.startswith(("model.", "lm_head.")) for name in files.names - {head}):
        return None
    if not has_head(config) and head not in files.names:
        files.new = {head: torch.zeros(1, config.hidden_size)}
    return files


def _new_adapters(path: str, config: PreTrainedConfig, lora: LoraSpec) -> dict[str, Tensor]:
    """The initial values of the adapters of `lora`, by name, the same on every rank: those that `read_policy` would
    sample on rank 0, without allocating the model's weights. Collective."""
    lm = _without_weights(auto_class(config), config, torch.float32)
    for module in lm.modules():
        for name, parameter in module.named_parameters(recurse=False):  # peft puts adapters where these are
            setattr(module, name, nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False))
    generator = torch.get_rng_state()
    dist.broadcast(generator, 0)
    with torch.random.fork_rng(devices=[], enabled=dist.get_rank() > 0):
        torch.set_rng_state(generator)
        add_lora(lm, lora, path, meta=False)
    return {name: parameter.detach() for name, parameter in lm.named_parameters() if is_adapter(name)}


def _without_weights(auto_model: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` on the meta device. auto_model: a class such as `AutoModelForCausalLM`."""
    with init_empty_weights(include_buffers=False):
        lm: PreTrainedModel = adjusted(auto_model.from_config(_without_dropout(config), dtype=dtype))
    lm.tie_weights()  # moving parameters to the meta device untied them
    return lm


def _load(
    model: Decoder,
    read: Callable[[], Mapping[str, Tensor]],
    meshes: tuple[DeviceMesh, DeviceMesh | None],
    device: torch.device,
    gradient_checkpointing: Checkpointing,
    compiled: bool,
    files: WeightFiles | None = None,
) -> None:
    """Shard `model` over the meshes of its weights and of its experts' weights if there is more than one rank, and fill
    it from `files` if all ranks have them with all its weights, else with the result of `read` on rank 0. Master
    weights of computation in 16 bits are dithered."""
    if gradient_checkpointing:
        _checkpoint_layers(model.lm, offload=gradient_checkpointing == "offload" and device.type == "cuda")
    if compiled:
        compile_layers(model.lm)
    # One rank in float32 has nothing to gather, to cast or to reduce, but FSDP2 would still take time.
    sharded = meshes[0].size() > 1 or model.dtype != torch.float32
    if sharded:
        shard(model, *meshes)
    complete = files is not None and all(files.hold(name, weight.shape) for name, weight in named_weights(model.lm))
    if _on_all_ranks(complete):
        assert files is not None
        fill_from_files(model, files, device)
    else:
        fill_from_rank0(model, read() if dist.get_rank() == 0 else {}, device)
    if not sharded:
        model.lm.tie_weights()  # allocating memory untied tied parameters
    if model.dtype != torch.float32:
        dither((part for part in model.lm.named_parameters() if not is_adapter(part[0])), model.dtype)


def _on_all_ranks(condition: bool) -> bool:
    """True if the condition is true on every rank. Collective."""
    smallest = torch.tensor(int(condition))
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return bool(smallest)


def _checkpoint_layers(lm: PreTrainedModel, *, offload: bool) -> None:
    """Keep only the input of each decoder layer, with `offload` in pinned host memory, until the backward pass
    recomputes the rest."""
    if offload and "offload" not in inspect.signature(lm.gradient_checkpointing_enable).parameters:
        raise SetupError(
            f"model.gradient_checkpointing = offload needs transformers 5.17, this is {transformers.__version__}",
            "pip install -U transformers, or set it to true",
        )
    lm.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}, **({"offload": True} if offload else {})
    )


def read_policy(path: str, config: PreTrainedConfig, lora: LoraSpec | None) -> dict[str, Tensor]:
    """Every parameter by its name, in the dtype of the files, with new adapters if requested."""
    lm = read_model(auto_class(config), path, config)
    check_finite(path, named_weights(lm))
    if lora:
        add_lora(lm, lora, path, meta=False)
    return dict(lm.state_dict())


def read_value(path: str, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Every parameter by its name, in the dtype of the files, with a head of zeros if the files have none."""
    with _quiet():  # transformers would report a missing head and advise to train it
        lm, report = read_model(
            value_class(config), path, config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    for name, shape, config_shape in report["mismatched_keys"]:
        if name.startswith(f"{HEAD}."):
            raise foreign_head(path, name, list(shape))
        raise ModelError(
            f"{path}: {name} is {list(shape)} in the weights and {list(config_shape)} by config.json",
            "use the config.json that these weights came with",
        )
    for name in report["unexpected_keys"]:
        if not name.startswith(("model.", "lm_head.")):
            raise foreign_head(path, name)
    missing = report["missing_keys"]
    if missing - (set() if has_head(config) else {f"{HEAD}.weight"}):
        raise ModelError(f"{path}: {min(missing)} is not in the weights", "check or download them again")
    if missing:
        nn.init.zeros_(lm.score.weight)
    return dict(lm.state_dict())


def read_model(auto_model: Any, path: str, config: PreTrainedConfig, **options: object) -> Any:
    """The result of transformers' `from_pretrained`, in the dtype of the files unless `options` sets another."""
    if stored := quantization(path):  # transformers would ignore quantised tensors without it
        config = copy.deepcopy(config)
        config.quantization_config = stored | {"dequantize": True}
    try:
        read = auto_model.from_pretrained(path, config=config, trust_remote_code=False, **{"dtype": "auto", **options})
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{path}: the weights do not load: {_first_line(error)}", "check or download them again"
        ) from error
    lm = adjusted(read[0] if isinstance(read, tuple) else read)
    if stored and isinstance(dtype := options.get("dtype"), torch.dtype):
        lm.to(dtype)  # tensors stored in MXFP4 are in bfloat16 whatever dtype is requested
    return read


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config without dropout and router noise. Rollout has neither: with them, the trainer's log-probs
    would be those of another policy."""
    config = copy.deepcopy(config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        for name, value in vars(part).items():
            if name.endswith(("dropout", "dropout_prob", "pdrop", "jitter_noise")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
