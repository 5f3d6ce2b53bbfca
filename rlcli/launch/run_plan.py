"""The plan that a run prints before it starts, derived from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.dataset_mixture import shares
from rlcli.data.prompts.prompt_table import JoinedPrompts, images_per_prompt
from rlcli.launch.prepared_run import Prepared

if TYPE_CHECKING:
    from rlcli.algorithms.algorithm import Algorithm


SANDBOXES = {
    "bwrap": "bubblewrap",
    "landlock": "Landlock and a system-call filter, without separate namespaces",
    "unsafe": "processes with limits only: a program can read this user's files",
}
DETERMINISTIC = {
    "cpu": "one thread a worker: the same bits on any number of cores, at the speed of one core a worker",
    "cuda": "torch's deterministic kernels, cuBLAS with a fixed workspace, vLLM's batch-invariant mode, no TF32: the "
    "same bits on the same GPUs and versions, as far as torch has such kernels; slower, mostly in generation",
}
"""Effects and cost of train.deterministic."""
OFFLOADED = {
    "optimizer": "the optimizer's states",
    "all": "weights, the optimizer's states and the reference model",
}
"""State that train.offload moves."""
MOST_LISTED = 5


def _divided(config: RunConfig) -> str:
    """Layout of the workers that train, if they are divided."""
    parallel = config.parallel
    sizes = {**parallel.model_dump(), "shard": config.cluster.workers // (parallel.replicate * parallel.context)}
    layout = " × ".join(f"{name} {sizes[name]}" for name in ("replicate", "shard", "context"))
    experts = f", experts over {parallel.expert} workers" if parallel.expert > 1 else ""
    return (f", {layout}" if parallel.replicate * parallel.context > 1 else "") + experts


def _micro_batch(config: RunConfig) -> str:
    tokens, ranks = config.train.tokens_per_microbatch, config.parallel.context
    return f"at most {tokens} tokens" + (f", divided over {ranks} workers" if ranks > 1 else " a worker")


def derived_plan(prepared: Prepared) -> list[tuple[str, str]]:
    """The plan of a configuration as (label, text) rows: printed before a run and by --dry-run."""
    from rlcli.algorithms.build import build_algorithm

    config = prepared.config
    algorithm = build_algorithm(**config.algorithm.model_dump(), trial_calls=False)
    rollout, train = config.rollout, config.train
    workers = config.cluster.workers
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    epoch = len(prepared.prompts) / rollout.prompts_per_step
    trained = 2 * rollout.prompts_per_step if algorithm.selects_pairs else samples
    bound = "at most " if config.algorithm.select == "right" else ""
    rows = {
        "model": f"{config.model.path}, {_count(prepared.parameters)} parameters, "
        f"{prepared.facts.dtype} on {prepared.facts.device}" + (", layers compiled" if config.model.compile else ""),
        "trained": _trained(prepared),
        **_algorithm_rows(config, algorithm),
        **_prompt_rows(prepared, epoch),
        "samples a step": f"{rollout.prompts_per_step} prompts × {rollout.samples_per_prompt} = {samples}",
        "samples an update": f"{bound}{trained} / {train.minibatches} minibatches = {trained / train.minibatches:g}",
        **_rollout_rows(prepared, algorithm, samples),
        "longest sample": f"{config.longest} = {prepared.facts.max_length} tokens",
        "micro-batch": _micro_batch(config),
        "workers": f"{workers} on {prepared.facts.device}"
        + _divided(config)
        + (f", and {rollout.workers} that generate" if rollout.workers else "")
        + (f", {prepared.threads} threads each" if prepared.facts.device == "cpu" else ""),
        "optimizer": ("Muon and " if train.optimizer == "muon" else "")
        + f"AdamW, lr {train.lr:g}, {train.warmup_steps} steps of warm-up, then {train.schedule}",
        "length": f"{train.steps} steps, {train.steps * samples} samples"
        + (f", {train.steps / epoch:.2f} epochs" if epoch else ""),
        **_memory_rows(prepared),
    }
    if train.deterministic:
        rows["deterministic"] = DETERMINISTIC[prepared.facts.device]
    if train.passes > 1:
        updates = train.passes * train.minibatches
        rows["updates a step"] = f"{train.passes} passes × {train.minibatches} minibatches = {updates}"
    return list(rows.items())


def _memory_rows(prepared: Prepared) -> dict[str, str]:
    """Offloading to host memory, and recomputation of activations."""
    config, on_gpu = prepared.config, prepared.facts.device == "cuda"
    rows = {}
    if config.train.offload != "none":
        where = f"{OFFLOADED[config.train.offload]}: in host memory while the engine generates"
        rows["offload"] = where if on_gpu else "none: on CPUs everything is in host memory"
    if config.model.gradient_checkpointing:
        activations = "only the input of each layer is kept"
        inputs = config.model.gradient_checkpointing == "offload" and on_gpu
        rows["activations"] = activations + (", in host memory" if inputs else "")
    return rows


def _prompt_rows(prepared: Prepared, epoch: float) -> dict[str, str]:
    """Empty if the data is not known yet."""
    if not epoch:
        return {}
    left_out = f"{len(prepared.prompts)} ({prepared.prompts.too_long} left out), {epoch:.1f} steps an epoch"
    return {"prompts": left_out, **_image_rows(prepared), **_mix_rows(prepared), **_template_rows(prepared)}


def _image_rows(prepared: Prepared) -> dict[str, str]:
    """Images of the prompts, for a vision-language model."""
    prompts, rule = prepared.prompts, prepared.prompts.rule
    if rule is None or not prompts.image_tokens:
        return {}
    mean, max_images = prompts.image_tokens / len(prompts), int(images_per_prompt(prompts.prompts).max())
    height, width = rule.blank.shape[:2]
    step = 3 * prepared.config.rollout.prompts_per_step * mean * height * width / rule.tokens(width, height)
    return {
        "pictures": f"at most {max_images} a prompt; {mean:.0f} tokens of a mean prompt, "
        f"{step / 1e6:.3g} MB of pixels a step"
    }


def _mix_rows(prepared: Prepared) -> dict[str, str]:
    """The share of each dataset, if there are several."""
    prompts, data = prepared.prompts.prompts, prepared.config.data
    if not isinstance(prompts, JoinedPrompts):
        return {}
    sizes = [len(part) for part in prompts.parts]
    parts = [
        f"{name} {share:.1%} of {data.mix} ({size} rows)"
        for name, share, size in zip(prompts.names, shares(data.weights or sizes), sizes, strict=True)
    ]
    return {"mix": ", ".join(parts) + ("" if data.weights else "; concatenated")}


def _trained(prepared: Prepared) -> str:
    lora = prepared.config.lora
    if not lora.rank:
        frozen = prepared.config.model.freeze
        return "all weights" + (f" but {' and '.join(frozen)} (model.freeze)" if frozen else "")
    transfer = "added to the engine's weights" if prepared.facts.dtype == "float32" else "sent to the engine separately"
    return f"LoRA of rank {lora.rank} on {lora.targets}, {transfer}"


def _algorithm_rows(config: RunConfig, algorithm: Algorithm) -> dict[str, str]:
    """The algorithm's functions with the numbers they use, and the models that it needs."""
    section, critic = config.algorithm, config.critic
    parts: list[tuple[str, str, Sequence[Callable[..., object]]]] = [
        ("advantage", section.advantage, [algorithm.advantage.function]),
        ("loss", section.loss, [algorithm.loss.function]),
        ("aggregation", section.aggregation, [algorithm.aggregation.function]),
        ("correction", section.correction, [part.function for part in algorithm.correction.parts]),
        ("trained samples", section.select, [algorithm.select.function]),
    ]
    rows = {label: name + _numbers(functions, algorithm.options) for label, name, functions in parts}
    if not algorithm.needs_reference:
        rows["reference model"] = "none (algorithm.kl_coef = 0)"
    else:
        target = f", with a target KL of {section.kl_target:g}" if section.kl_target else ""
        held_by = f"β = {section.kl_coef:g} · {section.kl_estimator} in the {section.kl_in}{target}; "
        held_by = held_by if section.kl_coef else ""
        rows["reference model"] = held_by + ("the policy without its adapter" if config.lora.rank else "a frozen copy")
    if algorithm.needs_critic or algorithm.needs_process_rewards:
        label = "value model" if algorithm.needs_critic else "process reward model"
        plural = "s" if critic.workers > 1 else ""
        where = f"{critic.workers} separate worker{plural}" if critic.workers else "in the policy's workers"
        where += f"; the first {critic.warmup_steps} steps train only it" if critic.warmup_steps else ""
        rows[label] = f"from {critic.path or config.model.path}, all weights, lr {critic.lr:g}, {where}"
    rows |= _teacher_rows(config)
    bonus = f"entropy × {section.entropy_coef:g}" if section.entropy_coef else ""
    bonus = f"entropy up to {section.entropy_target:g}" if section.entropy_target else bonus
    likelihood = f"log-likelihood of right responses × {section.nll_coef:g}" if section.nll_coef else ""
    if bonus or likelihood:
        rows["added to the objective"] = ", ".join(filter(None, (bonus, likelihood)))
    return rows


