"""The packer: nothing lost, nothing over budget, ranks in lockstep and evenly loaded."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.data.packer import ATTENTION, MinibatchPlan, Plan, plan_batches
from rlcli.model.packed import pack

relaxed = settings(deadline=None)


@dataclass(frozen=True)
class Case:
    prompt_tokens: list[int]
    response_tokens: list[int]
    groups: list[int]
    minibatches: int
    ranks: int
    budget: int
    active: list[bool] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_tokens, self.response_tokens, strict=True)]

    def is_active(self, sample: int) -> bool:
        return self.active is None or self.active[sample]

    def plan(self) -> Plan:
        return plan_batches(
            self.prompt_tokens,
            self.response_tokens,
            self.groups,
            minibatches=self.minibatches,
            ranks=self.ranks,
            tokens_per_microbatch=self.budget,
            max_response_tokens=777,
            active=self.active,
        )

    def members(self, minibatch: int) -> list[int]:
        """The samples of a minibatch, by the rule: equal shares of the groups, in order of appearance."""
        order = sorted(set(self.groups), key=self.groups.index)
        share = len(order) // self.minibatches
        mine = order[minibatch * share : (minibatch + 1) * share]
        return [sample for sample, group in enumerate(self.groups) if group in mine]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    minibatches, per_minibatch = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    labels = draw(
        st.lists(
            st.integers(0, 99), unique=True, min_size=minibatches * per_minibatch, max_size=minibatches * per_minibatch
        )
    )
    groups = draw(st.permutations([label for label in labels for _ in range(draw(st.integers(1, 5)))]))
    n = len(groups)
    prompts = draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    responses = draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    longest = max(p + r for p, r in zip(prompts, responses, strict=True))
    return Case(
        prompt_tokens=prompts,
        response_tokens=responses,
        groups=groups,
        minibatches=minibatches,
        ranks=draw(st.integers(1, 5)),
        budget=longest + draw(st.integers(0, 100)),
        active=draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n)),
    )


def forwarded(minibatch: MinibatchPlan) -> list[int]:
    return [sample for rank in minibatch.ranks for bin in rank for sample in bin]


def step_of(n: int, ranks: int, *, minibatches: int = 1, budget: int = 16384, seed: int = 0) -> Case:
    """A large step: groups of 8, log-normal responses of up to 8192 tokens as reasoning models write them."""
    draw = random.Random(seed)
    responses = [min(8192, int(draw.lognormvariate(6.5, 1.0)) + 1) for _ in range(n)]
    prompts = [draw.randint(20, 400) for _ in range(n)]
    return Case(prompts, responses, [i // 8 for i in range(n)], minibatches, ranks, budget)


@relaxed
@given(case=cases())
def test_every_active_sample_is_forwarded_once_in_its_groups_minibatch(case: Case) -> None:
    plan = case.plan()
    assert len(plan.minibatches) == case.minibatches
    for i, minibatch in enumerate(plan.minibatches):
        assert sorted(forwarded(minibatch)) == [s for s in case.members(i) if case.is_active(s)]
    assert plan.skipped == sum(not case.is_active(s) for s in range(len(case.groups)))


@relaxed
@given(case=cases())
def test_micro_batches_keep_the_budget_and_are_equally_many_on_every_rank(case: Case) -> None:
    plan = case.plan()
    for minibatch in plan.minibatches:
        assert len(minibatch.ranks) == len(minibatch.rank_tokens) == case.ranks
        assert {len(rank) for rank in minibatch.ranks} == {minibatch.microbatches}
        for rank, tokens in zip(minibatch.ranks, minibatch.rank_tokens, strict=True):
            loads = [sum(case.sizes[sample] for sample in bin) for bin in rank]
            assert max(loads, default=0) <= case.budget
            assert sum(loads) == tokens
    assert plan.microbatches == sum(minibatch.microbatches for minibatch in plan.minibatches)


@relaxed
@given(case=cases())
def test_denominators_count_inactive_samples_too(case: Case) -> None:
    for i, minibatch in enumerate(case.plan().minibatches):
        members = case.members(i)
        assert minibatch.tokens == sum(case.response_tokens[s] for s in members)
        assert minibatch.sequences == len(members)
        assert minibatch.max_length == 777


@relaxed
@given(case=cases())
def test_a_plan_depends_on_its_input_alone(case: Case) -> None:
    assert case.plan() == replace(case).plan()


@relaxed
@given(case=cases())
def test_no_micro_batch_is_wasted_and_loads_differ_by_less_than_a_sample(case: Case) -> None:
    for i, minibatch in enumerate(case.plan().minibatches):
        sizes = [case.sizes[s] for s in case.members(i) if case.is_active(s)]
        fewest = math.ceil(sum(sizes) / (case.budget * case.ranks))
        # Two neighbouring bins that fit into one cannot both stand in a best-fit packing: fewer than twice the fewest.
        assert fewest <= minibatch.microbatches <= 2 * fewest
        assert max(minibatch.rank_tokens) - min(minibatch.rank_tokens) <= case.budget


@pytest.mark.parametrize(("n", "ranks", "minibatches"), [(2048, 8, 1), (4096, 8, 4), (16384, 64, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_large_steps_are_balanced_over_ranks_and_within_each_micro_batch(
    n: int, ranks: int, minibatches: int, seed: int
) -> None:
    case = step_of(n, ranks, minibatches=minibatches, seed=seed)
    plan = case.plan()
    assert 1.0 <= plan.imbalance < 1.03  # what the others wait for the slowest rank of each micro-batch
    for minibatch in plan.minibatches:
        fewest = math.ceil(sum(minibatch.rank_tokens) / (case.budget * ranks))
        assert minibatch.microbatches <= fewest + 1


def test_no_rank_waits_long_for_one_with_longer_samples_and_as_many_tokens() -> None:
    draw = random.Random(0)
    lengths = [min(32768, int(draw.lognormvariate(8.5, 0.9)) + 1) for _ in range(1024)]
    case = Case([0] * 1024, lengths, list(range(1024)), minibatches=1, ranks=8, budget=32768)
    plan = case.plan()
    assert plan.imbalance < 1.05
    work = sum(length + length**2 / ATTENTION for length in lengths)
    assert sum(minibatch.work for minibatch in plan.minibatches) == pytest.approx(work * ATTENTION)


def test_samples_that_spreading_cannot_fit_are_packed_tightly_instead() -> None:
    # 40 + 40, 40 + 40, 30 + 30 + 30 and 30 + 30 + 20 fit into two micro-batches of two ranks. Spreading, which gives
    # each bin a 40 and a 30 first, would need a third.
    case = Case([0] * 10, [40, 40, 30, 30, 30, 40, 40, 30, 30, 20], [0] * 10, minibatches=1, ranks=2, budget=90)
    assert case.plan().microbatches == 2


def test_samples_are_packed_into_the_fewest_micro_batches() -> None:
    plan = plan_batches(
        [1] * 8, [3, 5, 3, 2, 4, 8, 4, 2], [0] * 8,
        minibatches=1, ranks=1, tokens_per_microbatch=13, max_response_tokens=10,
    )  # fmt: skip
    assert plan.minibatches[0].ranks == (((2, 5), (0, 1, 7), (3, 4, 6)),)  # 39 tokens, in three full micro-batches


def test_equal_samples_fill_the_budget_exactly() -> None:
    case = Case([10] * 12, [20] * 12, list(range(12)), minibatches=1, ranks=2, budget=90)
    (minibatch,) = case.plan().minibatches
    assert [[len(bin) for bin in rank] for rank in minibatch.ranks] == [[3, 3], [3, 3]]


def test_the_micro_batch_with_the_most_tokens_comes_first() -> None:
    case = step_of(512, 4)
    (minibatch,) = case.plan().minibatches
    rows = [[sum(case.sizes[s] for s in bin) for bin in row] for row in zip(*minibatch.ranks, strict=True)]
    assert all(max(current) >= max(following) for current, following in pairwise(rows))


def test_a_rank_with_the_larger_micro_batch_is_given_the_smaller_one_next() -> None:
    case = Case([0] * 4, [50, 40, 30, 20], [0] * 4, minibatches=1, ranks=2, budget=50)
    plan = case.plan()
    assert plan.minibatches[0].ranks == (((0,), (3,)), ((1,), (2,)))
    assert plan.minibatches[0].rank_tokens == (70, 70)


def test_imbalance_is_the_slowest_ranks_work_over_the_average() -> None:
    assert Case([0] * 2, [30, 10], [0] * 2, 1, ranks=2, budget=30).plan().imbalance == pytest.approx(1.5, rel=1e-3)
    # In the first micro-batch one rank waits for the other's 50 tokens, in the second for 30.
    of_two = Case([0] * 4, [50, 40, 30, 20], [0] * 4, 1, ranks=2, budget=50).plan()
    assert of_two.imbalance == pytest.approx(80 / 70, rel=1e-3)


def test_equal_token_counts_are_parted_by_the_cost_of_attention() -> None:
    # By tokens the sample of 1 may go beside 8 or beside 4 + 4; by squares, beside the pair.
    case = Case([0] * 4, [8, 4, 4, 1], [0] * 4, minibatches=1, ranks=2, budget=20)
    (minibatch,) = case.plan().minibatches
    assert sorted(sorted(rank[0]) for rank in minibatch.ranks) == [[0], [1, 2, 3]]


def test_a_minibatch_without_active_samples_keeps_its_denominators() -> None:
    case = Case(
        [5] * 4, [5, 6, 7, 8], [0, 0, 1, 1], minibatches=2, ranks=3, budget=40, active=[False, False, True, True]
    )
    idle, busy = case.plan().minibatches
    assert idle.ranks == ((), (), ())
    assert (idle.microbatches, idle.tokens, idle.sequences) == (0, 11, 2)
    assert busy.microbatches == 1
    assert replace(case, active=[False] * 4).plan().imbalance == 1.0


def test_fewer_samples_than_ranks_leave_some_ranks_an_empty_micro_batch() -> None:
    (minibatch,) = Case([1], [3], [0], minibatches=1, ranks=3, budget=9).plan().minibatches
    assert sorted(minibatch.ranks) == [((),), ((),), ((0,),)]


def test_a_sample_over_the_budget_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="12 > 11 tokens"):
        Case([2], [10], [0], minibatches=1, ranks=1, budget=11).plan()


@pytest.mark.parametrize(("groups", "shares"), [(3, [2, 1]), (4, [2, 2]), (1, [1]), (0, [])])
def test_groups_that_do_not_divide_are_shared_out_as_equally_as_can_be(groups: int, shares: list[int]) -> None:
    plan = Case([1] * groups, [1] * groups, list(range(groups)), minibatches=2, ranks=1, budget=11).plan()
    assert [minibatch.groups for minibatch in plan.minibatches] == shares
    assert [sample for minibatch in plan.minibatches for sample in minibatch.samples] == list(range(groups))


@relaxed
@given(cases(), st.randoms(use_true_random=False))
def test_pairs_share_a_micro_batch_and_move_together(case: Case, draw: random.Random) -> None:
    """Every sample gets a partner of its own minibatch: a copy of itself, so that the groups stay as they are."""
    n = len(case.groups)
    doubled = replace(
        case,
        prompt_tokens=case.prompt_tokens * 2,
        response_tokens=case.response_tokens * 2,
        groups=case.groups * 2,
        budget=2 * case.budget,
        active=[draw.random() < 0.5 for _ in range(2 * n)],
    )
    plan = plan_batches(
        doubled.prompt_tokens,
        doubled.response_tokens,
        doubled.groups,
        minibatches=doubled.minibatches,
        ranks=doubled.ranks,
        tokens_per_microbatch=doubled.budget,
        max_response_tokens=777,
        active=doubled.active,
        pairs=[*range(n), *range(n)],
    )
    seen = set()
    for minibatch in plan.minibatches:
        for rank, tokens in zip(minibatch.ranks, minibatch.rank_tokens, strict=True):
            assert tokens == sum(doubled.sizes[sample] for bin in rank for sample in bin)
            for bin in rank:
                assert sum(doubled.sizes[sample] for sample in bin) <= doubled.budget
                assert {sample % n for sample in bin if sample < n} == {sample % n for sample in bin if sample >= n}
                seen |= set(bin)
    assert seen == {s for s in range(2 * n) if doubled.is_active(s) or doubled.is_active((s + n) % (2 * n))}


def groups_of(prompt: int, responses: list[list[int]], *, ranks: int, budget: int, **changes: Any) -> Plan:
    """A step of groups whose samples have their prompt, of `prompt` tokens, in common."""
    groups = [group for group, lengths in enumerate(responses) for _ in lengths]
    lengths = [length for group in responses for length in group]
    return plan_batches(
        [prompt] * len(groups),
        lengths,
        groups,
        minibatches=1,
        ranks=ranks,
        tokens_per_microbatch=budget,
        max_response_tokens=777,
        prompts=groups,
        **changes,
    )


def test_samples_of_a_prompt_share_a_micro_batch_which_counts_it_once() -> None:
    (minibatch,) = groups_of(50, [[10, 30, 20, 40]] * 4, ranks=2, budget=300).minibatches
    assert [{sample // 4 for sample in rank[0]} for rank in minibatch.ranks] == [{0, 2}, {1, 3}]
    assert minibatch.rank_tokens == (300, 300)


def test_a_group_beyond_the_budget_is_cut_into_as_few_parts_as_can_be() -> None:
    (minibatch,) = groups_of(50, [[40] * 8], ranks=1, budget=210).minibatches
    assert [len(bin) for bin in minibatch.ranks[0]] == [4, 4]
    assert minibatch.rank_tokens == (420,)


def test_balance_is_preferred_where_it_saves_more_than_sharing() -> None:
    # One group on two ranks: together it would leave one of them idle.
    (minibatch,) = groups_of(10, [[100, 100, 100, 100]], ranks=2, budget=1000).minibatches
    assert [len(rank[0]) for rank in minibatch.ranks] == [2, 2]
    # By chance two of them lie on each rank, which has the prompt to itself once.
    assert minibatch.rank_tokens == (210, 210)


def test_only_active_samples_of_a_group_move() -> None:
    (minibatch,) = groups_of(
        50, [[10, 30, 20, 40]] * 2, ranks=1, budget=300, active=[True, False, True, False] + [False] * 4
    ).minibatches
    assert minibatch.ranks == (((0, 2),),)
    assert minibatch.rank_tokens == (80,)


@pytest.mark.parametrize("pairs", [None, [0, 0, 1, 1]])
def test_a_long_response_beside_short_ones_keeps_the_shared_prompt(pairs: list[int] | None) -> None:
    # Each unit that goes into a micro-batch was counted with its prompt once: together they may not be more.
    long = 5000
    (minibatch,) = groups_of(100, [[5, 5, 5, long]], ranks=1, budget=4 * 100 + 15 + long - 1, pairs=pairs).minibatches
    rows = [(np.arange(100 + tokens), 100) for tokens in (5, 5, 5, long)]
    for bin, tokens in zip(minibatch.ranks[0], minibatch.rank_tokens, strict=True):
        assert pack([rows[sample] for sample in bin], torch.device("cpu")).tokens == tokens == 2 * 100 + 15 + long


def test_as_many_tokens_are_forwarded_as_were_planned() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        groups = sorted(random.integers(0, 3, 9).tolist())
        prompts = random.integers(1, 60, 3)[groups].tolist()
        responses = random.choice([0, 1, 30, 300, 900], 9).tolist()
        (minibatch,) = plan_batches(
            prompts,
            responses,
            groups,
            minibatches=1,
            ranks=2,
            tokens_per_microbatch=1000,
            max_response_tokens=900,
            prompts=groups,
        ).minibatches
        rows = [
            (np.concatenate([np.full(prompt, group), np.arange(response)]), prompt)
            for group, prompt, response in zip(groups, prompts, responses, strict=True)
        ]
        for rank, tokens in zip(minibatch.ranks, minibatch.rank_tokens, strict=True):
            packs = [pack([rows[sample] for sample in bin], torch.device("cpu")) for bin in rank if bin]
            assert sum(micro_batch.tokens for micro_batch in packs) == tokens
            assert all(micro_batch.tokens <= 1000 for micro_batch in packs)


@relaxed
@given(case=cases())
def test_sharing_prompts_keeps_the_budget_and_loses_no_sample(case: Case) -> None:
    prompts = dict(zip(case.groups, case.prompt_tokens, strict=True))
    case = replace(case, prompt_tokens=[prompts[group] for group in case.groups])
    budget = case.budget + max(case.sizes)
    arguments: dict[str, Any] = {"minibatches": case.minibatches, "ranks": case.ranks, "active": case.active}
    arguments |= {"tokens_per_microbatch": budget, "max_response_tokens": 777}
    plan = plan_batches(case.prompt_tokens, case.response_tokens, case.groups, **arguments, prompts=case.groups)
    for i, minibatch in enumerate(plan.minibatches):
        assert sorted(forwarded(minibatch)) == [s for s in case.members(i) if case.is_active(s)]
        for rank in minibatch.ranks:
            for bin in rank:
                response = sum(case.response_tokens[s] for s in bin)
                assert sum(prompts[group] for group in {case.groups[s] for s in bin}) + response <= budget
