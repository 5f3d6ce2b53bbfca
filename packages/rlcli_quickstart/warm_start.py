"""Supervised warm-up of a tiny model, so that reinforcement learning has something to improve.

The demonstrations of a task show two behaviours, the better one less often. So the model learns the better one, but
seldom shows it, until it is rewarded.
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
from typing import TYPE_CHECKING, NamedTuple, NotRequired, Protocol, TypedDict

from rlcli.errors import ModelError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


class TrainingRecipe(TypedDict):
    """Hyperparameters of the warm start."""

    version: int
    """Raise it when the code below changes the result."""
    batch: int
    """Demonstrations of a step."""
    final_lr_fraction: float
    """Learning rate of the last step, as a share of the highest."""
    warmup_steps: int
    """Steps in which the learning rate rises."""
    betas: tuple[float, float]
    """Betas of AdamW."""
    weight_decay: float
    """Weight decay of AdamW."""


class ModelSizes(TypedDict):
    """Sizes of a tiny model, as arguments of `tiny_config`."""

    hidden: int
    """H, the hidden size."""
    layers: int
    """Decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    experts: NotRequired[int]
    """Experts of each layer."""
    kind: NotRequired[str]
    """Family of the model."""


SIZES: ModelSizes = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
RECIPE: TrainingRecipe = {
    "version": 2,
    "batch": 32,
    "final_lr_fraction": 0.1,
    "warmup_steps": 20,
    "betas": (0.9, 0.95),
    "weight_decay": 0.01,
}
NOTE = "warm-start.json"
THREADS = 1
"""Two are hardly faster at this size, and several times slower if the cores are shared."""
IGNORED = -100
"""Label of tokens without a loss, as in torch's cross entropy."""


class Batch(NamedTuple):
    """A padded batch of demonstrations."""

    ids: Int[Tensor, "S T"]
    """Token ids."""
    labels: Int[Tensor, "S T"]
    """The same, IGNORED where there is no loss."""
    inputs: Mapping[str, Tensor] = {}
    """Further arguments of the model: images and positions."""


DrawBatches = Callable[[random.Random, int, float], list[Batch]]
"""Samples a number of demonstrations for one step, in batches of similar lengths. Arguments: random generator, number
of demonstrations, share of the steps that are done."""


@dataclass(frozen=True)
class WarmStart:
    """A warmed-up model."""

    path: Path
    """Folder of the model."""
    seconds: float
    """Training time, in an earlier call if `cached`."""
    cached: bool
    """True if the model existed."""
    loss: float
    """Nats per answer token, averaged over the last tenth of the steps."""


class Lessons(Protocol):
    """Demonstrations of a task."""

    steps: int
    """Default number of steps."""
    lr: float = 3e-3
    """Highest learning rate."""

    def key(self) -> object:
        """Everything that affects the demonstrations, as JSON. Raises `DataError` for unsuitable data."""
        ...

    def prepare(self, seed: int) -> tuple[PreTrainedTokenizerBase | ProcessorMixin, DrawBatches]:
        """The model's tokenizer or processor, and a function that samples demonstrations."""
        ...

    def model(self, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, sizes: ModelSizes) -> PreTrainedModel:
        """A model with random weights for the tokenizer or processor. sizes: as of `tiny_config`."""
        from rlcli.model.io.tiny_model import new_model, tiny_config

        return new_model(tiny_config(**sizes, tokenizer=tokenizer))


def warm_start(
    folder: str | Path,
    lessons: Lessons,
    seed: int,
    steps: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> WarmStart:
    """The warmed-up tiny model in a folder below `folder`; trained unless an equal one exists.

    steps: 0: those of the lessons. The folder's name has a hash of everything that affects the model. `on_progress`
    gets (steps done, steps). Raises `DataError` for data without demonstrations, `ModelError` if `folder` cannot be
    written.
    """
    steps = steps or lessons.steps
    path = Path(folder) / f"warm-start-{_key(lessons, seed, steps)}"
    cached = path.is_dir()
    if not cached:
        _check_writable(path)
        started = time.monotonic()
        model, tokenizer, loss = warmed_up(lessons, seed, steps, on_progress)
        note = {"seconds": round(time.monotonic() - started, 3), "loss": round(loss, 4), "seed": seed}
        _save(model, tokenizer, path, note)
    note = json.loads((path / NOTE).read_text())
    return WarmStart(path, note["seconds"], cached, note["loss"])


def _check_writable(path: Path) -> None:
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
    """Hash of everything that affects the model."""
    content = json.dumps([SIZES, {**RECIPE, "lr": lessons.lr}, seed, steps, lessons.key()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def warmed_up(
    lessons: Lessons,
    seed: int,
    steps: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
    sizes: ModelSizes = SIZES,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin, float]:
    """A model of these sizes after supervised learning, its tokenizer, and its loss as in `WarmStart`."""
    import torch

    steps = steps or lessons.steps
    tokenizer, draw_batches = lessons.prepare(seed)
    rng = random.Random(seed)
    losses: list[float] = []
    with _torch_state(seed):
        model = lessons.model(tokenizer, sizes).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=RECIPE["betas"], weight_decay=RECIPE["weight_decay"], fused=True
        )
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lessons.lr * _schedule(step, steps)
            batches = draw_batches(rng, RECIPE["batch"], step / steps)
            tokens = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
            loss = sum((_summed_loss(model, batch) for batch in batches), torch.zeros(())) / tokens
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


def _summed_loss(model: PreTrainedModel, batch: Batch) -> Float[Tensor, ""]:
    """Cross entropy of the labels, summed over the tokens."""
    import torch

    hidden = model.model(input_ids=batch.ids, **batch.inputs, use_cache=False).last_hidden_state[:, :-1]
    labels = batch.labels[:, 1:]
    answers = labels != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answers]), labels[answers], reduction="sum")


def _schedule(step: int, steps: int) -> float:
    """Learning rate of a step, as a share of the highest: linear warm-up, linear decay."""
    rising = min(1.0, (step + 1) / RECIPE["warmup_steps"])
    falling = max(RECIPE["final_lr_fraction"], 1 - step / steps)
    return float(rising * falling)


@contextmanager
def _torch_state(seed: int) -> Iterator[None]:
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


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, path: Path, note: Mapping[str, object]
) -> None:
    """Save a model atomically."""
    from rlcli.model.io.tiny_model import save_model

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            save_model(model, temporary, tokenizer)
            (temporary / NOTE).write_text(json.dumps(note) + "\n")
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        # Another process may have saved the same model in the meantime: an existing folder is complete.
        if not path.is_dir():
            hint = "free some disk space, or give another folder"
            raise ModelError(f"cannot write {path}: {error.strerror or error}", hint) from error
