"""Sizes of a model, from its config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlcli.errors import ModelError
from rlcli.model.io.model_config import (
    LATENT,
    check_place,
    check_sizes,
    dense_layers,
    expert_count,
    plain_config,
    read_config,
)
from rlcli_planner.vision_encoder import VisionEncoder, vision_encoder_of

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder layer."""

    name: str
    """Last part of its name."""
    inputs: int
    """Input features."""
    outputs: int
    """Output features."""
    bias: bool = False
    """True if it has a bias."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: a token's keys and values are compressed to one vector for all heads, which is what
    an engine caches together with the rotated part of the key."""

    query: int
    """Width of the compressed queries; 0 if they are not."""
    kv: int
    """Width of the compressed keys and values."""
    rotated: int
    """Width of the rotated part of each key, which is the same for all heads."""
    value: int
    """Width of a head's values, which may be narrower than its keys."""


@dataclass(frozen=True)
class DeltaNet:
    """The gated DeltaNet layers of a model (`rlcli.model.delta_net`)."""

    layers: int
    """Number of such layers."""
    keys: int
    """Heads of queries and keys."""
    values: int
    """Heads of values, each of which carries a state; a multiple of `keys`."""
    key: int
    """Size of a head of queries or keys."""
    value: int
    """Size of a head of values."""
    kernel: int
    """Tokens that the convolution reads."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.keys * self.key + self.width

    @property
    def width(self) -> int:
        """Width of all values."""
        return self.values * self.value

    @property
    def vectors(self) -> int:
        """Parameters outside the linear layers: the convolution, A_log and dt_bias, and the norm."""
        return self.kernel * self.channels + 2 * self.values + self.value

    @property
    def multiplied(self) -> float:
        """Products of numbers that a layer computes of a token outside its linear layers."""
        k, v = self.key, self.value
        rule = DELTA_CHUNK * (2 * k + (k + v) / 2 + v) + 3 * k * v
        return self.values * rule + self.kernel * self.channels

    def state_bytes(self, each: float) -> float:
        """Bytes of a request's state for one layer in an engine: the convolution's inputs, and a float32 matrix for
        each head."""
        return (self.kernel - 1) * self.channels * each + 4 * self.values * self.key * self.value


DELTA_CHUNK = 64
"""As `rlcli.model.recurrence.CHUNK`, whose import would load torch."""
GATED_ATTENTION = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Kinds whose query layer gives a gate of each head's output too."""
HEAD_NORM = {
    **dict.fromkeys(("gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_text", *GATED_ATTENTION), "head"),
    **dict.fromkeys(("olmo2", "olmo3"), "all"),
}
"""`model_type` → `ModelShape.head_norm`."""
GPT_OSS = "gpt_oss"
"""Its attention has sinks, and experts and routers biases."""
QWEN2 = ("qwen2", "qwen2_5_vl_text")
"""Kinds whose query, key and value layers have a bias, whatever the config says."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    kind: str
    """transformers' `model_type`."""
    layers: int
    """Decoder layers."""
    hidden: int
    """H, the hidden size."""
    intermediate: int
    """Width of the feed-forward part, or of one expert."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Size of a head; with latent attention, of a key."""
    vocab: int
    """V, rows of the embedding."""
    positions: int
    """Maximum sequence length."""
    tied: bool
    """True if the output layer shares the embedding."""
    head_norm: str
    """Norm of queries and keys: `none`; `head`, one of a head's width, as in Qwen3; `all`, one over all heads, as
    in OLMo 2."""
    linears: tuple[Linear, ...]
    """Linear layers of a decoder layer."""
    value: bool = False
    """A value model, whose head has one row in place of V."""
    experts: int = 0
    """Experts of each layer; 0: a dense model."""
    experts_per_token: int = 0
    """Experts that a token is routed to."""
    layer_norms: int = 2
    """Norms of a layer with its full width."""
    shared: int = 0
    """Width of the shared experts, which every token passes through."""
    dense_layers: int = 0
    """Leading layers of a mixture that have a dense feed-forward part."""
    dense: int = 0
    """Width of that part."""
    vision_encoder: VisionEncoder | None = None
    """Vision encoder, if there is one."""
    delta: DeltaNet | None = None
    """Layers of linear attention, if there are any."""
    mixer: DeltaNet | None = None
    """The same, in a shape that stands for such layers only (`delta_layer`)."""
    rotated: int = 0
    """Width of the cosines and sines of a position."""
    shared_gate: bool = False
    """True if the shared experts' output is multiplied by a gate of one number."""
    latent: Latent | None = None
    """Widths of latent attention, if it has that."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, and of all value heads as they attend."""
        return self.kv_heads * self.head_dim

    @property
    def norms(self) -> int:
        if self.mixer is not None:
            return self.layer_norms * self.hidden + self.mixer.vectors
        head_norms = {"none": 0, "head": 2 * self.head_dim, "all": self.query + self.key}[self.head_norm]
        compressed = self.latent.query + self.latent.kv if self.latent is not None else 0
        return self.layer_norms * self.hidden + head_norms + compressed

    @property
    def passed(self) -> int:
        """Width of the feed-forward parts that a token passes through, together."""
        return self.intermediate * max(1, self.experts_per_token) + self.shared

    @property
    def largest_matrix(self) -> int:
        """Parameters of a layer's last weight: those of all experts are one."""
        return self.hidden * self.intermediate * max(1, 2 * self.experts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        if not self.experts:
            return 0
        return 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * (self.kind == GPT_OSS)

    @property
    def router_parameters(self) -> int:
        return self.experts * (self.hidden + (self.kind == GPT_OSS))

    @property
    def expert_layers(self) -> int:
        """Layers of a mixture that have experts; all of a dense model."""
        return self.layers - self.dense_layers

    @property
    def dense_layer(self) -> ModelShape:
        """The shape if all layers were like the leading ones of a mixture."""
        return replace(self, experts=0, experts_per_token=0, shared=self.dense, intermediate=0, dense_layers=0)

    @property
    def delta_layers(self) -> int:
        """Layers of linear attention."""
        return self.delta.layers if self.delta is not None else 0

    @property
    def attention_layers(self) -> int:
        """Layers whose keys and values an engine keeps."""
        return self.layers - self.delta_layers

    @property
    def delta_layer(self) -> ModelShape:
        """The shape if all layers were of linear attention."""
        assert self.delta is not None
        linears = tuple(linear for linear in self.linears if linear.name not in ATTENTION)
        return replace(self, linears=(*_delta_linears(self, self.delta), *linears), delta=None, mixer=self.delta)

    @cached_property  # plans that simulate a run read it ten thousand times
    def kinds(self) -> list[tuple[int, ModelShape]]:
        """Number of layers of each kind, and the shape of a model of such layers alone. The last kind is that of
        `layer_parameters`."""
        special = [(self.dense_layers, self.dense_layer)] if self.dense_layers else []
        special += [(self.delta.layers, self.delta_layer)] if self.delta is not None else []
        return [*special, (self.layers - sum(count for count, _ in special), replace(self, dense_layers=0, delta=None))]

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer; of a mixture, of a layer with experts."""
        outside_experts = sum(linear.parameters for linear in self.linears) + self.norms
        outside_experts += (3 * self.shared + self.shared_gate) * self.hidden
        outside_experts += self.heads * (self.kind == GPT_OSS)  # sinks
        return outside_experts + self.experts * self.expert_parameters + self.router_parameters

    @property
    def all_layer_parameters(self) -> int:
        return sum(count * shape.layer_parameters for count, shape in self.kinds)

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
        """Parameters outside the layers of the decoder and of a vision encoder: embedding, last norm, head, and the
        vision encoder's rest."""
        rest = self.vision_encoder.parameters - self.vision_encoder.blocks if self.vision_encoder is not None else 0
        return self.embedding_parameters + self.hidden + self.head_parameters + rest

    @property
    def parameters(self) -> int:
        blocks = self.vision_encoder.blocks if self.vision_encoder is not None else 0
        return self.all_layer_parameters + self.root_parameters + blocks

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest module that is gathered alone: a layer of the decoder, or a block of the vision
        encoder."""
        layers = [shape.layer_parameters for _, shape in self.kinds]
        return max(*layers, self.vision_encoder.block if self.vision_encoder is not None else 0)

    @property
    def matrix_parameters(self) -> int:
        """Weights that each token is multiplied with in a forward pass, without the head: 2 operations each."""
        return sum(count * shape.layer_matrices for count, shape in self.kinds)

    @property
    def layer_matrices(self) -> int:
        """`matrix_parameters` of one layer."""
        dense = sum(linear.inputs * linear.outputs for linear in self.linears)
        passed = self.experts_per_token * self.expert_parameters + self.router_parameters
        passed += (3 * self.shared + self.shared_gate) * self.hidden
        return dense + passed + (round(self.mixer.multiplied) if self.mixer is not None else 0)

    @property
    def hidden_matrices(self) -> int:
        """Parameters that `train.optimizer = muon` takes by whole matrices (`rlcli.model.muon`)."""
        blocks = self.vision_encoder.blocks if self.vision_encoder is not None else 0
        return blocks + sum(count * shape.layer_hidden_matrices for count, shape in self.kinds)

    @property
    def layer_hidden_matrices(self) -> int:
        """The same of one layer."""
        dense = sum(linear.inputs * linear.outputs for linear in self.linears)
        return dense + 3 * self.hidden * (self.shared + self.experts * self.intermediate)

    def largest_hidden(self, shards: int) -> int:
        """Size of the largest matrix, or part of a layer's experts, that a rank makes orthogonal at once."""
        sizes = [linear.inputs * linear.outputs for _, shape in self.kinds for linear in shape.linears]
        experts = 2 * self.hidden * self.intermediate * -(-self.experts // shards)
        return max(*sizes, self.hidden * self.shared, experts)

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Parameters of a LoRA adapter."""
        return sum(count * shape.adapter_layer_parameters(rank, targets) for count, shape in self.kinds)

    def adapter_layer_parameters(self, rank: int, targets: str) -> int:
        """Parameters of a LoRA adapter on one layer; of a mixture, on one that has experts."""
        experts = self.experts * (2 * self.hidden + 3 * self.intermediate) if self.adapts_experts(targets) else 0
        return rank * (experts + sum(linear.inputs + linear.outputs for linear in self.adapted(targets)))

    def adapted(self, targets: str) -> list[Linear]:
        """The linear layers that `lora.targets` names."""
        names = _split(targets)
        return [linear for linear in self.linears if "all-linear" in names or linear.name in names]

    def adapts_experts(self, targets: str) -> bool:
        """True if `lora.targets` names the experts."""
        return self.experts > 0 and "experts" in _split(targets)

    def kv_bytes_per_token(self, bytes_each: float) -> float:
        """Bytes per token of vLLM's KV cache, over all layers."""
        cached = 2 * self.key if self.latent is None else self.latent.kv + self.latent.rotated
        return self.attention_layers * cached * bytes_each

    def state_bytes(self, bytes_each: float) -> float:
        """Bytes of a request's state in vLLM, over all layers of linear attention."""
        return self.delta.layers * self.delta.state_bytes(bytes_each) if self.delta is not None else 0.0


def _split(targets: str) -> set[str]:
    return {name.strip() for name in targets.split(",")}


ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def _delta_of(config: PretrainedConfig | SimpleNamespace) -> DeltaNet | None:
    layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if not layers:
        return None
    return DeltaNet(
        layers=layers,
        keys=config.linear_num_key_heads,
        values=config.linear_num_value_heads,
        key=config.linear_key_head_dim,
        value=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )


def _delta_linears(shape: ModelShape, delta: DeltaNet) -> tuple[Linear, ...]:
    hidden, output = shape.hidden, Linear("out_proj", delta.width, shape.hidden)
    if shape.kind == "qwen3_next":
        fused = Linear("in_proj_qkvz", hidden, delta.channels + delta.width)
        return fused, Linear("in_proj_ba", hidden, 2 * delta.values), output
    return (
        Linear("in_proj_qkv", hidden, delta.channels),
        Linear("in_proj_z", hidden, delta.width),
        Linear("in_proj_b", hidden, delta.values),
        Linear("in_proj_a", hidden, delta.values),
        output,
    )


def shape_of(config: PretrainedConfig | SimpleNamespace) -> ModelShape:
    """The shape of a model from its config, as returned by `rlcli.model.io.model_config.read_config`."""
    if hasattr(config, "vision_config"):
        text = shape_of(config.text_config)
        return replace(text, tied=bool(config.tie_word_embeddings), vision_encoder=vision_encoder_of(config))
    heads = config.num_attention_heads
    experts, leading_dense = expert_count(config), dense_layers(config)
    shape = ModelShape(
        kind=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=_head_dim(config),
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        head_norm="head" if getattr(config, "use_qk_norm", False) else HEAD_NORM.get(config.model_type, "none"),
        linears=(),
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        layer_norms=4 if config.model_type in ("gemma3_text", "glm4") else 2,
        shared=_shared(config),
        dense_layers=leading_dense,
        dense=config.intermediate_size if leading_dense else 0,
        delta=_delta_of(config),
        rotated=_rotated(config, heads),
        shared_gate=hasattr(config, "shared_expert_intermediate_size"),
        latent=_latent(config),
    )
    return replace(shape, linears=_linears(shape, config))


def _shared(config: PretrainedConfig | SimpleNamespace) -> int:
    """Width of the experts that every token passes through."""
    if hasattr(config, "n_shared_experts"):
        return int(config.n_shared_experts * config.moe_intermediate_size)
    return int(getattr(config, "shared_expert_intermediate_size", 0))


def _rotated(config: PretrainedConfig | SimpleNamespace, heads: int) -> int:
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_rope_head_dim)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == GPT_OSS:  # both halves of a head have the same cosines and sines
        return int(size) // 2
    if config.model_type not in GATED_ATTENTION:
        return int(size)
    return int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))


