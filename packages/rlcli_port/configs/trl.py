"""Translate TRL's GRPOConfig and RLOOConfig to our settings. Follows TRL 1.16.0: trl/trainer/grpo_config.py,
grpo_trainer.py and rloo_trainer.py."""

from __future__ import annotations

import math
from typing import Any

from rlcli_port.configs.key_report import Reading, divisor_near
from rlcli_port.configs.trl_keys import AGGREGATIONS, CORRECTIONS, DEFAULTS, DIRECT, MISSING, RLOO_DEFAULTS, SAME
from rlcli_port.configs.verl import template

VERSION = "1.16.0"
SCHEDULE = "lr_scheduler_kwargs"


def translate(foreign: dict[str, Any], processes: int, method: str = "grpo") -> Reading:
    """The reading, which still has to be finished. processes: the number that TRL is started with; its batch sizes are
    per process. method: grpo or rloo."""
    read = Reading(foreign, RLOO_DEFAULTS if method == "rloo" else DEFAULTS)
    read.direct({source: to for source, to in DIRECT.items() if to[1] is not bool or read.gives(source)})
    updates = _sizes(read, processes)
    steps(read, updates)
    for part in (_rloo,) if method == "rloo" else (_advantage, _loss, _kl, _correction):
        part(read)
    for part in (_sampling, model, betas, trackers):
        part(read)
    return read


def finish(read: Reading, ours: dict[str, Any]) -> None:
    """Report the keys that were not read. ours: our defaults, by key."""
    read.finish(SAME, MISSING, ours)


def _rloo(read: Reading) -> None:
    """RLOOTrainer: leave-one-out advantages of whole responses, the KL in the reward, one ratio a response."""
    whitened, bounds = "normalize_advantages", "reward_clip_range"
    read.map(whitened, "algorithm.advantage", "rloo")
    if read.flag(whitened):
        read.seen.discard(whitened)
        read.missing(whitened, "advantages keep the rewards' scale")
    if read.gives(bounds):
        read.missing(bounds, "rewards have no bounds")
    note = "TRL clips the ratio of a whole response; with one update a step there is nothing to clip"
    read.map("epsilon", "algorithm.loss", "ppo", note)
    read.settings["algorithm.aggregation"] = "seq-mean-token-sum"
    read.direct({"epsilon": ("algorithm.clip_low", float)})
    read.direct({"epsilon_high" if read.gives("epsilon_high") else "epsilon": ("algorithm.clip_high", float)})
    if (read.number("beta") or 0) > 0:
        read.direct({"beta": ("algorithm.kl_coef", float)})
        read.settings |= {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}
    _truncated(read)
    note = "rlcli always generates with vLLM, and corrects for it"
    read.map("use_vllm", "algorithm.correction", "token_tis", note)
    read.skip("epsilon", "epsilon_high", "beta", "use_vllm")


