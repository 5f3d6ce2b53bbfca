"""What a model's files say of it, without reading weights: is it one that can be trained here?"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlcli.errors import ModelError
from rlcli.registry import near

SUPPORTED = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""`model_type`s whose packed log-probs are tested against their own padded forward pass."""

THEIR_CONFIG = "use the config.json that these weights came with"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `check_model` found.

    vocab_size: rows of the embedding. tokenizer_size: one more than the tokenizer's largest id. max_positions: longest
    sequence. parameters: how many; None where only the weights would tell (hub ids, `.bin` files).
    """

    path: str
    architecture: str
    vocab_size: int
    tokenizer_size: int
    max_positions: int
    parameters: int | None


def check_model(path: str, key: str = "model.path") -> ModelFacts:
    """Raise `ModelError` where the model at `path` (folder or hub id) could not be trained; reads no weights.

    key: where the path was given, for the error.
    """
    config = read_config(path, key)
    from transformers import AutoModelForCausalLM  # seconds, which a folder that is not there does not cost

    folder = Path(path)
    tokenizer_size = _check_tokenizer(path, config.vocab_size)
    shapes = _local_shapes(folder) if folder.is_dir() else None
    if shapes is not None:
        _check_shapes(path, _parameters(AutoModelForCausalLM, config), shapes)
    return ModelFacts(
        path=path,
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        tokenizer_size=tokenizer_size,
        max_positions=config.max_position_embeddings,
        parameters=None if shapes is None else sum(prod(shape) for shape in shapes.values()),
    )


def check_value_model(path: str, tokenizer_size: int) -> None:
    """Raise `ModelError` where a value model could not start from `path` (folder or hub id); reads no weights.

    tokenizer_size: one more than the largest id of the policy's tokenizer. The value model reads the policy's tokens,
    so it needs no tokenizer of its own.
    """
    from rlcli.model.value import HEAD, foreign_head, has_head, read_value_config, value_class

    config = read_value_config(path)
    if config.vocab_size < tokenizer_size:
        raise ModelError(
            f"{path}: the policy's tokenizer has ids up to {tokenizer_size - 1}, but this model's vocabulary ends at "
            f"{config.vocab_size - 1}",
            "give a value model of the policy's family, or leave critic.path out",
        )
    shapes = _local_shapes(Path(path)) if Path(path).is_dir() else None
    if shapes is None:
        return
    wanted = _parameters(value_class(config), config)
    # Where no name is known, the file has other names than the model, and loading it must tell.
    for name, shape in shapes.items() if wanted.keys() & shapes.keys() else ():
        if not name.startswith(("model.", "lm_head.")) and wanted.get(name) != shape:
            raise foreign_head(path, name, shape)
    if not has_head(config) and f"{HEAD}.weight" not in shapes:
        del wanted[f"{HEAD}.weight"]  # it is made anew
    _check_shapes(path, wanted, shapes)


def check_place(path: str, key: str = "model.path") -> None:
    """Raise `ModelError` where there can be no model at `path`, as far as that is told without importing anything."""
    folder = Path(path)
    if folder.is_file():
        raise ModelError(f"{key} = '{path}' is a file", "give the folder that holds config.json")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{key} = '{path}': the folder holds no config.json", "give a Hugging Face model folder")
    elif not _HUB_ID.fullmatch(path):
        raise ModelError(f"{key} = '{path}': there is no such folder", "give a model folder or a hub id (owner/name)")


def read_config(path: str, key: str = "model.path") -> Any:
    """The model's config, once everything in it is known to be supported. key: where the path was given."""
    check_place(path, key)
    from transformers import AutoConfig

    folder = Path(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers' validators raise errors of their own kinds
        if folder.is_dir():
            raise ModelError(
                f"{path}/config.json does not load: {_first_line(error).rstrip('.')}",
                f"see that it is whole and of a supported kind ({', '.join(SUPPORTED)})",
            ) from error
        raise ModelError(
            f"{key} = '{path}' is no folder here, and the hub does not give it: {_first_line(error)}",
            "check the name, the network and the login (`hf auth login`), or download it and give the folder",
        ) from error
    _check_config(path, config)
    return config


SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "vocab_size", "max_position_embeddings"),
)
"""What config.json counts: there is no model with 0 of it."""


def check_sizes(path: str, config: Any) -> None:
    """Raise `ModelError` for a size that no model has: arithmetic with it fails far from config.json."""
    from rlcli.model.plain_config import MOST

    for name in SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{path}: config.json has {name} = {size}, and a model needs 1 or more", THEIR_CONFIG)
        if isinstance(size, int) and size >= MOST:
            raise ModelError(f"{path}: config.json has {name} = {size:.3g}, which no model has", THEIR_CONFIG)


