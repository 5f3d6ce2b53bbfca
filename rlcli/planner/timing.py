"""Estimate the seconds of a step by phase, for full-length responses: operations and bytes divided by device rates.

The device's figures are peaks; its constants say how many times as long real work takes. Unless they were measured
(`rlcli plan --calibrate`) they are round numbers from what good implementations report: expect the order of magnitude,
and trust comparisons more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlcli.planner.activations import FLOAT
from rlcli.planner.engine import full_responses, kv_per_token, weights
from rlcli.planner.memory import checkpoint_bytes
from rlcli.planner.setting import Setting

ADAM_TRAFFIC = 7 * FLOAT
"""Bytes per parameter that a step reads and writes: weight, gradient and two moments."""


@dataclass(frozen=True)
class PhaseTime:
    """Maximum seconds of a phase, and what bounds it."""

    name: str
    seconds: float
    bound: str


def times(setting: Setting) -> list[PhaseTime]:
    """The phases in the order of a step; empty if the device's rates are unknown."""
    if not setting.device.has_rates:
        return []
    found = []
    if not setting.config.data.response:
        found.append(_generate(setting))
    needed = {
        "old_log_probs": setting.algorithm.needs_old_log_probs(setting.updates),
        "reference": setting.algorithm.needs_reference,
    }
    forward = _pass_seconds(setting, passes=1, head=1)
    found += [PhaseTime(name, *forward) for name, there in needed.items() if there]
    if (critic := _as_critic(setting)) is not None:
        found.append(PhaseTime("critic", *_pass_seconds(critic, passes=1, head=critic.algorithm.needs_process_rewards)))
    found.append(_update(setting))
    if setting.has_engine:
        found.append(_sync(setting))
    every = setting.config.checkpoint.every
    if every:
        copied = checkpoint_bytes(setting) / setting.shards / _host_rate(setting)
        found.append(PhaseTime("checkpoint", copied / every, "copies to host memory, a step's share"))
    return found


def step_seconds(setting: Setting, phases: list[PhaseTime]) -> float:
    """Seconds of a whole step with the times `phases`; 0 if they are unknown."""
    total = sum(phase.seconds for phase in phases)
    if not setting.config.async_.staleness:
        return total
    generating = sum(phase.seconds for phase in phases if phase.name == "generate")
    return max(generating, total - generating)


def _as_critic(setting: Setting) -> Setting | None:
    """The setting with the critic in place of the policy, on the critic's workers."""
    if setting.critic is None:
        return None
    apart = {"workers": setting.config.critic.workers, "replicate": 1}
    return replace(setting.with_keys(cluster=apart) if apart["workers"] else setting, policy=setting.critic)


def model_flops(setting: Setting) -> float:
    """Operations of one forward and backward pass over a step's tokens, on all ranks."""
    shape = setting.policy
    tokens, places, responses = _step_tokens(setting)
    matrices = 2 * shape.matrix_parameters * tokens + 2 * shape.embedding_parameters * responses
    return 3 * (matrices + _attention(setting, places))


def _step_tokens(setting: Setting) -> tuple[float, float, float]:
    """Totals over all ranks in one pass: tokens of the packs, places in attention, response tokens."""
    pack, config = setting.pack, setting.config
    packs = setting.samples * setting.sample_tokens / pack.places
    return pack.tokens * packs, pack.places * packs, setting.samples * config.rollout.max_response_tokens


def _attention(setting: Setting, places: float) -> float:
    """Operations of one forward pass: scores and values of half the pairs."""
    return setting.policy.layers * 2 * setting.policy.query * places * setting.sample_tokens


