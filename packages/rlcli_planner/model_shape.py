"""The sizes of a model from its config.json, from which all else is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlcli.errors import ModelError
from rlcli.model.io.model_config import check_place, check_sizes, dense_layers, expert_count, plain_config, read_config
from rlcli_planner.vision_encoder import Tower, tower_of


@dataclass(frozen=True)
class Linear:
    """One linear layer of a decoder layer: the last part of its name, and its sizes."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs


HEAD_NORM = {
    **dict.fromkeys(("gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_text"), "head"),
    **dict.fromkeys(("olmo2", "olmo3"), "all"),
}
"""What `ModelShape.head_norm` is, by `model_type`."""
QWEN2 = ("qwen2", "qwen2_5_vl_text")
"""Kinds whose query, key and value layers have a bias, whatever the config says."""


@dataclass(frozen=True)
class ModelShape:
    """kind: transformers' `model_type`. positions: longest sequence. vocab: rows of the embedding; a value model's head
    has one row in place of them (`value`). norms: elements of the norms of one layer; layer_norms: how many of them are
    as wide as the layer. head_norm: `none`; `head`, one norm of a head's width, as in Qwen3; or `all`, one over all
    heads, as in OLMo 2. experts: of each layer, of which a token passes through `chosen`; 0 in a dense model.
    intermediate: width of the feed-forward part, or of one expert. shared: width of the experts that every token passes
    through. dense_layers: of a mixture, those at its beginning that have a feed-forward part of width `dense` in place
    of experts. tower: what sees pictures, if anything does.
    """

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool
    head_norm: str
    linears: tuple[Linear, ...]
    value: bool = False
    experts: int = 0
    chosen: int = 0
    layer_norms: int = 2
    shared: int = 0
    dense_layers: int = 0
    dense: int = 0
    tower: Tower | None = None

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def norms(self) -> int:
        own = {"none": 0, "head": 2 * self.head_dim, "all": self.query + self.key}[self.head_norm]
        return self.layer_norms * self.hidden + own

    @property
    def passed(self) -> int:
        """Width of the feed-forward parts that a token passes through, together."""
        return self.intermediate * max(1, self.chosen) + self.shared

    @property
    def largest_matrix(self) -> int:
        """Parameters of a layer's last weight: those of all experts are one."""
        return self.hidden * self.intermediate * max(1, 2 * self.experts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.intermediate if self.experts else 0

    @property
    def router_parameters(self) -> int:
        return self.experts * self.hidden

    @property
    def expert_layers(self) -> int:
        """Layers of a mixture that have experts; all of a dense model."""
        return self.layers - self.dense_layers

    @property
    def dense_layer(self) -> ModelShape:
        """As if all layers were like the first ones of a mixture."""
        return replace(self, experts=0, chosen=0, shared=self.dense, intermediate=0, dense_layers=0)

    @property
    def layer_parameters(self) -> int:
        """Of a layer; of a mixture, of one that has experts."""
        own = sum(linear.parameters for linear in self.linears) + self.norms + 3 * self.hidden * self.shared
        return own + self.experts * self.expert_parameters + self.router_parameters

    @property
    def all_layer_parameters(self) -> int:
        dense = self.dense_layers * self.dense_layer.layer_parameters if self.dense_layers else 0
        return self.expert_layers * self.layer_parameters + dense

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer, if it is not tied to the embedding."""
        if self.value:
            return self.hidden
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers of the decoder and of a tower: embedding, last norm, head, and the tower's
        rest."""
        rest = self.tower.parameters - self.tower.blocks if self.tower is not None else 0
        return self.embedding_parameters + self.hidden + self.head_parameters + rest

    @property
    def parameters(self) -> int:
        blocks = self.tower.blocks if self.tower is not None else 0
        return self.all_layer_parameters + self.root_parameters + blocks

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest module that is gathered alone: a layer of the decoder, or a block of the tower."""
        return max(self.layer_parameters, self.tower.block if self.tower is not None else 0)

    @property
    def matrix_parameters(self) -> int:
        """Weights that each token is multiplied with in a forward pass, without the head: 2 operations each."""
        dense = sum(linear.inputs * linear.outputs for linear in self.linears)
        passed = self.chosen * self.expert_parameters + self.router_parameters + 3 * self.hidden * self.shared
        return self.layers * dense + self.expert_layers * passed + self.dense_layers * 3 * self.hidden * self.dense

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Parameters of a LoRA adapter."""
        before = self.dense_layer.adapter_layer_parameters(rank, targets) if self.dense_layers else 0
        return self.dense_layers * before + self.expert_layers * self.adapter_layer_parameters(rank, targets)

    def adapter_layer_parameters(self, rank: int, targets: str) -> int:
        """Parameters of a LoRA adapter on one layer; of a mixture, on one that has experts."""
        experts = self.experts * (2 * self.hidden + 3 * self.intermediate) if self.adapts_experts(targets) else 0
        return rank * (experts + sum(linear.inputs + linear.outputs for linear in self.adapted(targets)))

    def adapted(self, targets: str) -> list[Linear]:
        """The linear layers that `lora.targets` names."""
        names = _split(targets)
        return [linear for linear in self.linears if "all-linear" in names or linear.name in names]

    def adapts_experts(self, targets: str) -> bool:
        """Whether `lora.targets` names them."""
        return self.experts > 0 and "experts" in _split(targets)

    def kv_bytes_per_token(self, bytes_each: float) -> float:
        """Bytes per token of vLLM's KV cache, over all layers."""
        return 2 * self.layers * self.key * bytes_each


def _split(targets: str) -> set[str]:
    return {name.strip() for name in targets.split(",")}


def shape_of(config: Any) -> ModelShape:
    """The shape of a model from its config, as returned by `rlcli.model.io.model_config.read_config`."""
    if hasattr(config, "vision_config"):
        text = shape_of(config.text_config)
        return replace(text, tied=bool(config.tie_word_embeddings), tower=tower_of(config))
    heads = config.num_attention_heads
    experts, before = expert_count(config), dense_layers(config)
    shape = ModelShape(
        kind=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        head_norm="head" if getattr(config, "use_qk_norm", False) else HEAD_NORM.get(config.model_type, "none"),
        linears=(),
        experts=experts,
        chosen=config.num_experts_per_tok if experts else 0,
        layer_norms=4 if config.model_type in ("gemma3_text", "glm4") else 2,
        shared=config.n_shared_experts * config.moe_intermediate_size if hasattr(config, "n_shared_experts") else 0,
        dense_layers=before,
        dense=config.intermediate_size if before else 0,
    )
    return replace(shape, linears=_linears(shape, config))


def read_shape(path: str, key: str = "model.path") -> ModelShape:
    """The shape of the model at `path`, a folder with a config.json or a hub id; no weights are read. Raises
    `ModelError` if there is none or it cannot be trained. key: the config key that gives the path."""
    if not path:
        raise ModelError("no model is given", "name a folder or hub id with --model")
    check_place(path, key)
    config = plain_config(path) or read_config(path, key)
    check_sizes(path, config)
    return shape_of(config)


def _linears(shape: ModelShape, config: Any) -> tuple[Linear, ...]:
    hidden, wide = shape.hidden, shape.intermediate
    bias = bool(getattr(config, "attention_bias", False))
    qkv_bias = bias or shape.kind in QWEN2
    out_bias = bias and shape.kind not in (*QWEN2, "glm4", "glm4_moe")
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    out = Linear("o_proj", shape.query, hidden, out_bias)
    separate = (
        Linear("q_proj", hidden, shape.query, qkv_bias),
        Linear("k_proj", hidden, shape.key, qkv_bias),
        Linear("v_proj", hidden, shape.key, qkv_bias),
    )
    fused = (Linear("qkv_proj", hidden, shape.query + 2 * shape.key),)
    attention = (*(fused if shape.kind == "phi3" else separate), out)
    if shape.experts:
        return attention
    if shape.kind in ("phi3", "glm4"):
        return (*attention, Linear("gate_up_proj", hidden, 2 * wide), Linear("down_proj", wide, hidden))
    return (
        *attention,
        Linear("gate_proj", hidden, wide, mlp_bias),
        Linear("up_proj", hidden, wide, mlp_bias),
        Linear("down_proj", wide, hidden, mlp_bias),
    )
