"""The states of groups: who moves a group on, what a move keeps, and which moves are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from rlcli.data.columns import SampleTable
from rlcli.data.messages import PartialRollout, RolloutBatch, ScoredGroup
from rlcli.rollout.scheduler.group_buffer import GroupBuffer
from rlcli.rollout.scheduler.groups import Group, GroupState
from rlcli.rollout.scheduler.round_totals import StepTotals
from rlcli.types import Outcome, Sample, Verdict

QUEUED, RUNNING, COMPLETE = GroupState.QUEUED, GroupState.RUNNING, GroupState.COMPLETE
TAKEN, DROPPED = GroupState.TAKEN, GroupState.DROPPED
GREEDY = Verdict(1.0, Outcome.OK)


def report(
    samples: Mapping[int, Sequence[int]],
    partial: Mapping[int, Sequence[int]] | None = None,
    baselines: Mapping[int, Verdict] | None = None,
) -> RolloutBatch:
    """Of a round with one shard: number of a group → its finished samples, and its aborted ones."""
    pairs = [(number, sample) for number, finished in samples.items() for sample in finished]
    table = SampleTable.of(
        Sample(number, sample, 0, row, 4, 9, "stop", Verdict(float(sample), Outcome.OK), 1)
        for row, (number, sample) in enumerate(pairs)
    )
    aborted = [PartialRollout(number, sample, 0, 50, 3, 1) for number, ids in (partial or {}).items() for sample in ids]
    return RolloutBatch(table, ["shard"], baselines=baselines or {}, partial=aborted)


def running(count: int, greedy: bool = False, keep: Sequence[int] | None = None) -> tuple[GroupBuffer, list[Group]]:
    """Groups of two samples each. keep: numbers of those that dynamic sampling keeps; None: all."""
    rule = (lambda groups: groups) if keep is None else (lambda groups: [g for g in groups if g.number in keep])
    buffer = GroupBuffer(2, greedy, rule)
    groups = [Group(step=number + 1, prompt_index=number) for number in range(count)]
    buffer.fill(groups)
    for number, group in enumerate(groups):
        buffer.start(group, number)
    return buffer, groups


def states(groups: Sequence[Group]) -> list[GroupState]:
    return [group.state for group in groups]


def test_a_group_is_complete_with_its_last_sample_and_baseline() -> None:
    buffer, groups = running(3, greedy=True)
    assert buffer.finish(report({0: [0, 1], 1: [1]}, baselines={1: GREEDY})) == []
    assert states(groups) == [RUNNING] * 3
    assert [buffer.missing(group) for group in groups] == [0, 1, 2]
    assert buffer.finish(report({1: [0]}, baselines={0: GREEDY})) == groups[:2]
    assert states(groups) == [COMPLETE, COMPLETE, RUNNING]
    assert groups[1].samples.sample.tolist() == [0, 1]
    assert groups[1].baseline == GREEDY


def test_the_rule_sees_the_groups_that_are_complete_now() -> None:
    buffer, groups = running(3, keep=[1])
    assert buffer.finish(report({0: [0, 1], 1: [0, 1], 2: [0]})) == groups[:2]
    assert states(groups) == [DROPPED, COMPLETE, RUNNING]
    assert buffer.groups == groups[1:]


def test_a_round_that_ends_early_keeps_samples_and_partial_responses() -> None:
    buffer, groups = running(2)
    buffer.finish(report({0: [1]}, partial={0: [0], 1: [1]}))
    buffer.requeue()
    assert states(groups) == [QUEUED, QUEUED]
    assert [(group.samples.sample.tolist(), group.aborted) for group in groups] == [([1], {0}), ([], {1})]
    for number, group in enumerate(buffer.queued):
        buffer.start(group, 7 + number)
    assert buffer.finish(report({7: [0]})) == groups[:1]
    assert (groups[0].samples.sample.tolist(), groups[0].aborted) == ([0, 1], set())
    assert groups[0].shards == ["shard", "shard"]


def test_only_complete_groups_expire_by_their_age() -> None:
    buffer, groups = running(3)
    buffer.finish(report({0: [0, 1], 2: [0, 1]}))
    assert buffer.expire(oldest_step=3) == 1
    assert states(groups) == [DROPPED, RUNNING, COMPLETE]
    assert buffer.expire(oldest_step=3) == 0


def test_a_step_takes_complete_groups_and_the_others_keep_their_order() -> None:
    buffer, groups = running(4)
    buffer.finish(report({3: [0, 1], 0: [0, 1], 2: [0, 1]}))
    assert buffer.take(buffer.complete[:2]) == [groups[0], groups[2]]
    assert states(groups) == [TAKEN, RUNNING, TAKEN, COMPLETE]
    assert buffer.groups == [groups[1], groups[3]]


def test_moves_out_of_order_are_refused() -> None:
    buffer, groups = running(1)
    with pytest.raises(AssertionError, match="the group is running"):
        buffer.start(groups[0], 1)
    with pytest.raises(AssertionError, match="a step takes complete groups"):
        buffer.take(groups)


def test_a_roll_back_drops_groups_in_every_state() -> None:
    buffer, groups = running(3)
    buffer.finish(report({0: [0, 1]}))
    buffer.requeue()
    buffer.start(groups[1], 5)
    buffer.clear()
    assert states(groups) == [DROPPED] * 3
    assert buffer.groups == []


def test_a_checkpoint_is_no_view_of_totals_that_go_on() -> None:
    totals = StepTotals(scored_groups=[ScoredGroup("row:1", 4, 3, 96, True)])
    state = totals.state()  # written to disk while the next step adds to the totals
    serialized = json.dumps(state)
    totals.scored_groups += [ScoredGroup("row:2", 4, 2, 89, True)]
    totals.draws[7] += 1
    assert json.dumps(state) == serialized
