"""Estimate the seconds of a step by phase, for full-length responses of which every one is trained on.

On the machine that the command runs on, operations and bytes are divided by rates that were measured there
(`rlcli_planner.machine.machine_rates`). Of other devices the data sheet gives peaks, and constants say how many times
as long real work takes, in round numbers: expect the order of magnitude, and trust comparisons more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlcli_planner.activations import FLOAT
from rlcli_planner.engine_memory import CPU_BLOCK, full_responses, kv_per_token, weights
from rlcli_planner.known_devices import Device
from rlcli_planner.model_shape import Linear, ModelShape
from rlcli_planner.phase_memory import checkpoint_bytes
from rlcli_planner.plan_input import RunPlanInput
from rlcli_planner.vision_encoder import backward_flops, vision_encoder_flops

CHANGED_SHARE = {"bfloat16": 0.03, "float16": 0.24, "float32": 1.0}
"""Share of the values that an update changes, by their dtype: of bfloat16 at a learning rate of 1e-6, by
`scripts/bench/sync.py --delta`; of float16, which has three bits more, assumed; of float32 nearly all."""
INDEX_BYTES = 4
SUM_S = 10e-6
"""Seconds until a sum over the devices of an engine begins: an assumption."""

ADAM_TRAFFIC = 7 * FLOAT
"""Bytes per parameter that a step reads and writes: weight, gradient and two moments."""

TRAINING_OPERATIONS, FORWARD_OPERATIONS = 60, 20
"""Small operations of a layer in a micro-batch, beyond those whose time grows with the tokens."""
DECODING_OPERATIONS, STEP_OPERATIONS = 20, 150
"""Small operations of an engine on a CPU for each decoding step: of each layer, and others."""
STEP_PYTHON, REQUEST_PYTHON = 20.0, 0.5
"""Python time of an engine for each decoding step, and for each request in it, in units of `Rates.python_s`."""
SYNC_COPIES = 100
"""Duration of a sync with its checks, in copies of the weights."""
UPDATE_PYTHON, SYNC_PYTHON, CONTROLLER_PYTHON = 200.0, 600.0, 300.0
"""Python time of a step whatever its sizes are, in units of `Rates.python_s`: of an update's packs and metrics, of a
sync's calls and checks, and of the controller's plan, calls and records."""


@dataclass(frozen=True)
class PhaseTime:
    """Maximum seconds of a phase."""

    name: str
    """Name of the phase, as in the run's metrics."""
    seconds: float
    """Seconds of a step."""
    bound: str
    """The resource that bounds it, in words."""


def times(setting: RunPlanInput) -> list[PhaseTime]:
    """The phases in the order of a step; empty if no seconds are predicted."""
    if setting.untimed:
        return []
    phases = []
    if not setting.config.data.response:
        phases.append(_generate(setting))
    needed = {
        "old_log_probs": setting.algorithm.needs_old_log_probs(setting.updates),
        "reference": setting.algorithm.needs_reference,
    }
    seconds, bound = _pass_seconds(setting, passes=1, head=1, vision_flops=_vision_flops(setting))
    phases += [PhaseTime(name, seconds, bound) for name, is_needed in needed.items() if is_needed]
    if setting.teachers:
        phases.append(_teach(setting))
    if (critic := _as_critic(setting)) is not None:
        seconds, bound = _pass_seconds(critic, passes=1, head=critic.algorithm.needs_process_rewards)
        phases.append(PhaseTime("critic", seconds, bound))
    phases.append(_update(setting))
    if setting.has_engine:
        phases.append(_sync(setting))
    every = setting.config.checkpoint.every
    if every:
        copied = checkpoint_bytes(setting) / setting.shards / _host_rate(setting)
        phases.append(PhaseTime("checkpoint", copied / every, "copies to host memory, a step's share"))
    if controlling := _python_seconds(setting, CONTROLLER_PYTHON):
        phases.append(PhaseTime("other", controlling, "Python of the controller"))
    return phases


def step_seconds(setting: RunPlanInput, phases: list[PhaseTime]) -> float:
    """Seconds of a whole step with the times `phases`; 0 if they are unknown."""
    total = sum(phase.seconds for phase in phases)
    if not (setting.config.async_.staleness and setting.config.rollout.workers):
        return total
    generating = sum(phase.seconds for phase in phases if phase.name == "generate")
    return max(generating, total - generating)


def _python_seconds(setting: RunPlanInput, units: float) -> float:
    """Seconds of `units` of Python; 0 on a device that was not measured, whose other figures are coarser."""
    rates = setting.device.rates
    return 0.0 if rates is None else units * rates.python_s


