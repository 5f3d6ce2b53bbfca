"""The training backend: one model on this rank, whatever parallelism is behind it.

Roles compute losses and know nothing of shards, meshes or optimizers: they load models through a `Loader` and use them
through `PolicyBackend` or `ValueBackend`. The controller assigns work to data ranks
(`rlcli.model.parallel.parallel_dims`), so a backend with context, tensor or expert parallelism changes neither the loop
nor an algorithm. `fsdp_backend.py` implements them with FSDP2; to add another backend, copy its shape and build it in
`Worker.build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, overload

from rlcli.algorithms.ranks import Ranks
from rlcli.training.worker.train_batch import MicroBatch

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from rlcli.model.logprobs import Likeliest
    from rlcli.model.lora import LoraSpec
    from rlcli.model.packed import PackedBatch
    from rlcli.model.parallel.offload import Offload
    from rlcli.model.parallel.weight_delta import LastSent
    from rlcli.model.policy import TokenOutputs
    from rlcli.model.value_model import ValueOutputs


class TrainingBackend(Protocol):
    """A model, its optimizer, and their part among the ranks.

    Every method is collective: all ranks of the group call it in the same order, each with its data rank's rows. Ranks
    with the same data rank get the same rows. One optimizer step on a minibatch:

        for micro, outputs in model.forward(micros, temperature=1.0):
            loss, sums = ...
            model.backward(loss, sums)
        sums = model.step(lr=1e-6)
    """

    data_ranks: int
    """Number of parts that a step's rows are divided into."""
    ranks: Ranks
    """Sums and concatenations over the data ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of computation, export and weight sync."""
        ...

    def backward(self, loss: Float[Tensor, ""], sums: Mapping[str, Tensor]) -> None:
        """The backward pass of the micro-batch that `forward` yielded last, on `data_ranks` × the loss.

        loss: summed over ranks and micro-batches it is the minibatch's. sums: over the micro-batch's tokens, float64
        scalars, to report.
        """
        ...

    def step(self, lr: float) -> dict[str, float]:
        """The optimizer step, after the last backward pass.

        Returns the `sums`, added up, and `grad_norm` ÷ data_ranks: added up over data ranks, the norm over all ranks
        before clipping; with experts also what `rlcli.model.mixture.routing.load_metrics` gives, and in float16
        `gradient_scale`, likewise. Empty if there were no micro-batches. If the gradient is bad (the loss, an output or
        a gradient is not finite, or its norm is above fault_tolerance.bad_grad_norm) no rank steps, and only
        `grad_norm` and `bad`, 1 ÷ data_ranks, are returned. Raises RunFailed if ranks disagree about weights.
        """
        ...

    def state(self, name: str) -> dict[str, Tensor]:
        """The trained state, as DCP saves it: tensors under keys that begin with `name.`, not copied, sharded as they
        are. Saved once however many ranks hold a copy."""
        ...

    def load_state(self, folder: Path, name: str) -> None:
        """Read what DCP saved of `state(name)` to `folder`, on any number of ranks. Not collective. CheckpointError if
        the folder is of another model."""
        ...

    def register(self, offload: Offload, name: str) -> None:
        """Let `offload` move the weights as `name`, and the optimizer's states as `name.optimizer`."""
        ...


class PolicyBackend(TrainingBackend, Protocol):
    """A causal language model, possibly with an adapter."""

    @property
    def adapter_scale(self) -> float:
        """Factor of the product of a LoRA adapter's factors."""
        ...

    def forward(self, micros: Sequence[MicroBatch], **options: float) -> Iterator[tuple[MicroBatch, TokenOutputs]]:
        """The forward pass of each micro-batch of a minibatch that is not empty, with gradient; call `backward` before
        the next one. Every rank has equally many micro-batches, some of them empty.

        options: arguments of the model's forward pass. In float16 all micro-batches come again if their gradients
        overflow. Raises RunFailed, after the last one, if ranks disagree about gradients.
        """
        ...

    def log_probs(self, batch: PackedBatch, temperature: float) -> Float[Tensor, " R"]:
        """log π of the response tokens, float32, without gradient."""
        ...

    def likeliest(self, batch: PackedBatch, temperature: float, k: int, below: int) -> Likeliest:
        """As `log_probs`, with the k likeliest tokens of each position among the ids less than `below`."""
        ...

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """Within the block the model computes without its adapter."""
        ...

    def rounded_again(self, unit: float, seed: int) -> AbstractContextManager[None]:
        """Within the block the model's layers round their outputs once more, at random (`rlcli.model.rounding`)."""
        ...

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole, in `dtype`, under their checkpoint names, one after another; an adapter is added to its
        weights. A tensor may be the parameter itself: copy what must outlast the next update."""
        ...

    def stream_changes(self, last: LastSent, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Differences from the weights that were sent last, as `LastSent.changes` gives them. Not with an adapter."""
        ...

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        """As `stream_weights`, without the adapter."""
        ...

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        """Write the adapter in peft's format to `folder`, on each rank; returns its tensors, float32, by name."""
        ...


class ValueBackend(TrainingBackend, Protocol):
    """A value model: one number for each token."""

    def forward(self, micros: Sequence[MicroBatch], **options: float) -> Iterator[tuple[MicroBatch, ValueOutputs]]:
        """As `PolicyBackend.forward`."""
        ...

    def values(self, batch: PackedBatch) -> Float[Tensor, " R"]:
        """Values of the states before the response tokens, float32, without gradient."""
        ...


class Loader(Protocol):
    """Loads models with a backend, all over the same ranks. Collective."""

    @overload
    def __call__(
        self,
        kind: Literal["policy"],
        path: str,
        *,
        lora: LoraSpec | None = None,
        trained: bool = True,
        replays: bool = False,
    ) -> PolicyBackend:
        """A causal language model of the folder or hub id `path`. lora: train an adapter instead of the weights.
        trained=False: a reference, without optimizer. replays: packs go through the experts of their routes. ModelError
        if it cannot be used."""
        ...

    @overload
    def __call__(self, kind: Literal["value"], path: str) -> ValueBackend:
        """A value model."""
        ...
