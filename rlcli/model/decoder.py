"""Base class of the policy and the value model: a Hugging Face decoder that reads packs, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcli.model.attention import ATTENTION, Segments
from rlcli.model.delta_net import packs
from rlcli.model.device_copies import upload
from rlcli.model.mixture.routing import Replay
from rlcli.model.packed import PackedBatch
from rlcli.model.parallel.buckets import buckets
from rlcli.model.parallel.context_parallel import ContextGroup, Run
from rlcli.model.tensor_names import has_vision_encoder, named_weights, vision_modules

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel


class Decoder(nn.Module):
    """A Hugging Face model with its head, wrapped so that FSDP2 gathers the head's weight with its root.

    lm: the transformers model; it is set to the attention `rlcli_packed`. dtype: of computation, export and weight
    sync. source: folder or hub id that it was loaded from.
    """

    def __init__(self, lm: PreTrainedModel, *, dtype: torch.dtype, source: str) -> None:
        super().__init__()
        lm.set_attn_implementation(
            ATTENTION if not has_vision_encoder(lm) else {"text_config": ATTENTION, "vision_config": "sdpa"}
        )
        packs(lm)
        self.lm = lm
        self.dtype = dtype
        self.source = source
        self.context: ContextGroup | None = None
        """The ranks that divide each pack's tokens; None: each rank computes whole packs."""
        self.replay: Replay | None = None
        """Routes tokens to the experts that the engine chose; None: the routers decide."""
        self.frozen: frozenset[str] = frozenset()
        """Names of the model's parameters that are not trained (`model.freeze`)."""

    def local_part(self, batch: PackedBatch) -> PackedBatch | Run:
        """The part of a pack that this rank computes: the pack, or a run of its tokens."""
        return batch if self.context is None else self.context.run_of(batch)

    def hidden(self, local: PackedBatch | Run, segments: Segments) -> Float[Tensor, "R H"]:
        """For each response token that this rank predicts, the last hidden state of the token before it. segments:
        of the whole pack."""
        if self.replay is not None:
            self.replay.routes = local.routes
        states: Tensor = self.lm.base_model(
            input_ids=local.input_ids[None],
            position_ids=local.position_ids[..., None, :],  # [1, T], or [3, 1, T]
            segments=segments,
            **({"divided": local} if isinstance(local, Run) else _image_inputs(local)),
            use_cache=False,
        ).last_hidden_state[0]
        return states.index_select(0, local.response_index)

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """All weights, gathered, one after another under their checkpoint names; a tied head is omitted.

        Collective: every rank iterates to the end, in step. A tensor may be the parameter itself: copy what must
        outlast the next update. dtype: the dtype to cast to; unset: the model's dtype. Fixed tensors keep
        theirs (`rlcli.model.tensor_names`).
        """
        return gathered(named_weights(self.lm), dtype or self.dtype)


def _image_inputs(batch: PackedBatch) -> dict[str, Tensor]:
    """The pack's image inputs, on the device. Uploaded per pass: those of all micro-batches of a step would take
    gigabytes there."""
    return dict(zip(batch.image_inputs, upload([*batch.image_inputs.values()], batch.input_ids.device), strict=True))


def blocks(lm: PreTrainedModel) -> Iterator[nn.Module]:
    """The layers of the vision encoder, if there is one, then those of the decoder, in the order of the forward
    pass."""
    for module in vision_modules(lm):
        yield from (layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer))
    yield from lm.base_model.language_model.layers if has_vision_encoder(lm) else lm.base_model.layers


def gathered(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each of the named `weights` in `dtype`, gathered from all ranks. Collective (see `buckets`)."""
    return chain.from_iterable(buckets(weights, dtype))
