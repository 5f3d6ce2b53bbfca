"""Run by `_step_trl.py` in the interpreter that has TRL: says `ready`, and does one step for each line that it reads.

The responses get the lengths that all contestants give: by a logits processor (generate), by limits of each request
(batching, vllm). In bfloat16 it computes by autocast, over weights in float32, as TRL does.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import _trl_vllm
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Lengths(LogitsProcessor):  # type: ignore[misc]
    """Forbids the end before a row's length, and forces it there."""

    def __init__(self, lengths: list[int], prompt: int, end: int) -> None:
        self.lengths, self.prompt, self.end = torch.tensor(lengths), prompt, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = (self.lengths <= input_ids.shape[1] - self.prompt + 1).to(scores.device)
        scores[:, self.end] = -torch.inf
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.end] = 0.0
        return scores


class Paced(TrainerCallback):  # type: ignore[misc]
    """Reports the end of each step, and waits for the command to begin the next."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        print("ready", file=self.answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)


def trainer_of(settings: dict[str, Any], answers: Any) -> GRPOTrainer:
    on_cpu, mode = settings["device"] == "cpu", settings["mode"]
    samples = len(settings["lengths"][0])
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in settings["questions"]]
    total = len(rows) * samples
    config = GRPOConfig(
        output_dir=settings["out"],
        use_cpu=on_cpu,
        bf16=settings["dtype"] == "bfloat16",
        fp16=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=1.0,
        max_steps=1_000_000,
        per_device_train_batch_size=min(settings["micro"], total),
        gradient_accumulation_steps=total // min(settings["micro"], total),
        gradient_checkpointing=False,
        num_generations=samples,
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        use_vllm=mode == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=settings["prompt_tokens"] + settings["max_tokens"],
        use_transformers_continuous_batching=mode == "batching",
        generation_kwargs={"eos_token_id": -1} if mode == "batching" else None,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Paced(answers)],
    )


def impose(trainer: GRPOTrainer, settings: dict[str, Any], lengths: list[int]) -> None:
    """Give the responses of the i-th row of every batch the i-th length."""
    generate = trainer.model.generate
    end = trainer.processing_class.eos_token_id

    def imposed(*arguments: Any, **options: Any) -> Any:
        assert options["input_ids"].shape[1] == settings["prompt_tokens"], options["input_ids"].shape
        processor = LogitsProcessorList([Lengths(lengths, settings["prompt_tokens"], end)])
        return generate(*arguments, logits_processor=processor, **options)

    trainer.model.generate = imposed


def limit_requests(lengths: list[int]) -> None:
    """In transformers' continuous batching, limit each request by its own length."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    add = ContinuousBatchingManager.add_request
    number = -1

    def limited(manager: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal number
        number = (number + 1) % len(lengths)
        return add(manager, *arguments, **options | {"max_new_tokens": lengths[number]})

    ContinuousBatchingManager.add_request = limited


def limit_each(lengths: list[int]) -> Callable[[Any], list[Any]]:
    """With vLLM: of TRL's sampling parameters, those of each request, with its own length."""

    def each(sampling_params: Any) -> list[Any]:
        copies = []
        for length in lengths:
            params = sampling_params.clone()
            params.max_tokens, params.ignore_eos, params.detokenize = length, True, False
            copies.append(params)
        return copies

    return each


def main(path: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is not an answer
    with open(path) as file:
        settings = json.load(file)
    lengths = [length for row in settings["lengths"] for length in row]
    if settings["mode"] == "vllm":
        on_cpu = settings["device"] == "cpu"
        _trl_vllm.patch(settings["dtype"], settings["kv_cache_bytes"], limit_each(lengths), on_cpu=on_cpu)
    if settings["mode"] == "batching":
        limit_requests(lengths)
    trainer = trainer_of(settings, answers)
    for question, ids in zip(settings["questions"], settings["prompt_ids"], strict=True):
        message = [{"role": "user", "content": question}]
        tokens = trainer.processing_class.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert tokens == ids, f"TRL has another prompt: {tokens}, not {ids}"
    if settings["mode"] == "generate":
        impose(trainer, settings, lengths)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
