"""The base of the policy and the value model: a Hugging Face decoder that reads packs, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcli.model.attention import ATTENTION, Segments
from rlcli.model.delta_net import packs
from rlcli.model.device_copies import upload
from rlcli.model.mixture.routing import Replay
from rlcli.model.packed_batch import PackedBatch
from rlcli.model.parallel.buckets import buckets
from rlcli.model.parallel.context_parallel import ContextGroup, Run
from rlcli.model.tensor_names import named_weights, sees, tower


class Decoder(nn.Module):
    """A Hugging Face model with its head, wrapped so that FSDP2 gathers the head's weight with its root.

    lm: the model, set to the attention `rlcli_packed`. dtype: of computation, export and weight sync. source: the
    folder or hub id it came from. context: the ranks that divide each pack's tokens, if any do. replay: has packs go
    through the experts of their routes, if that is wanted. frozen: names of the parameters that do not train although
    they are the model's own (`model.freeze`).
    """

    def __init__(self, lm: nn.Module, *, dtype: torch.dtype, source: str) -> None:
        super().__init__()
        lm.set_attn_implementation(ATTENTION if not sees(lm) else {"text_config": ATTENTION, "vision_config": "sdpa"})
        packs(lm)
        self.lm = lm
        self.dtype = dtype
        self.source = source
        self.context: ContextGroup | None = None
        self.replay: Replay | None = None
        self.frozen: frozenset[str] = frozenset()

    def own(self, batch: PackedBatch) -> PackedBatch | Run:
        """What this rank computes of a pack: all, or a run of its tokens."""
        return batch if self.context is None else self.context.run_of(batch)

    def hidden(self, own: PackedBatch | Run, segments: Segments) -> Tensor:
        """[R, D]: for each response token that this rank predicts, the last hidden state of the token before it.
        segments: of the pack."""
        if self.replay is not None:
            self.replay.routes = own.routes
        places = own.position_ids[..., None, :]  # [1, T], or [3, 1, T]
        states: Tensor = self.lm.base_model(
            input_ids=own.input_ids[None],
            position_ids=places,
            segments=segments,
            **({"divided": own} if isinstance(own, Run) else _shown(own)),
            use_cache=False,
        ).last_hidden_state[0]
        return states.index_select(0, own.response_index)

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole, one after another under their checkpoint names; a tied head is omitted.

        Collective: every rank iterates to the end, in step. A tensor may be the parameter itself: copy what must
        outlast the next update. dtype: the dtype to cast to; unset: the model's own. Fixed tensors keep
        theirs (`rlcli.model.tensor_names`).
        """
        return whole(named_weights(self.lm), dtype or self.dtype)


def _shown(batch: PackedBatch) -> dict[str, Tensor]:
    """What a pack has of pictures. That of all of a step's micro-batches would take gigabytes on a device."""
    return dict(zip(batch.shown, upload([*batch.shown.values()], batch.input_ids.device), strict=True))


def blocks(lm: Any) -> Iterator[nn.Module]:
    """The layers of the decoder, and before them those of its tower, in the order of the forward pass."""
    for part in tower(lm):
        yield from (layer for layer in part.modules() if isinstance(layer, GradientCheckpointingLayer))
    yield from lm.base_model.language_model.layers if sees(lm) else lm.base_model.layers


def whole(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each parameter in `dtype`, gathered from all ranks. Collective (see `buckets`)."""
    return chain.from_iterable(buckets(named, dtype))
