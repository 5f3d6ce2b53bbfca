"""Write the trained weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from rlcli.data.prompts.template_choice import choose_template
from rlcli.errors import ModelError
from rlcli.model.io.checkpoint_files import TensorReader, load_tensors
from rlcli.model.io.loading import read_model
from rlcli.model.io.model_config import add_engine_keys, auto_class, read_config
from rlcli.model.io.weight_files import WeightFiles
from rlcli.model.lora import LoraSpec, add_lora, is_adapter, saved_names, write_adapter
from rlcli.model.tensor_names import PREDICTING, kept_dtype, named_weights, stored, stored_shapes
from rlcli.model.value_model import read_value_config, value_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INDEX = "model.safetensors.index.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with the image and video processors of vision-language models."""

Read = Callable[[Iterable[str]], Mapping[str, Tensor]]
"""Reads tensors by their names."""


class Stored:
    """The tensors in the distributed checkpoint `folder` whose names start with `prefix`, named without it, read in one
    process without a process group.

    Each tensor is read whole, for any number of ranks that wrote it; no other tensors are read. The files are assumed
    to be undamaged: see `read_checkpoint`.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        self._reader = TensorReader(folder)
        metadata = self._reader.metadata.state_dict_metadata
        self.shapes: dict[str, torch.Size] = {
            name.removeprefix(prefix): entry.size for name, entry in metadata.items() if name.startswith(prefix)
        }
        self._dtypes = {name: metadata[prefix + name].properties.dtype for name in self.shapes}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors on the CPU, in their stored dtype."""
        state = {self.prefix + name: torch.empty(self.shapes[name], dtype=self._dtypes[name]) for name in names}
        load_tensors(state, self._reader)
        return {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}


def write_model(
    stored: Stored,
    base: str,
    tokenizer: str,
    dtype: torch.dtype,
    folder: Path,
    stops: Sequence[int] = (),
    *,
    computed_in: torch.dtype = torch.float32,
) -> None:
    """Write the causal language model `stored`, trained from `base`, to the empty `folder`, with its config, generation
    config and tokenizer. dtype: of the weights in the files. stops: every id that ends a response, for the generation
    config; none: those of the base. computed_in: the dtype to which training and rollout rounded the weights; they are
    first rounded to it here, too. `ModelError` if base and weights do not match.
    """
    config = read_config(base)
    lm = _skeleton(auto_class(config), config)
    _write(lm, config, stored, dtype, folder, computed_in, _carried(base, config))
    _write_generation_config(base, config, folder, stops)
    write_tokenizer(tokenizer, folder)


def write_value(
    stored: Stored,
    base: str,
    tokenizer: str,
    dtype: torch.dtype,
    folder: Path,
    *,
    computed_in: torch.dtype = torch.float32,
) -> None:
    """Like `write_model`, for a value model: transformers' classification class, one label, head `score.weight`."""
    config = read_value_config(base)
    _write(_skeleton(value_class(config), config), config, stored, dtype, folder, computed_in)
    write_tokenizer(tokenizer, folder)


def write_lora(stored: Stored, spec: LoraSpec, base: str, dtype: torch.dtype, folder: Path) -> None:
    """Write the adapter `stored` in the format of peft and vLLM, with the base's tokenizer; `adapter_config.json` names
    the base."""
    config = read_config(base)
    peft = add_lora(_skeleton(auto_class(config), config), spec, base, meta=True)
    names = [name for name, _ in peft.base_model.model.named_parameters() if is_adapter(name)]
    _check(stored, names, base)
    state = saved_names(peft, {name: tensor.to(dtype) for name, tensor in stored.read(names).items()})
    write_adapter(peft, state, folder)
    write_tokenizer(base, folder)


def write_merged(adapter: Path, base: str, dtype: torch.dtype, folder: Path, stops: Sequence[int] = ()) -> None:
    """Write `base` with the adapter in the folder `adapter` added to its weights (in float32), like `write_model`."""
    from peft import PeftModel

    config = read_config(base)
    lm = read_model(auto_class(config), base, config, dtype=torch.float32)
    merged = PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload(safe_merge=True)
    weights = dict(named_weights(merged))  # a tied head is not among them
    shapes = {name: weight.shape for name, weight in weights.items()}
    kind = config.model_type

    def read(names: Iterable[str]) -> Mapping[str, Tensor]:
        return {name: weights[name].detach() for name in names}

    _write_weights(shapes, read, kind, dtype, folder, _carried(base, config))
    _write_config(config, type(merged).__name__, dtype, folder)
    _write_generation_config(base, config, folder, stops)
    write_tokenizer(base, folder)


