"""Assign samples to ranks and micro-batches, from their lengths alone.

Samples of one optimizer update (a minibatch) are spread over ranks × micro-batches bins, each of at most
`tokens_per_microbatch` tokens. Ranks forward in lockstep (FSDP gathers weights layer by layer), so every rank needs the
same number of micro-batches, and the slowest rank of each micro-batch sets the pace. Hence, in this order:

1. as few micro-batches as possible: as many as all tokens would fill, if the next rule finds a packing; else the number
   from best-fit decreasing, which is nearly always the fewest (its bound is 11/9 of the fewest, + 1);
2. bins as equal as possible: the longest sample first, each into the bin with the least work (LPT), over all ranks'
   bins at once. That balances ranks and micro-batches together, whereas a partition by rank first (Karmarkar–Karp)
   would leave each rank to split its share into an arbitrary number of bins. If bins of equal work exceed the budget
   (they are almost full), bins of equally many tokens are tried, and one micro-batch more;
3. similar bins in the same micro-batch: bins sorted by work are assigned one to each rank, the larger to the rank that
   has less so far. The micro-batch with the most tokens comes first: out-of-memory errors then occur early.

Work is tokens and, for attention, the squares of the samples' lengths: of two ranks with equally many tokens, the one
with shorter samples would wait for the other, half of its time if responses reach 32,768 tokens.

A prompt is computed once for all its samples in a micro-batch. So two ways are tried, samples spread one by one and
the samples of a prompt kept together, and the one whose slowest ranks have fewer tokens to forward is used: with few
groups per rank, or responses much longer than prompts, balance matters more.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

WORTH_SHARING = 1 / 16
"""Minimum share of a sample's tokens in its prompt for the prompt to be shared: attention pays for sharing with a copy
of each layer's queries, keys and values. Decided for each sample by itself, so that the other samples of a micro-batch
can only save more tokens, never fewer."""

ATTENTION = 32768
"""Length at which a sample's attention costs as much as everything else. By the shapes of the models it would be 23,000
for Qwen2.5-0.5B and 77,000 for 7B, but attention is slower per floating-point operation; twice or half of the right
value costs a hundredth of a step."""
MICROBATCH = 512 * ATTENTION
"""Work of one additional micro-batch: it gathers the weights and launches the kernels again."""
MAX_SKIPPED_BINS = 32
"""Maximum number of full bins that are skipped for one unit."""

Bin = tuple[int, ...]
"""Indexes of the samples in one micro-batch of one rank, ascending; may be empty."""


@dataclass(frozen=True)
class MinibatchPlan:
    """The samples of one optimizer update.

    `tokens`, `sequences`, `groups` and `max_length` are the denominators of the loss. They count all samples of the
    minibatch, inactive ones included.
    """

    ranks: tuple[tuple[Bin, ...], ...]
    """[rank][micro-batch] → sample indexes; every rank has equally many micro-batches, none if no sample is active."""
    rank_tokens: tuple[int, ...]
    """[rank] → tokens that it forwards, response tokens or not, a shared prompt once per micro-batch."""
    slowest_work: int
    """Sum over micro-batches of the slowest rank's work (`_Costs.work`)."""
    work: int
    """Work of all ranks."""
    tokens: int
    """Response tokens."""
    sequences: int
    """Responses."""
    groups: int
    """Groups."""
    max_length: int
    """Longest response that the run allows, in tokens."""
    samples: tuple[int, ...]
    """Indexes of all its samples."""

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

    minibatches: tuple[MinibatchPlan, ...]

    def of_rank(self, rank: int) -> list[tuple[Bin, ...]]:
        """[minibatch][micro-batch] → sample indexes."""
        return [minibatch.ranks[rank] for minibatch in self.minibatches]

    @property
    def imbalance(self) -> float:
        """Work of the slowest rank summed over micro-batches, ÷ work of the average rank: 1.0 is perfect."""
        mean = sum(minibatch.work / len(minibatch.ranks) for minibatch in self.minibatches)
        return sum(minibatch.slowest_work for minibatch in self.minibatches) / mean if mean else 1.0

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
    context_tokens: Sequence[int] | None = None,
) -> Plan:
    """Plan a step from the lengths and the group of each sample. Deterministic.

    Minibatches hold whole groups, as evenly as possible, in the order in which the groups appear; there are fewer
    minibatches than requested if there are fewer groups. `active` flags the samples that have a gradient (None: all);
    the others only count in the denominators. `pairs` labels samples that must share a micro-batch (None: no pairs).
    No sample, or pair, may exceed `tokens_per_microbatch`. `prompts` labels samples that begin with the same prompt,
    from 0 on (None: no two do). `context_tokens` counts the tokens after the prompt that are no response tokens (None:
    none): they are forwarded, and count in no denominator. `response_tokens` counts the response tokens.
    """
    lengths = zip(prompt_tokens, response_tokens, context_tokens or [0] * len(groups), strict=True)
    costs = _Costs(prompt_tokens, list(map(sum, lengths)), prompts)
    assert len(groups) == len(prompt_tokens) == len(response_tokens), "one prompt, response and group per sample"
    assert active is None or len(active) == len(groups), "one flag per sample"
    batches = list(_members(groups).values())
    share, longer = divmod(len(batches), minibatches)
    planned, start = [], 0
    for number in range(minibatches if share else longer):
        end = start + share + (number < longer)
        samples = [sample for group in batches[start:end] for sample in group]
        alternatives = _units(samples, costs, active, pairs, tokens_per_microbatch)
        assigned = min(
            (_pack_units(units, costs, tokens_per_microbatch, ranks) for units in alternatives),
            key=_Assignment.critical_path,
        )
        planned.append(
            MinibatchPlan(
                ranks=tuple(map(tuple, assigned.bins)),
                rank_tokens=tuple(map(sum, assigned.tokens)),
                slowest_work=assigned.slowest_work(),
                work=sum(map(sum, assigned.work)),
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


class _Costs:
    """The cost of a micro-batch of some samples, as tokens and as work: tokens × ATTENTION plus, for attention, the
    squares of the lengths. tokens, work: of each sample by itself. prompts: labels of those to compute once (see
    `_prompt_labels`)."""

    def __init__(self, prompt_tokens: Sequence[int], tokens: list[int], prompts: Sequence[int] | None) -> None:
        self.prompt_tokens, self.tokens = prompt_tokens, tokens
        self.work = [ATTENTION * length + length * length for length in tokens]
        self.prompts = _prompt_labels(prompt_tokens, tokens, prompts)

    def of(self, samples: Sequence[int]) -> tuple[int, int]:
        """Tokens and work of `samples` together."""
        if len(samples) == 1:
            return self.tokens[samples[0]], self.work[samples[0]]
        saved = sum([(len(group) - 1) * self.prompt_tokens[group[0]] for group in self.grouped_by_prompt(samples)])
        tokens = sum([self.tokens[sample] for sample in samples]) - saved
        return tokens, sum([self.work[sample] for sample in samples]) - ATTENTION * saved

    def grouped_by_prompt(self, samples: Sequence[int]) -> list[list[int]]:
        """The samples by their prompt, if any two may share one."""
        if self.prompts is None or len(samples) < 2:
            return []
        labels = [self.prompts[sample] for sample in samples]
        if len(set(labels)) == len(labels):
            return []
        members = _members(labels)
        return [[samples[index] for index in indexes] for indexes in members.values()]


def _prompt_labels(
    prompt_tokens: Sequence[int], tokens: Sequence[int], prompts: Sequence[int] | None
) -> list[int] | None:
    """`prompts`, with a separate label for each sample whose prompt is not shared."""
    if prompts is None:
        return None
    return [
        label if prompt >= WORTH_SHARING * length else -1 - sample
        for sample, (label, prompt, length) in enumerate(zip(prompts, prompt_tokens, tokens, strict=True))
    ]


def _units(
    samples: Sequence[int], costs: _Costs, active: Sequence[bool] | None, pairs: Sequence[int] | None, budget: int
) -> list[list[list[int]]]:
    """Ways to split the active samples into indivisible units; a pair moves if any of its samples is active."""
    if pairs is not None:
        paired = [[samples[index] for index in unit] for unit in _members([pairs[s] for s in samples]).values()]
        return [[unit for unit in paired if active is None or any(active[sample] for sample in unit)]]
    moving = [sample for sample in samples if active is None or active[sample]]
    alone = [[sample] for sample in moving]
    together = [unit for group in costs.grouped_by_prompt(moving) for unit in _split_group(group, costs, budget)]
    return [together, alone] if 0 < len(together) < len(alone) else [alone]


def _split_group(group: Sequence[int], costs: _Costs, budget: int) -> list[list[int]]:
    """Samples of one prompt in as few units as the budget allows, in their order."""
    units: list[list[int]] = []
    room = 0
    for sample in group:
        response = costs.tokens[sample] - costs.prompt_tokens[sample]
        if units and response <= room:
            units[-1].append(sample)
        else:
            units.append([sample])
            room = budget - costs.prompt_tokens[sample]
        room -= response
    return units


@dataclass(frozen=True)
class _Assignment:
    """Bins assigned to ranks."""

    bins: list[list[Bin]]
    """[rank][micro-batch] → sample indexes."""
    tokens: list[list[int]]
    """[rank][micro-batch] → tokens to forward."""
    work: list[list[int]]
    """[rank][micro-batch] → work (`_Costs.work`)."""

    def slowest_work(self) -> int:
        """Sum over micro-batches of the slowest rank's work."""
        return sum(map(max, zip(*self.work, strict=True)))

    def critical_path(self) -> int:
        """The work on the critical path of the step, by which two ways of splitting are compared."""
        return self.slowest_work() + MICROBATCH * len(self.work[0])


def _pack_units(units: Sequence[list[int]], costs: _Costs, budget: int, ranks: int) -> _Assignment:
    """Pack indivisible units into micro-batches, and assign these to ranks."""
    measured = [costs.of(unit) for unit in units]
    sizes, work = [tokens for tokens, _ in measured], [work for _, work in measured]
    assert max(sizes, default=0) <= budget, f"a sample of {max(sizes)} > {budget} tokens"

    def critical_path(rows: Sequence[Sequence[list[int]]]) -> int:
        return sum(max([sum([work[unit] for unit in bin]) for bin in row]) + MICROBATCH for row in rows)

    rows = min(
        (_microbatches(bins, sizes, work, ranks) for bins in _packings(sizes, work, budget, ranks)), key=critical_path
    )
    rows.sort(key=lambda row: -max([sum([sizes[unit] for unit in bin]) for bin in row]))
    samples = [[sorted([sample for unit in bin for sample in units[unit]]) for bin in row] for row in rows]
    return _assign_to_ranks(samples, costs, ranks)


def _packings(sizes: Sequence[int], work: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Ways to split the units into bins of at most `budget` tokens, ranks × the fewest micro-batches, or one more; some
    may be empty."""
    most_first = sorted(range(len(sizes)), key=lambda unit: (-work[unit], unit))
    fewest = -(-sum(sizes) // (budget * ranks)) * ranks
    even = _even_bins(most_first, sizes, work, budget, fewest)
    if even is not None:
        return [even]
    longest_first = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    tight = _best_fit(longest_first, sizes, budget)
    count = -(-len(tight) // ranks) * ranks
    if count > fewest and (even := _even_bins(most_first, sizes, work, budget, count)) is not None:
        return [even]
    full = tight + [[] for _ in range(count - len(tight))]
    by_tokens = _even_bins(longest_first, sizes, sizes, budget, count)
    one_more = _even_bins(most_first, sizes, work, budget, count + ranks)
    return [bins for bins in (full, by_tokens, one_more) if bins is not None]


def _best_fit(longest_first: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Few bins: each unit goes where it leaves the least room, into a new bin if it fits in none."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens still free, bin), ascending
    for unit in longest_first:
        fitting = bisect_left(rooms, (sizes[unit], 0))
        if fitting == len(rooms):
            bins.append([])
            room, target = budget, len(bins) - 1
        else:
            room, target = rooms.pop(fitting)
        bins[target].append(unit)
        insort(rooms, (room - sizes[unit], target))
    return bins


def _even_bins(
    largest_first: Sequence[int], sizes: Sequence[int], work: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    """`count` bins, of work as equal as possible; None if a unit does not fit into the bins with the least work."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [budget] * count
    least = list(range(count))  # a heap of work × count + bin: one number compares faster than two
    for unit in largest_first:
        needed, full = sizes[unit], []
        while least and rooms[least[0] % count] < needed:
            full.append(heapq.heappop(least))
            if len(full) > MAX_SKIPPED_BINS:
                return None
        if not least:
            return None
        target = least[0] % count
        bins[target].append(unit)
        rooms[target] -= needed
        heapq.heapreplace(least, least[0] + work[unit] * count)
        for entry in full:
            heapq.heappush(least, entry)
    return bins


def _microbatches(
    bins: Sequence[list[int]], sizes: Sequence[int], work: Sequence[int], ranks: int
) -> list[list[list[int]]]:
    """[micro-batch][rank] from bins whose number is divisible by the ranks: similar ones in the same micro-batch. Among
    those of about equal work the ones with equal tokens, so that they stay equal if the real share of attention differs
    from `ATTENTION`."""
    grain = max(1, sum(work) // (32 * max(1, len(bins))))

    def order(bin: list[int]) -> tuple[int, int, list[int]]:
        return -sum([work[unit] for unit in bin]) // grain, -sum([sizes[unit] for unit in bin]), sorted(bin)

    ordered = sorted(bins, key=order)
    return [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]


def _assign_to_ranks(rows: Sequence[Sequence[list[int]]], costs: _Costs, ranks: int) -> _Assignment:
    """Assign, in each micro-batch, the larger bins to the ranks that have less so far."""
    done = [(0, rank) for rank in range(ranks)]
    assigned = _Assignment([[] for _ in range(ranks)], [[] for _ in range(ranks)], [[] for _ in range(ranks)])
    for row in rows:
        largest_first = sorted([(-work, bin, tokens) for bin in row for tokens, work in [costs.of(bin)]])
        for (previous, rank), (negative_work, bin, tokens) in zip(sorted(done), largest_first, strict=True):
            assigned.bins[rank].append(tuple(bin))
            assigned.tokens[rank].append(tokens)
            assigned.work[rank].append(-negative_work)
            done[rank] = (previous - negative_work, rank)
    return assigned
