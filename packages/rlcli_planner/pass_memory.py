"""Temporary memory of passes through a sharded model: gathered layers, activations, logits, gradients, and the
optimizer's step.

FSDP2 gathers a small model whole: all of it stays until all its gradients are reduced at once. A larger model is
gathered layer by layer: what was received from other ranks stays until the next layer arrives, as the weights built
from it do, so two layers are in memory, and three while the next one is built; on GPUs the next one arrives while one
computes. One rank on a CPU gathers nothing from others, and in float32 it is not sharded at all; on a GPU one rank in
16 bits keeps all weights in these during an update. The root (embedding and head) stays from the first use to the end
of the backward pass. In that pass layer j from the end holds, in addition to the activations of the layers before it:
its own gathered weights and their gradients, the float32 copy of the gradients of the layer after it that is being
reduced, and the reduced gradients of all layers after it."""

from __future__ import annotations

from rlcli.model.logit_chunks import BLOCK_LOGITS, chunk_tokens
from rlcli_planner.activations import (
    FLOAT,
    Pass,
    core_bytes,
    kept_bytes,
    layer_bytes,
    recomputed_bytes,
    rotation_bytes,
    vision_bytes,
)
from rlcli_planner.engine_memory import reloading
from rlcli_planner.model_shape import ModelShape
from rlcli_planner.plan_input import Parts, RunPlanInput
from rlcli_planner.vision_encoder import block_bytes, working_bytes

BUCKET_BYTES, WHOLE_BYTES = 32 << 20, 24 << 20
"""As in `rlcli.model.parallel.buckets` and `rlcli.model.parallel.fsdp_sharding`, whose import would load torch."""


def without_gradient(setting: RunPlanInput, shape: ModelShape) -> Parts:
    """A forward pass without gradients: nothing is kept."""
    pack, each = setting.pack, setting.bytes_each
    # Of the current layer: gate, its activation, their product; and four hidden states (the input, the embedding, the
    # residual, the norm's output).
    working = pack.tokens * each * (3 * shape.passed + 4 * shape.hidden + 2 * shape.head_dim)
    if setting.config.lora.rank and shape == setting.policy:
        working += pack.tokens * each * setting.config.lora.rank
    working = max(working, *(core_bytes(kind, pack, each) for _, kind in shape.kinds))
    ending = _logits(setting, shape, "infer") + each * shape.hidden * pack.responses
    between = pack.tokens * each * 2 * shape.hidden
    vision = (
        working_bytes(shape.vision_encoder, each, pack.images * shape.vision_encoder.unit)
        if shape.vision_encoder is not None
        else 0.0
    )
    computing = {"gathered weights": _gathered(setting, shape), "activations": max(working, ending, vision)}
    gathering = {"gathered weights": _gathered(setting, shape, while_gathering=True), "activations": between}
    return max(computing, gathering, key=lambda parts: sum(parts.values()))


def with_gradient(setting: RunPlanInput, shape: ModelShape) -> Parts:
    """The peak of a forward and a backward pass."""
    trained_whole = shape != setting.policy
    run = setting.passing(trained_whole=trained_whole)
    trained = _trained_per_layer(setting, shape, run)
    # The vision encoder's part of the root gets its gradients last.
    vision = shape.vision_encoder.parameters - shape.vision_encoder.blocks if shape.vision_encoder is not None else 0
    root = shape.root_parameters - vision if not run.lora_rank else 0
    activations = kept_bytes(shape, run, setting.pack)
    gathered = _gathered_in_update(setting, shape, run)
    accumulated = FLOAT * _trained(setting, shape, run) / setting.shards * setting.accumulates
    entering = {
        "gathered weights": gathered,
        "activations": activations,
        "logits": _logits(setting, shape, "forward"),
        "gradients": accumulated,
    }
    leaving = {
        "gathered weights": gathered,
        "activations": activations,
        "logits": _backward_of_head(setting, shape),
        "gradients": accumulated + FLOAT * root,
    }
    below = _undivided if setting.sharded and _gathers_whole_model(setting, shape) else _layers
    candidates = [
        entering,
        leaving,
        *below(setting, shape, run, trained, root),
        *_in_vision_encoder(setting, shape, run),
    ]
    return max(candidates, key=lambda parts: sum(parts.values()))


def _in_vision_encoder(setting: RunPlanInput, shape: ModelShape, run: Pass) -> list[Parts]:
    """The peak at the start of the vision encoder's backward pass, which is the last part: the decoder's gradients
    exist, and its activations are freed."""
    vision = vision_bytes(shape, run, setting.pack)
    if shape.vision_encoder is None or not vision:
        return []
    if run.checkpointing and "encoder" not in run.frozen:
        vision += setting.pack.images * shape.vision_encoder.unit * block_bytes(shape.vision_encoder, run.bytes_each)
    gradients = FLOAT * _trained(setting, shape, run) / setting.shards
    gradients += FLOAT * _unreduced(setting, shape, run) * setting.sharded
    return [
        {"gathered weights": _gathered_in_update(setting, shape, run), "activations": vision, "gradients": gradients}
    ]


