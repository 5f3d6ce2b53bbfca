"""GRPO in one process for scripts/proofs/prompt_selection.py: seconds a run, since there is neither Ray nor an engine.

The draw of prompts (`cursor_of`), the filter of groups (`keep_groups`) and the learning rate are those of `rlcli
train`, as a step uses them: groups that the filter drops are replaced in at most `dynamic_sampling.max_batches` rounds.
Sampling and the update are plain: one on-policy step with the advantages of GRPO and the mean over all drawn tokens,
where PPO's ratio is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcli.algorithms.selection import keep_groups
from rlcli.config.schema import RunConfig
from rlcli.data.prompts.dataset_mixture import cursor_of
from rlcli.model.optim import lr_at
from rlcli.types import Outcome, Prompt, Verdict

LEAST_STD = 1e-6


@dataclass
class Course:
    """curve: generated tokens so far, and the held-out score, at each evaluation. groups, equal: generated in all, and
    those whose rewards are all equal. tokens: generated so far."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    groups: int = 0
    equal: int = 0
    tokens: int = 0


@dataclass
class Drawn:
    """Responses: ids int64 `[rows, prompt + response]`, prompts padded on the left and responses on the right; mask of
    the prompts' tokens and the drawn ones, bool, alike; lengths of the responses."""

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]
    width: int

    def texts(self, tokenizer: Any) -> list[str]:
        rows = [row[self.width : self.width + n].tolist() for row, n in zip(self.ids, self.lengths, strict=True)]
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))


class Loop:
    """One run of `config` on a model. prompts, test: with the verifiers that `verify` knows by name."""

    def __init__(
        self, model: str, config: RunConfig, prompts: Sequence[Prompt], test: Sequence[Prompt], verify: Any
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.config, self.prompts, self.test, self.verify = config, prompts, test, verify
        self.cursor = cursor_of(prompts, config)
        self.ids, self.test_ids = self._encoded(prompts), self._encoded(test)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=train.betas, weight_decay=train.weight_decay, fused=True
        )
        self.generator = torch.Generator().manual_seed(train.seed)
        self.course = Course()

    def run(self, target: float) -> Course:
        """Train until an evaluation has the score `target`, or the steps are done."""
        every, steps = self.config.evaluation.every, self.config.train.steps
        self.evaluate()
        for step in range(steps):
            self.update(step, self.collect())
            if (step + 1) % every == 0 or step + 1 == steps:
                self.evaluate()
                if self.course.curve[-1][1] >= target:
                    break
        return self.course

    def evaluate(self) -> None:
        drawn = self.sample(self.test_ids, greedy=True)
        right = [
            self.judged(prompt, text).outcome == Outcome.OK
            for prompt, text in zip(self.test, drawn.texts(self.tokenizer), strict=True)
        ]
        self.course.curve.append((self.course.tokens, sum(right) / len(right)))

    def collect(self) -> list[tuple[Drawn, list[int], list[float]]]:
        """Rounds until enough groups are kept: of each round its responses, the rows of kept groups, and advantages."""
        rules, rollout = self.config.dynamic_sampling, self.config.rollout
        n, missing, rounds = rollout.samples_per_prompt, rollout.prompts_per_step, []
        while missing and len(rounds) < rules.max_batches:
            indexes = self.cursor.take(missing)
            drawn = self.sample([self.ids[index] for index in indexes for _ in range(n)])
            texts = drawn.texts(self.tokenizer)
            verdicts = [self.judged(self.prompts[indexes[row // n]], text) for row, text in enumerate(texts)]
            scores = torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float64)
            for place, index in enumerate(indexes):
                own = verdicts[place * n : (place + 1) * n]
                right = sum(verdict.outcome == Outcome.OK for verdict in own)
                self.cursor.account(index, sum(drawn.lengths[place * n : (place + 1) * n]), right, n)
                self.course.groups += 1
                self.course.equal += len({verdict.score for verdict in own}) == 1
            self.course.tokens += sum(drawn.lengths)
            labels = torch.arange(len(scores)) // n
            kept = keep_groups(scores, labels, keep=rules.keep, low=rules.low, high=rules.high).nonzero()[:, 0].tolist()
            groups = scores.view(-1, n)
            advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + LEAST_STD)
            rounds.append((drawn, kept, advantages.view(-1)[kept].tolist()))
            missing -= len(kept) // n
        return rounds

    def update(self, step: int, rounds: Sequence[tuple[Drawn, list[int], list[float]]]) -> None:
        """One optimizer step: −Σ A · log π ÷ the drawn tokens of all kept responses."""
        train = self.config.train
        tokens = sum(drawn.lengths[row] for drawn, kept, _ in rounds for row in kept)
        for drawn, kept, advantages in rounds:
            if kept and any(advantages):
                log_probs, mask = self.log_probs(drawn, kept)
                loss = -(log_probs * mask * torch.tensor(advantages)[:, None]).sum() / tokens
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(
                step,
                steps=train.steps,
                peak=train.lr,
                warmup_steps=train.warmup_steps,
                schedule=train.schedule,
                min_fraction=train.min_lr_fraction,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_probs(self, drawn: Drawn, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the responses' tokens and their mask, both `[rows, response]`."""
        longest = drawn.width + max(drawn.lengths[row] for row in rows)
        ids, mask = drawn.ids[rows, :longest], drawn.mask[rows, :longest]
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), logits_to_keep=longest - drawn.width + 1
        ).logits[:, :-1]
        targets = ids[:, drawn.width :]
        chosen = logits.gather(2, targets[:, :, None])[:, :, 0] - logits.logsumexp(2)
        return chosen, mask[:, drawn.width :]

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], greedy: bool = False) -> Drawn:
        """A response to each of the prompts, at temperature 1."""
        width, most = max(map(len, prompts)), self.config.rollout.max_response_tokens
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids = torch.full((len(prompts), width + most), pad)
        mask = torch.zeros(len(prompts), width + most, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) : width] = torch.tensor(prompt)
            mask[row, width - len(prompt) : width] = True
        lengths = torch.zeros(len(prompts), dtype=torch.int64)
        active, cache, given = torch.arange(len(prompts)), None, ids[:, :width]
        for place in range(width, width + most):
            out = self.model(
                input_ids=given,
                attention_mask=mask[active, :place],
                position_ids=positions(mask[active, :place])[:, -given.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits, cache = out.logits[:, -1], out.past_key_values
            chances = logits.softmax(-1)
            drawn = logits.argmax(-1) if greedy else torch.multinomial(chances, 1, generator=self.generator)[:, 0]
            ids[active, place], mask[active, place] = drawn, True
            lengths[active] += 1
            alive = drawn != eos
            if not alive.any():
                break
            if not alive.all():
                rows = alive.nonzero()[:, 0]
                cache.batch_select_indices(rows)
                active, drawn = active[rows], drawn[rows]
            given = drawn[:, None]
        return Drawn(ids, mask, lengths.tolist(), width)

    def judged(self, prompt: Prompt, text: str) -> Verdict:
        verdict: Verdict = self.verify[prompt.verifier](prompt.request(text))
        return verdict

    def _encoded(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [
            self.tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
            for prompt in prompts
        ]


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)
