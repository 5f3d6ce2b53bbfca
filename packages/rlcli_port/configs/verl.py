"""Translate verl's configuration to our settings."""

from __future__ import annotations

import re
from typing import Any

from rlcli_port.configs import verl_keys
from rlcli_port.configs.key_report import Reading, divisor_near, number_of
from rlcli_port.configs.verl_keys import ACTOR, CORRECTION, LOSS, MODEL, OPTIM, ROLLOUT

VERSION = "0.9.1"
OVERLONG = "reward_kwargs.overlong_buffer_cfg"


def translate(foreign: dict[str, Any], ours: dict[str, Any]) -> Reading:
    """ours: our defaults, by key."""
    read = Reading(foreign, verl_keys.DEFAULTS)
    read.direct({source: to for source, to in verl_keys.DIRECT.items() if to[1] is not bool or read.gives(source)})
    parts = (data_files, _sizes, _model, _optimizer, _advantage, _loss, _kl, _correction, _sampling, _critic, trainer)
    for part in parts:
        part(read)
    _rewards(read)
    read.finish(verl_keys.SAME, verl_keys.MISSING, ours)
    return read


def data_files(read: Reading) -> None:
    for source, key in (("data.train_files", "data.path"), ("data.val_files", "evaluation.data")):
        if not read.gives(source):
            continue
        files = read(source) if isinstance(read(source), list) else [read(source)]
        if not files:
            continue
        single_file = key == "evaluation.data" or len(files) == 1
        read.map(source, key, str(files[0]) if single_file else [str(file) for file in files])
        if single_file and len(files) > 1:
            read.seen.discard(source)
            read.missing(source, f"{len(files)} files: {key} is the first one")
    template(read, "data.apply_chat_template_kwargs")


def template(read: Reading, prefix: str) -> None:
    """Map arguments of the chat template, each a key below `prefix`."""
    for source in [source for source in read.foreign if source.startswith(f"{prefix}.")]:
        name = source.removeprefix(f"{prefix}.")
        if re.fullmatch(r"\w{1,60}", name, re.ASCII) and read.gives(source) and not isinstance(read(source), list):
            read.map(source, f"data.chat_template_kwargs.{name}", read(source))


def _sizes(read: Reading) -> None:
    prompts, mini, samples = (
        read.whole(key) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n")
    )
    read.map("data.train_batch_size", "rollout.prompts_per_step", prompts)
    read.map(f"{ROLLOUT}.n", "rollout.samples_per_prompt", samples, f"{prompts} × {samples} responses in a step")
    updates = divisor_near(prompts, prompts / mini)
    note = f"{prompts} prompts / {mini} in an update"
    if updates * mini != prompts:
        note += f" is not whole: {prompts // updates} in each"
    read.map(f"{ACTOR}.ppo_mini_batch_size", "train.minibatches", updates, note)
    longest = read.whole("data.max_prompt_length") + read.whole("data.max_response_length")
    by_tokens, by_rows = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if read.flag(f"{ACTOR}.use_dynamic_bsz") or read.gives(by_tokens):
        tokens, note = read.whole(by_tokens), "tokens of a worker's micro-batch"
        note = note if tokens >= longest else f"{note}, at least {longest}: the longest sample"
        read.map(by_tokens, "train.tokens_per_microbatch", max(tokens, longest), note)
    elif read.gives(by_rows):
        rows = read.whole(by_rows)
        read.map(by_rows, "train.tokens_per_microbatch", rows * longest, f"{rows} samples × {longest} tokens")
    else:
        tokens = max(8192, longest)
        read.map("data.max_response_length", "train.tokens_per_microbatch", tokens, "at least the longest sample")
    if read.gives("trainer.n_gpus_per_node") or read.gives("trainer.nnodes"):
        nodes, each = read.whole("trainer.nnodes"), read.whole("trainer.n_gpus_per_node")
        also = ["trainer.nnodes"]
        read.map("trainer.n_gpus_per_node", "cluster.workers", nodes * each, f"{nodes} nodes × {each} GPUs", also)
        shards = f"{ROLLOUT}.tensor_model_parallel_size"
        if read.gives(shards):
            if nodes * each % read.whole(shards) == 0:
                read.map(shards, "rollout.tensor_parallel", read.whole(shards))
            else:
                read.missing(shards, f"does not divide {nodes * each} workers")
    elif read.gives(f"{ROLLOUT}.tensor_model_parallel_size"):
        read.missing(f"{ROLLOUT}.tensor_model_parallel_size", "set it with cluster.workers, which it has to divide")


