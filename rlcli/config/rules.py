"""Rules between keys. Messages name the keys, their values and the fix, with the arithmetic if sizes do not fit."""

from __future__ import annotations

from rlcli.config.schema import RunConfig

MOST_SAMPLES = 1_000_000
"""Maximum samples of one step: more would fill the driver's memory before a token is generated."""

CLIP_RATIO = ("ppo", "cispo", "dppo_tv", "clip_cov", "gspo", "gmpo")
"""Losses that clip how far the policy has moved from that at the start of the step."""

OF_SESSION = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RLCLI_SESSION", "RLCLI_ROW", "RLCLI_REWARD_KEY")
"""Environment variables that a command gets for each sample."""

Rule = tuple[bool, str]
"""Result of the rule, true if it holds, and the message if it does not."""


def broken(config: RunConfig) -> list[str]:
    """A message for each rule that `config` breaks."""
    rollout = (_sampling, _environment, _older_policies, _sleep, _routes, _sync)
    groups = (_data, _algorithm, _teacher, *rollout, _given_responses, _training)
    rules = [rule for group in groups for rule in group(config)]
    return [message for holds, message in rules if not holds]


def without_effect(config: RunConfig) -> list[str]:
    """A message for each key that differs from its default although nothing reads it."""
    settled = "no response is being generated when the weights change"
    alternate = "nothing is generated while a step is trained on"
    one_update = config.train.minibatches * config.train.passes == 1
    at_start = "with one update a step (train.minibatches × train.passes = 1) it is that of the policy itself"
    idle = [
        ("evaluation", "every samples temperature top_p max_prompts", not config.evaluates, "evaluation.data is unset"),
        ("evaluation", "top_p", config.evaluation.temperature == 0, "evaluation.temperature = 0 is greedy"),
        (
            "environment",
            "options python processes deadline_s memory_mb variables ground_truth max_failure_rate turns turn_tokens "
            "context_tokens past tool_calls reply_chars seconds rows eval_rows",
            not config.environment.name,
            "environment.name is unset",
        ),
        (
            "environment",
            "options python past reply_chars",
            config.environment.is_command,
            "environment.name is a command, which has its own options, interpreter and messages",
        ),
        (
            "environment",
            "ground_truth",
            bool(config.environment.name) and not config.environment.is_command,
            "only commands get a row without it",
        ),
        ("environment", "rows", bool(config.environment.name and config.data.path), "data.path has the rows"),
        ("environment", "eval_rows", bool(config.evaluation.data), "evaluation.data has the rows"),
        ("rollout", "sleep", config.rollout.workers > 0, "engines with separate workers share no GPU"),
        ("rollout", "servers servers_folder", config.rollout.engine != "server", "rollout.engine is not server"),
        ("lora", "alpha targets", not config.lora.rank, "lora.rank = 0 trains all weights"),
        ("model", "freeze", bool(config.lora.rank), "an adapter does not train the vision encoder"),
        ("dynamic_sampling", "low high", config.dynamic_sampling.keep != "accuracy", "keep is not accuracy"),
        ("dynamic_sampling", "max_batches oversample", config.dynamic_sampling.keep == "all", "keep = all"),
        ("tracking", "token_samples", not config.tracking.save_samples, "tracking.save_samples = false"),
        ("async", "on_update", not config.in_flight, settled),
        ("async", "engine_steps", not (config.async_.staleness and config.rollout.workers), alternate),
        (
            "data",
            "shuffle",
            config.data.sampling != "uniform",
            f"data.sampling = {config.data.sampling} draws at random",
        ),
        (
            "algorithm",
            "clip_low clip_high dual_clip",
            one_update and config.algorithm.loss in CLIP_RATIO and "bypass" not in config.algorithm.correction,
            f"the ratio is always 1: {at_start}",
        ),
        ("critic", "clip", one_update, f"no value differs from its old one: {at_start}"),
        ("train", "muon_momentum muon_step_size", config.train.optimizer != "muon", "train.optimizer = adamw"),
        ("train", "min_lr_fraction", config.train.schedule == "constant", "train.schedule = constant ends at train.lr"),
        ("shaping", "overlong_penalty", not config.shaping.overlong_buffer, "shaping.overlong_buffer = 0"),
    ]
    messages = []
    for name, keys, has_none, why in idle:
        section = getattr(config, "async_" if name == "async" else name)
        for key in keys.split() if has_none else ():
            value = getattr(section, key)
            if value != type(section).model_fields[key].get_default(call_default_factory=True):
                messages.append(f"{name}.{key} = {value} has no effect: {why}")
    return messages


def _data(config: RunConfig) -> list[Rule]:
    sets, weights = config.data.sets, config.data.weights
    without = next((other.path for other in sets if other.weight is None), "")
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
        (
            config.data.sampling == "uniform" or config.dynamic_sampling.keep != "all" or bool(config.data.response),
            f"data.sampling = {config.data.sampling} draws prompts that are solved every second time, and still trains "
            "on groups whose rewards are all equal; give dynamic_sampling.keep = unequal, or data.sampling = uniform",
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
            t.epochs is not None or config.critic.warmup_steps < t.steps,
            f"critic.warmup_steps = {config.critic.warmup_steps} leaves none of train.steps = {t.steps} for the "
            "policy; lower the first or raise the second",
        ),
    ]


