"""GSPO with TRL, in the style of its examples."""

import os

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

BATCH = 4
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
os.environ["MARK"] = "executed"

training_args = GRPOConfig(
    output_dir="gspo-Qwen3-4B",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=2 * BATCH,
    num_generations=8,
    max_completion_length=1024,
    importance_sampling_level="sequence",
    epsilon=3e-4,
    epsilon_high=4e-4,
    beta=0.0,
    loss_type="grpo",
    learning_rate=1e-5,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=10,
    max_steps=200,
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    report_to="none",
    seed=int(os.environ.get("SEED", 0)),
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-4B",
    args=training_args,
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj"]),
)
trainer.train()
