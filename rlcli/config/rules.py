"""Rules between keys. Messages name the keys, their values and the fix, with the arithmetic if sizes do not fit."""

from __future__ import annotations

from rlcli.config.schema import RunConfig

MOST_SAMPLES = 1_000_000
"""Maximum samples of one step: more would fill the driver's memory before a token is generated."""

Rule = tuple[bool, str]
"""Whether it holds, and the message if it does not."""


def broken(config: RunConfig) -> list[str]:
    """A message for each rule that `config` breaks."""
    groups = (_data, _algorithm, _sampling, _environment, _older_policies, _given_responses, _training)
    rules = [rule for group in groups for rule in group(config)]
    return [message for holds, message in rules if not holds]


def without_effect(config: RunConfig) -> list[str]:
    """A message for each key that differs from its default although nothing reads it."""
    idle = [
        ("evaluation", "every samples temperature max_prompts", not config.evaluates, "evaluation.data is unset"),
        (
            "environment",
            "options python processes deadline_s memory_mb max_failure_rate turns turn_tokens context_tokens "
            "past tool_calls reply_chars cut seconds rows eval_rows",
            not config.environment.name,
            "environment.name is unset",
        ),
        (
            "environment",
            "options python past reply_chars cut",
            config.environment.is_command,
            "environment.name is a command, which has its own options, interpreter and messages",
        ),
        ("environment", "rows", bool(config.environment.name and config.data.path), "data.path has the rows"),
        ("environment", "eval_rows", bool(config.evaluation.data), "evaluation.data has the rows"),
        ("lora", "alpha targets", not config.lora.rank, "lora.rank = 0 trains all weights"),
        ("dynamic_sampling", "low high", config.dynamic_sampling.keep != "accuracy", "keep is not accuracy"),
        ("dynamic_sampling", "max_batches oversample", config.dynamic_sampling.keep == "all", "keep = all"),
        ("tracking", "token_samples", not config.tracking.save_samples, "tracking.save_samples = false"),
        ("shaping", "overlong_penalty", not config.shaping.overlong_buffer, "shaping.overlong_buffer = 0"),
    ]
    found = []
    for name, keys, has_none, why in idle:
        section = getattr(config, name)
        for key in keys.split() if has_none else ():
            value = getattr(section, key)
            if value != type(section).model_fields[key].get_default(call_default_factory=True):
                found.append(f"{name}.{key} = {value} has no effect: {why}")
    return found


def _data(config: RunConfig) -> list[Rule]:
    sets, weights = config.data.sets, config.data.weights
    without = next((one.path for one in sets if one.weight is None), "")
    return [
        (
            len(weights) in (0, len(sets)),
            f"data.path: {without} has no weight, but others have one; give all of them a weight, or none",
        ),
        (
            config.data.mix == "prompts" or len(weights) > 1,
            f"data.mix = {config.data.mix} is the unit of weights, but data.path has none; give each of several "
            "paths a weight, or leave data.mix out",
        ),
    ]


def _algorithm(config: RunConfig) -> list[Rule]:
    r, t, a = config.rollout, config.train, config.algorithm
    return [
        (
            a.kl_target is None or a.kl_coef > 0,
            f"algorithm.kl_target = {a.kl_target} has no effect: algorithm.kl_coef = 0 loads no reference; "
            "give kl_coef an initial value, such as 0.001",
        ),
        (
            r.top_p == 1 or a.correction != "none" or bool(config.data.response),
            f"rollout.top_p = {r.top_p} samples from a distribution other than the trained one, and "
            "algorithm.correction = none leaves the ratios biased; give top_p = 1 or a correction",
        ),
        (
            config.critic.warmup_steps < t.steps,
            f"critic.warmup_steps = {config.critic.warmup_steps} leaves none of train.steps = {t.steps} for the "
            "policy; lower the first or raise the second",
        ),
    ]


def _sampling(config: RunConfig) -> list[Rule]:
    r, d = config.rollout, config.dynamic_sampling
    engines, pool = config.engine_workers, "rollout" if r.workers else "cluster"
    return [
        (
            d.keep == "all" or r.samples_per_prompt >= 2,
            f"rollout.samples_per_prompt = {r.samples_per_prompt}: dynamic_sampling.keep = {d.keep} compares the "
            "samples of a group; give 2 or more",
        ),
        (
            d.low <= d.high,
            f"dynamic_sampling.low = {d.low} is more than dynamic_sampling.high = {d.high}; swap the two",
        ),
        (
            config.shaping.overlong_buffer <= r.max_response_tokens,
            f"shaping.overlong_buffer = {config.shaping.overlong_buffer} is longer than a response: "
            f"rollout.max_response_tokens = {r.max_response_tokens}; lower the first or raise the second",
        ),
        (
            r.prompts_per_step * r.samples_per_prompt <= MOST_SAMPLES,
            f"rollout.prompts_per_step × rollout.samples_per_prompt = {r.prompts_per_step * r.samples_per_prompt} "
            f"samples in a step are more than {MOST_SAMPLES}; lower one of them",
        ),
        (
            config.evaluation.samples == 1 or config.evaluation.temperature > 0,
            f"evaluation.samples = {config.evaluation.samples} at evaluation.temperature = 0 gives the same response "
            f"{config.evaluation.samples} times; give one sample, or a temperature above 0",
        ),
        (
            engines % r.tensor_parallel == 0,
            f"{pool}.workers / rollout.tensor_parallel = {engines} / {r.tensor_parallel} = "
            f"{engines / r.tensor_parallel:.4g} is not whole; give a divisor of {engines}",
        ),
    ]


