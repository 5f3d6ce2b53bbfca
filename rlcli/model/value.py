"""The value model: a Hugging Face decoder with a head of one number, PPO's critic (arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlcli.errors import ModelError
from rlcli.model.decoder import Decoder
from rlcli.model.facts import read_config
from rlcli.model.packed import PackedBatch

HEAD = "score"
"""What transformers calls the head of its classification models."""


class ValueOutputs(NamedTuple):
    """values [R] float32: of each response token of a pack, in the pack's order, V of the state before that token.

    (A tuple, since FSDP2 looks for the tensors to hook in tuples, lists and dicts only.)
    """

    values: Tensor


class ValueModel(Decoder):
    """lm: a sequence or token classification model of transformers with one label, without its pooling and dropout."""

    def forward(self, batch: PackedBatch) -> ValueOutputs:
        """V(what precedes the token) for every response token of the pack."""
        # In float32 also where the layers compute in bfloat16, whose steps near 1 (0.004 to 0.008) are as large as the
        # differences between neighbouring values, which is what GAE sums up.
        head = self.lm.score
        values = self.hidden(batch).float() @ head.weight[0].float()
        return ValueOutputs(values if head.bias is None else values + head.bias.float())


def read_value_config(path: str) -> Any:
    """The config of the value model at `path`: of one label, whatever the checkpoint had."""
    config = read_config(path, "critic.path")
    config.num_labels = 1
    return config


def value_class(config: Any) -> Any:
    """transformers' class for the checkpoint: token classification (its head has a bias) where it is one, else sequence
    classification, which every supported architecture has and which reward models are saved as.
    """
    kind = _kind(config)
    return AutoModelForTokenClassification if kind == "TokenClassification" else AutoModelForSequenceClassification


def has_head(config: Any) -> bool:
    """Whether the checkpoint says that it brings the head along."""
    return _kind(config).endswith("Classification")


def foreign_head(path: str, name: str, shape: list[int] | None = None) -> ModelError:
    """The error for a head that does not give one number by one linear layer."""
    held = f"{name} {shape}" if shape else name
    return ModelError(
        f"{path}: the weights have {held}, which is not a head of one number ({HEAD}.weight [1, width])",
        "give a reward model with one label, or a causal language model, whose head is then made anew",
    )


def _kind(config: Any) -> str:
    return str((config.architectures or [""])[0]).rpartition("For")[2]