def _teacher(config: RunConfig) -> list[Rule]:
    models, t = config.teacher.models, config.teacher
    sources = [source for teacher in models for source in teacher.sources]
    twice = next((source for source in sources if sources.count(source) > 1), "")
    others = [teacher.path for teacher in models if not teacher.sources]
    served = next((teacher.path for teacher in models if teacher.is_served), "")
    return [
        (not twice, f"teacher.path: two teachers name the data source '{twice}'; give each source one teacher"),
        (
            len(others) <= 1,
            f"teacher.path: {' and '.join(others[:2])} name no sources, so both would teach all rows; give one of them "
            'its sources, as in {path = "…", sources = ["…"]}',
        ),
        (bool(models) or not t.top_k, f"teacher.top_k = {t.top_k}: no teacher.path is given; give one, or top_k = 0"),
        (
            bool(models) or not t.workers,
            f"teacher.workers = {t.workers}: no teacher.path is given; give one, or workers = 0",
        ),
        (
            not models or bool(t.held) or not t.workers,
            f"teacher.workers = {t.workers}, but servers score for all teachers; give workers = 0",
        ),
        (
            not served or config.rollout.temperature == 1.0,
            f"teacher.path = '{served}': a server scores at temperature 1, and rollout.temperature = "
            f"{config.rollout.temperature:g}; give 1, or the teacher's folder",
        ),
        (
            not served or config.parallel.context == 1,
            f"teacher.path = '{served}': a server scores whole samples, and parallel.context = "
            f"{config.parallel.context} divides them; give 1, or the teacher's folder",
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
            r.engine != "server" or not config.train.deterministic,
            "rollout.engine = server: when a server answers depends on timing, but train.deterministic = true promises "
            "the same bits in every run; give rollout.engine = vllm, or leave train.deterministic out",
        ),
        (
            r.engine != "server" or not config.async_.engine_steps,
            f"async.engine_steps = {config.async_.engine_steps}: servers take their steps by themselves, uncounted; "
            "leave it out, or give 0",
        ),
        (
            r.engine != "server" or r.servers != (),
            "rollout.servers is an empty list; give a URL, or how many servers each engine's worker starts",
        ),
        (
            r.engine != "server" or not r.server_urls or len(set(r.server_urls)) >= engines,
            f"rollout.servers has {len(set(r.server_urls))} URLs for {engines} engines ({pool}.workers): give each its "
            "own server, or rollout.workers = 1, whose engine uses all of them",
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
    of_session = next((variable for variable in e.variables if variable in OF_SESSION), "")
    return [
        (
            not (e.is_command and of_session),
            f"environment.variables: a command gets {of_session} of its session, not this one; leave it out, or export "
            "the value under another name",
        ),
        (
            not config.data.response,
            f"data.response = {config.data.response}: no response is sampled, so that {name} has nothing to answer; "
            "leave one of them out",
        ),
        (
            not e.is_command or config.rollout.oversample == 1,
            f"rollout.oversample = {config.rollout.oversample}: {name} is a program, which cannot continue with a "
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
            not staleness or r.oversample == 1,
            f"rollout.oversample = {r.oversample}: with async.staleness = {staleness} no response is waited for that "
            "a later step may take; give oversample = 1",
        ),
        (
            not config.in_flight or not config.environment.is_command,
            f"async.staleness = {staleness}: {config.environment.name} is a program, whose conversation cannot "
            "continue with other weights; give rollout.workers = 1 or more and async.engine_steps = 0, or staleness "
            "= 0",
        ),
        (
            config.async_.on_update == "recompute" or r.workers > 0,
            "async.on_update = keep: engines that share the trainer's devices lose keys and values when they make room "
            "for it; give rollout.workers = 1 or more, or on_update = recompute",
        ),
        (
            not staleness or corrected or bool(config.data.response),
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
            not r.speculate or not config.train.deterministic,
            f"rollout.speculate = {r.speculate}: log-probs of several tokens at once differ in their last bits from "
            "those of one, and train.deterministic = true promises the same bits in every run; give speculate = 0 or "
            "deterministic = false",
        ),
        (
            d.oversample == 1 or d.keep == "all" or corrected,
            f"dynamic_sampling.oversample = {d.oversample} trains on samples of an earlier policy, {biased}; "
            "give oversample = 1 or a correction",
        ),
    ]


def _sleep(config: RunConfig) -> list[Rule]:
    r = config.rollout
    return [
        (
            r.sleep != "cache" or r.engine == "vllm",
            f"rollout.sleep = cache: rollout.engine = {r.engine} cannot release its KV cache alone; give auto, all or "
            "none",
        ),
    ]


def _routes(config: RunConfig) -> list[Rule]:
    shared = config.rollout.tensor_parallel
    if not config.rollout.replay_routes:
        return []
    return [
        (
            shared == 1,
            f"rollout.replay_routes = true: of the rollout.tensor_parallel = {shared} workers of an engine one alone "
            "gets the routes; give tensor_parallel = 1 or replay_routes = false",
        ),
        (
            not config.model.compile,
            "rollout.replay_routes = true: compiled layers (model.compile = true) would be compiled again for every "
            "pack; give compile = false or replay_routes = false",
        ),
    ]


def _sync(config: RunConfig) -> list[Rule]:
    """Copies of the weights are for engines separate from the trainer, and hold whole weights."""
    r, rank = config.rollout, config.lora.rank
    full, name = r.sync == "full", f"rollout.sync = {r.sync}"
    return [
        (
            full or r.workers > 0,
            f"{name}: engines that share the trainer's devices read the weights where they are; give rollout.workers = "
            "1 or more, or leave it out",
        ),
        (
            full or not rank,
            f"{name}: lora.rank = {rank} changes all weights, or sends a small adapter; leave it out",
        ),
        (
            "ahead" not in r.sync or config.async_.staleness > 0,
            f"{name}: with async.staleness = 0 no engine generates when the weights are ready; give "
            "async.staleness = 1 or more, or leave it out",
        ),
    ]


def _given_responses(config: RunConfig) -> list[Rule]:
    if not config.data.response:
        return []
    r, d, a, staleness = config.rollout, config.dynamic_sampling, config.algorithm, config.async_.staleness
    response = "if responses are given (data.response)"
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
        (r.top_p == 1, f"rollout.top_p = {r.top_p}: nothing is sampled {response}; give 1"),
        (
            config.data.sampling == "uniform",
            f"data.sampling = {config.data.sampling}: no prompt has a pass rate {response}; give uniform",
        ),
        (config.data.retire == 0, f"data.retire = {config.data.retire}: no prompt has a pass rate {response}; give 0"),
        (not r.quantization, f"rollout.quantization = {r.quantization}: nothing is sampled {response}; leave it out"),
        (staleness == 0, f"async.staleness = {staleness}: nothing is sampled {response}; give 0"),
        (r.workers == 0, f"rollout.workers = {r.workers}: nothing is sampled {response}; give 0"),
        (r.oversample == 1, f"rollout.oversample = {r.oversample}: nothing is sampled {response}; give 1"),
        (a.correction == "none", f"algorithm.correction = {a.correction}: no engine takes part {response}; give none"),
    ]


def _parallel(config: RunConfig) -> list[Rule]:
    """Sizes that the workers are to be divided by."""
    workers, parallel = config.cluster.workers, config.parallel
    product, a_copy = parallel.replicate * parallel.context, workers // parallel.replicate
    divide = {"parallel.replicate": parallel.replicate, "parallel.context": parallel.context}
    sizes = {name: str(size) for name, size in divide.items() if size > 1}
    return [
        (
            workers % product == 0,
            f"cluster.workers = {workers} is no multiple of {' × '.join(sizes)} = {' × '.join(sizes.values())}"
            + f" = {product}" * (len(sizes) > 1)
            + f"; give {nearest(workers, product)} workers",
        ),
        (
            a_copy % parallel.expert == 0,
            f"parallel.expert = {parallel.expert} does not divide the {a_copy} workers of a copy of the model; give "
            f"{nearest_divisors(a_copy, parallel.expert)}",
        ),
        *(
            (
                separate % parallel.context == 0,
                f"{name}.workers = {separate} is no multiple of parallel.context = {parallel.context}; give "
                f"{nearest(separate, parallel.context)} workers",
            )
            for name, separate in (("critic", config.critic.workers), ("teacher", config.teacher.workers))
        ),
        *(
            (
                not (config.model.compile and size > 1),
                f"model.compile = true: layers whose {problem} are divided (parallel.{key} = {size}) are not compiled; "
                "give false",
            )
            for problem, key, size in (("experts", "expert", parallel.expert), ("tokens", "context", parallel.context))
        ),
    ]


def nearest(count: int, divisor: int) -> str:
    """The multiples of `divisor` next to `count`, which is none.

    >>> nearest(7, 4), nearest(3, 4)
    ('4 or 8', '4')
    """
    below = count // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def nearest_divisors(count: int, wanted: int) -> str:
    """The divisors of `count` next to `wanted`, which is none.

    >>> nearest_divisors(6, 4), nearest_divisors(6, 7)
    ('3 or 6', '6')
    """
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    below, above = ([size for size in divisors if (size > wanted) is larger] for larger in (False, True))
    return " or ".join(map(str, below[-1:] + above[:1]))


def _training(config: RunConfig) -> list[Rule]:
    r, t = config.rollout, config.train
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
            t.optimizer != "muon" or not config.lora.rank,
            f"train.optimizer = muon steps whole matrices, and lora.rank = {config.lora.rank} trains two factors of "
            "each, whose product it says nothing about; give adamw, or lora.rank = 0",
        ),
        *_parallel(config),
        (
            t.epochs is not None or t.warmup_steps <= t.steps,
            f"train.warmup_steps = {t.warmup_steps} is more than train.steps = {t.steps}; "
            "lower the first or raise the second",
        ),
    ]
