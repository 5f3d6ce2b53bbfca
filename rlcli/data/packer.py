"""Which rank trains which samples in which micro-batch, decided from lengths alone.

Samples of one optimizer update (a minibatch) are spread over ranks × micro-batches bins, each of at most
`tokens_per_microbatch` tokens. Ranks forward in lockstep (FSDP gathers weights layer by layer), so every rank needs the
same number of micro-batches, and the slowest rank of each micro-batch sets the pace. Hence, in this order:

1. as few micro-batches as possible: best-fit decreasing finds their number, which is nearly always the fewest (its
   bound is 11/9 of the fewest bins, + 1);
2. bins as equal as possible: the longest sample first, each into the bin with the fewest tokens (LPT), over all ranks'
   bins at once. That balances ranks and micro-batches together, where a partition by rank first (Karmarkar–Karp) would
   leave each rank to cut its share into as many bins as it happens to need. Where LPT overflows a bin (few samples to
   a bin, and bins all but full) the best-fit bins stand;
3. alike bins side by side: bins in order of size are dealt out, one to each rank, the larger to the rank that has less
   so far. The first micro-batch is the largest: memory that does not suffice shows at once.

Work is counted in tokens. Attention's cost, which grows with the square of the length, only breaks ties.

A prompt is computed once for all its samples in a micro-batch. So both ways are tried, samples spread one by one and
the samples of a prompt kept together, and that one is taken whose slowest ranks have fewer tokens to forward: with few
groups to a rank, or responses much longer than prompts, balance is worth more.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

WORTH_SHARING = 1 / 16
"""A prompt is computed once where that leaves out this part of its samples' tokens: attention pays for it with a copy
of each layer's queries, keys and values."""

Bin = tuple[int, ...]
"""Indexes of the samples that one rank forwards at once, ascending; may be empty."""


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer update.

    ranks: [rank][micro-batch] → sample indexes; every rank has equally many micro-batches, none if no sample is active.
    rank_tokens: [rank] → prompt and response tokens that it forwards, a prompt that is shared once a micro-batch.
    tokens, sequences, groups, max_length: the denominators of the loss, which count all samples of the minibatch,
    inactive ones included: response tokens, responses, groups, and the longest response that the run allows. samples:
    their indexes.
    """

    ranks: tuple[tuple[Bin, ...], ...]
    rank_tokens: tuple[int, ...]
    tokens: int
    sequences: int
    groups: int
    max_length: int
    samples: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


@dataclass(frozen=True)
class Plan:
    """One step's training, minibatch by minibatch.

    Two prompts of 2 tokens, each with responses of 3 and 1:

    >>> plan = plan_batches(
    ...     [2, 2, 2, 2], [3, 1, 1, 3], [0, 0, 1, 1],
    ...     minibatches=1, ranks=2, tokens_per_microbatch=8, max_response_tokens=4,
    ... )
    >>> plan.minibatches[0].ranks  # both ranks forward 8 tokens
    (((0, 1),), ((2, 3),))
    >>> plan.imbalance, plan.microbatches, plan.skipped
    (1.0, 1, 0)
    """

    minibatches: tuple[MiniBatch, ...]

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest rank ÷ tokens of the average rank, minibatch by minibatch: 1.0 is perfect."""
        busiest = sum(max(minibatch.rank_tokens) for minibatch in self.minibatches)
        mean = sum(sum(minibatch.rank_tokens) / len(minibatch.rank_tokens) for minibatch in self.minibatches)
        return busiest / mean if mean else 1.0

    @property
    def microbatches(self) -> int:
        """Micro-batches of each rank in the whole step."""
        return sum(minibatch.microbatches for minibatch in self.minibatches)

    @property
    def skipped(self) -> int:
        """Samples that are in no micro-batch: the inactive ones."""
        forwarded = sum(len(bin) for minibatch in self.minibatches for rank in minibatch.ranks for bin in rank)
        return sum(minibatch.sequences for minibatch in self.minibatches) - forwarded


