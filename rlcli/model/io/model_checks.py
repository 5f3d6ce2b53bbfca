"""Checks a model's files before it is loaded: shapes, tokenizer, adapters' targets, and on request each weight."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError
from rlcli.images.families import rule_of
from rlcli.images.image_rule import ImageRule
from rlcli.model.io.bin_file import mapped_tensors
from rlcli.model.io.model_config import THEIR_CONFIG, auto_class, cached_config, expert_count, first_line, read_config
from rlcli.model.io.mxfp4 import quantization, read_shapes
from rlcli.model.io.tied_head import check_tied_head
from rlcli.support.reading import read_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)")
OTHER_LAYERS = ("visual.", "model.visual.", "vision_tower.", "model.vision_tower.", "mtp.")
"""Prefixes of weights whose layers are not those of the language model."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The results of `check_model`."""

    vocab_size: int
    """Rows of the embedding."""
    tokenizer_size: int
    """One more than the tokenizer's largest id."""
    max_positions: int
    """Longest sequence."""
    parameters: int | None
    """Number of parameters; None if only the weights would show it (hub ids, `.bin` files)."""
    heads: int
    """Attention heads."""
    experts: int
    """Experts of a layer; 0 in a dense model."""
    kind: str
    """The `model_type`."""
    image_rule: ImageRule | None = None
    """Rule by which images become tokens; None for a text-only model."""


def check_model(path: str, key: str = "model.path", *, has_template: bool = False) -> ModelFacts:
    """Raise `ModelError` if the model at `path` (folder or hub id) could not be trained; reads no weights, but a head
    and an embedding that should be one.

    key: where the path was given, for the error. has_template: the chat template comes from elsewhere.
    """
    config = read_config(path, key)
    folder = Path(path)
    text = config.get_text_config()
    tokenizer_size = _check_tokenizer(path, text.vocab_size, has_template=has_template)
    shapes = _local_shapes(folder) if folder.is_dir() else None
    if shapes is not None and quantization(path):
        shapes = read_shapes(path, shapes)
    if shapes is not None:
        _check_shapes(path, _parameters(auto_class(config), config), shapes, config.model_type)
        predicting = int(getattr(text, "num_nextn_predict_layers", None) or 0)
        check_extra_layers(path, weights_by_layer(shapes), text.num_hidden_layers, predicting)
    files: list[Path] = []
    with contextlib.suppress(ModelError) if not folder.is_dir() else contextlib.nullcontext():  # only some of them
        files = weight_files(path)
    check_tied_head(path, config, files)
    return ModelFacts(
        vocab_size=text.vocab_size,
        tokenizer_size=tokenizer_size,
        max_positions=text.max_position_embeddings,
        parameters=None if shapes is None else sum(prod(shape) for shape in shapes.values()),
        heads=text.num_attention_heads,
        experts=expert_count(text),
        kind=config.model_type,
        image_rule=_image_rule(path, config),
    )


