"""The training backend: one model on this rank, whatever parallelism is behind it.

Roles compute losses and know nothing of shards, meshes or optimizers: they load models through a `Loader` and use them
through `TrainingBackend`. The controller assigns work to data ranks (`rlcli.model.parallel.parallel_dims`), so a
backend with context, tensor or expert parallelism changes neither the loop nor an algorithm. `fsdp_backend.py`
implements both with FSDP2; to add another backend, copy its shape and build it in `Worker.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlcli.algorithms.ranks import Ranks
from rlcli.training.worker.train_batch import MicroBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.logprobs import Likeliest
    from rlcli.model.lora import LoraSpec
    from rlcli.model.packed_batch import PackedBatch
    from rlcli.model.parallel.offload import Offload
    from rlcli.model.parallel.weight_delta import LastSent

MicroLoss = Callable[[MicroBatch, Any], "tuple[Tensor, dict[str, Tensor]]"]
"""Of a micro-batch that is not empty and the model's outputs for it (`TokenOutputs` or `ValueOutputs`, with gradient):
the loss, a scalar that summed over ranks and micro-batches is the minibatch's, and sums over its tokens, float64
scalars, to report."""


class TrainingBackend(Protocol):
    """A model, its optimizer, and their place among the ranks.

    Every method is collective: all ranks of the group call it in the same order, each with its data rank's rows. Ranks
    with the same data rank get the same rows.

        model = load("policy", "path/to/model")
        before = model.log_probs(micro.packed, temperature=1.0)
        sums = model.update([micro], loss, lr=1e-6, temperature=1.0)

    data_ranks: number of parts that a step's rows are divided into. ranks: sums and concatenations over them. dtype: of
    computation, export and weight sync. adapter_scale: factor of the product of a LoRA adapter's factors.
    """

    data_ranks: int
    ranks: Ranks

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def adapter_scale(self) -> float: ...

    def log_probs(self, batch: PackedBatch, temperature: float) -> Tensor:
        """log π of the response tokens, float32 `[R]`, without gradient. Only of a policy."""
        ...

    def likeliest(self, batch: PackedBatch, temperature: float, k: int, below: int) -> Likeliest:
        """As `log_probs`, with the k likeliest tokens of each position among the ids less than `below`."""
        ...

    def values(self, batch: PackedBatch) -> Tensor:
        """Values of the states before the response tokens, float32 `[R]`, without gradient. Only of a value model."""
        ...

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """Within the block the model computes without its adapter."""
        ...

    def rounded_again(self, unit: float, seed: int) -> AbstractContextManager[None]:
        """Within the block the model's layers round their outputs once more, at random (`rlcli.model.rounding`)."""
        ...

    def update(self, micros: Sequence[MicroBatch], loss: MicroLoss, lr: float, **forward: Any) -> dict[str, float]:
        """One optimizer step over the micro-batches of a minibatch; every rank has equally many, some of them empty.
        forward: options of the model's forward pass. The backward pass runs on `data_ranks` × the loss.

        Returns the losses' sums, added up, and `grad_norm` ÷ data_ranks: added up over data ranks, the norm over all
        ranks before clipping; with experts also what `rlcli.model.mixture.routing.load_metrics` gives, and in float16
        `gradient_scale`, likewise. Empty if there
        are no micro-batches. If the gradient is bad (the loss, an output or a gradient is not finite, or its norm
        is above fault_tolerance.bad_grad_norm) no rank steps, and only `grad_norm` and `bad`, 1 ÷ data_ranks, are
        returned. Raises RunFailed if ranks disagree about gradients or weights.
        """
        ...

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole, in `dtype`, under their checkpoint names, one after another; an adapter is added to its
        weights. A tensor may be the parameter itself: copy what must outlast the next update."""
        ...

    def stream_changes(self, last: LastSent, most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """What differs from the weights that were sent last, as `LastSent.changes` gives it. Not with an adapter."""
        ...

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        """As `stream_weights`, without the adapter."""
        ...

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        """Write the adapter in peft's format to `folder`, on each rank; returns its tensors, float32, by name."""
        ...

    def state(self, name: str) -> dict[str, Tensor]:
        """What training has changed, as DCP saves it: tensors under keys that begin with `name.`, not copied, sharded
        as they are. Saved once however many ranks hold a copy."""
        ...

    def load_state(self, folder: Path, name: str) -> None:
        """Read what DCP saved of `state(name)` to `folder`, on any number of ranks. Not collective. CheckpointError if
        the folder is of another model."""
        ...

    def register(self, offload: Offload, name: str) -> None:
        """Let `offload` move the weights as `name`, and the optimizer's states as `name.optimizer`."""
        ...


class Loader(Protocol):
    """Loads models with a backend, all over the same ranks. Collective."""

    def __call__(
        self,
        kind: Literal["policy", "value"],
        path: str,
        *,
        lora: LoraSpec | None = None,
        trained: bool = True,
        replays: bool = False,
    ) -> TrainingBackend:
        """kind: a causal language model, or a value model; path: of its folder or hub id. lora: train an adapter
        instead of the weights. trained=False: a reference, without optimizer. replays: packs go through the experts of
        their routes. ModelError if it cannot be used."""
        ...