def _teacher_rows(config: RunConfig) -> dict[str, str]:
    """The teachers of a distillation, and the tokens that they score."""
    teacher = config.teacher
    if not teacher.path:
        return {}
    several = len(teacher.models) > 1
    teachers = [model.path + f" for {', '.join(model.sources) or 'all others'}" * several for model in teacher.models]
    scored = f"its {teacher.top_k} likeliest tokens and the rest" if teacher.top_k else "the sampled tokens"
    plural = "s" if teacher.workers > 1 else ""
    where = f"{teacher.workers} separate worker{plural}" if teacher.workers else "in the policy's workers"
    where = where if teacher.held else "scored by a server"
    return {"teacher": f"{'; '.join(teachers)}: log-probs of {scored}, {where}"}


def _rollout_rows(prepared: Prepared, algorithm: Algorithm, samples: int) -> dict[str, str]:
    config, dynamic = prepared.config, prepared.config.dynamic_sampling
    if config.data.response:
        return {"responses": f"given by extra_info.{config.data.response}"}
    engines = config.engine_workers // config.rollout.tensor_parallel
    each, at_once = math.ceil(samples / engines), config.rollout.max_concurrent
    rollout, shaping = config.rollout, config.shaping
    greedy = " and one greedy response a prompt" if algorithm.needs_baselines else ""
    quantized = (
        ", linear layers in 8-bit floating point, one scale a tensor; the mismatch is reported, and corrected by "
    )
    rows = {
        "engine": rollout.engine + (f"{quantized}{config.algorithm.correction}" if rollout.quantization else ""),
        "samples an engine": f"{samples} / {engines} engines = {each}{greedy}, {at_once} at once",
        "sampling": f"temperature {rollout.temperature:g}, top-p {rollout.top_p:g}",
        **_ending_rows(prepared),
    }
    if environment := config.environment.name:
        limits, added = config.environment, config.environment.context_tokens
        rows["conversations"] = f"with {environment}, at most {limits.turns} turns and {added} tokens of its own"
    if rollout.oversample > 1:
        started = math.ceil(round(rollout.prompts_per_step * rollout.oversample, 6))
        rows["long tail"] = (
            f"{started} prompts start, the step ends when {rollout.prompts_per_step} are finished; the others continue "
            "in the next"
        )
    if config.async_.staleness:
        rows["generated ahead"] = _ahead(config)
    shaped = {
        f"up to −{shaping.overlong_penalty:g} in the last {shaping.overlong_buffer} tokens": shaping.overlong_buffer,
        f"short responses × {shaping.length_weight:g}": shaping.length_weight,
        f"format × {shaping.format_weight:g}": shaping.format_weight,
    }
    if any(shaped.values()):
        rows["added to the score"] = ", ".join(label for label, active in shaped.items() if active)
    if dynamic.keep != "all":
        kept_groups = {
            "unequal": "whose rewards differ",
            "accuracy": f"whose mean score is {dynamic.low:g} to {dynamic.high:g}",
        }[dynamic.keep]
        missing = f"{dynamic.oversample:g} × what is missing, at most {dynamic.max_batches} rounds"
        rows["dynamic sampling"] = f"groups {kept_groups}; {missing}"
    if prepared.facts.verifiers:
        count = config.verifier.processes
        processes = f"{count} processes a machine" if count else "processes by the machine's cores"
        rows["verifiers"] = (
            f"{_listed(prepared.facts.verifiers)}; {processes}, each response for at most "
            f"{config.verifier.deadline_s:g} s of CPU time"
        )
    if prepared.sandbox:
        rows["programs run in"] = SANDBOXES.get(prepared.sandbox, prepared.sandbox)
    if prepared.facts.kv_cache_bytes:
        rows["KV cache"] = f"{prepared.facts.kv_cache_bytes >> 20} MiB an engine"
    return rows


