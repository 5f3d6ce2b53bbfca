"""Translate supervised fine-tuning of TRL (SFTConfig) and verl (sft_trainer) to settings over the recipe `sft`."""

from __future__ import annotations

from typing import Any

from rlcli_port.configs import trl, verl
from rlcli_port.configs.key_report import Reading, number_of
from rlcli_port.configs.trl_keys import DEFAULTS as GRPO_DEFAULTS
from rlcli_port.configs.trl_keys import DIRECT as TRL_DIRECT
from rlcli_port.configs.trl_keys import MISSING as TRL_MISSING
from rlcli_port.configs.trl_keys import SAME as TRL_SAME
from rlcli_port.configs.verl_keys import MISSING as VERL_MISSING
from rlcli_port.configs.verl_keys import SAME as VERL_SAME

BASE = "sft"
LEAST_TOKENS = 8192
"""Tokens of a micro-batch."""

OF_TRL = ("model_name_or_path", "learning_rate", "weight_decay", "max_grad_norm", "seed", "save_total_limit")
TRL_DEFAULTS = {
    name: GRPO_DEFAULTS[name]
    for name in (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "weight_decay"),
        *("adam_beta1", "adam_beta2", "max_grad_norm", "lr_scheduler_type", "save_strategy", "save_steps"),
        *("eval_strategy", "seed", "gradient_checkpointing", "lora_r", "lora_alpha"),
    )
} | {"learning_rate": 2e-5, "max_length": 1024}
SAME = {
    "sequences are always packed": "packing packing_strategy padding_free eval_packing",
    "the loss covers the tokens of the response alone": "assistant_only_loss completion_only_loss",
    "the prompt is the chat template's": "eos_token pad_token dataset_kwargs",
}
MISSING = {
    "rows are a prompt and a response: --columns prompt=…,response=…": "dataset_text_field data.prompt_key "
    "data.response_key data.prompt_dict_keys data.response_dict_keys data.messages_key data.multiturn.* messages_key",
    "longer rows are left out, never cut": "truncation_mode data.truncation",
    "cross-entropy alone": "loss_type",
    "see model.gradient_checkpointing = offload": "activation_offloading",
}
VERL_DEFAULTS = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "optim.lr": 1e-5,
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.95],
    "optim.clip_grad": 1.0,
    "optim.lr_warmup_steps_ratio": 0.1,
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.seed": 1,
}
VERL_DIRECT: dict[str, tuple[str, type]] = {
    "model.path": ("model.path", str),
    "model.partial_pretrain": ("model.path", str),
    "optim.lr": ("train.lr", float),
    "optim.weight_decay": ("train.weight_decay", float),
    "optim.clip_grad": ("train.max_grad_norm", float),
    "trainer.total_training_steps": ("train.steps", int),
    "trainer.seed": ("train.seed", int),
    "trainer.max_ckpt_to_keep": ("checkpoint.keep", int),
    "trainer.project_name": ("tracking.project", str),
}


def translate_trl(foreign: dict[str, Any], processes: int, ours: dict[str, Any]) -> Reading:
    """ours: defaults of the recipe `sft`, by key. processes: the number that TRL is started with."""
    read = Reading(foreign, TRL_DEFAULTS)
    read.direct({name: TRL_DIRECT[name] for name in OF_TRL})
    each, accumulated = "per_device_train_batch_size", "gradient_accumulation_steps"
    rows = read.whole(each) * processes * read.whole(accumulated)
    note = f"{read.whole(each)} × {processes} processes × {read.whole(accumulated)} rows an update"
    read.map(each, "rollout.prompts_per_step", rows, note, [accumulated])
    if processes > 1:
        read.settings["cluster.workers"] = processes
    _lengths(read, "max_seq_length" if read.gives("max_seq_length") else "max_length")
    trl.steps(read, 1)
    trl.model(read)
    trl.betas(read)
    trl.trackers(read)
    read.finish(SAME | TRL_SAME, MISSING | TRL_MISSING, ours)
    return read


def translate_verl(foreign: dict[str, Any], processes: int | None, ours: dict[str, Any]) -> Reading:
    """ours: defaults of the recipe `sft`, by key. processes: the number that torchrun starts."""
    read = Reading(foreign, VERL_DEFAULTS)
    read.direct(VERL_DIRECT)
    verl.data_files(read)
    read.map("data.train_batch_size", "rollout.prompts_per_step", read.whole("data.train_batch_size"))
    if processes:
        read.settings["cluster.workers"] = processes
    else:
        nodes, each = (read.foreign.get(f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
        if number_of(each):
            workers = int((number_of(nodes) or 1) * (number_of(each) or 1))
            read.map("trainer.n_gpus_per_node", "cluster.workers", workers, also=["trainer.nnodes"])
    _lengths(read, "data.max_length")
    _verl_optimizer(read)
    if (read.number("model.lora_rank") or 0) > 0:
        read.direct({"model.lora_rank": ("lora.rank", int), "model.lora_alpha": ("lora.alpha", float)})
        targets = read("model.target_modules")
        if targets:
            names = ",".join(map(str, targets)) if isinstance(targets, list) else str(targets)
            read.map("model.target_modules", "lora.targets", names)
    read.skip("model.lora_rank", "model.lora_alpha", "model.target_modules")
    checkpointing = "model.enable_gradient_checkpointing"
    read.map(checkpointing, "model.gradient_checkpointing", read.flag(checkpointing))
    verl.trainer(read)
    read.finish(SAME | VERL_SAME | {"sized by tokens": "data.micro_batch_size*"}, MISSING | VERL_MISSING, ours)
    return read


def _lengths(read: Reading, source: str) -> None:
    longest = read.whole(source)
    read.map(source, "rollout.max_response_tokens", longest, "the response's; the prompt's: data.max_prompt_tokens")
    tokens = max(LEAST_TOKENS, 2 * longest)
    read.map(source, "train.tokens_per_microbatch", tokens, "at least the longest sample")


def _verl_optimizer(read: Reading) -> None:
    betas = read("optim.betas")
    if isinstance(betas, list) and len(betas) == 2 and None not in map(number_of, betas):
        read.map("optim.betas", "train.betas", [float(beta) for beta in betas])
    ratio, count = "optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps"
    if (read.number(count) or 0) > 0:
        read.map(count, "train.warmup_steps", int(read.number(count) or 0))
    else:
        read.map(ratio, "train.warmup_fraction", float(read.number(ratio) or 0.0))
    read.skip(ratio, count)
    source = next((name for name in ("optim.lr_scheduler", "optim.lr_scheduler_type") if read.gives(name)), "")
    schedule = read.text(source) if source else "cosine"
    if schedule in ("constant", "cosine"):
        read.map(source or "optim.lr_scheduler", "train.schedule", schedule)
        if schedule == "cosine" and read.gives("optim.min_lr_ratio"):
            read.direct({"optim.min_lr_ratio": ("train.min_lr_fraction", float)})
    else:
        read.missing(source, "only constant, linear and cosine")
    read.skip("optim.lr_scheduler", "optim.lr_scheduler_type", "optim.min_lr_ratio")
