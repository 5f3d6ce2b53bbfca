"""Report on training a model, from its files: layers, kernels, chat template, stop tokens, memory.

Only config.json, the tokenizer's files and the names of the weights are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcli.errors import ModelError
from rlcli.model.io.model_checks import check_extra_layers, weights_by_layer
from rlcli.model.io.model_config import (
    THEIR_CONFIG,
    cached_config,
    check_place,
    check_sizes,
    plain_config,
    read_config,
    stored_config,
)
from rlcli.support.reading import check_regular, read_json
from rlcli_planner.activations import FLOAT
from rlcli_planner.model_shape import ModelShape, shape_of

HALF = 2
"""Bytes of a weight in 16 bits."""
ADAPTER_RANK = 32
"""Rank of the adapter whose memory is reported."""
MIXERS = {"linear_attention": "linear_attn.", "full_attention": "self_attn.", "sliding_attention": "self_attn."}
"""The type of a layer → how the names of what mixes its tokens begin."""
LAYER_NAMES = {
    "full_attention": "attention to all tokens",
    "sliding_attention": "attention within a window",
    "linear_attention": "gated DeltaNet",
}


@dataclass(frozen=True)
class Kernel:
    """Compiled code that a model's layers are computed with on GPUs."""

    package: str
    """Its name for pip."""
    version: str
    """Empty: not installed."""
    purpose: str
    """The computation that it serves."""
    without: str
    """Consequence if it is not installed."""


@dataclass(frozen=True)
class Template:
    """Behaviour of the chat template, tried on conversations."""

    thinking: str
    """Form in which responses think."""
    conversations: str
    """The verdict of `rlcli doctor --template`, which also covers tools."""
    variables: tuple[str, ...]
    """Variables that `chat_template_kwargs` may set."""


@dataclass(frozen=True)
class Memory:
    """Bytes, over all devices that share a copy."""

    weights: int
    """In 16 bits, as an engine holds them."""
    adamw: int
    """Weights, gradients and two moments in float32."""
    muon: int
    """As `adamw`, with `train.optimizer = muon`, which keeps one moment of hidden matrices."""
    adapter: int
    """Weights in 16 bits and an adapter of rank 32 with its gradients and moments."""
    cache_per_token: int
    """Bytes of an engine's KV cache, in 16 bits."""
    state_per_request: int
    """States of layers of linear attention that an engine holds for a request."""


@dataclass(frozen=True)
class ModelReport:
    """Output of `rlcli model check` of a model that can be trained."""

    path: str
    """The folder or hub id, as given."""
    kind: str
    """Its `model_type`."""
    parameters: int
    """Number of all parameters."""
    active: int
    """Number of parameters that a token passes through."""
    positions: int
    """Maximum length of a sequence in tokens."""
    layers: Mapping[str, int]
    """Kind of layer, or of its feed-forward part → number of layers."""
    kernels: tuple[Kernel, ...]
    """Compiled code that its layers and the engine need."""
    template: Template | None
    """None: there is no tokenizer, or it has no chat template."""
    stop_tokens: Mapping[int, str]
    """Token id → text of the tokens that end a response."""
    memory: Memory
    """Memory of weights, training and the engine."""
    notes: tuple[str, ...]
    """Parts that could not be checked, and what happens to the weights."""
    supported: bool = True
    """In `--json`: a model that is refused has false."""


def check_model_files(path: str) -> ModelReport:
    """Raises `ModelError` for a model that cannot be trained, and for files that do not fit together."""
    check_place(path, "MODEL")
    config = plain_config(path) or read_config(path, "MODEL")
    check_sizes(path, config)
    shape, types = shape_of(config), layer_types(config)
    values = stored_config(path) or {}
    names = weight_names(path)
    if names is not None:
        predicting = int(values.get("num_nextn_predict_layers") or 0)
        check_names(path, shape, types, names, predicting)
    notes = [] if names is not None else ["no weights are there: their names were not compared with config.json"]
    if values.get("quantization_config"):
        notes.append("its MXFP4 weights are read as bfloat16, which holds each of them exactly, and exported so")
    template: Template | None = None
    stops: dict[int, str] = {}
    if has_tokenizer(path):
        template, stops, of_template = check_chat(path, values)
        notes += of_template
        if template is None:
            notes.append("the tokenizer has no chat template: give model.chat_template")
    else:
        notes.append("no tokenizer is there: neither the chat template nor stop tokens were checked")
    return ModelReport(
        path=path,
        kind=str(values.get("model_type") or shape.kind),
        parameters=shape.parameters,
        active=active_parameters(shape),
        positions=shape.positions,
        layers=layers_by_kind(shape, types),
        kernels=kernels_of(shape),
        template=template,
        stop_tokens=stops,
        memory=memory_of(shape),
        notes=tuple(notes),
    )


def active_parameters(shape: ModelShape) -> int:
    idle = shape.expert_layers * (shape.experts - shape.experts_per_token) * shape.expert_parameters
    return shape.parameters - idle


def memory_of(shape: ModelShape) -> Memory:
    adapter = shape.adapter_parameters(ADAPTER_RANK, "all-linear")
    states = 4 * FLOAT
    return Memory(
        weights=HALF * shape.parameters,
        adamw=states * shape.parameters,
        muon=states * shape.parameters - FLOAT * shape.hidden_matrices,
        adapter=HALF * shape.parameters + states * adapter,
        cache_per_token=int(shape.kv_bytes_per_token(HALF)),
        state_per_request=int(shape.state_bytes(HALF)),
    )


