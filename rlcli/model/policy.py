"""The policy: a Hugging Face causal language model that returns log-probs of packed responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rlcli.errors import ModelError
from rlcli.model.decoder import Decoder, whole
from rlcli.model.logit_chunks import chunk_tokens
from rlcli.model.logprobs import Likeliest, likeliest_tokens, token_log_probs
from rlcli.model.lora import base_of, is_adapter, merged, saved_names, scaled_to_zero, write_adapter
from rlcli.model.packed_batch import PackedBatch
from rlcli.model.parallel.context_parallel import Run

if TYPE_CHECKING:
    from peft import PeftModel


class TokenOutputs(NamedTuple):
    """For each response token of a pack, in the pack's order: log_probs [R], entropy [R] or None, and of the pack's
    candidates, if it has any, candidate_log_probs [R, K]; all float32.

    (A tuple, since FSDP2 looks for the tensors to hook in tuples, lists and dicts only.)
    """

    log_probs: Tensor
    entropy: Tensor | None
    candidate_log_probs: Tensor | None = None


class PolicyModel(Decoder):
    """lm: a causal language model; its head is never run whole. peft: the adapter's handle if `lm` has one. float_head:
    logits are computed in float32, from hidden states and weights in `dtype`."""

    def __init__(self, lm: nn.Module, *, dtype: torch.dtype, source: str, peft: PeftModel | None = None) -> None:
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError(
                f"{source}: the output layer of {type(lm).__name__} is not a plain linear layer without bias",
                "choose a model of another architecture",
            )
        super().__init__(lm, dtype=dtype, source=source)
        self.float_head = False
        self._peft = (peft,)  # in a tuple, or nn.Module would register every parameter a second time

    def forward(
        self,
        batch: PackedBatch,
        temperature: float = 1.0,
        want_entropy: bool = True,
        likeliest: tuple[int, int] | None = None,
    ) -> TokenOutputs | Likeliest:
        """log π(token | preceding tokens) at `temperature` for every response token of the pack. likeliest: (k, below),
        to return the k likeliest tokens among the ids less than `below` instead, without gradient."""
        own = self.own(batch)
        hidden = self.hidden(own, batch.segments)
        weight = self.lm.get_output_embeddings().weight
        if self.float_head:
            hidden, weight = hidden.float(), weight.float()
        how = (temperature, chunk_tokens(weight.shape[0], weight.is_cuda))
        never = None if isinstance(own, Run) else own.never
        gathered = own.gather if isinstance(own, Run) else lambda values: values
        if likeliest is not None:
            return Likeliest(*map(gathered, likeliest_tokens(hidden, weight, own.targets, *how, *likeliest, never)))
        targets = own.targets if own.candidates is None else torch.cat([own.targets[:, None], own.candidates], dim=1)
        log_probs, entropy = token_log_probs(hidden, weight, targets, *how, want_entropy, never)
        log_probs, entropy = gathered(log_probs), None if entropy is None else gathered(entropy)
        if own.candidates is None:
            return TokenOutputs(log_probs, entropy)
        # Copies: FSDP2 hooks its outputs, and warns of views.
        return TokenOutputs(log_probs[:, 0].clone(), entropy, log_probs[:, 1:].clone())

    @property
    def peft(self) -> PeftModel:
        peft = self._peft[0]
        assert peft is not None, "this policy trains all weights: it has no adapter"
        return peft

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """Inside the block `forward` is the base model's: the reference of a policy with an adapter."""
        return scaled_to_zero(self.peft)

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """As in every decoder; an adapter is added to its weights."""
        if self._peft[0] is None:
            return super().stream_weights(dtype)
        return whole(merged(self.lm, self.adapter_scale), dtype or self.dtype)

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        """As `stream_weights`, without the adapter."""
        return whole(base_of(self.lm), self.dtype)

    @property
    def adapter_scale(self) -> float:
        """The factor by which the product of the adapter's factors is multiplied."""
        adapter = self.peft.peft_config["default"]
        return float(adapter.lora_alpha / adapter.r)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter, whole, in float32, under the names of peft's files. Collective."""
        named = ((name, p) for name, p in self.lm.named_parameters() if is_adapter(name))
        return saved_names(self.peft, dict(whole(named, torch.float32)))

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        """Write `adapter_config.json` and `adapter_model.safetensors` in the format of peft and vLLM; returns the
        contents of the second.

        Collective: every rank calls it and writes its own gathered copy to its own folder.
        """
        state = self.adapter_state()
        write_adapter(self.peft, state, folder)
        return state
