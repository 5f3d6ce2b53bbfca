"""Run by `words_trl.py` in the interpreter that has TRL: trains as the settings say, and writes what each step gave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _trl_vllm
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.evaluation.statistics import interval
from rlcli.model.optim import lr_at
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Prompt


class Scorer:
    """Scores responses with the run's verifier; `mean` of a greedy response each."""

    def __init__(self, pool: ScoringPool, tokenizer: Any, stops: set[int], zero_truncated: bool) -> None:
        self.pool, self.tokenizer, self.stops, self.zero_truncated = pool, tokenizer, stops, zero_truncated
        self.truncated = 0.0
        """Share of the responses of the last call that were cut off."""

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        ended = [bool(ids) and ids[-1] in self.stops for ids in responses]
        self.truncated = 1.0 - sum(ended) / len(ended)
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        verdicts = [
            self.pool.submit(prompt.verifier, prompt.request(text, "stop" if stopped else "length"))
            for prompt, text, stopped in zip(prompts, texts, ended, strict=True)
        ]
        scores = [verdict.result().score for verdict in verdicts]
        if self.zero_truncated:
            scores = [score * stopped for score, stopped in zip(scores, ended, strict=True)]
        return scores


class ScheduledTrainer(GRPOTrainer):  # type: ignore[misc]
    """With the learning rates of the run. settings: as `words_trl.py` wrote them."""

    settings: dict[str, Any]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        schedule = self.settings["schedule"]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: lr_at(step, **schedule) / schedule["peak"]
        )
        return self.lr_scheduler


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Times the steps, evaluates between them and writes the result."""

    def __init__(self, settings: dict[str, Any], tokenizer: Any, scorer: Scorer, held_out: Sequence[Prompt]) -> None:
        self.settings, self.tokenizer, self.scorer, self.held_out = settings, tokenizer, scorer, held_out
        self.result: dict[str, Any] = {"settings": settings, "steps": [], "evaluations": []}
        self.launched = time.time()
        self._began = self._seconds = 0.0

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.result["startup_s"] = time.time() - self.launched
        self.evaluate(0, model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter() - self._began

    def on_log(self, _: Any, state: Any, __: Any, *, logs: dict[str, Any], model: Any, **___: Any) -> None:
        if "reward" not in logs:
            return  # the summary at the end
        step, every = state.global_step, self.settings["evaluate_every"]
        self.result["steps"].append(
            {
                "step": step,
                "seconds": self._seconds,
                "reward": float(logs["reward"]),
                "truncated": self.scorer.truncated,
                "tokens": float(logs["completions/mean_length"]),
                "lr": float(logs["learning_rate"]),
            }
        )
        self.write()
        if step == self.settings["steps"] or (every and step % every == 0):
            self.evaluate(step, model)

    @torch.no_grad()
    def evaluate(self, step: int, model: Any) -> None:
        started = time.perf_counter()
        training = model.training
        model.eval()
        scores: list[float] = []
        size = self.settings["evaluate_batch"]
        for first in range(0, len(self.held_out), size):
            prompts = self.held_out[first : first + size]
            scores += self.scorer(prompts, self.answer(model, [list(prompt.messages) for prompt in prompts]))
        model.train(training)
        estimate = interval([float(score >= 1.0) for score in scores])
        self.result["evaluations"].append(
            {
                "step": step,
                "mean": estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "prompts": len(scores),
                "truncated": self.scorer.truncated,
                "seconds": time.perf_counter() - started,
            }
        )
        self.write()

    def answer(self, model: Any, conversations: list[Any]) -> list[list[int]]:
        """The greedy responses, with the token that ends each."""
        inputs = self.tokenizer.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        limit = self.settings["trl"]["max_completion_length"]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.settings["dtype"] == "bfloat16"):
            generated = model.generate(**inputs, do_sample=False, max_new_tokens=limit, use_cache=True)
        responses = generated[:, inputs["input_ids"].shape[1] :].tolist()
        return [self.until_end(ids) for ids in responses]

    def until_end(self, ids: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(ids) if token in self.scorer.stops), len(ids) - 1)
        return ids[: end + 1]

    def write(self) -> None:
        report_path = Path(self.settings["out"])
        temporary = report_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=2) + "\n")
        os.replace(temporary, report_path)


def main(path: str) -> None:
    with open(path) as file:
        settings = json.load(file)
    if settings["mode"] == "vllm":
        _trl_vllm.patch(settings["dtype"], settings["kv_cache_bytes"], on_cpu=not torch.cuda.is_available())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    stops = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    prompts = fitting(tokenizer, settings, "data", "train")
    held_out = fitting(tokenizer, settings, "held_out", "test")[: settings["evaluate_prompts"] or None]
    rows = [{"prompt": list(prompt.messages), "row": number} for number, prompt in enumerate(prompts)]
    with ExitStack() as stack:
        verifiers = sorted({prompt.verifier for prompt in (*prompts, *held_out)})
        pool = stack.enter_context(ScoringPool(1, settings["deadline_s"], verifiers))
        scorer = Scorer(pool, tokenizer, stops, settings["zero_truncated"])

        def reward(completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
            return scorer([prompts[number] for number in row], completion_ids)

        trainer = ScheduledTrainer(
            model,
            reward_funcs=reward,
            args=trl_config(settings, model, rows),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Recorder(settings, tokenizer, scorer, held_out)],
        )
        trainer.settings = settings
        trainer.train()


def fitting(tokenizer: Any, settings: dict[str, Any], key: str, split: str) -> list[Prompt]:
    """The prompts of a split that the run would not leave out as too long."""
    prompts = read_prompts(settings[key], split, settings["verifier"])
    limit = settings["max_prompt_tokens"]

    def tokens(prompt: Prompt) -> int:
        messages = list(prompt.messages)
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return [prompt for prompt in prompts if tokens(prompt) <= limit]


def trl_config(settings: dict[str, Any], model: Any, rows: list[Any]) -> GRPOConfig:
    longest = settings["max_prompt_tokens"] + settings["trl"]["max_completion_length"]
    return GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=not torch.cuda.is_available(),
        bf16=settings["dtype"] == "bfloat16",
        fp16=settings["dtype"] == "float16",
        optim="adamw_torch",
        max_steps=settings["steps"],
        use_vllm=settings["mode"] == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=min(longest, model.config.max_position_embeddings),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings["trl"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