def _check_config(path: str, config: Any) -> None:
    def refuse(what: str, mend: str = "choose another model") -> None:
        raise ModelError(f"{path}: {what}", mend)

    check_sizes(path, config)
    if config.model_type not in SUPPORTED:
        refuse(f"the architecture '{config.model_type}' is not supported", near(config.model_type, SUPPORTED))
    # Where a config tells the kind of each layer, its window applies to those of that kind; otherwise to all layers.
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if set(layers) - {"full_attention"} if layers else window:
        refuse(f"attention is not full in every layer (sliding_window = {window})")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        refuse(f"rope_type '{rope}' makes a token's log-prob depend on what else is in the batch")
    if getattr(config, "quantization_config", None):
        refuse("the weights are quantised and cannot be trained", "choose the unquantised model")


def check_lora(path: str, targets: str) -> None:
    """Raise `ModelError` where the model at `path` has no layer of a name among `targets`; reads no weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from rlcli.model.lora import target_names

    with init_empty_weights():
        target_names(AutoModelForCausalLM.from_config(read_config(path)), targets)


def check_weights(path: str, on_note: Callable[[str], None] = lambda text: None) -> None:
    """Read each weight of the model at `path` (folder or hub id) once, a tensor at a time. Raises `ModelError` for NaN
    and infinity, and for a file that is not whole. Notes it where the weights of a hub id are not in the cache yet."""
    from rlcli.model.finite import check_finite

    if Path(path).is_dir():
        files = _weight_files(Path(path))
    else:
        snapshot, files = _cached(path), []
        with contextlib.suppress(ModelError):  # only some of them
            files = _weight_files(snapshot) if snapshot else []
    if not files:
        on_note(f"the weights of {path} are not downloaded yet, and so not looked at")
    for file in files:
        check_finite(path, _tensors(file))


def _cached(path: str) -> Path | None:
    """The snapshot of a hub id in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Each weight in a file, with its name. Raises `ModelError` where the file is not whole."""
    import torch
    from safetensors import safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
            return
        with open(file, "rb") as opened:
            is_zip = opened.read(2) == b"PK"  # what torch wrote before 1.6 cannot be mapped
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        yield from ((name, value) for name, value in weights.items() if isinstance(value, torch.Tensor))
    except ModelError:  # of who looks at them
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise ModelError(f"{file}: not a whole file of weights: {_first_line(error)}", "download it again") from error


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
            raise ModelError(f"{file}: not a whole safetensors file: {error}", "download it again") from error
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    """At least one; all are there. Raises `ModelError`."""
    index = next(
        (
            folder / n
            for n in ("model.safetensors.index.json", "pytorch_model.bin.index.json")
            if (folder / n).is_file()
        ),
        None,
    )
    if index:
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of weights: {_first_line(error)}", "download it again") from error
    else:
        files = [folder / n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()][:1]
    if not files:
        raise ModelError(f"{folder}: no weights (model.safetensors)", "download the whole model")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} weight files are missing, {missing[0]} the first", "download the whole model"
        )
    return files


def _parameters(auto_class: Any, config: Any) -> dict[str, list[int]]:
    """Name and shape of every parameter that `config` asks for."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        try:
            lm = auto_class.from_config(config)
        except Exception as error:  # whatever arithmetic a model does with sizes that fit no model
            raise ModelError(
                f"{config.name_or_path}: config.json describes no model: {type(error).__name__}: {_first_line(error)}",
                THEIR_CONFIG,
            ) from error
    lm.tie_weights()  # moving parameters to the meta device had parted them
    return {name: list(parameter.shape) for name, parameter in lm.named_parameters()}


def _check_shapes(path: str, wanted: dict[str, list[int]], shapes: dict[str, list[int]]) -> None:
    """Refuse weights that the config does not describe: what is missing would be filled with random numbers."""
    mend = THEIR_CONFIG
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            raise ModelError(f"{path}: {name} is {shapes[name]} in the weights and {shape} by config.json", mend)
    missing = [name for name in wanted if name not in shapes]
    # Where no name is known, the file has other names than the model, which transformers may know how to map.
    if missing and len(missing) < len(wanted):
        raise ModelError(f"{path}: {missing[0]}, which config.json asks for, is not in the weights", mend)


def _check_tokenizer(path: str, vocab_size: int) -> int:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise ModelError(
            f"{path}: the tokenizer does not load: {_first_line(error)}", "add tokenizer.json to the model"
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):  # what transformers makes up where there are no files
        raise ModelError(f"{path}: the tokenizer is empty", "add tokenizer.json to the model")
    size = max(vocabulary.values()) + 1
    if size > vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has ids up to {size - 1}, but the model's vocabulary ends at {vocab_size - 1}",
            "use the tokenizer that the model was trained with, or resize its embeddings",
        )
    if not tokenizer.chat_template:
        mend = (
            "add chat_template.jinja to the folder (that of the model's chat or instruct version, say)"
            if Path(path).is_dir()
            else "give the folder of a copy to which you add chat_template.jinja"
        )
        raise ModelError(
            f"{path}: the tokenizer has no chat template", f"{mend}, or choose the model's chat or instruct version"
        )
    return size


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # What ends in a colon says nothing without the next.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
