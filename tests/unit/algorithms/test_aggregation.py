"""The aggregations against a plain-Python reference, whole and split into micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.algorithms import aggregation
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.inputs import LossInputs
from rlcli.errors import UnknownName

relaxed = settings(deadline=None)  # the first call of a torch operation is slow
MODES = ["group-mean-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"]
Group = list[list[float]]
responses = st.lists(st.floats(-9, 9), max_size=6)
minibatches = st.lists(st.lists(responses, min_size=1, max_size=4), min_size=1, max_size=4)


def reference(name: str, groups: list[Group], longest: int) -> float:
    flat = [response for group in groups for response in group]
    tokens = [value for response in flat for value in response]
    if name == "token-mean":
        return math.fsum(tokens) / len(tokens)
    if name == "group-mean-token-mean":
        means = []
        for group in groups:
            inside = [value for response in group for value in response]
            means.append(math.fsum(inside) / len(inside) if inside else 0.0)
        return math.fsum(means) / len(groups)
    total = 0.0
    for response in flat:
        value = math.fsum(response)
        if name == "seq-mean-token-mean":
            value = value / len(response) if response else 0.0
        if name == "seq-mean-token-sum-norm":
            value /= longest
        total += value
    return total / len(flat)


def inputs(rows: list[tuple[list[float], int]], denominators: Denominators) -> dict[str, Any]:
    """Of a micro-batch, each row a response and the tokens of its group."""
    lengths = [len(response) for response, _ in rows]
    return {
        "values": torch.tensor([v for response, _ in rows for v in response], dtype=torch.float64, requires_grad=True),
        "sequence": torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "group_tokens": torch.tensor([tokens for _, tokens in rows], dtype=torch.float64),
        "denominators": denominators,
    }


def aggregate(name: str, micro_batch: dict[str, Any]) -> Tensor:
    columns = {column: micro_batch[column] for column in ("sequence", "lengths", "group_tokens")}
    return aggregation.part(name)(micro_batch["values"], LossInputs(**columns), micro_batch["denominators"])


def rows_of(groups: list[Group]) -> list[tuple[list[float], int]]:
    return [(response, sum(map(len, group))) for group in groups for response in group]


def denominators_of(groups: list[Group], longest: int) -> Denominators:
    rows = rows_of(groups)
    return Denominators(sum(len(response) for response, _ in rows), len(rows), longest, groups=len(groups))


def run(name: str, rows: list[tuple[list[float], int]], denominators: Denominators) -> tuple[Tensor, Tensor]:
    """The scalar and its gradient."""
    columns = inputs(rows, denominators)
    scalar = aggregate(name, columns)
    assert scalar.shape == ()
    assert scalar.dtype == torch.float64
    (gradient,) = torch.autograd.grad(scalar, columns["values"])
    return scalar.detach(), gradient


def test_every_mode_is_offered_and_proven_here() -> None:
    assert aggregation.names() == MODES


@pytest.mark.parametrize("name", MODES)
@relaxed
@given(groups=minibatches, slack=st.integers(0, 9))
def test_the_scalar_equals_the_reference(name: str, groups: list[Group], slack: int) -> None:
    rows = rows_of(groups)
    assume(any(response for response, _ in rows))
    longest = max(len(response) for response, _ in rows) + slack
    got, _ = run(name, rows, denominators_of(groups, longest))
    assert got.item() == pytest.approx(reference(name, groups, longest), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", MODES)
@relaxed
@given(data=st.data(), groups=minibatches)
def test_any_split_into_micro_batches_adds_up_to_the_whole(name: str, data: st.DataObject, groups: list[Group]) -> None:
    """Also where a group is torn apart, and in any order."""
    rows = rows_of(groups)
    denominators = denominators_of(groups, 6)
    expected, gradient = run(name, rows, denominators)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    total = torch.zeros((), dtype=torch.float64)
    pieces: dict[int, list[float]] = {}
    for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = [rows[i] for i in order[start:end]]
        scalar, grown = run(name, part, denominators)
        total += scalar
        for i, piece in zip(order[start:end], grown.split([len(response) for response, _ in part]), strict=True):
            pieces[i] = piece.tolist()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert [value for i in sorted(pieces) for value in pieces[i]] == gradient.tolist()


@pytest.mark.parametrize("name", MODES)
def test_the_gradient_is_right(name: str) -> None:
    columns = inputs(rows_of([[[1.0, 3.0], [], [6.0]], [[5.0]]]), Denominators(4, 4, 8, groups=2))

    def scalar(values: Tensor) -> Tensor:
        return aggregate(name, columns | {"values": values})

    assert torch.autograd.gradcheck(scalar, columns["values"])


@pytest.mark.parametrize("name", MODES)
def test_a_minibatch_of_empty_responses_aggregates_to_zero(name: str) -> None:
    scalar, _ = run(name, [([], 0)] * 3, Denominators(0, 3, 8, groups=2))
    assert scalar.item() == 0.0


@pytest.mark.parametrize("name", MODES)
def test_the_result_has_the_dtype_of_the_values(name: str) -> None:
    columns = inputs([([1.0, 2.0], 2)], Denominators(2, 1, 8))
    assert aggregate(name, columns | {"values": torch.ones(2)}).dtype == torch.float32


def test_only_the_group_mean_weighs_prompts_alike() -> None:
    groups = [[[1.0] * 2, [1.0] * 2], [[10.0]]]
    rows, denominators = rows_of(groups), denominators_of(groups, 4)
    assert run("group-mean-token-mean", rows, denominators)[0].item() == 5.5
    assert run("token-mean", rows, denominators)[0].item() == 14 / 5
    assert run("seq-mean-token-mean", rows, denominators)[0].item() == 4.0


def test_an_unknown_mode_is_refused_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'token_mean'.*token-mean"):
        aggregation.get("token_mean")