def _as_critic(setting: RunPlanInput) -> RunPlanInput | None:
    """The setting with the critic in place of the policy, on the critic's workers."""
    if setting.critic is None:
        return None
    workers = setting.config.critic.workers
    critic_setting = setting.with_dedicated_workers(workers) if workers else setting
    return replace(critic_setting, policy=setting.critic)


def _teach(setting: RunPlanInput) -> PhaseTime:
    """Forward passes of the teachers, on their workers. The data's shares are unknown: each has an equal part."""
    workers = setting.config.teacher.workers
    teacher_setting = setting.with_dedicated_workers(workers) if workers else setting
    by_teacher = [_pass_seconds(replace(teacher_setting, policy=shape), passes=1, head=1) for shape in setting.teachers]
    return PhaseTime("teacher", sum(seconds for seconds, _ in by_teacher) / len(by_teacher), max(by_teacher)[1])


def model_flops(setting: RunPlanInput) -> float:
    """Operations of one forward and backward pass over a step's tokens, on all ranks."""
    shape = setting.policy
    tokens, attention_tokens, responses = _step_tokens(setting)
    matrices = 2 * shape.matrix_parameters * tokens + 2 * shape.embedding_parameters * responses
    text = 3 * (matrices + _attention(setting, attention_tokens))
    return text + _vision_flops(setting) + _vision_flops(setting, backward=True)


def _vision_flops(setting: RunPlanInput, *, backward: bool = False, recomputed: bool = False) -> float:
    """Operations of a forward pass of the vision encoder over a step's images, on all ranks. backward: of the backward
    pass; recomputed: with a second forward pass of its blocks."""
    vision_encoder = setting.policy.vision_encoder
    if vision_encoder is None or not setting.image_stats.tokens:
        return 0.0
    patches, image_patches = (
        setting.packs * setting.pack.images * vision_encoder.unit,
        _image_tokens(setting) * vision_encoder.unit,
    )
    if not backward:
        return sum(vision_encoder_flops(vision_encoder, patches, image_patches))
    second_forward = (
        vision_encoder_flops(vision_encoder, patches, image_patches)[0]
        if recomputed and "encoder" not in setting.frozen
        else 0.0
    )
    return backward_flops(vision_encoder, patches, image_patches, setting.frozen) + second_forward


def _image_tokens(setting: RunPlanInput) -> float:
    """Tokens of a mean image."""
    return setting.image_stats.tokens / max(setting.image_stats.images, 1.0)


def _step_tokens(setting: RunPlanInput) -> tuple[float, float, float]:
    """Totals over all ranks in one pass: tokens of the packs, places in attention, response tokens."""
    pack = setting.pack
    packs = setting.samples * setting.sample_tokens / pack.attention_tokens
    return pack.tokens * packs, pack.attention_tokens * packs, setting.samples * setting.response_tokens


def _attention(setting: RunPlanInput, attention_tokens: float) -> float:
    """Operations of one forward pass: scores and values of half the pairs."""
    return setting.policy.attention_layers * 2 * setting.policy.query * attention_tokens * setting.sample_tokens


def _pass_seconds(
    setting: RunPlanInput, *, passes: float, head: float, exchanges: int = 1, vision_flops: float = 0.0
) -> tuple[float, str]:
    """Seconds of passes over a step's tokens, and what bounds them. passes, head: through layers and head, in forward
    passes. exchanges: number of exchanges of a token's values with other ranks, and back. vision_flops: operations of
    the vision encoder."""
    shape = setting.policy
    tokens, attention_tokens, _ = _step_tokens(setting)
    over = setting.device.constants
    computing = _compute_seconds(setting, passes, head, vision_flops) / setting.ranks
    if setting.ranks == 1:
        return computing, "matrix rate"
    microbatches = math.ceil(tokens / setting.ranks / setting.pack.tokens)
    gathers = 2 if passes > 1 else 1
    moved: float = gathers * setting.bytes_each + (FLOAT if passes > 1 else 0)
    moved *= microbatches * (setting.shards > 1)
    rate, links = setting.device.rate_among(setting.shards)
    moving = moved * (shape.parameters - _not_gathered(setting)) / rate
    if setting.shards < setting.ranks and passes > 1:  # between copies, once: reduced and broadcast again
        between, carried = setting.device.rate_among(setting.ranks)
        last = 2 * FLOAT / setting.shards * shape.parameters / between
        moving, links = moving + last, carried if last > moving else links
    moving *= over.over_links
    # Nothing is computed during these exchanges.
    parallel = setting.config.parallel
    within, among = (setting.device.rate_among(size)[0] for size in (parallel.context, parallel.expert))
    exchanging = _context_bytes(setting, attention_tokens) / within + _expert_bytes(setting, tokens) / among
    exchanging *= exchanges * over.over_links
    bound = links if moving + exchanging > computing else "matrix rate"
    return max(moving, computing) + exchanging, bound


