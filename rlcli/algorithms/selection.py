"""Selections: which samples of a step are trained on.

A selection takes, in this order, rewards (float [S]), groups (int64 [S], labels in any order) and generator
(torch.Generator on the CPU), and returns the indexes (int64) of the samples to train on, repeats allowed: groups in the
order of first appearance, and within a group by position unless stated otherwise. Randomness depends only on the
generator's state.

`keep_groups` is different: it decides, while a step is collected, which groups are kept at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlcli.algorithms.function_registry import FunctionRegistry
from rlcli.algorithms.lazy import Tensor, torch

SelectionFunction = Callable[..., Tensor]
"""Takes rewards, groups and generator, and options."""

_selection: FunctionRegistry[Tensor] = FunctionRegistry("selection", ("rewards", "groups", "generator"))
get = _selection.get
part = _selection.part
names = _selection.names
register = _selection.register
rules = _selection.rules


@_selection.register("all")
def everything(rewards: Tensor, groups: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Every sample once.

    >>> everything(torch.ones(3), torch.tensor([5, 3, 5]))
    tensor([0, 2, 1])
    """
    return _joined(_members(groups))


@_selection.register("right")
def right(
    rewards: Tensor, groups: Tensor, generator: torch.Generator | None = None, *, right_above: float = 0.5
) -> Tensor:
    """The samples with R > 0.5: expert iteration, or rejection-sampling fine-tuning. RFT, arXiv 2308.01825.

    >>> right(torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([0, 3])
    """
    return _joined([members[rewards[members] > right_above] for members in _members(groups)])


@_selection.register("pairs", needs_group=True, makes_pairs=True)
def pairs(rewards: Tensor, groups: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The best and the worst sample of each group, best first, for a preference loss.

    Of equals the first one counts. A group whose rewards are all equal has no preference and adds nothing. DPO, arXiv
    2305.18290, on the model's own samples; SPPO, arXiv 2405.00675.

    >>> pairs(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]))
    tensor([1, 0])
    """
    selected = []
    for members in _members(groups):
        inside = rewards[members].tolist()
        best, worst = inside.index(max(inside)), inside.index(min(inside))
        if inside[best] > inside[worst]:
            selected.append(members[[best, worst]])
    return _joined(selected)


@_selection.register("best_random")
def best_random(rewards: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
    """From each group of n, n drawn with replacement: half of the chance is the best one's, the others share the rest.

    The filter BR of PF-PPO, arXiv 2409.06957, with weights 1/2, 1/(2(n − 1)), …, 1/(2(n − 1)) by rank. Several best
    ones share their half equally, so order never matters; a group of equals is drawn from uniformly.

    With one right response in a thousand, about half of a thousand draws are that one:

    >>> rewards, groups = torch.tensor([0.0] * 999 + [1.0]), torch.zeros(1000, dtype=torch.int64)
    >>> drawn = best_random(rewards, groups, torch.Generator().manual_seed(1))
    >>> len(drawn), 400 < drawn.tolist().count(999) < 600
    (1000, True)
    """
    return _drawn(rewards, groups, generator, lambda inside: inside < inside.max())


@_selection.register("best_worst")
def best_worst(rewards: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
    """From each group of n, n drawn with replacement: half of the chance is the best one's, half the worst one's.

    The filter BW of PF-PPO, arXiv 2409.06957, with weights 1/2, 0, …, 0, 1/2 by rank. Several best or worst ones share
    their half equally; a group of equals is drawn from uniformly.

    >>> rewards, groups = torch.tensor([0.0] * 500 + [0.5] * 499 + [1.0]), torch.zeros(1000, dtype=torch.int64)
    >>> drawn = best_worst(rewards, groups, torch.Generator().manual_seed(1))
    >>> len(drawn), 400 < drawn.tolist().count(999) < 600, any(rewards[drawn] == 0.5)
    (1000, True, False)
    """
    return _drawn(rewards, groups, generator, lambda inside: inside == inside.min())


def keep_groups(
    scores: Tensor, groups: Tensor, *, keep: Literal["all", "unequal", "accuracy"], low: float, high: float
) -> Tensor:
    """Mask of the samples whose group is kept: bool [S], from scores (float [S]) and groups (int64 [S]).

    all: every group. unequal: those whose scores are not all equal (DAPO's dynamic sampling, arXiv 2503.14476).
    accuracy: those whose mean score lies in [low, high] (0.2 and 0.8 in PRIME, arXiv 2502.01456).

    >>> scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> keep_groups(scores, groups, keep="unequal", low=0.2, high=0.8)
    tensor([ True,  True, False, False])
    """
    mask = torch.ones(len(groups), dtype=torch.bool)
    if keep == "all":
        return mask
    for members in _members(groups):
        inside = scores[members].double()
        mask[members] = inside.min() < inside.max() if keep == "unequal" else low <= inside.mean() <= high
    return mask


def _drawn(rewards: Tensor, groups: Tensor, generator: torch.Generator, others: Callable[[Tensor], Tensor]) -> Tensor:
    selected = []
    for members in _members(groups):
        inside = rewards[members]
        best, rest = inside == inside.max(), others(inside)
        # If all are equal, all are best, and for `best_worst` all are worst too: either way all chances are equal.
        chances = best / best.sum() + rest / rest.sum().clamp(min=1)
        indexes = torch.multinomial(chances, len(members), replacement=True, generator=generator)
        selected.append(members[indexes.sort().values])
    return _joined(selected)


def _members(groups: Tensor) -> list[Tensor]:
    """Positions of each group's samples, groups in the order in which they first appear."""
    members: dict[int, list[int]] = {}
    for position, label in enumerate(groups.tolist()):
        members.setdefault(label, []).append(position)
    return [torch.tensor(positions) for positions in members.values()]


def _joined(selected: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *selected])
