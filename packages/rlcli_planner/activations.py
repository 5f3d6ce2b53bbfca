"""Bytes that autograd keeps of a forward pass, counted operation by operation.

With b bytes per number in compute dtype, and w a width, torch keeps for each token of a pack, in a decoder layer,

    norm            4 w (its input in float32) + 4 (its scale), and if its weight is trained b w: what that multiplies
    linear          b w: its input, once for those that share it; nothing if neither it nor an adapter is trained
    rotation        nothing: cosines and sines are shared by all layers
    gated unit      b (gate + its activation + up); with the input of the last linear 4 b intermediate in total
    experts         for each expert that the token passes through, a gated unit, and if they or adapters on them are
                    trained its input b w;
                    b w for the weight of its output; of the router 4 for each expert, and its choice, and if it
                    computes in float32 while the rest does not, its input in that; of experts that
                    all tokens pass through, and of layers without others, a gated unit, whose last linear is trained
                    with all weights alone

    output gate     of attention: 2 b query: the gate and what it multiplies; in float32 the gate's input stays, too,
                    4 query
    gated DeltaNet  b (channels + width + 2 heads): what its convolution reads, its gate, and what its steps and decays
                    come from; the rest is recomputed

and for each attention token (a shared prompt is repeated before each of its samples),

    attention       b (query + keys + values + output) + 4 heads (logsumexp)

On CPUs attention is in float32, only keys and values of a shared prompt are repeated, and sequences of similar length
are padded to the longest of them (by a quarter at most, mostly a few percent: not counted). On GPUs the output is the
next linear's input, and kept once.
tests/unit/packages/planner/test_planner_activations.py compares this with what torch keeps, model by model.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcli_planner.model_shape import DELTA_CHUNK, GATED_ATTENTION, GPT_OSS, DeltaNet, ModelShape
from rlcli_planner.vision_encoder import vision_encoder_bytes

FLOAT = 4
"""Bytes of a float32."""
INDEX = 8
"""Bytes of an int64."""
ALIGNED = 8
"""As in `rlcli.model.mixture.expert_adapters`, whose import would load torch."""


OLMO = ("olmo2", "olmo3")
"""Their layers begin without a norm, and rotate in float32."""
SCALED_IN_FLOAT = ("gemma3_text", *GATED_ATTENTION, *OLMO, GPT_OSS)
"""Models whose norms multiply in float32 and cast the result."""

ROUTED_IN_FLOAT = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
"""Models whose routers copy their input to float32."""


@dataclass(frozen=True)
class Pack:
    """Tokens that one rank passes through the model at once."""

    tokens: float
    """Tokens of the pack, with each shared prompt counted once."""
    attention_tokens: float
    """Tokens that attention reads, where each sample has its own copy of the prompt."""
    responses: float
    """Response tokens, which are scored."""
    images: float = 0.0
    """Image tokens, with those of a shared prompt counted once."""


@dataclass(frozen=True)
class Pass:
    """Settings of a forward and backward pass."""

    bytes_each: int
    """Bytes of a number in compute dtype."""
    on_cpu: bool
    """Attention runs in float32 on CPUs."""
    lora_rank: int = 0
    """Rank of the adapter; 0: all weights are trained."""
    lora_targets: str = "all-linear"
    """As `lora.targets`."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the rest in the backward pass."""
    offload: bool = False
    """Keep that input in host memory."""
    float_head: bool = False
    """Compute logits in float32."""
    frozen: frozenset[str] = frozenset()
    """Frozen parts of the vision encoder (`encoder`, `projector`)."""


def layer_bytes(shape: ModelShape, run: Pass, pack: Pack) -> float:
    """Bytes kept of one decoder layer."""
    adapted = {linear.name for linear in shape.adapted(run.lora_targets)} if run.lora_rank else set()
    inputs = sum(
        width * run.bytes_each for width, names in _inputs(shape) if not run.lora_rank or not adapted.isdisjoint(names)
    )
    factors = run.lora_rank * len(adapted) * run.bytes_each
    gated = _experts(shape, run) if shape.experts else 3 * run.bytes_each * shape.intermediate
    gated += run.bytes_each * (shape.shared * (3 + (not run.lora_rank)) + shape.shared_gate * (shape.hidden + 1))
    held = _held_factors(shape, run) if run.lora_rank and shape.adapts_experts(run.lora_targets) else 0
    each = inputs + factors + gated + _norms(shape, run)
    if shape.mixer is not None:
        return held + pack.tokens * (each + run.bytes_each * _mixed(shape.mixer))
    return held + pack.tokens * (each + _output_gate(shape, run)) + _attention(shape, run, pack)