def _compute_seconds(setting: RunPlanInput, passes: float, head: float, vision_flops: float) -> float:
    """Seconds of `_pass_seconds` if one rank computed all of it."""
    shape, rates, device = setting.policy, setting.device.rates, setting.device
    tokens, attention_tokens, responses = _step_tokens(setting)
    layers = passes * (2 * shape.matrix_parameters * tokens + _attention(setting, attention_tokens)) + vision_flops
    projecting = head * 2 * shape.embedding_parameters * responses
    if rates is None:
        return (layers + projecting) / device.flops * device.constants.over_flops
    training = passes > 1
    seconds = layers / rates.of_layer(shape.hidden, training=training)
    seconds += projecting / rates.of_product(shape.hidden, math.inf)
    seconds += rates.softmax_s * responses * shape.vocab * (head / 4 if training else head / 2)
    operations = TRAINING_OPERATIONS if training else FORWARD_OPERATIONS
    return seconds + math.ceil(setting.packs) * shape.layers * operations * rates.operation_s


def _context_bytes(setting: RunPlanInput, attention_tokens: float) -> float:
    """Bytes that a rank sends in one forward pass to those with which it divides tokens: queries, keys and values of
    its tokens, and the outputs of its heads; a key goes to each rank that has one of its queries."""
    shape, ranks = setting.policy, setting.config.parallel.context
    copies = max(1.0, ranks / shape.kv_heads)
    width = 2 * shape.query + 2 * shape.key * copies
    return shape.layers * width * attention_tokens / setting.ranks * setting.bytes_each * (ranks - 1) / ranks


def _expert_bytes(setting: RunPlanInput, tokens: float) -> float:
    """Bytes that a rank sends in one forward pass to those with which it divides experts: each token to each of its
    experts, and as many outputs back."""
    shape, ranks = setting.policy, setting.config.parallel.expert
    pairs = tokens / setting.ranks * shape.experts_per_token
    return shape.expert_layers * 2 * pairs * shape.hidden * setting.bytes_each * (ranks - 1) / ranks


def _not_gathered(setting: RunPlanInput) -> float:
    """Parameters that a rank does not gather from others: their experts, and its own ones so far as it has them."""
    shape, ranks = setting.policy, setting.config.parallel.expert
    if ranks == 1:
        return 0.0
    local_experts, replicas = shape.experts * shape.expert_parameters / ranks, setting.shards // ranks
    return shape.expert_layers * (setting.elsewhere(shape) + local_experts / replicas)


def _update(setting: RunPlanInput) -> PhaseTime:
    config = setting.config
    checkpointing = bool(config.model.gradient_checkpointing)
    # The head is always computed twice; with an adapter the base weights have no gradient.
    backward = 1 if config.lora.rank else 2
    exchanges = 2 + checkpointing
    vision_flops = _vision_flops(setting) + _vision_flops(setting, backward=True, recomputed=checkpointing)
    passes = 1 + checkpointing + backward
    seconds, bound = _pass_seconds(
        setting, passes=passes, head=2 + backward, exchanges=exchanges, vision_flops=vision_flops
    )
    stepping = _optimizer_seconds(setting, setting.policy, setting.trained_parameters())
    critic_seconds = 0.0
    if (critic := _as_critic(setting)) is not None:
        head = 3 * critic.algorithm.needs_process_rewards
        passing, _ = _pass_seconds(critic, passes=3 + checkpointing, head=head, exchanges=exchanges)
        critic_seconds = config.train.passes * passing
        critic_seconds += setting.updates * _optimizer_seconds(critic, critic.policy, critic.policy.parameters)
    away = {"none": 0, "optimizer": 2, "all": 3}[config.train.offload] if not setting.device.is_cpu else 0
    moving = 2 * away * FLOAT * setting.trained_parameters() / setting.shards / _host_rate(setting)
    fixed = _python_seconds(setting, UPDATE_PYTHON)
    total = config.train.passes * seconds + setting.updates * stepping + moving + critic_seconds + fixed
    return PhaseTime("update", total, bound if seconds > stepping + moving else "memory")