def _undivided(setting: RunPlanInput, shape: ModelShape, run: Pass, trained: float, root: float) -> list[Parts]:
    """The peaks of a model that is gathered as a whole: within each layer of the backward pass, and when all gradients
    are concatenated for the reduction, after everything else is freed."""
    each = setting.bytes_each
    sharded_gradients = FLOAT * _trained(setting, shape, run) / setting.shards
    accumulated = sharded_gradients * setting.accumulates
    within_layers = [
        {
            "gathered weights": _gathered_in_update(setting, shape, run),
            "activations": activations,
            "gradients": accumulated + each * (root + done * trained),
        }
        for done, activations in enumerate(_kept_by_layer(setting, shape, run))
    ]
    trained_parameters = _trained(setting, shape, run)
    return [
        *within_layers,
        {"gradients": accumulated + FLOAT * trained_parameters + max(each * trained_parameters, sharded_gradients)},
    ]


def _layers(setting: RunPlanInput, shape: ModelShape, run: Pass, trained: float, root: float) -> list[Parts]:
    """The peak within each layer of the backward pass, starting at the last layer."""
    each = setting.bytes_each
    peaks = []
    for done, activations in enumerate(_kept_by_layer(setting, shape, run)):
        reducing = FLOAT * _unreduced(setting, shape, run) if done and setting.sharded else 0
        # From the second micro-batch on, gradients of all layers exist, plus new ones until they are added.
        layers_with_gradients = shape.layers + bool(done and setting.sharded) if setting.accumulates else done
        reduced = layers_with_gradients * FLOAT * trained / setting.shards
        peaks.append(
            {
                "gathered weights": _gathered_in_update(setting, shape, run),
                "activations": activations,
                "gradients": reducing + reduced + each * root + FLOAT * root / setting.shards * setting.accumulates,
            }
        )
    return peaks


def _kept_by_layer(setting: RunPlanInput, shape: ModelShape, run: Pass) -> list[float]:
    """Activations and the weight gradients that replace them, at the peak within each layer of the backward pass,
    starting at the last layer."""
    tokens, each = setting.pack.tokens, setting.bytes_each
    each_kind = [(count, layer_bytes(kind, run, setting.pack)) for count, kind in shape.kinds]
    largest_layer = max(size for _, size in each_kind)
    mean = sum(count * size for count, size in each_kind) / shape.layers
    recomputed = max(recomputed_bytes(kind, setting.pack, setting.bytes_each) for _, kind in shape.kinds)
    # The gradient of a hidden state replaces what the head had kept.
    ends = tokens * (each * shape.hidden + rotation_bytes(shape, run))
    inputs = 0.0 if run.offload else tokens * each * shape.hidden
    # In the backward pass of the gated unit there are two more tensors of its width, and few gradients yet; at the
    # layer's end all gradients exist, and no kept activations are left.
    largest = shape.largest_matrix / setting.config.parallel.expert if shape.experts else shape.largest_matrix
    early = tokens * each * 2 * shape.passed + each * largest * bool(not run.lora_rank)
    late = each * _unreduced(setting, shape, run) - largest_layer
    kept_by_layers = [
        (remaining * inputs + largest_layer) if run.checkpointing else remaining * mean
        for remaining in range(shape.layers, 0, -1)
    ]
    vision = vision_bytes(shape, run, setting.pack)
    peaks = [activations + vision + ends + max(early, late) for activations in kept_by_layers]
    if not recomputed:
        return peaks
    # The last layer attends, in every such model: those of linear attention come after it here.
    inputs_below = [
        remaining * (inputs if run.checkpointing else mean) for remaining in range(shape.layers - 1, -1, -1)
    ]
    inside = [0.0, *(activations + vision + ends + recomputed for activations in inputs_below[1:])]
    return [max(peak_pair) for peak_pair in zip(peaks, inside, strict=True)]


MUON_COPIES = 6
"""Copies of the largest matrix in a step of Muon (`rlcli.model.muon`): sent, received, the iterate and the next, its
products with itself."""


def stepping(setting: RunPlanInput, shape: ModelShape) -> Parts:
    """The optimizer step: all gradients, and with Muon what makes a matrix orthogonal."""
    run = setting.passing(trained_whole=shape != setting.policy)
    found = {"gradients": FLOAT * _trained(setting, shape, run) / setting.shards}
    if setting.config.train.optimizer == "muon":
        each = FLOAT if setting.device.is_cpu else 2
        found["gradients"] += MUON_COPIES * each * shape.largest_hidden(setting.shards)
    return found