def layer_types(config: Any) -> list[str]:
    """The type of each layer, if the config lists them."""
    return list(getattr(getattr(config, "text_config", config), "layer_types", None) or ())


def layers_by_kind(shape: ModelShape, types: Sequence[str]) -> dict[str, int]:
    """Number of layers of each kind: token mixers first, then feed-forward parts. types: type of each layer; empty: all
    have full attention."""
    mixing = ["latent attention"] * shape.layers if shape.latent is not None else [LAYER_NAMES[kind] for kind in types]
    counts = dict(Counter(mixing or [LAYER_NAMES["full_attention"]] * shape.layers))
    if shape.dense_layers or not shape.experts:
        counts["feed-forward"] = shape.dense_layers or shape.layers
    if shape.experts:
        shared = " and shared ones" * bool(shape.shared)
        counts[f"{shape.experts} experts, {shape.experts_per_token} of them chosen{shared}"] = shape.expert_layers
    if shape.vision_encoder is not None:
        counts["layers of the vision encoder"] = shape.vision_encoder.encoding.layers
    return counts


def kernels_of(shape: ModelShape) -> tuple[Kernel, ...]:
    """On CPUs torch computes all of them."""
    kernels = [Kernel("torch", version_of("torch"), "attention over packs", "nothing trains")]
    if shape.delta is not None:
        purpose, without = "gated DeltaNet in 16 bits", "torch computes them on GPUs too, slowly"
        kernels += [
            Kernel(package, version_of(package) if find_spec(module) else "", purpose, without)
            for package, module in (("flash-linear-attention", "fla"), ("causal-conv1d", "causal_conv1d"))
        ]
    kernels.append(Kernel("vllm", version_of("vllm"), "generation", "rollout.engine = transformers generates, slowly"))
    return tuple(kernels)


def version_of(package: str) -> str:
    """Version of an installed package; empty if it is not installed. vLLM for CPUs has another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def folder_of(path: str) -> Path | None:
    """The folder of a model, or of a hub id in the cache."""
    if Path(path).is_dir():
        return Path(path)
    cached = cached_config(path)
    return cached.parent if cached else None


def has_tokenizer(path: str) -> bool:
    folder = folder_of(path)
    if folder is None:
        return False
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def weight_names(path: str) -> set[str] | None:
    """The names of a model's weights, of an index or of the header of a single file; None if neither is there."""
    folder = folder_of(path)
    if folder is None:
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return set(read_json(index, links=True)["weight_map"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"{index} is not a weights index: {error}", "download it again") from error
    if not (folder / "model.safetensors").is_file():
        return None
    from safetensors import SafetensorError, safe_open

    check_regular(folder / "model.safetensors", links=True)
    try:
        with safe_open(folder / "model.safetensors", framework="np") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise ModelError(f"{folder}/model.safetensors is incomplete: {error}", "download it again") from error


def check_names(
    path: str, shape: ModelShape, types: Sequence[str], names: Collection[str], predicting: int = 0
) -> None:
    """Raise `ModelError` for layers that are missing, too many or of another kind than config.json says, and for blocks
    of MXFP4 without scales. predicting: how many further layers predict several tokens, which are not trained."""
    from rlcli.model.io.mxfp4 import BLOCKS, SCALES

    for name in sorted(names):
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES not in names:
            raise ModelError(
                f"{path}: {name} has no scales ({name.removesuffix(BLOCKS) + SCALES}), without which MXFP4 "
                "weights mean nothing",
                "download the whole model",
            )
    layers = weights_by_layer(names)
    if not layers:
        return  # Other names than transformers': loading them reports it.
    missing = [layer for layer in range(shape.layers) if layer not in layers]
    if missing:
        raise ModelError(
            f"{path}: config.json has {shape.layers} layers, and the weights have none for "
            f"{len(missing)} of them, the first being layer {missing[0]}",
            f"download the whole model, or {THEIR_CONFIG}",
        )
    check_extra_layers(path, layers, shape.layers, predicting)
    for layer, kind in enumerate(types if shape.delta is not None else []):
        wanted = MIXERS[kind]
        if not any(name.startswith(wanted) for name in layers[layer]):
            raise ModelError(
                f"{path}: layer {layer} is of {kind} by config.json, and none of its weights is named {wanted}…",
                THEIR_CONFIG,
            )


def check_chat(path: str, values: Mapping[str, Any]) -> tuple[Template | None, dict[int, str], list[str]]:
    """The template, the tokens that end a response, and notes. Raises `ModelError` for a template that is surely of
    another family."""
    from rlcli.data.prompts import chat_template
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.launch.machine_checks import check_template

    tokenizer = load_tokenizer(path)
    if not tokenizer.chat_template:
        return None, {}, []
    notes = chat_template.check_family(tokenizer, path, str(values.get("model_type")))
    stops = chat_template.stop_tokens(tokenizer, path, ())
    if values.get("model_type") == "gpt_oss":
        thinking = "harmony's analysis channel"
    elif chat_template.opens_thinking(tokenizer):
        thinking = "the prompt opens <think>"
    else:
        thinking = "<think> in past answers" if "<think>" in str(tokenizer.chat_template) else "none"
    variables = sorted(chat_template.reads(tokenizer) - PASSED)
    return Template(thinking, check_template(path)[0].detail, tuple(variables)), stops, notes


PASSED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "namespace", "range", "loop"),
        *("strftime_now", "dict", "cycler", "joiner", "lipsum"),
    )
)
"""Names that every template may use, and that nobody sets."""