def _optimizer_seconds(setting: RunPlanInput, shape: ModelShape, parameters: float) -> float:
    """Seconds of the optimizer's step."""
    device = setting.device
    seconds = _orthogonalizing(setting, shape) if setting.config.train.optimizer == "muon" else 0.0
    if device.rates is not None:
        return seconds + parameters / setting.shards / device.rates.update_rate
    return seconds + parameters / setting.shards * ADAM_TRAFFIC / device.read_rate * _over_reading(device)


def _orthogonalizing(setting: RunPlanInput, shape: ModelShape) -> float:
    """Seconds of Muon's products of matrices (`rlcli.model.muon`), which ranks divide: in each of 5 iterations 4 m² n +
    2 m³ operations, for the smaller side m and the larger n."""
    smaller = [(min(one.inputs, one.outputs), one, count) for count, kind in shape.kinds for one in _matrices(kind)]
    operations = sum(10 * count * (2 * m * one.inputs * one.outputs + m**3) for m, one, count in smaller)
    rates, device = setting.device.rates, setting.device
    rate = device.flops / device.constants.over_flops if rates is None else rates.of_layer(shape.hidden, training=True)
    return operations / setting.shards / rate


def _matrices(shape: ModelShape) -> list[Linear]:
    """The linear maps of a layer, with those of its experts."""
    experts = [Linear("experts", shape.hidden, shape.intermediate)] * (3 * shape.experts)
    shared = [Linear("shared", shape.hidden, shape.shared)] * (3 if shape.shared else 0)
    return [*shape.linears, *experts, *shared]


def _over_reading(device: Device) -> float:
    """Time of reading over the time at the device's rate: 1 for a measured rate, which is not a peak."""
    return 1.0 if device.rates is not None else device.constants.over_reading


def _generate(setting: RunPlanInput) -> PhaseTime:
    """Decoding, in as many rounds as concurrent requests require, and the prompts' prefill."""
    config, rollout = setting.config, setting.config.rollout
    sampling = config.dynamic_sampling
    requests = (
        rollout.prompts_per_step * rollout.samples_per_prompt * (sampling.oversample if sampling.keep != "all" else 1)
    )
    each = math.ceil(requests / setting.engines)
    at_once = max(1.0, min(each, rollout.max_concurrent, full_responses(setting)))
    steps = each / at_once * rollout.max_response_tokens
    length = setting.prompt_tokens + rollout.max_response_tokens / 2
    bounds = _decode_bounds(setting, at_once, length)
    bound = max(bounds, key=lambda name: bounds[name])
    prefill = rollout.prompts_per_step / setting.engines * _prefill(setting)
    if setting.device.is_cpu:  # only whole blocks of a prompt are shared by its samples
        alone = setting.prompt_tokens % CPU_BLOCK * (rollout.samples_per_prompt - 1)
        prefill *= 1 + alone / max(setting.prompt_tokens, 1.0)
    bound += "; beside the rest" * bool(config.async_.staleness and config.rollout.workers)
    return PhaseTime("generate", steps * decode_seconds(setting, at_once, length) + prefill, bound)


def decode_seconds(setting: RunPlanInput, running: float, length: float) -> float:
    """Seconds in which an engine generates one token of each of `running` samples, which have `length` tokens so
    far."""
    bounds = _decode_bounds(setting, running, length)
    return max(bounds["memory"], bounds["matrix rate"]) + bounds["scheduling"]


def prefill_seconds(setting: RunPlanInput) -> float:
    """Seconds of an engine for one token of a prompt."""
    shape, device = setting.policy, setting.device
    shared = setting.config.rollout.tensor_parallel
    if device.rates is not None:
        return 2 * shape.matrix_parameters / shared / device.rates.of_layer(shape.hidden, training=False)
    per_token = 2 * (shape.matrix_parameters + shape.embedding_parameters) / shared
    return per_token / device.flops * device.constants.over_flops


def _prefill(setting: RunPlanInput) -> float:
    """Seconds of an engine for one prompt with its images."""
    vision_encoder, text = setting.policy.vision_encoder, setting.prompt_tokens * prefill_seconds(setting)
    if vision_encoder is None or not setting.image_stats.tokens:
        return text
    flops = sum(
        vision_encoder_flops(
            vision_encoder,
            setting.image_stats.tokens * vision_encoder.unit,
            _image_tokens(setting) * vision_encoder.unit,
        )
    )
    flops /= setting.config.rollout.tensor_parallel
    rates = setting.device.rates
    if rates is not None:
        return text + flops / rates.of_layer(setting.policy.hidden, training=False)
    return text + flops / setting.device.flops * setting.device.constants.over_flops


