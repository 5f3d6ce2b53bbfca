"""The value model: a Hugging Face decoder with a head of one output, PPO's critic (arXiv 1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlcli.errors import ModelError
from rlcli.model.decoder import Decoder
from rlcli.model.io.model_config import read_config
from rlcli.model.packed import PackedBatch
from rlcli.model.parallel.context_parallel import Run

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedConfig

HEAD = "score"
"""transformers' name for the head of its classification models."""


class ValueOutputs(NamedTuple):
    """Output of the value model.

    (A tuple, since FSDP2 looks for the tensors to hook in tuples, lists and dicts only.)
    """

    values: Float[Tensor, " R"]
    """float32: for each response token of a pack, in the pack's order, V of the state before that token."""


class ValueModel(Decoder):
    """The critic. lm: a sequence or token classification model of transformers with one label, of which pooling and
    dropout are not used."""

    def forward(self, batch: PackedBatch) -> ValueOutputs:
        """V(preceding tokens) for every response token of the pack."""
        # In float32 even if the layers compute in bfloat16, whose steps near 1 (0.004 to 0.008) are as large as the
        # differences between neighbouring values, which GAE sums up.
        head, local = self.lm.score, self.local_part(batch)
        values: Tensor = self.hidden(local, batch.segments).float() @ head.weight[0].float()
        values = values if head.bias is None else values + head.bias.float()
        return ValueOutputs(local.gather(values) if isinstance(local, Run) else values)


def read_value_config(path: str) -> PreTrainedConfig:
    """The config of the value model at `path`, with one label whatever the checkpoint has."""
    config = read_config(path, "critic.path")
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(
            f"{path}: transformers has no value model of the architecture '{config.model_type}'",
            "give a critic.path of another one with the same tokenizer, or a recipe without a critic",
        )
    config.num_labels = 1
    return config


def value_class(
    config: PreTrainedConfig,
) -> type[AutoModelForTokenClassification] | type[AutoModelForSequenceClassification]:
    """transformers' class for the checkpoint: token classification (its head has a bias) if the checkpoint is one, else
    sequence classification, which every supported architecture has and as which reward models are saved.
    """
    model_class: type[AutoModelForTokenClassification] | type[AutoModelForSequenceClassification]
    model_class = AutoModelForSequenceClassification
    if _kind(config) == "TokenClassification":
        model_class = AutoModelForTokenClassification
    return model_class


def has_head(config: PreTrainedConfig) -> bool:
    """True if the checkpoint includes the head, according to its config."""
    return _kind(config).endswith("Classification")


def foreign_head(path: str, name: str, shape: list[int] | None = None) -> ModelError:
    """The error for a head that is not one linear layer with one output."""
    tensor = f"{name} {shape}" if shape else name
    return ModelError(
        f"{path}: the weights have {tensor}, which is not a head of one number ({HEAD}.weight [1, width])",
        "give a reward model with one label, or a causal language model, which then gets a new head",
    )


def _kind(config: PreTrainedConfig) -> str:
    """The task of the checkpoint's architecture, such as `CausalLM` or `TokenClassification`."""
    return str((config.architectures or [""])[0]).rpartition("For")[2]