def _ahead(config: RunConfig) -> str:
    """Generation of samples for later steps during training."""
    rules, updates = config.async_, "update" if config.async_.staleness == 1 else "updates"
    policy_age = f"by a policy at most {rules.staleness} {updates} old; corrected by {config.algorithm.correction}"
    if not config.in_flight:
        return f"{policy_age}; an update waits until all responses are complete (async.engine_steps = 0)"
    when = "" if rules.engine_steps is None else f" after {rules.engine_steps} steps of the engines"
    when = when if config.rollout.workers else " when a batch is complete"
    cache = "recomputed" if rules.on_update == "recompute" else "kept"
    return f"{policy_age}; weights change{when} while responses are generated, whose keys and values are {cache}"


def _ending_rows(prepared: Prepared) -> dict[str, str]:
    """End of a response, and treatment of truncated ones."""
    cut = {"mask": "left out of the loss and of the group's statistics", "zero_reward": "their reward is 0"}
    stops = ", ".join(f"{token} {text!r}" for token, text in prepared.facts.stop_tokens.items())
    rows = {"a response ends at": stops} if stops else {}
    rule = prepared.config.train.truncated
    return rows | ({"cut-off responses": cut[rule]} if rule in cut else {})


def _template_rows(prepared: Prepared) -> dict[str, str]:
    """Arguments for the chat template, if any."""
    template_kwargs = prepared.config.data.chat_template_kwargs
    rows = (
        {"chat template": ", ".join(f"{name} = {value!r}" for name, value in template_kwargs.items())}
        if template_kwargs
        else {}
    )
    if prepared.facts.day:
        rows["date in the template"] = f"{prepared.facts.day.isoformat()}, kept with the run"
    return rows | ({"reasoning": "the template opens a <think>"} if prepared.facts.thinking else {})


def _listed(verifiers: Sequence[str]) -> str:
    """The first few, since rows may name many expressions."""
    unlisted = len(verifiers) - MOST_LISTED
    return ", ".join(verifiers[:MOST_LISTED]) + (f" and {unlisted} more" if unlisted > 0 else "")


def _numbers(functions: Sequence[Callable[..., object]], values: Mapping[str, object]) -> str:
    """The options that the functions will use: the given ones, and their defaults."""
    from rlcli.algorithms.function_registry import options_of

    defaults = {name: default for function in functions for name, default in options_of(function).items()}
    options = {name: values.get(name, default) for name, default in defaults.items()}
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in options.items()}
    text = ", ".join(f"{name} {value}" for name, value in rounded.items() if value is not None)
    return f" ({text})" if text else ""


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "unknown"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
