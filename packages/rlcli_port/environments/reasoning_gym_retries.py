"""Tasks of reasoning_gym, with feedback and further attempts."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

WITHOUT_EVAL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "rlcli_sandbox" / "no_eval.py"))["without_eval"]
INSTRUCTION = "Reason step by step, then give the final answer alone inside <answer> and </answer>."
MAX_CHARS = 10_000


class ReasoningGym:
    """A task of reasoning_gym, with feedback and further attempts.

    task: a name of reasoning_gym, config: of its dataset; or both come with the row, as `rlcli prep reasoning-gym`
    writes it (`extra_info.task` and `extra_info.entry`). attempts: turns of the policy. A turn's reward is the change
    of the score, so that the sum is the score of the last answer. A scorer that evaluates the answer or the entry as
    Python reads a literal or arithmetic instead; one that uses sympy's parser is refused."""

    def __init__(self, task: str = "", config: Any = None, attempts: int = 3) -> None:
        self.task, self.config, self.attempts, self.score = task, config or {}, attempts, 0.0

    def reset(self, row: Any, seed: int) -> Any:
        factory = importlib.import_module("reasoning_gym.factory")
        extra_info = row.get("extra_info") or {}
        self.task, entry = extra_info.get("task", self.task), extra_info.get("entry")
        if self.task not in factory.DATASETS:
            raise ValueError(f"reasoning_gym has no task {self.task!r}")
        scorer = factory.get_score_answer_fn(self.task)
        self.scorer = WITHOUT_EVAL(scorer, f"the scorer of reasoning_gym's {self.task}")
        messages = list(row.get("messages") or ())
        if entry is None:
            entry = factory.create_dataset(self.task, seed=seed % 2**31, size=1, **self.config)[0]
            messages += [{"role": "user", "content": f"{entry['question'].strip()}\n\n{INSTRUCTION}"}]
        self.entry = json.loads(entry) if isinstance(entry, str) else entry
        return messages

    def step(self, message: Any) -> Any:
        answers = re.findall(r"<answer>(.*?)</answer>", message["content"], re.DOTALL)
        answer, previous_score = answers[-1].strip() if answers else "", self.score
        self.score = float(self.scorer(answer, self.entry)) if 0 < len(answer) <= MAX_CHARS else 0.0
        self.attempts -= 1
        done = self.score >= 1.0 or self.attempts <= 0
        wrong = "That is not right." if answer else "There is no answer inside <answer> and </answer>."
        partly = f" Its score is {self.score:.2f} of 1." if 0 < self.score < 1 else ""
        text = "That is right." if self.score >= 1.0 else f"{wrong}{partly} Attempts left: {self.attempts}."
        return [{"role": "user", "content": text}], self.score - previous_score, done, {"score": self.score}
