"""Tables of TRL's keys: its defaults, one-to-one keys, and keys that need no counterpart or have none."""

from __future__ import annotations

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 512,
    "num_train_epochs": 3.0,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "gradient_checkpointing": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "entropy_target": 0.2,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "lora_r": 16,
    "lora_alpha": 32,
}

DIRECT: dict[str, tuple[str, type]] = {
    "model_name_or_path": ("model.path", str),
    "max_prompt_length": ("data.max_prompt_tokens", int),
    "max_completion_length": ("rollout.max_response_tokens", int),
    "temperature": ("rollout.temperature", float),
    "top_p": ("rollout.top_p", float),
    "vllm_gpu_memory_utilization": ("rollout.gpu_memory_utilization", float),
    "shuffle_dataset": ("data.shuffle", bool),
    "learning_rate": ("train.lr", float),
    "weight_decay": ("train.weight_decay", float),
    "max_grad_norm": ("train.max_grad_norm", float),
    "seed": ("train.seed", int),
    "save_total_limit": ("checkpoint.keep", int),
    "full_determinism": ("train.deterministic", bool),
}
"""Mapped unchanged. Keys of type bool are mapped only if the file sets them."""

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
}

CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_icepop",
}

SAME = {
    "model.dtype = auto: bfloat16 on GPUs": "bf16 torch_dtype dtype",
    "torch decides": "tf32",
    "attention over packed sequences": "attn_implementation",
    "recomputation is non-reentrant": "gradient_checkpointing_kwargs*",
    "columns are those of the schema": "remove_unused_columns",
    "tracking.save_samples writes samples to parquet": "log_completions num_completions_to_print",
    "every step is logged": "logging_steps logging_first_step logging_strategy",
    "the run folder: rlcli train --out": "output_dir run_name",
    "a run folder is never overwritten": "overwrite_output_dir",
    "engine and trainer share the workers": "vllm_mode",
    "the engine sleeps while the trainer works": "vllm_enable_sleep_mode",
    "the longest prompt and response": "vllm_max_model_length",
    "vLLM decides": "vllm_model_impl",
    "an evaluation is one batch": "per_device_eval_batch_size",
    "prompts are read as columns": "dataloader_num_workers",
    "nothing is padded": "pad_to_multiple_of",
    "weights are streamed to the engine": "ds3_gather_for_generation",
    "log-probs are always computed in chunks, without whole logits": "use_liger_kernel",
    "AdamW": "optim",
    "models are trained without dropout": "disable_dropout",
    "FSDP2": "ddp_*",
    "weights are always sharded over all workers": "fsdp* deepspeed",
}
MISSING = {
    "make a parquet file: rlcli prep, then data.path": "dataset_name dataset_config dataset_train_split "
    "dataset_test_split",
    "verifiers: verifier.name takes functions written for TRL, as FILE.py:FUNCTION": "reward_funcs",
    "weights are part of verifier.name, as in math + 0.1 * format": "reward_weights",
    "rlcli export --push": "push_to_hub hub_*",
    "the reference model does not change": "sync_ref_model ref_model_*",
    "no such loss": "vespo_*",
    "only rank, alpha and targets": "lora_*",
    "engines in separate workers: rollout.workers": "vllm_server_*",
    "one argument per line: chat_template_kwargs.NAME": "chat_template_kwargs",
    "only temperature, top_p and the response length": "generation_kwargs*",
    "its keys are not in the file": "**",
}
