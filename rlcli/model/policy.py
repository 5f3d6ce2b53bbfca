"""The policy: a Hugging Face causal language model that returns log-probs of packed responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rlcli.errors import ModelError
from rlcli.model.decoder import Decoder, gathered
from rlcli.model.logit_chunks import chunk_tokens
from rlcli.model.logprobs import Likeliest, likeliest_tokens, token_log_probs
from rlcli.model.lora import base_of, is_adapter, merged, saved_names, scaled_to_zero, write_adapter
from rlcli.model.packed import PackedBatch
from rlcli.model.parallel.context_parallel import Run

if TYPE_CHECKING:
    from jaxtyping import Float
    from peft import PeftModel
    from transformers import PreTrainedModel


class TokenOutputs(NamedTuple):
    """Outputs for the R response tokens of a pack, in the pack's order; float32.

    (A tuple, since FSDP2 looks for the tensors to hook in tuples, lists and dicts only.)
    """

    log_probs: Float[Tensor, " R"]
    """log π of each token."""
    entropy: Float[Tensor, " R"] | None
    """Entropy of the distribution that each token was sampled from; None if not requested."""
    candidate_log_probs: Float[Tensor, "R K"] | None = None
    """log π of the pack's K candidates in each token's place; None for a pack without candidates."""


class PolicyModel(Decoder):
    """The policy. lm: a causal language model; the head is applied to chunks of tokens only. peft: the handle of the
    adapter if `lm` has one."""

    def __init__(self, lm: PreTrainedModel, *, dtype: torch.dtype, source: str, peft: PeftModel | None = None) -> None:
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters(recurse=False)):
            raise ModelError(
                f"{source}: the output layer of {type(lm).__name__} is not a plain linear layer without bias",
                "choose a model of another architecture",
            )
        super().__init__(lm, dtype=dtype, source=source)
        self.float_head: bool = False
        """Compute logits in float32, from hidden states and weights in `dtype`."""
        # In a tuple, or nn.Module would register every parameter a second time.
        self._peft: tuple[PeftModel | None] = (peft,)

    def forward(
        self,
        batch: PackedBatch,
        temperature: float = 1.0,
        want_entropy: bool = True,
        likeliest: tuple[int, int] | None = None,
    ) -> TokenOutputs | Likeliest:
        """log π(token | preceding tokens) at `temperature` for every response token of the pack. likeliest: (k, below),
        to return the k likeliest tokens among the ids less than `below` instead, without gradient."""
        local = self.local_part(batch)
        hidden = self.hidden(local, batch.segments)
        weight = self.lm.get_output_embeddings().weight
        if self.float_head:
            hidden, weight = hidden.float(), weight.float()
        chunk = chunk_tokens(weight.shape[0], weight.is_cuda)
        never = None if isinstance(local, Run) else local.never
        gather = local.gather if isinstance(local, Run) else lambda values: values
        if likeliest is not None:
            k, below = likeliest
            top = likeliest_tokens(hidden, weight, local.targets, temperature, chunk, k, below, never)
            return Likeliest(*map(gather, top))
        targets = local.targets
        if local.candidates is not None:
            targets = torch.cat([local.targets[:, None], local.candidates], dim=1)
        log_probs, entropy = token_log_probs(hidden, weight, targets, temperature, chunk, want_entropy, never)
        log_probs, entropy = gather(log_probs), None if entropy is None else gather(entropy)
        if local.candidates is None:
            return TokenOutputs(log_probs, entropy)
        # Copies: FSDP2 hooks its outputs, and warns of views.
        return TokenOutputs(log_probs[:, 0].clone(), entropy, log_probs[:, 1:].clone())

    @property
    def peft(self) -> PeftModel:
        """The adapter's handle."""
        peft = self._peft[0]
        assert peft is not None, "this policy trains all weights: it has no adapter"
        return peft

    def adapter_disabled(self) -> AbstractContextManager[None]:
        """Context in which `forward` is that of the base model: the reference of a policy with an adapter."""
        return scaled_to_zero(self.peft)

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """As `Decoder.stream_weights`; an adapter is merged into its weights."""
        if self._peft[0] is None:
            return super().stream_weights(dtype)
        return gathered(merged(self.lm, self.adapter_scale), dtype or self.dtype)

    def stream_base(self) -> Iterator[tuple[str, Tensor]]:
        """As `stream_weights`, without the adapter."""
        return gathered(base_of(self.lm), self.dtype)

    @property
    def adapter_scale(self) -> float:
        """Factor of the product of the adapter's two matrices: alpha / rank."""
        adapter = self.peft.peft_config["default"]
        return float(adapter.lora_alpha / adapter.r)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter, gathered, in float32, under the names of peft's files. Collective."""
        parameters = ((name, p) for name, p in self.lm.named_parameters() if is_adapter(name))
        return saved_names(self.peft, dict(gathered(parameters, torch.float32)))

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        """Write `adapter_config.json` and `adapter_model.safetensors` in the format of peft and vLLM; returns the
        contents of the second.

        Collective: every rank calls it and writes its gathered copy to a separate folder.
        """
        state = self.adapter_state()
        write_adapter(self.peft, state, folder)
        return state
