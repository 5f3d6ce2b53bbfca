"""Saves trained models and their optimizers as torch's distributed checkpoints (DCP): each rank writes its shards, and
any number of ranks can load them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from rlcli.errors import CheckpointError
from rlcli.model.io.checkpoint_files import METADATA, TensorPlanner, TensorReader, load_tensors, load_values, refusing
from rlcli.model.tensor_names import fixed_weights
from rlcli.support.files import FileFacts, described
from rlcli.support.machine.gpus import gpu_available, gpu_rng_state, set_gpu_rng_state

Trained = Mapping[str, tuple[nn.Module, Optimizer]]
"""Models and their optimizers, by their name in the checkpoint."""


def trained_state(trained: Trained) -> dict[str, Tensor]:
    """The trained parameters and their optimizer states, by name, without copying or gathering. The base of an adapter
    is omitted; tied parameters are included once; fixed and frozen weights are included."""
    state: dict[str, Tensor] = {}
    for owner, (model, optimizer) in trained.items():
        for name, parameter in _parameters(model, optimizer):
            state[f"{owner}.model.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{owner}.optimizer.{name}.{key}"] = value
        state |= {f"{owner}.model.{name}": tensor for name, tensor in _unchanged(model)}
    return state


def _to_cpu(tensor: Tensor) -> Tensor:
    """Always a copy: for a tensor on the CPU, `.to` alone makes none."""
    return tensor.detach().to("cpu", copy=True)


def copied(state: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor] = _to_cpu) -> dict[str, Tensor]:
    """A copy in this machine's memory, unaffected by later updates. copy: copies one tensor."""
    return {name: copy(tensor) for name, tensor in state.items()}


def rng_state() -> dict[str, Any]:
    """States of all random number generators of this process, as plain values that `torch.load` accepts without
    pickle."""
    import numpy as np

    kind, keys, *rest = np.random.get_state()
    numpy = (kind, np.asarray(keys).tolist(), *rest)
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    if gpu_available():
        state["cuda"] = gpu_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `rng_state`; the GPU's only if this machine has one and the saved state includes it."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and gpu_available():
        set_gpu_rng_state(state["cuda"])


def save_state(
    state: Mapping[str, Tensor], rank_state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup
) -> dict[str, FileFacts]:
    """Write `state`, and the values `rank_state` of this rank (`rank-{r}.pt`), to the new folder `folder`. Returns
    name → size and sha256 of the files that this rank wrote.

    Collective over `group`. An error on one rank is raised on all of them: DCP's CheckpointException.
    """
    rank = dist.get_rank(group)
    writer = _Writer(folder, rank_state, rank)
    dcp.save(dict(state), storage_writer=writer, process_group=group)
    if rank == 0:
        writer.written[METADATA] = described(folder / METADATA)
    return writer.written