def read_shape(path: str, key: str = "model.path") -> ModelShape:
    """The shape of the model at `path`, a folder with a config.json or a hub id; no weights are read. Raises
    `ModelError` if there is none or it cannot be trained. key: the config key that gives the path."""
    if not path:
        raise ModelError("no model is given", "name a folder or hub id with --model")
    check_place(path, key)
    config = plain_config(path) or read_config(path, key)
    check_sizes(path, config)
    return shape_of(config)


def _head_dim(config: PretrainedConfig | SimpleNamespace) -> int:
    if config.model_type in LATENT:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _latent(config: PretrainedConfig | SimpleNamespace) -> Latent | None:
    if config.model_type not in LATENT:
        return None
    return Latent(config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim)


def _latent_linears(shape: ModelShape, latent: Latent) -> tuple[Linear, ...]:
    queries: tuple[Linear, ...] = (Linear("q_proj", shape.hidden, shape.query),)
    if latent.query:
        queries = (Linear("q_a_proj", shape.hidden, latent.query), Linear("q_b_proj", latent.query, shape.query))
    keys_and_values = shape.heads * (shape.head_dim - latent.rotated + latent.value)
    return (
        *queries,
        Linear("kv_a_proj_with_mqa", shape.hidden, latent.kv + latent.rotated),
        Linear("kv_b_proj", latent.kv, keys_and_values),
        Linear("o_proj", shape.heads * latent.value, shape.hidden),
    )


def _linears(shape: ModelShape, config: PretrainedConfig | SimpleNamespace) -> tuple[Linear, ...]:
    if shape.latent is not None:
        return _latent_linears(shape, shape.latent)
    hidden, wide = shape.hidden, shape.intermediate
    bias = bool(getattr(config, "attention_bias", False))
    qkv_bias = bias or shape.kind in QWEN2
    out_bias = bias and shape.kind not in (*QWEN2, "glm4", "glm4_moe")
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    output = Linear("o_proj", shape.query, hidden, out_bias)
    separate = (
        Linear("q_proj", hidden, shape.query * (1 + (shape.kind in GATED_ATTENTION)), qkv_bias),
        Linear("k_proj", hidden, shape.key, qkv_bias),
        Linear("v_proj", hidden, shape.key, qkv_bias),
    )
    fused = (Linear("qkv_proj", hidden, shape.query + 2 * shape.key),)
    attention = (*(fused if shape.kind == "phi3" else separate), output)
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