def image_rule(path: str) -> ImageRule | None:
    """The image rule of the model at `path`, a folder or hub id; None for a text-only model, or if there is only a
    tokenizer. Raises `ModelError` if its files do not define it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):  # no config.json, or one of a kind that transformers does not know
        return None
    return _image_rule(path, config)


def _image_rule(path: str, config: PreTrainedConfig) -> ImageRule | None:
    try:
        return rule_of(path, config)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: its image preprocessing cannot be read: {first_line(error)}",
            "add the preprocessor_config.json and the tokenizer that these weights came with",
        ) from error


def check_value_model(path: str, tokenizer_size: int) -> tuple[int, int]:
    """The attention heads, and the experts of each layer, of the model at `path` (folder or hub id); 0 experts in a
    dense one. Raises `ModelError` if a value model could not start from it; reads no weights.

    tokenizer_size: one more than the largest id of the policy's tokenizer. The value model reads the policy's tokens,
    so it needs no tokenizer.
    """
    from rlcli.model.value_model import HEAD, foreign_head, has_head, read_value_config, value_class

    config = read_value_config(path)
    if config.vocab_size < tokenizer_size:
        raise ModelError(
            f"{path}: the policy's tokenizer has ids up to {tokenizer_size - 1}, but this model's vocabulary ends at "
            f"{config.vocab_size - 1}",
            "give a value model of the policy's family, or leave critic.path out",
        )
    sizes = int(config.num_attention_heads), expert_count(config)
    shapes = _local_shapes(Path(path)) if Path(path).is_dir() else None
    if shapes is None:
        return sizes
    wanted = _parameters(value_class(config), config)
    # If no name matches, the file's names differ from the model's, and loading it reports errors.
    for name, shape in shapes.items() if wanted.keys() & shapes.keys() else ():
        if not name.startswith(("model.", "lm_head.")) and wanted.get(name) != shape:
            raise foreign_head(path, name, shape)
    if not has_head(config) and f"{HEAD}.weight" not in shapes:
        del wanted[f"{HEAD}.weight"]  # it is newly created
    _check_shapes(path, wanted, shapes, config.model_type)
    return sizes


def check_teacher(path: str, model: str, positions: int, context: int) -> ModelFacts:
    """Run `check_model` on a teacher. Raises `ModelError` if the model at `path` cannot score the tokens of the policy
    at `model`: its tokenizer assigns other ids, it has fewer than `positions` positions, or fewer attention heads than
    the `context` workers that divide them. Reads no weights."""
    from transformers import AutoTokenizer

    facts = check_model(path, key="teacher.path")
    policy, teacher = (
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab() for source in (model, path)
    )
    if policy != teacher:
        token = min(policy.keys() ^ teacher.keys() or {name for name in policy if policy[name] != teacher[name]})
        ids = " and ".join(
            f"{vocabulary.get(token, 'missing')} in {name}" for vocabulary, name in ((policy, model), (teacher, path))
        )
        raise ModelError(
            f"teacher.path = '{path}': its vocabulary is not the policy's: the token {token!r} is {ids}",
            "give a teacher with the same tokenizer: log-probs are compared token by token",
        )
    if facts.max_positions < positions:
        raise ModelError(
            f"teacher.path = '{path}': it has {facts.max_positions} positions, and samples up to {positions} tokens",
            "lower data.max_prompt_tokens or rollout.max_response_tokens, or give another teacher",
        )
    if facts.heads < context:
        raise ModelError(
            f"teacher.path = '{path}': it has {facts.heads} attention heads, which parallel.context = {context} "
            "divides",
            f"give at most {facts.heads}, or another teacher",
        )
    return facts


def check_lora(path: str, targets: str) -> None:
    """Raise `ModelError` if the model at `path` has no layer named in `targets`; reads no weights."""
    from accelerate import init_empty_weights

    from rlcli.model.lora import target_names

    with init_empty_weights():
        config = read_config(path)
        target_names(auto_class(config).from_config(config), targets)


def check_weights(path: str, on_note: Callable[[str], None] = lambda text: None) -> None:
    """Read each weight of the model at `path` (folder or hub id) once, a tensor at a time. Raises `ModelError` for NaN
    and infinity, and for an incomplete file. Notes if the weights of a hub id are not in the cache yet."""
    from rlcli.model.weight_check.finite_weights import check_finite

    files = []
    with contextlib.suppress(ModelError) if not Path(path).is_dir() else contextlib.nullcontext():  # only some of them
        files = weight_files(path)
    if not files:
        on_note(f"the weights of {path} are not downloaded yet, so they are not checked")
    for file in files:
        check_finite(path, _tensors(file))


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each weight in a file, with its name. Raises `ModelError` if the file is incomplete."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        yield from mapped_tensors(file)
        return
    try:
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a complete weights file: {first_line(error)}", "download it again") from error


def _local_shapes(folder: Path) -> dict[str, list[int]] | None:
    """Name and shape of every weight from the headers of safetensors files; None for `.bin` files."""
    from safetensors import SafetensorError, safe_open

    files = _weight_files(folder)
    if files[0].suffix == ".bin":
        return None
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                shapes.update({name: opened.get_slice(name).get_shape() for name in opened.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{file}: not a complete safetensors file: {error}", "download it again") from error
    return shapes


def weight_files(path: str) -> list[Path]:
    """The files of the model at `path`, a folder or a hub id; empty if a hub id is not in the cache. Raises
    `ModelError` if only some are there."""
    if Path(path).is_dir():
        return _weight_files(Path(path))
    cached = cached_config(path)
    return _weight_files(cached.parent) if cached else []


def _weight_files(folder: Path) -> list[Path]:
    """At least one; all exist. Raises `ModelError`."""
    kinds = [folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    index = next((path for kind in kinds if (path := kind.with_name(f"{kind.name}.index.json")).is_file()), None)
    if index:
        try:
            names = set(read_json(index, links=True)["weight_map"].values())
            if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
                raise ValueError(f"{outside[0]!r:.100} is not in the folder")
            files = sorted(folder / name for name in names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a weights index: {first_line(error)}", "download it again") from error
    else:
        files = [kind for kind in kinds if kind.is_file()][:1]
    if not files:
        raise ModelError(f"{folder}: no weights (model.safetensors)", "download the whole model")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} weight files are missing, {missing[0]} the first", "download the whole model"
        )
    return files


def _parameters(auto_model: Any, config: PreTrainedConfig) -> dict[str, list[int]]:
    """Name and shape of every weight in the model of `config`."""
    from accelerate import init_empty_weights

    from rlcli.model.tensor_names import named_weights

    with init_empty_weights():
        try:
            lm = auto_model.from_config(config)
        except Exception as error:  # arithmetic with impossible sizes may raise anything
            raise ModelError(
                f"{config.name_or_path}: config.json is not valid: {type(error).__name__}: {first_line(error)}",
                THEIR_CONFIG,
            ) from error
    lm.tie_weights()  # moving parameters to the meta device untied them
    return {name: list(tensor.shape) for name, tensor in named_weights(lm)}


def _check_shapes(path: str, wanted: dict[str, list[int]], shapes: dict[str, list[int]], kind: str) -> None:
    """Refuse weights that do not match the config: missing ones would be filled with random numbers."""
    from rlcli.model.tensor_names import stored_shapes

    hint = THEIR_CONFIG
    if not wanted.keys() <= shapes.keys():  # experts are fused in memory only
        wanted = {
            part: part_shape
            for name, shape in wanted.items()
            for part, part_shape in stored_shapes(name, shape, kind).items()
        }
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            raise ModelError(f"{path}: {name} is {shapes[name]} in the weights and {shape} by config.json", hint)
    missing = [name for name in wanted if name not in shapes]
    # If no name matches, the file's names differ from the model's; transformers may know the mapping.
    if missing and len(missing) < len(wanted):
        raise ModelError(f"{path}: {missing[0]}, which config.json requires, is not in the weights", hint)


def weights_by_layer(names: Iterable[str]) -> dict[int, set[str]]:
    """Number of a layer of the language model → the rest of the names of its weights.

    >>> weights_by_layer(["model.layers.3.mlp.gate.weight", "visual.layers.7.proj.weight"])
    {3: {'mlp.gate.weight'}}
    """
    layers: dict[int, set[str]] = {}
    for name in names:
        matched = None if name.startswith(OTHER_LAYERS) else LAYER.search(name)
        if matched:
            layers.setdefault(int(matched[1]), set()).add(matched[2])
    return layers


def check_extra_layers(path: str, present: Iterable[int], layers: int, predicting: int) -> None:
    """Refuse weights of more layers than `layers`, which would be left out. predicting: number of further layers, which
    predict several tokens and are not trained."""
    extra = sorted(layer for layer in present if layer >= layers + predicting)
    if extra:
        raise ModelError(
            f"{path}: config.json has {layers} layers, and the weights {len(extra)} more, the first being layer "
            f"{extra[0]}",
            THEIR_CONFIG,
        )


def _check_tokenizer(path: str, vocab_size: int, *, has_template: bool) -> int:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise ModelError(
            f"{path}: the tokenizer does not load: {first_line(error)}", "add tokenizer.json to the model"
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):  # what transformers creates without files
        raise ModelError(f"{path}: the tokenizer is empty", "add tokenizer.json to the model")
    size = max(vocabulary.values()) + 1
    if size > vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has ids up to {size - 1}, but the model's vocabulary ends at {vocab_size - 1}",
            "use the tokenizer that the model was trained with, or resize its embeddings",
        )
    if not tokenizer.chat_template and not has_template:
        raise ModelError(
            f"{path}: the tokenizer has no chat template, as base models have none",
            "give one: --set model.chat_template=chatml (or plain, or a Jinja file), or choose the model's instruct "
            "version",
        )
    return size