def load_state(
    trained: Trained,
    folder: Path,
    on_tensor: Callable[[], None] = lambda: None,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fill models and optimizers from `folder`, whatever the number of ranks that wrote it. `on_tensor` is called after
    each tensor. extra: further tensors to fill if they were saved.

    Not collective. Reads tensor by tensor into the parameters themselves. An optimizer's state for a parameter that had
    no step when the folder was written is dropped. `CheckpointError` if the folder does not hold these models, or
    cannot be read.
    """
    reader = TensorReader(folder)
    saved: Mapping[str, TensorStorageMetadata] = reader.metadata.state_dict_metadata
    wanted = {key: tensor for key, tensor in extra.items() if key in saved}
    for owner, (model, optimizer) in trained.items():
        for name, parameter in _parameters(model, optimizer):
            key = f"{owner}.model.{name}"
            _check_fits(folder, key, parameter, saved)
            wanted[key] = parameter.detach()
            prefix = f"{owner}.optimizer.{name}."
            stored = {k.removeprefix(prefix): saved[k] for k in saved if k.rpartition(".")[0] + "." == prefix}
            optimizer.state[parameter] = _allocated(parameter, optimizer.state.get(parameter, {}), stored)
            if not stored:
                del optimizer.state[parameter]
            wanted |= {prefix + name: value for name, value in optimizer.state.get(parameter, {}).items()}
        for name, tensor in _unchanged(model):
            _check_fits(folder, f"{owner}.model.{name}", tensor, saved)
            wanted[f"{owner}.model.{name}"] = tensor
        optimizer.zero_grad(set_to_none=True)
    load_tensors(wanted, reader, TensorPlanner(on_tensor))


def load_own(folder: Path, rank: int) -> dict[str, Any] | None:
    """The `rank_state` that `rank` saved with `save_state`; None if there was no such rank."""
    path = folder / _rank_file(rank)
    rank_state: dict[str, Any] | None = load_values(path) if path.is_file() else None
    return rank_state


def restore_rng_state(folder: Path, rank: int) -> None:
    """Restore the `rng_state` that `rank` saved as its `rank_state`; a rank that did not exist then keeps its state."""
    rank_state = load_own(folder, rank)
    if rank_state is not None:
        with refusing(folder / _rank_file(rank)):
            set_rng_state(rank_state)


class _Writer(FileSystemWriter):
    """Writes the values of this rank next to its part of the tensors, and hashes both inside DCP's write, which reports
    an error on one rank to all."""

    def __init__(self, folder: Path, rank_state: Mapping[str, Any], rank: int) -> None:
        super().__init__(folder)
        self._folder, self._rank_state, self._group_rank = folder, rank_state, rank
        self.written: dict[str, FileFacts] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by DCP on each rank."""
        try:
            result = super().write_data(plan, planner)
            with (self._folder / _rank_file(self._group_rank)).open("wb") as file:
                torch.save(self._rank_state, file)
                file.flush()
                os.fsync(file.fileno())
            names = [
                _rank_file(self._group_rank),
                *(path.name for path in self._folder.glob(f"__{self._group_rank}_*")),
            ]
            self.written = {name: described(self._folder / name) for name in names}
            return result
        except Exception as error:
            self._remove_files()
            raise _cause(error) from error

    def _remove_files(self) -> None:
        """Remove the files of this rank: on a full disk the run needs the space for its records."""
        for path in [self._folder / _rank_file(self._group_rank), *self._folder.glob(f"__{self._group_rank}_*")]:
            path.unlink(missing_ok=True)


def _rank_file(rank: int) -> str:
    """Name of the file with the `rank_state` of `rank`."""
    return f"rank-{rank}.pt"


def _cause(error: BaseException) -> BaseException:
    """The operating system's error that caused torch's error, which reaches other ranks without its context."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters by name, each once."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Within FSDP2's passes a model's parameters are gathered copies, which the optimizer does not have.
    assert {id(parameter) for _, parameter in trained} == optimized, "the model is in the middle of a pass"
    return trained


def _unchanged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a checkpoint that no optimizer changes: fixed tensors, and the parts named by `model.freeze`."""
    frozen: frozenset[str] = getattr(model, "frozen", frozenset())
    frozen_weights = ((name, parameter.detach()) for name, parameter in model.named_parameters() if name in frozen)
    return chain(fixed_weights(model), frozen_weights)


def _check_fits(folder: Path, key: str, parameter: Tensor, saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise `CheckpointError` unless the checkpoint has a tensor `key` of the parameter's shape."""
    if key not in saved or saved[key].size != parameter.shape:
        problem = f"{list(saved[key].size)}, not {list(parameter.shape)}" if key in saved else "not there"
        raise CheckpointError(
            f"{folder}: {key} is {problem}: the checkpoint is of another model",
            "use the model.path, lora and critic settings that it was made with",
        )


def _allocated(
    parameter: nn.Parameter, state: Mapping[str, Tensor], stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """An optimizer's state tensors for a parameter: existing ones, and new ones for those stored, sharded like it."""
    tensors = dict(state)
    for key, saved in stored.items():
        if key not in tensors and saved.size == parameter.shape:
            tensors[key] = torch.zeros_like(parameter.detach(), dtype=saved.properties.dtype)
        elif key not in tensors:
            # AdamW's `step`, which its fused kernel needs on the parameter's device.
            tensors[key] = torch.zeros(saved.size, dtype=saved.properties.dtype, device=parameter.device)
    return tensors