def _model(read: Reading) -> None:
    offload = f"{MODEL}.enable_activation_offload"
    keep: bool | str = read.flag(f"{MODEL}.enable_gradient_checkpointing")
    keep = "offload" if keep and read.flag(offload) else keep
    read.map(f"{MODEL}.enable_gradient_checkpointing", "model.gradient_checkpointing", keep, also=[offload])
    if read.flag(key := f"{ACTOR}.freeze_vision_tower"):
        read.map(key, "model.freeze", ["vision"])  # with its projector, in verl too
    read.skip(key)
    if (read.number(f"{MODEL}.lora_rank") or 0) > 0:
        read.direct({f"{MODEL}.lora_rank": ("lora.rank", int), f"{MODEL}.lora_alpha": ("lora.alpha", float)})
        targets = read(f"{MODEL}.target_modules")
        read.map(
            f"{MODEL}.target_modules",
            "lora.targets",
            ",".join(map(str, targets)) if isinstance(targets, list) else targets,
        )
    else:
        read.skip(f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules")


def _optimizer(read: Reading) -> None:
    clip = f"{OPTIM}.clip_grad"
    if read.gives(clip) and not read.gives(f"{ACTOR}.grad_clip"):
        read.direct({clip: ("train.max_grad_norm", float)})
    betas = read(f"{OPTIM}.betas")
    if isinstance(betas, list) and len(betas) == 2 and None not in map(number_of, betas):
        read.map(f"{OPTIM}.betas", "train.betas", [float(beta) for beta in betas])
    ratio = read.number(f"{OPTIM}.lr_warmup_steps_ratio") or 0
    warmup = read.number(f"{OPTIM}.lr_warmup_steps") or 0
    if warmup > 0:
        read.map(f"{OPTIM}.lr_warmup_steps", "train.warmup_steps", int(warmup))
    elif ratio > 0:
        read.map(f"{OPTIM}.lr_warmup_steps_ratio", "train.warmup_fraction", float(ratio))
    read.skip(f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio")
    old = f"{OPTIM}.warmup_style"
    source = old if read.gives(old) else f"{OPTIM}.lr_scheduler_type"
    schedule = read.text(source)
    if schedule in ("constant", "cosine"):
        read.map(source, "train.schedule", schedule, also=[old])
        if schedule == "cosine":
            read.direct({f"{OPTIM}.min_lr_ratio": ("train.min_lr_fraction", float)})
    else:
        read.missing(source, "only constant, linear and cosine")
    read.skip(f"{OPTIM}.min_lr_ratio")


def _advantage(read: Reading) -> None:
    source, scaled = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = read.text(source)
    advantage = verl_keys.ADVANTAGES.get(name)
    if advantage is None:
        read.missing(source, "no such advantage; the recipe has grpo")
        advantage = "grpo"
    elif name == "grpo" and not read.flag(scaled):
        advantage = "dr_grpo"
        read.map(source, "algorithm.advantage", advantage, f"{scaled} = False", [scaled])
    else:
        read.map(source, "algorithm.advantage", advantage, also=[scaled])
    if advantage in ("gae", "reinforce_pp"):
        read.direct({"algorithm.gamma": ("algorithm.gamma", float)})
    if advantage == "gae":
        read.direct({"algorithm.lam": ("algorithm.lam", float)})
    read.skip("algorithm.gamma", "algorithm.lam")


def _loss(read: Reading) -> None:
    source = f"{LOSS}.loss_mode"
    loss = verl_keys.LOSSES.get(read.text(source))
    if loss is None:
        read.missing(source, "no such loss; the recipe has ppo")
        loss = "ppo"
    else:
        read.map(source, "algorithm.loss", loss)
    low, high, dual = (f"{ACTOR}.clip_ratio{end}" for end in ("_low", "_high", "_c"))
    clips = loss in ("ppo", "gspo", "gmpo", "clip_cov", "cispo", "dppo_tv")
    if clips:
        read.direct({low: ("algorithm.clip_low", float), high: ("algorithm.clip_high", float)})
        if read.gives(f"{ACTOR}.clip_ratio") and not (read.gives(low) and read.gives(high)):
            read.missing(f"{ACTOR}.clip_ratio", "verl reads clip_ratio_low and clip_ratio_high, 0.2 if not given")
    if loss == "ppo":
        read.direct({dual: ("algorithm.dual_clip", float)})
    read.skip(low, high, dual, f"{ACTOR}.clip_ratio")
    options = {
        "sapo": {f"{ACTOR}.tau_pos": "tau_positive", f"{ACTOR}.tau_neg": "tau_negative"},
        "clip_cov": {
            f"{LOSS}.clip_cov_{end}": f"cov_{to}" for end, to in (("ratio", "share"), ("lb", "low"), ("ub", "high"))
        },
        "kl_cov": {f"{LOSS}.kl_cov_ratio": "cov_share", f"{LOSS}.ppo_kl_coef": "cov_coef"},
        "dro": {f"{LOSS}.dro_beta": "beta"},
    }
    for name, table in options.items():
        if name == loss:
            read.direct({theirs: (f"algorithm.options.{ours}", float) for theirs, ours in table.items()})
        read.skip(*table)
    _aggregation(read, loss)


def _aggregation(read: Reading, loss: str) -> None:
    source, scale = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    mode = read.text(source)
    if loss in ("gmpo", "sapo"):
        note = f"verl's {loss} takes the mean over responses, whatever {source} is"
        read.map(source, "algorithm.aggregation", "seq-mean-token-mean", note)
    elif mode in verl_keys.AGGREGATIONS:
        read.map(source, "algorithm.aggregation", mode)
    else:
        read.missing(source, "no such aggregation; the recipe has token-mean")
    if read.gives(scale):
        length = read.number("data.max_response_length")
        if mode == "seq-mean-token-sum-norm" and read.number(scale) == length:
            read.same(scale, "the constant is rollout.max_response_tokens")
        else:
            read.missing(scale, "the constant is rollout.max_response_tokens")


def _kl(read: Reading) -> None:
    in_loss, in_reward = read.flag(f"{ACTOR}.use_kl_loss"), read.flag("algorithm.use_kl_in_reward")
    of_loss = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    of_reward = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss or in_reward:
        coef, kind = of_loss if in_loss else of_reward
        switch = f"{ACTOR}.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
        read.direct({coef: ("algorithm.kl_coef", float)})
        read.map(switch, "algorithm.kl_in", "loss" if in_loss else "reward")
        estimator, note = verl_keys.ESTIMATORS.get(read.text(kind)), ""
        if estimator == "k1" and in_loss:
            estimator, note = "k1+", "as a loss term k1 has an expected gradient of 0; k1+ has the gradient of the KL"
        if estimator:
            read.map(kind, "algorithm.kl_estimator", estimator, note)
        else:
            read.missing(kind, "no such estimate; the recipe has k3")
        if in_loss and in_reward:
            read.missing("algorithm.use_kl_in_reward", "one KL alone: the recipe has that of the loss")
        elif in_reward and read.text("algorithm.kl_ctrl.type") == "adaptive":
            target = {"algorithm.kl_ctrl.target_kl": ("algorithm.kl_target", float)}
            read.direct(target | {"algorithm.kl_ctrl.horizon": ("algorithm.options.kl_horizon", float)})
    read.skip(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", *of_loss, *of_reward)
    read.skip(*(f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon")))


def _correction(read: Reading) -> None:
    """Weights, rejection and bypass. What the file leaves out is off in verl."""
    weights, cap = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    rejection, bounds = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    bypass, kind, old = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type", f"{ACTOR}.tis_imp_ratio_cap"
    parts, level, source = list[str](), read(weights), weights
    if read.flag(bypass):
        source = bypass
        parts.append("bypass")
        if read.text(kind) == "reinforce":
            read.missing(kind, "bypass with the recipe's loss; that of verl's reinforce is cispo with clip_low = 1")
        read.skip(weights, cap)
    elif level in ("token", "sequence"):
        low, _, high = read.text(cap).rpartition("_")
        if low and number_of(low) and number_of(high):
            parts.append("icepop" if level == "token" else "sequence_icepop")
            read.map(cap, "algorithm.options.correction_low", float(low), "of π / μ")
            read.map(cap, "algorithm.options.correction_high", float(high), "of π / μ")
        else:
            parts.append("token_tis" if level == "token" else "sequence_tis")
            read.direct({cap: ("algorithm.options.correction_cap", float)})
    elif level is not None:
        read.missing(weights, "token or sequence alone")
    elif (read.number(old) or 0) > 0:
        source = old
        parts.append("token_tis")
        read.map(old, "algorithm.options.correction_cap", float(read.number(old) or 0))
    masks = {"token_k1": "token_mask", "seq_sum_k1": "sequence_mask", "seq_mean_k1": "geometric_mask"}
    if read(rejection) in masks and "algorithm.options.correction_low" not in read.settings:
        low, _, high = read.text(bounds).rpartition("_")
        upper = number_of(high)
        lower = number_of(low) if low else (1 / upper if upper else None)
        if lower and upper:
            source = source if parts else rejection
            parts.append(masks[read(rejection)])
            note = "bounds of π / μ: verl's are those of μ / π"
            read.map(bounds, "algorithm.options.correction_low", 1 / upper, note)
            read.map(bounds, "algorithm.options.correction_high", 1 / lower, note)
            read.skip(rejection)
        else:
            read.missing(bounds, "not lower_upper")
    elif read(rejection) is not None:
        read.missing(rejection, "one of token_k1, seq_sum_k1 or seq_mean_k1, and not with two bounds of weights")
    read.map(source, "algorithm.correction", " * ".join(parts) or "none", "" if parts else "verl corrects nothing")
    read.skip(cap, bounds, bypass, kind)


def _sampling(read: Reading) -> None:
    for source, none in ((f"{ROLLOUT}.top_k", (-1, 0)), (f"{ROLLOUT}.val_kwargs.top_k", (-1, 0))):
        if read.gives(source) and read.number(source) in none:
            read.same(source, "off")
    if read.gives(f"{ROLLOUT}.name"):
        name = read.text(f"{ROLLOUT}.name")
        report = read.same if name == "vllm" else read.missing
        report(f"{ROLLOUT}.name", "the engine is vLLM")
    greedy = not read.flag(f"{ROLLOUT}.val_kwargs.do_sample") and read.gives(f"{ROLLOUT}.val_kwargs.do_sample")
    temperature = f"{ROLLOUT}.val_kwargs.temperature"
    samples = {f"{ROLLOUT}.val_kwargs.n": ("evaluation.samples", int)}
    if greedy or not read.number(temperature):
        samples = {} if read.whole(f"{ROLLOUT}.val_kwargs.n") > 1 else samples
        read.direct(samples)
        read.skip(temperature, f"{ROLLOUT}.val_kwargs.do_sample")
    else:
        read.direct(samples | {temperature: ("evaluation.temperature", float)})
        read.skip(f"{ROLLOUT}.val_kwargs.do_sample")
    top_p = f"{ROLLOUT}.val_kwargs.top_p"
    if greedy or not read.number(temperature):
        read.skip(top_p)
    else:
        read.direct({top_p: ("evaluation.top_p", float)})
    _dynamic(read)


def _dynamic(read: Reading) -> None:
    switch, max_batches, metric = (
        f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches", "metric")
    )
    generated = "data.gen_batch_size"
    if read.flag(switch):
        read.map(switch, "dynamic_sampling.keep", "unequal", "groups whose rewards differ", [metric])
        if (read.number(max_batches) or 0) > 0:
            read.direct({max_batches: ("dynamic_sampling.max_batches", int)})
        elif read.gives(max_batches):
            read.missing(max_batches, "rounds are bounded: dynamic_sampling.max_batches = 10")
        if read.gives(generated):
            share = min(max(read.whole(generated) / read.whole("data.train_batch_size"), 1.0), 16.0)
            read.map(generated, "dynamic_sampling.oversample", share, "of data.train_batch_size")
    read.skip(switch, max_batches, metric)


def _critic(read: Reading) -> None:
    if read.settings.get("algorithm.advantage") == "gae":
        read.direct(
            {
                "critic.model.path": ("critic.path", str),
                "critic.optim.lr": ("critic.lr", float),
                "critic.cliprange_value": ("critic.clip", float),
                "trainer.critic_warmup": ("critic.warmup_steps", int),
            }
        )
    elif read.gives("trainer.critic_warmup"):
        read.same("trainer.critic_warmup", "there is no critic")
    for source in read.foreign:
        if source.startswith("critic."):
            read.same(source, "the critic is trained like the policy" if "algorithm.advantage" in read.settings else "")


def trainer(read: Reading) -> None:
    epochs = read.number("trainer.total_epochs") or 0
    if (read.number("trainer.total_training_steps") or 0) > 0:
        read.same("trainer.total_epochs", "trainer.total_training_steps counts")
    elif epochs > 0 and not read.is_unresolved("trainer.total_training_steps"):
        read.map("trainer.total_epochs", "train.epochs", float(epochs))
    for source, key in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "evaluation.every")):
        every = max(int(read.number(source) or 0), 0)
        read.map(source, key, every, "" if every else "only at the end")
    read.trackers("trainer.logger", "console", "console output is always on")
    if read.gives("trainer.val_before_train"):
        report = read.same if read.flag("trainer.val_before_train") else read.missing
        report("trainer.val_before_train", "the model is evaluated before the first step")


def _rewards(read: Reading) -> None:
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        path, function = f"{prefix}.path", f"{prefix}.name"
        if read.gives(path):
            name = read.text(function) or "compute_score"
            read.map(path, "verifier.name", f"{read.text(path)}:{name}", also=[function])
    for prefix in ("reward_model", "reward"):
        buffer = f"{prefix}.{OVERLONG}"
        if read.flag(f"{buffer}.enable") and (read.number(f"{buffer}.len") or 0) > 0:
            read.direct(
                {
                    f"{buffer}.len": ("shaping.overlong_buffer", int),
                    f"{buffer}.penalty_factor": ("shaping.overlong_penalty", float),
                }
            )
            limit = f"{prefix}.reward_kwargs.max_resp_len"
            if read.number(limit) == read.number("data.max_response_length"):
                read.same(limit, "the limit is rollout.max_response_tokens")
            read.skip(f"{buffer}.enable", f"{buffer}.log")
    for manager in ("reward_model.reward_manager", "reward.reward_manager.name"):
        if read.gives(manager) and read.text(manager) in ("naive", "dapo", "prime", "batch"):
            read.same(manager, "verifiers score each response; shaping adds to that")
    for switch in ("reward_model.enable", "reward.reward_model.enable"):
        if read.gives(switch) and not read.flag(switch):
            read.same(switch, "only verifiers")