def plan_batches(
    prompt_tokens: Sequence[int],
    response_tokens: Sequence[int],
    groups: Sequence[int],
    *,
    minibatches: int,
    ranks: int,
    tokens_per_microbatch: int,
    max_response_tokens: int,
    active: Sequence[bool] | None = None,
    pairs: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
) -> Plan:
    """Plan a step from the lengths and the group of each sample. Deterministic.

    Minibatches hold whole groups, as equally many as can be, in the order in which the groups appear; there are fewer
    minibatches than asked for where there are fewer groups. `active`, by sample, tells which have a gradient (None:
    all); the others only count in the denominators. `pairs` labels samples that must share a micro-batch (None: each
    stands alone). No sample, or pair, may exceed `tokens_per_microbatch`. `prompts` labels samples that begin with the
    same prompt (None: no two do).
    """
    size = _Sizes(prompt_tokens, response_tokens, prompts)
    assert len(groups) == len(prompt_tokens) == len(response_tokens), "a prompt, a response and a group a sample"
    assert active is None or len(active) == len(groups), "one flag a sample"
    batches = list(_members(groups).values())
    share, longer = divmod(len(batches), minibatches)
    planned, start = [], 0
    for number in range(minibatches if share else longer):
        end = start + share + (number < longer)
        samples = [sample for group in batches[start:end] for sample in group]
        dealt = min(
            (
                _dealt(units, size, tokens_per_microbatch, ranks)
                for units in _units(samples, size, active, pairs, tokens_per_microbatch)
            ),
            key=lambda dealt: _pace(dealt, size),
        )
        planned.append(
            MiniBatch(
                ranks=dealt,
                rank_tokens=tuple(sum(map(size, rank)) for rank in dealt),
                tokens=sum(response_tokens[sample] for sample in samples),
                sequences=len(samples),
                groups=end - start,
                max_length=max_response_tokens,
                samples=tuple(samples),
            )
        )
        start = end
    return Plan(tuple(planned))


def _members(labels: Sequence[int]) -> dict[int, list[int]]:
    """Label → positions, in the order of first appearance."""
    members: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    return members


@dataclass(frozen=True)
class _Sizes:
    """How many tokens a micro-batch of some samples forwards."""

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    prompts: Sequence[int] | None

    def __call__(self, samples: Sequence[int]) -> int:
        whole = sum([self.prompt_tokens[sample] + self.response_tokens[sample] for sample in samples])
        return whole - sum([self._saved(group) for group in self.alike(samples) if len(group) > 1])

    def alike(self, samples: Sequence[int]) -> list[list[int]]:
        """The samples by their prompt, where any two could have the same."""
        if self.prompts is None or len(samples) < 2:
            return []
        labels = [self.prompts[sample] for sample in samples]
        if len(set(labels)) == len(labels):
            return []
        members = _members(labels)
        return [[samples[place] for place in places] for places in members.values()]

    def _saved(self, group: Sequence[int]) -> int:
        return _saved(self.prompt_tokens[group[0]], len(group), sum([self.response_tokens[sample] for sample in group]))


def _saved(prompt: int, count: int, responses: int) -> int:
    """Tokens that `count` samples with the same prompt leave out where it is worth it; responses: tokens of all."""
    saved = (count - 1) * prompt
    return saved if saved >= WORTH_SHARING * (count * prompt + responses) else 0


def _units(
    samples: Sequence[int], size: _Sizes, active: Sequence[bool] | None, pairs: Sequence[int] | None, budget: int
) -> list[list[list[int]]]:
    """Ways to part the active samples into units that stay whole; a pair moves if any of its samples is active."""
    if pairs is not None:
        paired = [[samples[place] for place in unit] for unit in _members([pairs[s] for s in samples]).values()]
        return [[unit for unit in paired if active is None or any(active[sample] for sample in unit)]]
    moving = [sample for sample in samples if active is None or active[sample]]
    alone = [[sample] for sample in moving]
    together = [unit for group in size.alike(moving) for unit in _shares(group, size, budget)]
    return [together, alone] if 0 < len(together) < len(alone) else [alone]