def _sizes(read: Reading, processes: int) -> int:
    """Batch sizes; returns the optimizer updates in one of our steps, passes included."""
    each, accumulated = "per_device_train_batch_size", "gradient_accumulation_steps"
    window, batch = "steps_per_generation", "generation_batch_size"
    update = read.whole(each) * processes * read.whole(accumulated)
    generated = read.whole(batch) if read.gives(batch) else update
    if read.gives(window) and not read.gives(batch):
        generated = read.whole(each) * processes * read.whole(window)
    samples, passes = read.whole("num_generations"), read.whole("num_iterations")
    prompts = max(max(generated, update) // samples, 1)
    minibatches = divisor_near(prompts, max(generated / update, 1))
    count = f"{read.whole(each)} × {processes} processes × {read.whole(accumulated)} = {update} responses an update"
    read.map("num_generations", "rollout.samples_per_prompt", samples)
    source = batch if read.gives(batch) else window if read.gives(window) else each
    read.map(source, "rollout.prompts_per_step", prompts, f"{max(generated, update)} responses / {samples}", [each])
    read.map(accumulated, "train.minibatches", minibatches, count, [each, window, batch])
    read.map("num_iterations", "train.passes", passes)
    if processes > 1:
        read.settings["cluster.workers"] = processes
    longest = read.whole("max_completion_length") + 1024
    if read.gives("max_prompt_length"):
        longest += read.whole("max_prompt_length") - 1024
    tokens = max(8192, longest)
    read.map("max_completion_length", "train.tokens_per_microbatch", tokens, "at least the longest sample")
    return minibatches * passes


def steps(read: Reading, updates: int) -> None:
    """TRL counts updates, we count generations. updates: of one of our steps."""
    note = f"{updates} updates in a step" if updates > 1 else ""

    def of_steps(source: str) -> int | None:
        count = read.number(source)
        return math.ceil(count / updates) if count and count >= 1 else None

    total, epochs = of_steps("max_steps"), read.number("num_train_epochs") or 0
    if total:
        read.map("max_steps", "train.steps", total, note)
        if read.gives("num_train_epochs"):
            read.same("num_train_epochs", "max_steps counts")
    elif epochs > 0 and not read.is_unresolved("max_steps"):
        read.map("num_train_epochs", "train.epochs", float(epochs))
    read.skip("max_steps", "num_train_epochs")
    share = "warmup_steps" if 0 < (read.number("warmup_steps") or 0) < 1 else "warmup_ratio"
    ratio = read.number(share) or 0
    if warmup := of_steps("warmup_steps"):
        read.map("warmup_steps", "train.warmup_steps", warmup, note)
    elif ratio > 0:
        read.map(share, "train.warmup_fraction", float(ratio))
    read.skip("warmup_steps", "warmup_ratio")
    _intervals(read, updates, total)
    _schedule(read)


def _intervals(read: Reading, updates: int, total: int | None) -> None:
    """Map the intervals of checkpoints and evaluations. total: our steps; None: the data decides."""
    note = f"{updates} updates in a step" if updates > 1 else ""
    for name, key in (("save", "checkpoint.every"), ("eval", "evaluation.every")):
        strategy, every = f"{name}_strategy", f"{name}_steps"
        count = read.number(every) or 0
        if read.text(strategy) == "steps" and count >= 1:
            read.map(every, key, math.ceil(count / updates), note, [strategy])
        elif read.text(strategy) == "steps" and 0 < count < 1 and total:
            read.map(every, key, max(math.ceil(count * total), 1), f"a share of {total} steps", [strategy])
        elif read.text(strategy) == "steps" and 0 < count < 1:
            read.missing(every, f"a share of the steps, which the data decides: set {key}")
        elif read.text(strategy) == "no":
            read.map(strategy, key, 0, "only at the end", [every])
        elif read.gives(strategy):
            read.missing(strategy, f"{key} counts steps")
        read.skip(every)


def _schedule(read: Reading) -> None:
    schedule, share, lowest = read.text("lr_scheduler_type"), f"{SCHEDULE}.min_lr_rate", f"{SCHEDULE}.min_lr"
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    known |= dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine")
    if schedule not in known:
        read.missing("lr_scheduler_type", "only constant, linear and cosine")
        return
    read.map("lr_scheduler_type", "train.schedule", known[schedule])
    if schedule.endswith("with_min_lr"):
        if read.gives(share):
            read.direct({share: ("train.min_lr_fraction", float)})
        elif read.gives(lowest) and (rate := read.number("learning_rate")):
            fraction = (read.number(lowest) or 0) / rate
            read.map(lowest, "train.min_lr_fraction", fraction, "of the learning rate", ["learning_rate"])


def _advantage(read: Reading) -> None:
    source = "scale_rewards"
    scale = {"true": "group", "false": "none"}.get(read.text(source).lower(), read.text(source))
    if read.text("multi_objective_aggregation") == "normalize_then_sum":
        read.map("multi_objective_aggregation", "algorithm.advantage", "gdpo")
        read.skip(source)
        return
    read.map("multi_objective_aggregation", "algorithm.advantage", "grpo")
    if scale in ("group", "batch", "none"):
        read.map(source, "algorithm.scale", scale, "std + 1e-6; TRL adds 1e-4" if scale != "none" else "")
    else:
        read.missing(source, "group, batch or none; the recipe has group")


def _loss(read: Reading) -> None:
    kind, level, low, high = "loss_type", "importance_sampling_level", "epsilon", "epsilon_high"
    name = read.text(kind)
    sequence = read.text(level) == "sequence"
    loss = name if name in ("cispo", "sapo") else "gspo" if sequence else "ppo"
    note = "the tokens of all ranks, not of each batch" if name == "bnpo" else ""
    if name in AGGREGATIONS:
        read.map(kind, "algorithm.loss", loss, also=[level])
        read.map(kind, "algorithm.aggregation", AGGREGATIONS[name], note)
    else:
        read.missing(kind, f"no such loss; the recipe has {loss}")
    if sequence and loss != "gspo":
        read.missing(level, f"{name} uses single tokens")
    if loss == "sapo":
        temperatures = {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"}
        read.direct({theirs: (f"algorithm.options.{ours}", float) for theirs, ours in temperatures.items()})
    elif loss == "cispo":
        bound = read.number(high) if read.gives(high) else read.number(low)
        read.map(low, "algorithm.clip_low", 1.0, "TRL's cispo has no lower bound")
        if bound is not None and bound >= 1:
            read.map(high, "algorithm.clip_high", bound - 1, "TRL bounds ρ by epsilon_high, we by 1 + clip_high")
        else:
            read.missing(high, "TRL bounds ρ by this number itself: give 1 or more, such as 5")
    else:
        read.direct({low: ("algorithm.clip_low", float)})
        source = high if read.gives(high) else low
        read.direct({source: ("algorithm.clip_high", float)})
    if read.gives("delta"):
        if loss == "ppo" and (read.number("delta") or 0) > 1:
            read.direct({"delta": ("algorithm.dual_clip", float)})
        else:
            read.missing("delta", "algorithm.dual_clip needs the loss ppo and a value above 1")
    read.skip(low, high, level, "sapo_temperature_pos", "sapo_temperature_neg")
    _truncated(read)


def _truncated(read: Reading) -> None:
    truncated = "mask_truncated_completions"
    if read.flag(truncated):
        read.map(truncated, "train.truncated", "mask", "TRL keeps them in their group's statistics")
    read.skip(truncated)


def _kl(read: Reading) -> None:
    beta, unbiased = "beta", "use_bias_correction_kl"
    if (read.number(beta) or 0) > 0:
        read.direct({beta: ("algorithm.kl_coef", float)})
        read.map(unbiased, "algorithm.kl_estimator", "k3_unbiased" if read.flag(unbiased) else "k3")
    else:
        read.skip(beta, unbiased)
    read.direct({"entropy_coef": ("algorithm.entropy_coef", float)})
    if read.flag("use_adaptive_entropy"):
        read.direct({"entropy_target": ("algorithm.entropy_target", float)})
    read.skip("use_adaptive_entropy", "entropy_target")


def _correction(read: Reading) -> None:
    prefix, threshold = "vllm_importance_sampling", "off_policy_mask_threshold"
    switch, mode, low = f"{prefix}_correction", f"{prefix}_mode", f"{prefix}_clip_min"
    cap = f"{prefix}_cap" if read.gives(f"{prefix}_cap") else f"{prefix}_clip_max"
    source, note, parts = mode, "", list[str]()
    if not read.flag("use_vllm"):
        source, note, parts = "use_vllm", "rlcli always generates with vLLM, and corrects for it", ["token_tis"]
    elif read.flag(switch):
        name, bound = read.text(mode), read.number(cap)
        parts = [CORRECTIONS.get(name, "sequence_icepop")]
        if name.endswith("_truncate"):
            read.map(cap, "algorithm.options.correction_cap", float(bound or 1e9))
            if read.gives(low):
                read.missing(low, "weights have no lower bound")
        else:
            read.map(cap, "algorithm.options.correction_high", float(bound or 1e9))
            read.map(low, "algorithm.options.correction_low", float(read.number(low) or 0))
    if read.number(threshold) is not None:
        parts.append("off_policy_mask")
        read.direct({threshold: ("algorithm.options.off_policy_threshold", float)})
    read.map(source, "algorithm.correction", " * ".join(parts) or "none", note)
    read.skip(switch, mode, low, f"{prefix}_cap", f"{prefix}_clip_max", "use_vllm")


def _sampling(read: Reading) -> None:
    for source, off in (("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
        if read.gives(source):
            (read.same if read.number(source) == off else read.missing)(source, "responses are sampled from all tokens")
    if read.gives("top_entropy_quantile") and read.number("top_entropy_quantile") != 1:
        read.missing("top_entropy_quantile", "no selection of tokens by entropy")
    read.skip("top_entropy_quantile")
    if read.gives("vllm_tensor_parallel_size"):
        shards, workers = read.whole("vllm_tensor_parallel_size"), read.settings.get("cluster.workers", 1)
        if workers % shards == 0:
            read.map("vllm_tensor_parallel_size", "rollout.tensor_parallel", shards)
        else:
            read.missing("vllm_tensor_parallel_size", f"does not divide {workers} workers (--processes)")
    if read.text("vllm_mode") == "server":
        read.missing("vllm_mode", "engines in separate workers: rollout.workers")


def model(read: Reading) -> None:
    template(read, "chat_template_kwargs")
    if read.flag("use_peft"):
        read.direct({"lora_r": ("lora.rank", int), "lora_alpha": ("lora.alpha", float)})
        if targets := read("lora_target_modules"):
            names = ",".join(map(str, targets)) if isinstance(targets, list) else str(targets)
            read.map("lora_target_modules", "lora.targets", names)
        else:
            read.missing("lora_target_modules", "PEFT chooses modules by model; the recipe has all-linear")
    read.skip("use_peft", "lora_r", "lora_alpha", "lora_target_modules")
    read.map("gradient_checkpointing", "model.gradient_checkpointing", read.flag("gradient_checkpointing"))


def betas(read: Reading) -> None:
    values = [read.number(name) for name in ("adam_beta1", "adam_beta2")]
    if None not in values:
        read.map("adam_beta2", "train.betas", values, also=["adam_beta1"])


def trackers(read: Reading) -> None:
    if not read("report_to"):
        read.same("report_to", "only metrics.jsonl")
    read.trackers("report_to", "none", "only metrics.jsonl")