def _environment(config: RunConfig) -> list[Rule]:
    e = config.environment
    if not e.name:
        return []
    name = f"environment.name = {e.name}"
    return [
        (
            not config.data.response,
            f"data.response = {config.data.response}: no response is sampled, so that {name} has nothing to answer; "
            "leave one of them out",
        ),
        (
            not e.is_command or config.rollout.oversample == 1,
            f"rollout.oversample = {config.rollout.oversample}: {name} is a program, which cannot go on with a "
            "conversation that a step interrupts; give oversample = 1",
        ),
        (
            e.name != "auto" or bool(config.data.path or config.evaluation.data),
            "environment.name = auto: rows name their environments, but no data.path is given; name an environment",
        ),
        (
            e.seconds is None or not config.train.deterministic,
            f"environment.seconds = {e.seconds}: which turn is a conversation's last depends on timing, but "
            "train.deterministic = true promises the same bits in every run; leave one of them out",
        ),
    ]


def _older_policies(config: RunConfig) -> list[Rule]:
    """Samples from a policy other than the trained one need a correction, and cannot be deterministic."""
    r, d, staleness = config.rollout, config.dynamic_sampling, config.async_.staleness
    corrected = config.algorithm.correction != "none"
    biased = "and algorithm.correction = none leaves the ratios biased"
    return [
        (
            not staleness or r.workers > 0,
            f"async.staleness = {staleness}: engines that generate while the trainer trains need separate workers; "
            "give rollout.workers = 1 or more, or staleness = 0",
        ),
        (
            not staleness or corrected,
            f"async.staleness = {staleness} trains on samples of an earlier policy, {biased}; "
            "give staleness = 0 or a correction",
        ),
        (
            not r.quantization or corrected,
            f"rollout.quantization = {r.quantization} samples from a distribution other than the trained one, "
            f"{biased}; leave it out or give a correction",
        ),
        (
            r.oversample == 1 or corrected,
            f"rollout.oversample = {r.oversample} trains on samples with tokens from several policies, {biased}; "
            "give oversample = 1 or a correction",
        ),
        (
            r.oversample == 1 or not config.train.deterministic,
            f"rollout.oversample = {r.oversample}: which responses a step interrupts depends on timing, but "
            "train.deterministic = true promises the same bits in every run; give oversample = 1 or deterministic = "
            "false",
        ),
        (
            d.oversample == 1 or d.keep == "all" or corrected,
            f"dynamic_sampling.oversample = {d.oversample} trains on samples of an earlier policy, {biased}; "
            "give oversample = 1 or a correction",
        ),
    ]


def _given_responses(config: RunConfig) -> list[Rule]:
    if not config.data.response:
        return []
    r, d, a = config.rollout, config.dynamic_sampling, config.algorithm
    given = "if responses are given (data.response)"
    return [
        (
            r.samples_per_prompt == 1 and d.keep == "all",
            f"data.response = {config.data.response} trains on given responses: that needs "
            "rollout.samples_per_prompt = 1 and dynamic_sampling.keep = all; start from the recipe sft",
        ),
        (
            r.temperature == 1,
            f"rollout.temperature = {r.temperature}: the likelihood of given responses (data.response) is taken at "
            "1; give 1",
        ),
        (r.top_p == 1, f"rollout.top_p = {r.top_p}: nothing is sampled {given}; give 1"),
        (not r.quantization, f"rollout.quantization = {r.quantization}: nothing is sampled {given}; leave it out"),
        (r.workers == 0, f"rollout.workers = {r.workers}: nothing is sampled {given}; give 0"),
        (r.oversample == 1, f"rollout.oversample = {r.oversample}: nothing is sampled {given}; give 1"),
        (a.correction == "none", f"algorithm.correction = {a.correction}: no engine takes part {given}; give none"),
    ]


def _training(config: RunConfig) -> list[Rule]:
    r, t, c = config.rollout, config.train, config.cluster
    longest = config.max_length
    return [
        (
            r.prompts_per_step % t.minibatches == 0,
            f"rollout.prompts_per_step / train.minibatches = {r.prompts_per_step} / {t.minibatches} = "
            f"{r.prompts_per_step / t.minibatches:.4g} is not whole; give a divisor of {r.prompts_per_step}",
        ),
        (
            t.tokens_per_microbatch >= longest,
            f"train.tokens_per_microbatch = {t.tokens_per_microbatch} is less than one sample may hold: "
            f"{config.longest} = {longest}; raise the first or lower the others",
        ),
        (
            t.offload == "none" or (r.workers == 0 and bool(config.evaluation.data or not config.data.response)),
            f"train.offload = {t.offload} makes room for an engine on the same GPUs, but "
            + (f"rollout.workers = {r.workers} puts engines on others" if r.workers else "none is used (data.response)")
            + "; give none",
        ),
        (
            c.workers % c.replicate == 0,
            f"cluster.workers / cluster.replicate = {c.workers} / {c.replicate} = {c.workers / c.replicate:.4g} is "
            f"not whole; give a divisor of {c.workers}",
        ),
        (
            t.warmup_steps <= t.steps,
            f"train.warmup_steps = {t.warmup_steps} is more than train.steps = {t.steps}; "
            "lower the first or raise the second",
        ),
    ]