def _shares(group: Sequence[int], size: _Sizes, budget: int) -> list[list[int]]:
    """Samples of one prompt in as few units as the budget allows, or each alone where that leaves out too little."""
    prompt, units = size.prompt_tokens[group[0]], [[group[0]]]
    count, responses, saved = 1, size.response_tokens[group[0]], 0
    for sample in group[1:]:
        more, longer = count + 1, responses + size.response_tokens[sample]
        if more * prompt + longer - _saved(prompt, more, longer) <= budget:
            units[-1].append(sample)
            count, responses = more, longer
        else:
            saved += _saved(prompt, count, responses)
            units.append([sample])
            count, responses = 1, size.response_tokens[sample]
    saved += _saved(prompt, count, responses)
    return units if saved else [[sample] for sample in group]


def _pace(dealt: tuple[tuple[Bin, ...], ...], size: _Sizes) -> int:
    """Tokens of the slowest rank of each micro-batch, together."""
    return sum(max(map(size, row)) for row in zip(*dealt, strict=True))


def _dealt(units: Sequence[list[int]], size: _Sizes, budget: int, ranks: int) -> tuple[tuple[Bin, ...], ...]:
    """[rank][micro-batch] → samples, each unit of which stays whole."""
    weights = [size(unit) for unit in units]
    assert max(weights, default=0) <= budget, f"a sample of {max(weights)} > {budget} tokens"
    dealt = _deal(_pack(range(len(units)), weights, budget, ranks), weights, ranks)
    return tuple(
        tuple(tuple(sorted(sample for unit in bin for sample in units[unit])) for bin in rank) for rank in dealt
    )


def _pack(samples: Sequence[int], sizes: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, as many as the ranks times the fewest micro-batches; some may be empty."""
    longest_first = sorted(samples, key=lambda sample: (-sizes[sample], sample))
    tight = _best_fit(longest_first, sizes, budget)
    count = -(-len(tight) // ranks) * ranks
    return _spread(longest_first, sizes, budget, count) or tight + [[] for _ in range(count - len(tight))]


def _best_fit(longest_first: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Few bins: each sample goes where it leaves the least room, into a new bin where it fits in none."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens still free, bin), ascending
    for sample in longest_first:
        fitting = bisect_left(rooms, (sizes[sample], 0))
        if fitting == len(rooms):
            bins.append([])
            room, chosen = budget, len(bins) - 1
        else:
            room, chosen = rooms.pop(fitting)
        bins[chosen].append(sample)
        insort(rooms, (room - sizes[sample], chosen))
    return bins


def _spread(longest_first: Sequence[int], sizes: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """`count` bins, as equal as possible; None where a bin would exceed the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, 0, bin) for bin in range(count)]  # a heap of (tokens, squares of lengths, bin)
    for sample in longest_first:
        size = sizes[sample]
        tokens, squares, chosen = emptiest[0]
        if tokens + size > budget:
            return None
        bins[chosen].append(sample)
        heapq.heapreplace(emptiest, (tokens + size, squares + size * size, chosen))
    return bins


def _deal(bins: Sequence[list[int]], sizes: Sequence[int], ranks: int) -> tuple[tuple[Bin, ...], ...]:
    """[rank][micro-batch] from bins whose number the ranks divide: alike ones in the same micro-batch."""

    def load(bin: list[int]) -> tuple[int, int]:
        return sum(sizes[sample] for sample in bin), sum(sizes[sample] ** 2 for sample in bin)

    largest_first = sorted(
        ((*load(bin), sorted(bin)) for bin in bins), key=lambda entry: (-entry[0], -entry[1], entry[2])
    )
    loads = [(0, 0, rank) for rank in range(ranks)]
    dealt: list[list[Bin]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        row = largest_first[start : start + ranks]
        for (had, had_squares, rank), (tokens, squares, samples) in zip(sorted(loads), row, strict=True):
            dealt[rank].append(tuple(samples))
            loads[rank] = (had + tokens, had_squares + squares, rank)
    return tuple(tuple(rank) for rank in dealt)
