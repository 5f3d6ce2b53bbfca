"""Supervised warm-up of a tiny model, so that reinforcement learning has something to improve.

The demonstrations of a task show two behaviours, the better one less often. The model learns that it can do the better
one, but mostly does not; the rewards then teach it to.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlcli.errors import ModelError

if TYPE_CHECKING:
    import torch

SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
RECIPE: dict[str, Any] = {
    "version": 2,  # raise it when the code below changes the result
    "batch": 32,
    "final_lr_fraction": 0.1,
    "warmup_steps": 20,
    "betas": [0.9, 0.95],
    "weight_decay": 0.01,
}
NOTE = "warm-start.json"
THREADS = 1
"""Two are hardly faster at this size, and several times slower if something else uses the cores."""
IGNORED = -100
"""The label of tokens without a loss, as in torch's cross entropy."""


class Batch(NamedTuple):
    """ids, labels: int64 [rows, longest]. shown: further arguments of the model: its pictures and positions."""

    ids: torch.Tensor
    labels: torch.Tensor
    shown: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class WarmStart:
    """path: the model's folder. seconds: training time, in an earlier call if `cached`. loss: nats per answer token,
    averaged over the last tenth of the steps."""

    path: Path
    seconds: float
    cached: bool
    loss: float


class Lessons(Protocol):
    """What a warm start learns from. steps: how many, by default. lr: the highest learning rate."""

    steps: int
    lr: float = 3e-3

    def key(self) -> Any:
        """Everything that shapes the demonstrations, as JSON. Raises `DataError` for unsuitable data."""
        ...

    def prepare(self, seed: int) -> tuple[Any, Callable[[random.Random, int, float], list[Batch]]]:
        """The model's tokenizer or processor, and what draws so many demonstrations for one step, in batches of similar
        lengths. Its last argument is the share of the steps that are done."""
        ...

    def model(self, tokenizer: Any, sizes: Mapping[str, Any]) -> Any:
        """A model with random weights for the tokenizer or processor. sizes: as of `tiny_config`."""
        from rlcli.model.io.tiny_model import new_model, tiny_config

        return new_model(tiny_config(**sizes, tokenizer=tokenizer))


def warm_start(
    out: str | Path,
    lessons: Lessons,
    seed: int,
    steps: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> WarmStart:
    """The warmed-up tiny model in a separate folder under `out`; trained now unless an equal one exists.

    steps: 0: those of the lessons. The folder's name holds a hash of everything that affects the model. `on_progress`
    gets (steps done, steps). Raises `DataError` for data without demonstrations, `ModelError` if `out` cannot be
    written.
    """
    steps = steps or lessons.steps
    path = Path(out) / f"warm-start-{_key(lessons, seed, steps)}"
    cached = path.is_dir()
    if not cached:
        _writable(path)
        began = time.monotonic()
        model, tokenizer, loss = warmed_up(lessons, seed, steps, on_progress)
        note = {"seconds": round(time.monotonic() - began, 3), "loss": round(loss, 4), "seed": seed}
        _save(model, tokenizer, path, note)
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


def _key(lessons: Lessons, seed: int, steps: int) -> str:
    shape = json.dumps([SIZES, {**RECIPE, "lr": lessons.lr}, seed, steps, lessons.key()], sort_keys=True)
    return hashlib.sha256(shape.encode()).hexdigest()[:16]


def warmed_up(
    lessons: Lessons,
    seed: int,
    steps: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
    sizes: Mapping[str, Any] = SIZES,
) -> tuple[Any, Any, float]:
    """A model of these sizes after supervised learning, its tokenizer, and its loss as in `WarmStart`."""
    import torch

    steps = steps or lessons.steps
    tokenizer, batches_of = lessons.prepare(seed)
    rng = random.Random(seed)
    losses: list[float] = []
    with _own_torch_state(seed):
        model: Any = lessons.model(tokenizer, sizes).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=RECIPE["betas"], weight_decay=RECIPE["weight_decay"], fused=True
        )
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lessons.lr * _schedule(step, steps)
            batches = batches_of(rng, RECIPE["batch"], step / steps)
            tokens = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
            loss = sum(_summed_loss(model, batch) for batch in batches) / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if on_progress:
                on_progress(step + 1, steps)
    last = losses[-max(1, steps // 10) :]
    return model, tokenizer, sum(last) / len(last)


def padded(rows: list[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """Rows of token ids and labels as one batch, padded on the right. Causal attention needs no mask for that."""
    import torch

    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(ids) for ids, _ in rows], batch_first=True, padding_value=pad_id)
    return Batch(ids, pad([torch.tensor(labels) for _, labels in rows], batch_first=True, padding_value=IGNORED))


def _summed_loss(model: Any, batch: Batch) -> torch.Tensor:
    import torch

    hidden = model.model(input_ids=batch.ids, **batch.shown, use_cache=False).last_hidden_state[:, :-1]
    labels = batch.labels[:, 1:]
    answers = labels != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answers]), labels[answers], reduction="sum")


def _schedule(step: int, steps: int) -> float:
    rising = min(1.0, (step + 1) / RECIPE["warmup_steps"])
    falling = max(RECIPE["final_lr_fraction"], 1 - step / steps)
    return float(rising * falling)


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


def _save(model: Any, tokenizer: Any, path: Path, note: dict[str, Any]) -> None:
    from rlcli.model.io.tiny_model import save_model

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            save_model(model, beside, tokenizer)
            (beside / NOTE).write_text(json.dumps(note) + "\n")
            beside.rename(path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        # Another process may have made the same model meanwhile: an existing folder is complete.
        if not path.is_dir():
            hint = "free some disk space, or give another folder"
            raise ModelError(f"cannot write {path}: {error.strerror or error}", hint) from error