def write_tokenizer(path: str, folder: Path, template: str = "") -> None:
    """Write the tokenizer of the model at `path`, including its chat template, and its image processors, if it has
    some. template: as `model.chat_template`."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    choose_template(tokenizer, template)
    tokenizer.save_pretrained(folder)
    for name in PROCESSORS:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


def _skeleton(auto_model: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` without weights."""
    with init_empty_weights():
        lm: PreTrainedModel = auto_model.from_config(config)
    lm.tie_weights()  # moving parameters to the meta device had untied them
    return lm


@dataclass(frozen=True)
class Carried:
    """Tensors of a base's files that an export copies, converted to its dtype."""

    shapes: dict[str, list[int]]
    read: Callable[[str], Tensor]


NOTHING = Carried({}, lambda name: torch.empty(0))


def _carried(base: str, config: PreTrainedConfig) -> Carried:
    """The multi-token prediction layers of `base`, if its files have some."""
    files = WeightFiles.find(base, tied=False, kind=config.model_type)
    if files is None:
        return NOTHING
    return Carried({name: files.shape(name) for name in files.names if name.startswith(PREDICTING)}, files.tensor)


def _write(
    lm: PreTrainedModel,
    config: PreTrainedConfig,
    stored: Stored,
    dtype: torch.dtype,
    folder: Path,
    computed_in: torch.dtype,
    carried: Carried = NOTHING,
) -> None:
    names = [name for name, _ in named_weights(lm)]  # a tied head is not among them
    _check(stored, names, config._name_or_path)
    shapes = {name: stored.shapes[name] for name in names}

    def read(names: Iterable[str]) -> Mapping[str, Tensor]:
        return {name: tensor.to(kept_dtype(name, computed_in)) for name, tensor in stored.read(names).items()}

    _write_weights(shapes, read, config.model_type, dtype, folder, carried)
    _write_config(config, type(lm).__name__, dtype, folder)


def _check(stored: Stored, names: Iterable[str], base: str) -> None:
    missing = [name for name in names if name not in stored.shapes]
    if missing:
        raise ModelError(
            f"{stored.folder} holds no {missing[0]}, which {base} has ({len(missing)} such tensors)",
            "the base model has changed since the run started: restore its files",
        )


def _write_weights(
    shapes: Mapping[str, torch.Size], read: Read, kind: str, dtype: torch.dtype, folder: Path, carried: Carried
) -> None:
    """Write safetensors files of bounded size, with one at a time in memory, and an index if there are several. The
    experts of a layer, which are one tensor in `shapes`, are stored one by one. kind: the `model_type`."""
    parts = {
        part: (name, part_shape)
        for name, shape in shapes.items()
        for part, part_shape in stored_shapes(name, shape, kind).items()
    }
    part_shapes = {part: shape for part, (_, shape) in parts.items()} | carried.shapes
    plan = split_torch_state_dict_into_shards(
        {part: torch.empty(shape, dtype=kept_dtype(part, dtype), device="meta") for part, shape in part_shapes.items()}
    )
    for file, names in plan.filename_to_tensors.items():
        parameters = read(list(dict.fromkeys(parts[part][0] for part in names if part in parts)))
        contents = dict(part for name, tensor in parameters.items() for part in stored(name, tensor, kind))
        contents |= {part: carried.read(part) for part in names if part in carried.shapes}
        tensors = {part: contents[part].to(kept_dtype(part, dtype)).contiguous() for part in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_config(config: PreTrainedConfig, architecture: str, dtype: torch.dtype, folder: Path) -> None:
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(folder)
    add_engine_keys(folder)


def _write_generation_config(source: str, config: PreTrainedConfig, folder: Path, stops: Sequence[int]) -> None:
    """Write the generation config of `source`, with `stops` as end tokens: a base model's own names only the end of a
    text, so a server would let it continue with an invented turn after its answer."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # the source has none
        generation = GenerationConfig.from_model_config(config)
    if stops:
        generation.eos_token_id = stops[0] if len(stops) == 1 else list(stops)
    # save_pretrained would refuse files that published models use (a temperature without sampling).
    generation.to_json_file(folder / "generation_config.json")
