"""Batched decoding with a transformers model: one left-padded batch with its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlcli.rollout.sampling import draw_keys, gumbel_argmax

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Float32, Int64
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

LOGITS_PER_DRAW = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Maximum number of logits that one draw reads, by device: it takes several tensors of eight bytes for each, 2 GB on
GPUs. There each draw ends with the device waiting for the host, which then launches the kernels of the next one."""
SHRINK_SHARE = 8
"""Finished rows are removed once they are 1/8 of the batch: each time the caches are copied."""


@dataclass(eq=False)
class Row:
    """One response of the batch."""

    key: int
    """Key of its request."""
    context: list[int]
    """Ids of the prompt and of the response so far, if it is resumed."""
    seed: int
    """Seed of the response."""
    temperature: float
    """0: greedy."""
    top_p: float
    """As `Sampling.top_p`."""
    max_tokens: int
    """Tokens that may be generated."""
    tokens: list[int] = field(default_factory=list)
    """Ids that were generated."""
    log_probs: list[float] = field(default_factory=list)
    """Their log-probs."""

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return len(self.context) + len(self.tokens)


class DecodeBatch:
    """The running rows of `lm`, a causal language model of transformers. Row i of each layer's cache, `[rows, heads,
    columns, size]`, and of the mask, `[rows, columns]`, belongs to row i; shorter ones are padded on the left. Finished
    rows stay in the batch for a while and are None in `_rows`.
    """

    def __init__(self, lm: PreTrainedModel, device: torch.device) -> None:
        self._lm, self._device = lm, device
        self._rows: list[Row | None] = []
        self._cache: DynamicCache | None = None
        self._mask: Int64[Tensor, "rows columns"] | None = None

    def __len__(self) -> int:
        return sum(row is not None for row in self._rows)

    def admit(self, rows: Sequence[Row]) -> None:
        """Prefill the contexts of new rows, sample the first token of each, and add them to the batch."""
        import torch
        from transformers import DynamicCache

        # The samples of a prompt share one prefill.
        contexts = list(dict.fromkeys(tuple(row.context) for row in rows))
        longest = max(map(len, contexts))
        padding = [[0] * (longest - len(context)) for context in contexts]
        ids = self._tensor([[*pad, *context] for pad, context in zip(padding, contexts, strict=True)])
        mask = self._tensor([[*pad, *[1] * len(context)] for pad, context in zip(padding, contexts, strict=True)])
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        index_of = {context: index for index, context in enumerate(contexts)}
        indexes = self._tensor([index_of[tuple(row.context)] for row in rows])
        _select_rows(cache, indexes)
        self._sample(logits[indexes], rows)
        mask = mask[indexes]
        if self._cache is not None and self._mask is not None:
            self._shrink()
            mask = torch.cat(_padded([self._mask, mask], -1))
            for layer, new in zip(self._cache.layers, cache.layers, strict=True):
                layer.keys = torch.cat(_padded([layer.keys, new.keys], -2))
                layer.values = torch.cat(_padded([layer.values, new.values], -2))
        else:
            self._cache = cache
        self._mask = mask
        self._rows += rows

    def decode(self) -> None:
        """Sample the next token of each row."""
        import torch

        running = [index for index, row in enumerate(self._rows) if row is not None]
        if not running:
            return
        assert self._cache is not None, "running rows have a cache"
        assert self._mask is not None, "running rows have a mask"
        last_tokens = self._tensor([row.tokens[-1] if row is not None else 0 for row in self._rows])
        positions = self._tensor([row.length - 1 if row is not None else 0 for row in self._rows])
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], -1)
        logits = self._forward(last_tokens[:, None], self._mask, positions[:, None], self._cache)
        self._sample(logits[self._tensor(running)], self.rows)

    @property
    def rows(self) -> list[Row]:
        """The running rows."""
        return [row for row in self._rows if row is not None]

    def tokens_of(self, key: int) -> list[int]:
        """Tokens so far of the row with this key; empty if it does not run."""
        return next((list(row.tokens) for row in self._rows if row is not None and row.key == key), [])

    def take(self, predicate: Callable[[Row], bool]) -> list[Row]:
        """Remove the rows that fulfil `predicate`, and return them."""
        removed = [row for row in self.rows if predicate(row)]
        removed_ids = set(map(id, removed))
        self._rows = [None if id(row) in removed_ids else row for row in self._rows]
        if not len(self):
            self._rows, self._cache, self._mask = [], None, None
        elif self._rows.count(None) * SHRINK_SHARE >= len(self._rows):
            self._shrink()
        return removed

    def _shrink(self) -> None:
        """Remove finished rows from the cache, and columns that only they needed."""
        running = [index for index, row in enumerate(self._rows) if row is not None]
        if len(running) == len(self._rows):
            return
        assert self._cache is not None, "running rows have a cache"
        assert self._mask is not None, "running rows have a mask"
        indexes = self._tensor(running)
        self._rows = [self._rows[index] for index in running]
        mask = self._mask[indexes]
        unused = int(mask.shape[1] - mask.sum(-1).max())
        self._mask = mask[:, unused:]
        _select_rows(self._cache, indexes)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def _forward(
        self,
        ids: Int64[Tensor, "rows new"],
        mask: Int64[Tensor, "rows columns"],
        positions: Int64[Tensor, "rows new"],
        cache: DynamicCache,
    ) -> Float32[Tensor, "rows V"]:
        """The logits of each row's next token."""
        output = self._lm(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _sample(self, logits: Float32[Tensor, "rows V"], rows: Sequence[Row]) -> None:
        """Sample a token of each row from its logits."""
        size = max(1, LOGITS_PER_DRAW[self._device.type] // logits.shape[1])
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            tokens, log_probs = _sampled_tokens(logits[start : start + size], part)
            for row, token, log_prob in zip(part, tokens.tolist(), log_probs.tolist(), strict=True):
                row.tokens.append(token)
                row.log_probs.append(log_prob)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Int64[Tensor, ...]:
        import torch

        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _select_rows(cache: DynamicCache, indexes: Int64[Tensor, " rows"]) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[indexes], layer.values[indexes]


def _sampled_tokens(
    logits: Float32[Tensor, "rows V"], rows: Sequence[Row]
) -> tuple[Int64[Tensor, " rows"], Float32[Tensor, " rows"]]:
    """A token for each row, and its log-prob after temperature and top-p; greedy rows take the most likely token, with
    its log-prob at temperature 1."""
    import torch

    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    greedy = temperatures == 0
    logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    top_p = rows[0].top_p  # the same for all rows of a generation
    most_likely = logits.argmax(-1)
    if top_p < 1:
        logits = torch.where(greedy[:, None], logits, _nucleus(logits, top_p))
    keys = draw_keys(np.array([row.seed for row in rows], np.int64), np.array([row.length for row in rows], np.int64))
    tokens = torch.where(greedy, most_likely, gumbel_argmax(logits, torch.from_numpy(keys).to(logits.device)))
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _nucleus(logits: Float[Tensor, "rows V"], top_p: float) -> Float[Tensor, "rows V"]:
    """Logits with −inf for tokens outside the smallest set with probability `top_p`."""
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))


def _padded(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Left-pad tensors with zeros along `dim`, a negative index, to equal sizes."""
    from torch.nn.functional import pad

    longest = max(tensor.shape[dim] for tensor in tensors)
    return [pad(tensor, [0, 0] * (-dim - 1) + [longest - tensor.shape[dim], 0]) for tensor in tensors]
