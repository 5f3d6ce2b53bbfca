"""Padded tensors in, padded tensors out, and the packed functions between."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import advantages, aggregation, correction, kl, losses
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.function_registry import Part
from rlcli.algorithms.inputs import AdvantageInputs, LossInputs
from rlcli.algorithms.padded import Padded

relaxed = settings(deadline=None)  # the first call of a torch operation is slow
OPTIONS = {"beta": 0.1}  # for those that have no default of their own
TOKEN_INPUTS = [
    *("log_probs", "old_log_probs", "reference_log_probs", "rollout_log_probs", "weights", "advantages"),
    *("values", "token_rewards", "process_rewards", "teacher_log_probs"),
]
PARTS: dict[str, Part[Any]] = {
    f"{kind}.{name}": module.part(name, OPTIONS)
    for kind, module in {
        "advantages": advantages,
        "aggregation": aggregation,
        "correction": correction,
        "kl": kl,
        "losses": losses,
    }.items()
    for name in module.names()
    if kind == "aggregation" or module.part(name).needs & {*TOKEN_INPUTS, "sequence"}
}
MASK = torch.tensor(
    [  # whole, holed, padded on the left, empty, padded on the right, of one token
        [1, 1, 1, 1, 1],
        [1, 0, 1, 0, 1],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0],
    ],
    dtype=torch.bool,
)
RESPONSES: dict[str, Any] = {
    "pairs": torch.tensor([0, 1, 1, 2, 2, 0]),
    "groups": torch.tensor([0, 0, 1, 1, 1, 0]),
    "group_count": 2,
    "rewards": torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.25], dtype=torch.float64),
    "group_tokens": torch.tensor([9.0, 9.0, 5.0, 5.0, 5.0, 9.0], dtype=torch.float64),
}
DENOMINATORS = Denominators(tokens=14, sequences=6, max_length=5, groups=2)


def matrix(mask: list[list[bool]]) -> Tensor:
    return torch.tensor(mask, dtype=torch.bool).reshape(len(mask), len(mask[0]) if mask else 6)


masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=5)
)


@relaxed
@given(mask=masks)
def test_tokens_go_row_after_row_and_come_back_to_their_places(mask: list[list[bool]]) -> None:
    padded = Padded(matrix(mask))
    positions = [(row, column) for row, line in enumerate(mask) for column, token in enumerate(line) if token]
    numbers = torch.arange(padded.mask.numel()).reshape(padded.mask.shape)
    packed = padded.pack(numbers)
    assert packed.tolist() == [int(numbers[position]) for position in positions]
    assert padded.sequence.tolist() == [row for row, _ in positions]
    assert padded.lengths.tolist() == [sum(line) for line in mask]
    assert padded.sequence.dtype == padded.lengths.dtype == torch.int64
    back = padded.unpack(packed + 1)
    assert torch.equal(back, (numbers + 1) * padded.mask)


def test_every_dtype_survives() -> None:
    padded = Padded(MASK)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        packed = padded.pack(torch.ones(MASK.shape, dtype=dtype))
        assert packed.dtype == padded.unpack(packed).dtype == dtype


def test_a_wrong_shape_is_an_error() -> None:
    padded = Padded(MASK)
    with pytest.raises(AssertionError, match=r"\(6, 4\)"):
        padded.pack(torch.zeros(6, 4))
    with pytest.raises(AssertionError, match="14 tokens"):
        padded.unpack(torch.zeros(15))


def test_the_gradient_goes_through_both_ways_and_never_into_padding() -> None:
    padded = Padded(MASK)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(MASK.shape, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: padded.unpack(padded.pack(x).square()), values)


def token_tensors(fill: float) -> dict[str, Tensor]:
    """[B, L] tensors with the same tokens whatever `fill`, which is what stands in the padding."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.rand(MASK.shape, dtype=torch.float64, generator=generator) - 1 for name in TOKEN_INPUTS}
    return {name: values.masked_fill(~MASK, fill) for name, values in tensors.items()}


def results(outcome: Any) -> list[Tensor]:
    """The tensors that a function returned, whatever it returns them in."""
    if is_dataclass(outcome):
        outcome = [getattr(outcome, field.name) for field in fields(outcome)]
    return [outcome] if isinstance(outcome, Tensor) else [part for part in outcome if part is not None]


def applied(name: str, columns: dict[str, Any]) -> list[Tensor]:
    """The results of a function for the columns of its record; an aggregation gets the values, too."""
    if name.startswith("advantages"):
        known = {column: columns[column] for column in AdvantageInputs.columns() if column in columns}
        return results(PARTS[name](AdvantageInputs(**known, group_count=columns["group_count"])))
    inputs = LossInputs(**{column: columns[column] for column in LossInputs.columns() if column in columns})
    arguments = (columns["values"], inputs, DENOMINATORS) if name.startswith("aggregation") else (inputs,)
    return results(PARTS[name](*arguments))


@pytest.mark.parametrize("name", PARTS)
def test_a_token_level_function_gives_the_same_padded_and_packed(name: str) -> None:
    """Values and gradients, against the same tokens picked by hand, with NaN in all padding."""
    padded, padded_columns, clean = Padded(MASK), token_tensors(float("nan")), token_tensors(0.0)
    positions = [(row, column) for row in range(6) for column in range(5) if MASK[row, column]]
    packed = {name: torch.stack([clean[name][position] for position in positions]) for name in TOKEN_INPUTS}
    packed |= {"sequence": torch.tensor([row for row, _ in positions]), "lengths": torch.tensor([5, 3, 3, 0, 2, 1])}
    selected = torch.arange(30).reshape(6, 5) % 3 == 0
    by_hand = packed | {"selected": torch.stack([selected[position] for position in positions])} | RESPONSES
    leaf = "log_probs" if "log_probs" in PARTS[name].needs else "values"
    padded_columns[leaf].requires_grad_()
    by_hand[leaf].requires_grad_()
    through = {name: padded.pack(values) for name, values in padded_columns.items()}
    through |= {"sequence": padded.sequence, "lengths": padded.lengths, "selected": padded.pack(selected)} | RESPONSES
    actual, expected = applied(name, through), applied(name, by_hand)
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)
        if ours.ndim and not ours.requires_grad:
            assert torch.equal(padded.unpack(ours)[MASK], theirs)
    if actual[0].requires_grad:
        (gradient,) = torch.autograd.grad(actual[0].sum(), padded_columns[leaf])
        (reference,) = torch.autograd.grad(expected[0].sum(), by_hand[leaf])
        assert gradient[MASK].tolist() == reference.tolist()
        assert gradient[~MASK].tolist() == [0.0] * 16


def test_every_kind_of_token_level_function_was_tried() -> None:
    assert {name.split(".")[0] for name in PARTS} == {"advantages", "aggregation", "correction", "kl", "losses"}
    assert {"losses.ppo", "kl.k3+", "aggregation.token-mean", "correction.token_tis", "advantages.gae"} <= {*PARTS}