def _pass_seconds(setting: Setting, *, passes: float, head: float) -> tuple[float, str]:
    """passes, head: through layers and head, in forward passes."""
    shape = setting.policy
    tokens, places, responses = _step_tokens(setting)
    layers = 2 * shape.matrix_parameters * tokens + _attention(setting, places)
    flops = passes * layers + head * 2 * shape.embedding_parameters * responses
    over = setting.device.constants
    computing = flops / setting.ranks / setting.device.flops * over.over_flops
    if setting.ranks == 1:
        return computing, "matrix rate"
    microbatches = math.ceil(tokens / setting.ranks / setting.pack.tokens)
    gathers = 2 if passes > 1 else 1
    moved: float = gathers * setting.bytes_each + (FLOAT if passes > 1 else 0)
    moved *= microbatches * (setting.shards > 1)
    if setting.shards < setting.ranks and passes > 1:  # between copies, once: reduced and broadcast again
        moved += 2 * FLOAT / setting.shards
    moving = moved * shape.parameters / setting.device.link_rate * over.over_links
    return (moving, "links between devices") if moving > computing else (computing, "matrix rate")


def _update(setting: Setting) -> PhaseTime:
    config = setting.config
    checkpointing = bool(config.model.gradient_checkpointing)
    # The head is always computed twice; with an adapter the base weights have no gradient.
    backward = 1 if config.lora.rank else 2
    seconds, bound = _pass_seconds(setting, passes=1 + checkpointing + backward, head=2 + backward)
    stepping = _stepping(setting, setting.trained_parameters())
    beside = 0.0
    if (critic := _as_critic(setting)) is not None:
        head = 3 * critic.algorithm.needs_process_rewards
        beside = config.train.passes * _pass_seconds(critic, passes=3 + checkpointing, head=head)[0]
        beside += setting.updates * _stepping(critic, critic.policy.parameters)
    away = {"none": 0, "optimizer": 2, "all": 3}[config.train.offload] if not setting.device.is_cpu else 0
    moving = 2 * away * FLOAT * setting.trained_parameters() / setting.shards / _host_rate(setting)
    total = config.train.passes * seconds + setting.updates * stepping + moving + beside
    return PhaseTime("update", total, bound if seconds > stepping + moving else "memory")


def _stepping(setting: Setting, parameters: float) -> float:
    """Seconds of the optimizer's step."""
    device = setting.device
    return parameters / setting.shards * ADAM_TRAFFIC / device.read_rate * device.constants.over_reading


def _generate(setting: Setting) -> PhaseTime:
    """Decoding, in as many rounds as concurrent requests require, and the prompts' prefill."""
    config, shape, device = setting.config, setting.policy, setting.device
    rollout, shared = config.rollout, config.rollout.tensor_parallel
    kept = config.dynamic_sampling
    asked = rollout.prompts_per_step * rollout.samples_per_prompt * (kept.oversample if kept.keep != "all" else 1)
    each = math.ceil(asked / setting.engines)
    at_once = max(1.0, min(each, rollout.max_concurrent, full_responses(setting)))
    steps = each / at_once * rollout.max_response_tokens
    length = setting.prompt_tokens + rollout.max_response_tokens / 2
    over = device.constants
    reading = (weights(setting) + at_once * length * kv_per_token(setting)) / device.read_rate * over.over_reading
    per_token = 2 * (shape.matrix_parameters + shape.embedding_parameters) / shared
    computing = at_once * per_token / device.flops * over.over_flops
    waiting = over.decode_step_s * (10 if device.is_cpu or rollout.enforce_eager else 1)
    prompts = rollout.prompts_per_step / setting.engines * setting.prompt_tokens
    prefill = prompts * per_token / device.flops * over.over_flops
    longest = max((reading, "memory"), (computing, "matrix rate"))
    bound = longest[1] if longest[0] > waiting else "scheduling"
    bound += "; beside the rest" * config.async_.staleness
    return PhaseTime("generate", steps * (longest[0] + waiting) + prefill, bound)


def _sync(setting: Setting) -> PhaseTime:
    size = setting.bytes_each * setting.policy.parameters
    if setting.separate_adapter:
        size = FLOAT * setting.trained_parameters()
    over = setting.device.constants
    copying = 2 * size / setting.device.read_rate * over.over_reading
    if setting.shards == 1:
        return PhaseTime("sync", copying, "memory")
    moving = size / setting.device.link_rate * over.over_links
    return PhaseTime("sync", max(copying, moving), "links between devices" if moving > copying else "memory")


def _host_rate(setting: Setting) -> float:
    device, over = setting.device, setting.device.constants
    return device.read_rate / over.over_reading / 2 if device.is_cpu else device.host_rate / over.over_links