def _mixed(mixer: DeltaNet) -> int:
    """Numbers that a gated DeltaNet layer keeps of a token between its linear layers."""
    return mixer.channels + mixer.width + 2 * mixer.values


AT_ONCE, AGAIN = {4: 0.8, 2: 0.55}, {4: 1.4, 2: 1.28}
"""Shares of what a plain pass would keep of a gated DeltaNet layer between its linear layers, by the bytes of a number:
what a pass holds at once if it keeps nothing, and what a pass and its backward pass hold; measured, with pieces of 64
to 1024 tokens."""


def _plainly_kept(mixer: DeltaNet, each: int) -> float:
    """Bytes that autograd keeps of a token between the linear layers, in a pass with gradients by torch."""
    k, v, chunk = mixer.key, mixer.value, DELTA_CHUNK
    rule = mixer.values * FLOAT * (12 * k + 6 * v + 5 * chunk + 9 + k * v / chunk)
    convolution = mixer.channels * (2 * each + 4 * FLOAT * (each < FLOAT))
    return rule + convolution + 2 * each * mixer.width


def recomputed_bytes(shape: ModelShape, pack: Pack, each: int) -> float:
    """Peak bytes of a gated DeltaNet layer in its backward pass, which recomputes convolution, rule and norm of all
    tokens at once, after the activations of its feed-forward part are freed. 0 for a layer of another kind."""
    if shape.mixer is None:
        return 0.0
    return pack.tokens * (AGAIN[each] * _plainly_kept(shape.mixer, each) + (FLOAT + 2 * each) * shape.hidden)


def core_bytes(shape: ModelShape, pack: Pack, each: int) -> float:
    """Peak bytes of a gated DeltaNet layer between its linear layers in a pass without gradients."""
    if shape.mixer is None:
        return 0.0
    inside = AT_ONCE[each] * _plainly_kept(shape.mixer, each)
    return pack.tokens * (each * (2 * shape.hidden + _mixed(shape.mixer)) + inside)


def _output_gate(shape: ModelShape, run: Pass) -> float:
    if shape.kind not in GATED_ATTENTION:
        return 0.0
    return shape.query * (2 * run.bytes_each + FLOAT * (run.bytes_each == FLOAT))


def _inputs(shape: ModelShape) -> list[tuple[int, set[str]]]:
    """Width of each tensor that is input to linear layers, and their names."""
    attention = [(shape.hidden, {"q_proj", "k_proj", "v_proj", "qkv_proj"}), (shape.query, {"o_proj"})]
    if shape.mixer is not None:
        attention = [(shape.hidden, {linear.name for linear in shape.linears if linear.name.startswith("in_proj")})]
        attention += [(shape.mixer.width, {"out_proj"})]
    if latent := shape.latent:
        attention = [
            (shape.hidden, {"q_proj", "q_a_proj", "kv_a_proj_with_mqa"}),
            (latent.query, {"q_b_proj"}),
            (latent.kv, {"kv_b_proj"}),
            (shape.heads * latent.value, {"o_proj"}),
        ]
    if shape.experts:
        return [*attention, (shape.hidden, {"router"})]
    return [*attention, (shape.hidden, {"gate_proj", "up_proj", "gate_up_proj"}), (shape.intermediate, {"down_proj"})]


def _experts(shape: ModelShape, run: Pass) -> float:
    """Bytes that the experts and the router keep of a token. Frozen experts keep their input only if they have
    adapters."""
    trained, adapted = not run.lora_rank, run.lora_rank > 0 and shape.adapts_experts(run.lora_targets)
    keeps_input = trained or adapted
    # The gated unit of GPT-OSS keeps more: gate and up before they are clamped, the gate after it, its sigmoid, …
    unit = 6 if shape.kind == GPT_OSS else 3
    pair = (
        run.bytes_each * (shape.hidden * (1 + keeps_input) + shape.intermediate * (unit + keeps_input))
        + FLOAT
        + 2 * INDEX
    )
    pair += 2 * run.bytes_each * _aligned(run.lora_rank) * adapted
    copied = trained and run.bytes_each < FLOAT and shape.kind in ROUTED_IN_FLOAT
    return shape.experts_per_token * pair + FLOAT * shape.experts + FLOAT * shape.hidden * copied