def _decode_bounds(setting: RunPlanInput, running: float, length: float) -> dict[str, float]:
    """Seconds of one decoding step by what could bound it."""
    device, shape, shared = setting.device, setting.policy, setting.config.rollout.tensor_parallel
    rates, over = device.rates, device.constants
    states = shape.state_bytes(setting.bytes_each) / shared
    reading = weights(setting) + running * (length * kv_per_token(setting) + states)
    reading = reading / device.read_rate * _over_reading(device)
    if shared > 1:  # nothing is read while two sums a layer are exchanged
        rate = device.rate_among(shared)[0]
        summed = 2 * (shared - 1) / shared * running * shape.hidden * setting.bytes_each
        reading += 2 * shape.layers * (SUM_S + summed / rate * over.over_links)
    if rates is None:
        computing = running * prefill_seconds(setting)
    else:
        flops = 2 * running * (shape.matrix_parameters + shape.embedding_parameters) / shared
        computing = flops / rates.of_product(shape.hidden, running)
    if rates is None or not device.is_cpu:
        scheduling = over.decode_step_s * (10 if setting.config.rollout.enforce_eager else 1)
    else:
        scheduling = (DECODING_OPERATIONS * shape.layers + STEP_OPERATIONS) * rates.operation_s
        scheduling += (STEP_PYTHON + REQUEST_PYTHON * running) * rates.python_s
        scheduling += running * shape.vocab * rates.draw_s
    return {"memory": reading, "matrix rate": computing, "scheduling": scheduling}


def _sync(setting: RunPlanInput) -> PhaseTime:
    if setting.config.copies_weights:
        return _sync_of_copies(setting)
    size = setting.bytes_each * setting.policy.parameters
    if setting.separate_adapter:
        size = FLOAT * setting.trained_parameters()
    over, device = setting.device.constants, setting.device
    copies = SYNC_COPIES if device.rates is not None and device.is_cpu else 2
    copying, moving, links = copies * size / setting.device.read_rate * _over_reading(setting.device), 0.0, ""
    if setting.shards > 1 or setting.config.rollout.workers:
        rate, links = setting.device.rate_among(setting.ranks if setting.config.rollout.workers else setting.shards)
        moving = size / rate * over.over_links
    seconds, bound = max((copying, "memory"), (moving, links))
    slept, fixed = _sleep_seconds(setting), _python_seconds(setting, SYNC_PYTHON)
    return PhaseTime("sync", seconds + slept + fixed, "host memory" if slept > seconds else bound)


def _sleep_seconds(setting: RunPlanInput) -> float:
    """Seconds in which weights move to host memory when their engine starts to sleep, and back."""
    if not (setting.keeps_weights_in_sleep and setting.hosts_engine) or setting.device.is_cpu:
        return 0.0
    return 2 * weights(setting) / _host_rate(setting)


def _sync_of_copies(setting: RunPlanInput) -> PhaseTime:
    """With `rollout.sync = delta` each rank reads its shard of the copy that was sent last, and what has changed goes
    over the links; an engine then loads its part from its own copy, both in host memory. With `rollout.sync = ahead`
    only that last part keeps the engine waiting."""
    each, parameters = setting.bytes_each, setting.policy.parameters
    rollout = setting.config.rollout
    loading = each * parameters / rollout.tensor_parallel / _host_rate(setting)
    fixed = _python_seconds(setting, SYNC_PYTHON)
    if "ahead" in rollout.sync:
        return PhaseTime("sync", loading + fixed, "host memory")
    moved, comparing = float(each * parameters), 0.0
    if "delta" in rollout.sync:
        share = CHANGED_SHARE[setting.dtype]
        moved = parameters * min(each, share * (INDEX_BYTES + each))
        comparing = each * parameters / setting.shards / _host_rate(setting)
    rate, links = setting.device.rate_among(setting.config.all_workers)
    moving = moved / rate * setting.device.constants.over_links
    bound = links if moving > loading + comparing else "host memory"
    return PhaseTime("sync", comparing + moving + loading + fixed, bound)


def _host_rate(setting: RunPlanInput) -> float:
    """Bytes per second to host memory."""
    device, over = setting.device, setting.device.constants
    return device.host_rate if device.is_cpu else device.host_rate / over.over_links
