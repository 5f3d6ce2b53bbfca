"""Responses that a transformers model generates together: one left-padded batch with its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.rollout.sampling import draw_keys, gumbel_argmax

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DRAWN_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Most logits that one draw reads, by device: it takes several tensors of eight bytes for each, 2 GB on GPUs. There
each draw ends with the device waiting for the host, which then launches the kernels of the next one."""
SHRINK_SHARE = 8
"""Finished rows are removed once they are 1/8 of the batch: each time the caches are copied."""


@dataclass(eq=False)
class Row:
    """One response. context: the prompt and what was generated before, ids. temperature 0: greedy. most: tokens that
    may be generated. tokens, log_probs: what has been."""

    key: int
    context: list[int]
    seed: int
    temperature: float
    top_p: float
    most: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.context) + len(self.tokens)


class DecodeBatch:
    """The running rows of `lm`, a causal language model of transformers. Row i of each layer's cache, `[rows, heads,
    columns, size]`, and of the mask, `[rows, columns]`, belongs to row i; shorter ones are padded on the left. Finished
    rows stay in the batch for a while and are None in `_rows`.
    """

    def __init__(self, lm: Any, device: torch.device) -> None:
        self._lm, self._device = lm, device
        self._rows: list[Row | None] = []
        self._cache: Any = None
        self._mask: Any = None

    def __len__(self) -> int:
        return sum(row is not None for row in self._rows)

    def admit(self, rows: Sequence[Row]) -> None:
        """Prefill the contexts of new rows, draw the first token of each, and let them run with the others."""
        import torch
        from transformers import DynamicCache

        # The samples of a prompt are computed once.
        contexts = list(dict.fromkeys(tuple(row.context) for row in rows))
        longest = max(map(len, contexts))
        padding = [[0] * (longest - len(context)) for context in contexts]
        ids = self._tensor([[*pad, *context] for pad, context in zip(padding, contexts, strict=True)])
        mask = self._tensor([[*pad, *[1] * len(own)] for pad, own in zip(padding, contexts, strict=True)])
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        place = {context: index for index, context in enumerate(contexts)}
        which = self._tensor([place[tuple(row.context)] for row in rows])
        self._select(cache, which)
        self._draw(logits[which], rows)
        mask = mask[which]
        if self._rows:
            self._shrink()
            mask = torch.cat(_padded([self._mask, mask], -1))
            for mine, new in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys = torch.cat(_padded([mine.keys, new.keys], -2))
                mine.values = torch.cat(_padded([mine.values, new.values], -2))
        else:
            self._cache = cache
        self._mask = mask
        self._rows += rows

    def decode(self) -> None:
        """Draw the next token of each row."""
        import torch

        live = [index for index, row in enumerate(self._rows) if row is not None]
        if not live:
            return
        last = [row.tokens[-1] if row is not None else 0 for row in self._rows]
        places = [row.length - 1 if row is not None else 0 for row in self._rows]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], -1)
        logits = self._forward(self._tensor(last)[:, None], self._mask, self._tensor(places)[:, None], self._cache)
        self._draw(logits[self._tensor(live)], [row for row in self._rows if row is not None])

    @property
    def rows(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def tokens_of(self, key: int) -> list[int]:
        """What was drawn so far of the row with this key; nothing if it does not run."""
        return next((list(row.tokens) for row in self._rows if row is not None and row.key == key), [])

    def take(self, which: Callable[[Row], bool]) -> list[Row]:
        """Remove the rows for which `which` holds, and return them."""
        taken = [row for row in self._rows if row is not None and which(row)]
        gone = set(taken)
        self._rows = [None if row in gone else row for row in self._rows]
        if not len(self):
            self._rows, self._cache, self._mask = [], None, None
        elif self._rows.count(None) * SHRINK_SHARE >= len(self._rows):
            self._shrink()
        return taken

    def _shrink(self) -> None:
        """Remove finished rows from the cache, and columns that only they needed."""
        kept = [index for index, row in enumerate(self._rows) if row is not None]
        if len(kept) == len(self._rows):
            return
        which = self._tensor(kept)
        self._rows = [self._rows[index] for index in kept]
        self._mask = self._mask[which]
        unused = int(self._mask.shape[1] - self._mask.sum(-1).max())
        self._mask = self._mask[:, unused:]
        self._select(self._cache, which)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def _select(self, cache: Any, which: Tensor) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[which], layer.values[which]

    def _forward(self, ids: Tensor, mask: Tensor, places: Tensor, cache: Any) -> Tensor:
        """The logits of each row's next token, `[rows, vocabulary]`, float32."""
        output = self._lm(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _draw(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Draw a token of each row from its logits."""
        at_once = max(1, DRAWN_AT_ONCE[self._device.type] // logits.shape[1])
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            tokens, log_probs = _drawn(logits[start : start + at_once], part)
            for row, token, log_prob in zip(part, tokens.tolist(), log_probs.tolist(), strict=True):
                row.tokens.append(token)
                row.log_probs.append(log_prob)

    def _tensor(self, values: Any) -> Tensor:
        import torch

        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _drawn(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """A token for each row of `logits` `[rows, vocabulary]`, and its log-prob after temperature and top-p; greedy rows
    take the likeliest token, with its log-prob at temperature 1."""
    import torch

    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    greedy = temperatures == 0
    logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    top_p = rows[0].top_p  # of all rows of a generation
    likeliest = logits.argmax(-1)
    if top_p < 1:
        logits = torch.where(greedy[:, None], logits, _nucleus(logits, top_p))
    keys = draw_keys(np.array([row.seed for row in rows], np.int64), np.array([row.length for row in rows], np.int64))
    tokens = torch.where(greedy, likeliest, gumbel_argmax(logits, torch.from_numpy(keys).to(logits.device)))
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits `[rows, vocabulary]`: −inf for tokens outside the smallest set with probability `top_p`."""
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))


def _padded(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The tensors with zeros put before the others' entries along `dim`, counted from the end, to equal sizes."""
    from torch.nn.functional import pad

    longest = max(tensor.shape[dim] for tensor in tensors)
    before = [[0, 0] * (-dim - 1) + [longest - tensor.shape[dim], 0] for tensor in tensors]
    return [pad(tensor, own) for tensor, own in zip(tensors, before, strict=True)]