def _held_factors(shape: ModelShape, run: Pass) -> float:
    """Bytes of copied adapter factors of experts: the second factors, sorted by expert, and the first ones if their
    rank is padded."""
    copied = 2 * shape.intermediate + shape.hidden
    if run.lora_rank % ALIGNED:
        copied += shape.hidden + shape.intermediate
    return run.bytes_each * shape.experts * _aligned(run.lora_rank) * copied


def _aligned(rank: int) -> int:
    return -(-rank // ALIGNED) * ALIGNED


def _norm(shape: ModelShape, width: int, run: Pass, scales: int = 1) -> float:
    scaled = 0 if run.lora_rank else FLOAT if shape.kind in SCALED_IN_FLOAT else run.bytes_each
    return FLOAT * width + FLOAT * scales + scaled * width


def _norms(shape: ModelShape, run: Pass) -> float:
    layer_norms = shape.layer_norms * _norm(shape, shape.hidden, run)
    if latent := shape.latent:
        # The rotated part is stored with the input of the second norm, unless that input is a copy in float32.
        rotated_part = FLOAT * latent.rotated * (run.bytes_each == FLOAT)
        return (
            layer_norms
            + _norm(shape, latent.query, run) * bool(latent.query)
            + _norm(shape, latent.kv, run)
            + rotated_part
        )
    if shape.head_norm == "none" or shape.mixer is not None:
        return layer_norms
    scales = (shape.heads, shape.kv_heads) if shape.head_norm == "head" else (1, 1)
    return layer_norms + _norm(shape, shape.query, run, scales[0]) + _norm(shape, shape.key, run, scales[1])


def _attention(shape: ModelShape, run: Pass, pack: Pack) -> float:
    if run.on_cpu:
        return FLOAT * (pack.attention_tokens * 2 * shape.key + pack.tokens * (2 * shape.query + shape.heads))
    if shape.latent is not None:  # values are padded to the keys' width, and the next linear's input is cut off
        return pack.attention_tokens * (run.bytes_each * (2 * shape.query + 2 * shape.key) + FLOAT * shape.heads)
    is_input = not run.lora_rank or any(linear.name == "o_proj" for linear in shape.adapted(run.lora_targets))
    bytes_per_token = (
        run.bytes_each * (shape.query + 2 * shape.key + (0 if is_input else shape.query)) + FLOAT * shape.heads
    )
    return pack.attention_tokens * bytes_per_token


def ends_bytes(shape: ModelShape, run: Pass, pack: Pack) -> float:
    """Bytes kept outside the layers: rotations, the last norm and ids; for a response token the head's input hidden
    state, its index and target, and the norm and entropy of its softmax. A head in float32 is a copy."""
    copied = run.float_head and run.bytes_each < FLOAT
    total = pack.tokens * (rotation_bytes(shape, run) + _norm(shape, shape.hidden, run))
    total += pack.responses * ((FLOAT if copied else run.bytes_each) * shape.hidden + 2 * INDEX + 2 * FLOAT)
    total += FLOAT * shape.vocab * shape.hidden if copied else 0
    if not run.lora_rank:
        return total + pack.tokens * INDEX  # ids, for the embedding's gradient
    # Nothing before the first adapter has a gradient, and so the first norm keeps nothing.
    return total - (pack.tokens * _norm(shape, shape.hidden, run) if shape.kind not in OLMO else 0)


def rotation_bytes(shape: ModelShape, run: Pass) -> float:
    """Cosines and sines, per token."""
    return 2 * (FLOAT if shape.kind in OLMO else run.bytes_each) * shape.rotated


def kept_bytes(shape: ModelShape, run: Pass, pack: Pack) -> float:
    """Bytes kept of a whole forward pass until its backward pass, on the device."""
    vision = vision_bytes(shape, run, pack)
    if not run.checkpointing:
        layers = sum(count * layer_bytes(kind, run, pack) for count, kind in shape.kinds)
        return vision + layers + ends_bytes(shape, run, pack)
    inputs = 0 if run.offload else shape.layers * pack.tokens * run.bytes_each * shape.hidden
    return vision + inputs + ends_bytes(shape, run, pack)


def vision_bytes(shape: ModelShape, run: Pass, pack: Pack) -> float:
    """Bytes kept of the vision encoder's pass. With `offload` the inputs of its blocks stay on the device."""
    if shape.vision_encoder is None or not pack.images:
        return 0.0
    patches = pack.images * shape.vision_encoder.unit
    return vision_encoder_bytes(
        shape.vision_encoder, run.bytes_each, run.frozen, patches, checkpointing=run.checkpointing
    )
