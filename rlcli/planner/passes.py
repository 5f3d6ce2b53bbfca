"""What passes through a sharded model take beside what is always there: gathered layers, activations, logits,
gradients, and the optimizer's step.

FSDP2 gathers layer by layer: on GPUs the next one comes in while one computes, so that two are there, on CPUs one. The
root (embedding and head) stays from the first use to the end of the backward pass. In that pass layer j from the end
holds, beside what the layers before it have kept: its own gathered weights and their gradients, the float32 copy of the
gradients of the layer after it that is being reduced, and the reduced gradients of all layers after it.
"""

from __future__ import annotations

from rlcli.planner.activations import FLOAT, Pass, kept_bytes, layer_bytes, rotation_bytes
from rlcli.planner.setting import Setting
from rlcli.planner.shape import ModelShape

BUCKET_BYTES = 256 << 20
"""`rlcli.model.buckets.BUCKET_BYTES`, which would bring half of torch along."""

Parts = dict[str, float]


def without_gradient(setting: Setting, shape: ModelShape) -> Parts:
    """A forward pass that nothing is kept of."""
    pack, each = setting.pack, setting.bytes_each
    # Of the layer at work: gate, its activation, their product; and four hidden states (what came in, the embedding,
    # the residual, what the norm gave).
    working = pack.tokens * each * (3 * shape.intermediate + 4 * shape.hidden + 2 * shape.head_dim)
    ending = _logits(setting, shape, forward=True) + each * shape.hidden * (2 * pack.tokens + pack.responses)
    return {"gathered weights": _gathered(setting, shape), "activations": max(working, ending)}


def with_gradient(setting: Setting, shape: ModelShape) -> Parts:
    """A forward and a backward pass at their highest point."""
    whole = shape != setting.policy
    run = setting.passing(trained_whole=whole)
    trained = _trained_per_layer(setting, shape, run)
    root = shape.root_parameters if not run.lora_rank else 0
    kept = kept_bytes(shape, run, setting.pack)
    head = _logits(setting, shape, forward=False)
    at_head = {
        "gathered weights": _gathered(setting, shape, layers=1),
        "activations": kept,
        "logits": head,
        "gradients": FLOAT * root,
    }
    return max([at_head, *_layers(setting, shape, run, trained, root)], key=lambda parts: sum(parts.values()))


def _layers(setting: Setting, shape: ModelShape, run: Pass, trained: float, root: float) -> list[Parts]:
    """The highest point within each layer of the backward pass, from the last layer on."""
    tokens, each = setting.pack.tokens, setting.bytes_each
    whole = layer_bytes(shape, run, setting.pack)
    # A hidden state's gradient comes down in place of what the head had kept.
    ends = tokens * (each * shape.hidden + rotation_bytes(shape, run))
    ahead = 0 if setting.device.is_cpu else 1
    found = []
    for done in range(shape.layers):
        left = shape.layers - done
        inputs = 0.0 if run.offload else tokens * each * shape.hidden
        kept = (left * inputs + whole) if run.checkpointing else left * whole
        reducing = FLOAT * trained if done else 0
        reduced = done * FLOAT * trained / setting.ranks
        # While the gated unit is passed back, two tensors of its width come on top and little has a gradient yet; at
        # the layer's end all of it has, and nothing is left of what was kept.
        early = tokens * each * 2 * shape.intermediate + each * _largest_linear(shape) * bool(not run.lora_rank)
        late = each * trained - whole
        found.append(
            {
                "gathered weights": _gathered(setting, shape, layers=1 + ahead),
                "activations": kept + ends + max(early, late),
                "gradients": reducing + reduced + each * root,
            }
        )
    return found


def _largest_linear(shape: ModelShape) -> int:
    """The last linear layer's weight: the first of a layer that has a gradient."""
    return shape.hidden * shape.intermediate


def stepping(setting: Setting, shape: ModelShape) -> Parts:
    """The optimizer's step: all gradients, and what it works with: a list of tensors as large as they are on GPUs, two
    of the largest parameter on CPUs."""
    run = setting.passing(trained_whole=shape != setting.policy)
    own = FLOAT * _trained(setting, shape, run) / setting.ranks
    if not setting.device.is_cpu:
        return {"gradients": own, "optimizer's step": own}
    largest = max(shape.embedding_parameters, _largest_linear(shape)) if not run.lora_rank else 0
    return {"gradients": own, "optimizer's step": 2 * FLOAT * largest / setting.ranks}


def sending(setting: Setting) -> Parts:
    """The weight sync: the buckets that are gathered, or of one rank the largest parameter that is copied."""
    if setting.config.lora.rank:
        return {"sync": 2 * FLOAT * setting.trained_parameters()}
    shape, each = setting.policy, setting.bytes_each
    largest = max(shape.embedding_parameters, 2 * _largest_linear(shape)) * each
    if setting.ranks == 1:
        return {"sync": largest}
    # Gathered and their own parts, two buckets at a time; never more than there is.
    return {"sync": min(2 * max(BUCKET_BYTES, largest), shape.parameters * each) * (1 + 1 / setting.ranks)}


def offloaded_activations(setting: Setting) -> float:
    """In host memory: the input of each layer, where checkpointing offloads it."""
    if not setting.passing().offload or setting.device.is_cpu:
        return 0.0
    return setting.pack.tokens * setting.bytes_each * setting.policy.layers * setting.policy.hidden


def _gathered(setting: Setting, shape: ModelShape, layers: int | None = None) -> float:
    """The root and the layers that are whole at one time, in compute dtype."""
    at_once = layers if layers is not None else 1 if setting.device.is_cpu else 2
    return setting.bytes_each * (shape.root_parameters + at_once * shape.layer_parameters)


def _logits(setting: Setting, shape: ModelShape, *, forward: bool) -> float:
    """A chunk of logits in float32, twice, and in a backward pass what is added up of the head's gradient beside the
    product that is added to it."""
    if shape.value:
        return 0.0
    from rlcli.model.logprobs import chunk_tokens

    chunk = min(chunk_tokens(shape.vocab, not setting.device.is_cpu), setting.pack.responses)
    logits = 2 * FLOAT * chunk * shape.vocab
    if forward or setting.config.lora.rank:
        return logits
    half = setting.bytes_each < FLOAT
    return logits + half * setting.bytes_each * shape.embedding_parameters


def _trained(setting: Setting, shape: ModelShape, run: Pass) -> float:
    return shape.layers * _trained_per_layer(setting, shape, run) + (0 if run.lora_rank else shape.root_parameters)


def _trained_per_layer(setting: Setting, shape: ModelShape, run: Pass) -> float:
    return shape.adapter_layer_parameters(run.lora_rank, run.lora_targets) if run.lora_rank else shape.layer_parameters
