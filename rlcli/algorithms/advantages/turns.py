"""Advantages of turns, which may differ within a conversation.

A function takes `AdvantageInputs` of the whole step: S conversations, in any order, have at most K turns; behind its
last turn, a conversation's columns are 0. n conversations are about the same prompt.
Every function returns the advantages: float [S, K], dtype of the rewards, computed in float64; all response tokens of a
turn have its advantage.

A turn whose returns are all equal has advantages of exactly 0, so that a group without differences needs no forward
pass.
"""

from __future__ import annotations

from rlcli.algorithms.advantages.base import register
from rlcli.algorithms.advantages.moments import Grouped
from rlcli.algorithms.inputs import AdvantageInputs
from rlcli.algorithms.lazy import Tensor, torch
from rlcli.errors import ConfigError

_EPSILON = 1e-6


@register("turn_rloo", level="turn", needs=("turn_rewards", "turns", "groups"), needs_group=True)
def turn_rloo(inputs: AdvantageInputs) -> Tensor:
    """A_t = G_t − the mean of the others' G_t, G_t = Σ_{k ≥ t} r_k, which is 0 for those that ended before turn t.

    RLOO (arXiv 2402.14740) of each turn's return, and exactly RLOO if there is a single turn. The gradient is unbiased:
    a baseline may depend on all other conversations of the group, whatever their lengths, but on nothing that this one
    does. So rewards must not be normalised by turn and then added up over the turns that were taken: the number of
    baselines in that sum is the policy's choice, and the gradient then has a term for taking another turn.

    The first has r = 1, 1, the second only r = 1. G = 2, 1 and 1, 0:

    >>> rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> turn_rloo(AdvantageInputs(turn_rewards=rewards, turns=torch.tensor([2, 1]), groups=torch.tensor([7, 7])))
    tensor([[ 1.,  1.],
            [-1.,  0.]])
    """
    turn_rewards, groups = inputs.turn_rewards, inputs.groups
    turn = torch.arange(turn_rewards.shape[1], device=groups.device)
    _, group = torch.unique(groups, return_inverse=True)
    grouped = Grouped.of(_returns(turn_rewards, 1.0).flatten(), (group[:, None] * len(turn) + turn).flatten())
    advantages = (grouped.centred * grouped.sizes / (grouped.sizes - 1).clamp(min=1)).view(turn_rewards.shape)
    return torch.where(turn < inputs.turns[:, None], advantages, 0.0).to(turn_rewards.dtype)


@register("gigpo", level="turn", needs=("turn_rewards", "turn_states", "turns", "groups"), needs_group=True)
def gigpo(inputs: AdvantageInputs, *, scale: str = "group", gamma: float = 1.0, omega: float = 1.0) -> Tensor:
    """A_t = (R − mean_g) / std_g + ω · (G_t − mean_s) / std_s. GiGPO, arXiv 2505.10978.

    R = Σ r, compared with the conversations of the group g. G_t = Σ_{k ≥ t} γ^(k − t) r_k, compared with all turns of
    the group, of any conversation and number, before which the environment wrote the same (the anchor state s); a turn
    whose state no other one has gets only the first term. Both std unbiased, + 1e-6. scale: "group" as above; "none":
    does not divide (the paper's F_norm = 1). Raises `ConfigError` for any other value. The paper has γ = 0.95.

    Both begin in state 5. The first reaches state 6, the second is done at once. R = 1, 0, so the first term is ±1/√2.
    G = 1/2, 1 and 0 for γ = 1/2: in state 5 the second term is ±1/√2, too, in state 6 it is 0:

    >>> rewards, states = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[5, 6], [5, 0]])
    >>> turns, groups = torch.tensor([2, 1]), torch.tensor([7, 7])
    >>> gigpo(AdvantageInputs(turn_rewards=rewards, turn_states=states, turns=turns, groups=groups), gamma=0.5)
    tensor([[ 1.4142,  0.7071],
            [-1.4142,  0.0000]])
    """
    if scale not in ("group", "none"):
        raise ConfigError(f"advantage gigpo: there is no scale '{scale}'", "choose one of: group, none")

    def compared(values: Tensor, labels: Tensor) -> Tensor:
        grouped = Grouped.of(values, labels)
        return grouped.centred / (grouped.std + _EPSILON) if scale == "group" else grouped.centred

    turn_rewards, groups = inputs.turn_rewards, inputs.groups
    conversation_advantages = compared(turn_rewards.double().sum(1), groups)
    is_turn = torch.arange(turn_rewards.shape[1], device=groups.device) < inputs.turns[:, None]
    _, group = torch.unique(groups, return_inverse=True)
    states, state = torch.unique(inputs.turn_states, return_inverse=True)
    steps = compared(_returns(turn_rewards, gamma)[is_turn], (group[:, None] * len(states) + state)[is_turn])
    turn_advantages = torch.zeros_like(turn_rewards, dtype=torch.float64).masked_scatter(is_turn, steps)
    return torch.where(is_turn, conversation_advantages[:, None] + omega * turn_advantages, 0.0).to(turn_rewards.dtype)


def _returns(turn_rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1} of each turn: float64 [S, K]."""
    returns = turn_rewards.double().clone()
    for turn in reversed(range(turn_rewards.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return returns