def sending(setting: RunPlanInput) -> Parts:
    """The weight sync: the gathered buckets, or with one rank the largest copied parameter; and what the engine does
    with them: on GPUs a reloaded module, on CPUs a layer that is packed, as received, as packed, and its old
    version."""
    if setting.separate_adapter:
        return {"sync": 2 * FLOAT * setting.trained_parameters()}
    shape, each = setting.policy, setting.bytes_each
    largest = max(shape.embedding_parameters, 2 * shape.largest_matrix) * each
    packing = 3 * each * shape.layer_parameters * setting.device.is_cpu * setting.hosts_engine + reloading(setting)
    if setting.shards == 1:
        return {"sync": largest + packing}
    # One bucket is copied out of the gathered data while the next one is in transit, for which gloo has its own memory;
    # each with its rank's own part.
    total = shape.parameters * each
    bucket = min(max(BUCKET_BYTES, largest), total)
    next_bucket = min(bucket, total - bucket)
    buckets = (2 + 1 / setting.shards) * bucket + (1 + setting.device.is_cpu + 1 / setting.shards) * next_bucket
    return {"sync": buckets + packing}


def _gathered(setting: RunPlanInput, shape: ModelShape, *, while_gathering: bool = False) -> float:
    """The root and the layers that are whole at once, in compute dtype; while_gathering: while one is being built."""
    if not setting.sharded:
        return 0.0
    together = setting.shards > 1 or not setting.device.is_cpu
    if _gathers_whole_model(setting, shape):
        return _whole(setting, shape) * (1 + (setting.shards > 1))
    at_once = 1 + together + (while_gathering and setting.shards > 1)
    layer = shape.largest_layer - setting.elsewhere(shape)
    return setting.bytes_each * (shape.root_parameters + at_once * layer)


def _gathered_in_update(setting: RunPlanInput, shape: ModelShape, run: Pass) -> float:
    """`_gathered` in passes with a gradient: all of one shard on a GPU (`casts_once` of
    `rlcli.model.parallel.fsdp_sharding`)."""
    if setting.sharded and setting.shards == 1 and not setting.device.is_cpu and not run.lora_rank:
        return max(_whole(setting, shape), _gathered(setting, shape))
    return _gathered(setting, shape)


def _gathers_whole_model(setting: RunPlanInput, shape: ModelShape) -> bool:
    return _whole(setting, shape) <= WHOLE_BYTES


def _whole(setting: RunPlanInput, shape: ModelShape) -> float:
    """A whole model, an adapter included, in compute dtype."""
    adapter = setting.trained_parameters() if setting.config.lora.rank and shape == setting.policy else 0
    return setting.bytes_each * (shape.parameters + adapter)


LOGIT_BYTES = {"infer": (4, 6), "forward": (8, 10), "backward": (4, 6), "backward with entropy": (8, 10)}
"""Bytes per logit in the head's loop over chunks (`rlcli.model.logprobs`), in float32 and in bfloat16."""


def _logits(setting: RunPlanInput, shape: ModelShape, doing: str) -> float:
    """Bytes of a chunk of logits, and of what is computed from them: on CPUs of a part of the chunk at a time."""
    if shape.value:
        return 0.0
    chunk = min(chunk_tokens(shape.vocab, not setting.device.is_cpu), setting.pack.responses)
    block = min(chunk, max(1, BLOCK_LOGITS // shape.vocab)) if setting.device.is_cpu else chunk
    each = LOGIT_BYTES[doing][setting.bytes_each < FLOAT]
    return (setting.bytes_each * chunk + (each - setting.bytes_each) * block) * shape.vocab


def _backward_of_head(setting: RunPlanInput, shape: ModelShape) -> float:
    """Logits, the hidden states' gradient and, for a trained head in bfloat16, the product added to its gradient."""
    doing = "backward with entropy" if setting.config.algorithm.entropy_coef else "backward"
    peak = _logits(setting, shape, doing) + setting.bytes_each * setting.pack.responses * shape.hidden
    half = setting.bytes_each < FLOAT and not setting.config.lora.rank
    return peak + half * setting.bytes_each * shape.embedding_parameters


def _trained(setting: RunPlanInput, shape: ModelShape, run: Pass) -> float:
    if run.lora_rank:
        return shape.adapter_parameters(run.lora_rank, run.lora_targets)
    return shape.parameters - (shape.vision_encoder.frozen(run.frozen) if shape.vision_encoder is not None else 0)


def _trained_per_layer(setting: RunPlanInput, shape: ModelShape, run: Pass) -> float:
    if shape.delta is not None:  # the mean: there are two kinds
        adapter = shape.adapter_parameters(run.lora_rank, run.lora_targets) if run.lora_rank else 0
        return (adapter or shape.all_layer_parameters) / shape.layers
    return shape.adapter_layer_parameters(run.lora_rank, run.lora_targets) if run.lora_rank else shape.layer_parameters


def _unreduced(setting: RunPlanInput, shape: ModelShape, run: Pass) -> float:
    """Trained parameters of a layer of which a worker has the gradients before they are reduced."""
    return _trained_per_layer(setting, shape, run) - (0 if run.lora_rank else setting.elsewhere(shape))
