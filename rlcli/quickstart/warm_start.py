"""Supervised warm-up of a tiny model, so that reinforcement learning has something to improve.

40% of the demonstrations work a sum digit by digit, and 60% guess its answer without working. The model learns that it
can show its work, but mostly does not; the rewards then teach it to.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.prompts.prompts import TokenizedPrompts
from rlcli.data.prompts.table import read_prompts
from rlcli.errors import DataError, ModelError
from rlcli.types import Prompt

if TYPE_CHECKING:
    import torch

SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
RECIPE: dict[str, Any] = {
    "version": 1,  # raise it when the code below changes the result
    "batch": 32,
    "lr": 3e-3,
    "final_lr_fraction": 0.1,
    "warmup_steps": 20,
    "betas": [0.9, 0.95],
    "weight_decay": 0.01,
    "guesses": 0.6,
    "guess_within": 10,
}
NOTE = "warm-start.json"
THREADS = 1
"""Two are hardly faster at this size, and several times slower if something else uses the cores."""
IGNORED = -100
"""The label of tokens without a loss, as in torch's cross entropy."""


@dataclass(frozen=True)
class WarmStart:
    """path: the model's folder. seconds: training time, in an earlier call if `cached`. loss: nats per answer token,
    averaged over the last tenth of the steps."""

    path: Path
    seconds: float
    cached: bool
    loss: float


@dataclass(frozen=True)
class Demonstration:
    """prompt: token ids with the chat template. worked: token ids of the worked answer. answer: the sum."""

    prompt: list[int]
    worked: list[int]
    answer: int


def warm_start(
    out: str | Path,
    data: str | Path,
    seed: int,
    steps: int = 1000,
    on_progress: Callable[[int, int], None] | None = None,
) -> WarmStart:
    """The warmed-up tiny model in a separate folder under `out`; trained now unless an equal one exists.

    data: output of `rlcli prep arithmetic`. The folder's name holds a hash of everything that affects the model.
    `on_progress` gets (steps done, steps). Raises `DataError` for data without worked solutions, `ModelError` if `out`
    cannot be written.
    """
    prompts = read_prompts(data, "train")
    path = Path(out) / f"warm-start-{_key(prompts, seed, steps)}"
    cached = path.is_dir()
    if not cached:
        _writable(path)
        began = time.monotonic()
        model, loss = _train(prompts, seed, steps, on_progress)
        _save(model, path, {"seconds": round(time.monotonic() - began, 3), "loss": round(loss, 4), "seed": seed})
    note = json.loads((path / NOTE).read_text())
    return WarmStart(path, note["seconds"], cached, note["loss"])


def _writable(path: Path) -> None:
    """Check that the model can be saved before a minute is spent on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ModelError(
            f"cannot write {path}: {error.strerror or error}", "give another folder with --cache"
        ) from error


def _key(prompts: Sequence[Prompt], seed: int, steps: int) -> str:
    rows = [(prompt.messages[-1]["content"], _solution(prompt)) for prompt in prompts]
    shape = json.dumps([SIZES, RECIPE, seed, steps, rows], sort_keys=True)
    return hashlib.sha256(shape.encode()).hexdigest()[:16]


def _solution(prompt: Prompt) -> str:
    solution = prompt.extra_info.get("response")
    if not isinstance(solution, str):
        raise DataError(f"data: {prompt.id} has no worked solution", "make the data with: rlcli prep arithmetic")
    return solution


def _train(
    prompts: Sequence[Prompt], seed: int, steps: int, on_progress: Callable[[int, int], None] | None
) -> tuple[Any, float]:
    import torch
    from transformers import Qwen2ForCausalLM

    from rlcli.model.io.tiny import tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    demonstrations = _demonstrations(prompts, tokenizer)
    rng = random.Random(seed)
    losses: list[float] = []
    with _own_torch_state(seed):
        model = Qwen2ForCausalLM(tiny_config(**SIZES)).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=RECIPE["betas"], weight_decay=RECIPE["weight_decay"], fused=True
        )
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _lr(step, steps)
            batches = _batches(demonstrations, tokenizer, rng)
            tokens = sum(int((labels != IGNORED).sum()) for _, labels in batches)
            loss = sum(_summed_loss(model, ids, labels) for ids, labels in batches) / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if on_progress:
                on_progress(step + 1, steps)
    last = losses[-max(1, steps // 10) :]
    return model, sum(last) / len(last)


def _demonstrations(prompts: Sequence[Prompt], tokenizer: Any) -> list[Demonstration]:
    tokenized = TokenizedPrompts.tokenize(prompts, tokenizer, max_prompt_tokens=tokenizer.model_max_length)
    return [
        Demonstration(tokenized.tokens(i).tolist(), _ids(tokenizer, _solution(prompt)), int(prompt.ground_truth))
        for i, prompt in enumerate(tokenized.prompts)
    ]


def _ids(tokenizer: Any, answer: str) -> list[int]:
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def _batches(
    demonstrations: list[Demonstration], tokenizer: Any, rng: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels of one step: guesses and worked answers separately, as their lengths differ by half."""
    guessed, worked = [], []
    for drawn in rng.choices(demonstrations, k=RECIPE["batch"]):
        if rng.random() < RECIPE["guesses"]:
            off = rng.randint(-RECIPE["guess_within"], RECIPE["guess_within"])
            guessed.append((drawn.prompt, _ids(tokenizer, f"#### {max(0, drawn.answer + off)}")))
        else:
            worked.append((drawn.prompt, drawn.worked))
    return [_pad(rows, tokenizer.pad_token_id) for rows in (guessed, worked) if rows]


def _pad(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64[rows, longest], padded on the right. Causal attention needs no mask for that."""
    import torch

    ids = [torch.tensor(prompt + response) for prompt, response in rows]
    labels = [torch.tensor([IGNORED] * len(prompt) + response) for prompt, response in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True, padding_value=pad_id), pad(labels, batch_first=True, padding_value=IGNORED)


def _summed_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    answers = labels[:, 1:] != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answers]), labels[:, 1:][answers], reduction="sum")


def _lr(step: int, steps: int) -> float:
    rising = min(1.0, (step + 1) / RECIPE["warmup_steps"])
    falling = max(RECIPE["final_lr_fraction"], 1 - step / steps)
    return float(RECIPE["lr"] * rising * falling)


@contextmanager
def _own_torch_state(seed: int) -> Iterator[None]:
    """Seed torch and use `THREADS` threads; restores the caller's random state and thread count afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _save(model: Any, path: Path, note: dict[str, Any]) -> None:
    from rlcli.model.io.tiny import save_model

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            save_model(model, beside)
            (beside / NOTE).write_text(json.dumps(note) + "\n")
            beside.rename(path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        # Another process may have made the same model meanwhile: an existing folder is complete.
        if not path.is_dir():
            hint = "free some disk space, or give another folder"
            raise ModelError(f"cannot write {path}: {error.strerror or error}", hint) from error
