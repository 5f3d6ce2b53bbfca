"""Groups between generation and training: a buffer with named states and transitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcli.data.messages import PartialRollout, RolloutBatch
from rlcli.rollout.scheduler.groups import NO_SAMPLES, Group, GroupState, split_by_prompt

KeepRule = Callable[[Sequence[Group]], Sequence[Group]]
"""Complete groups → the subset that is worth training on, as the same objects."""


class GroupBuffer:
    """The groups that no step has taken, in the order in which the cursor yielded them.

    | from     | to       | by        | when                                                                          |
    |----------|----------|-----------|-------------------------------------------------------------------------------|
    | (cursor) | QUEUED   | `fill`    | the scheduler has capacity for more groups                                    |
    | QUEUED   | RUNNING  | `start`   | it is sent to an engine                                                       |
    | RUNNING  | QUEUED   | `requeue` | its round ends early: verified samples and partial responses stay             |
    | RUNNING  | COMPLETE | `finish`  | its last sample and its baseline are verified, and dynamic sampling keeps it  |
    | RUNNING  | DROPPED  | `finish`  | they are verified, and dynamic sampling rejects it                            |
    | COMPLETE | DROPPED  | `expire`  | it was drawn for a step longer ago than `async.staleness` allows              |
    | COMPLETE | TAKEN    | `take`    | a step trains on it                                                           |
    | any      | DROPPED  | `clear`   | a roll-back discards what was generated for later steps                       |

    The trainer waits for COMPLETE groups, the engines for QUEUED ones; nothing else waits. A step takes the oldest
    groups first, so that slow groups do not starve. A checkpoint has QUEUED, RUNNING and COMPLETE groups; RUNNING ones
    are QUEUED in the run that resumes from it.

    Two samples a group; the first group's rewards are equal, so that the rule rejects it:

    >>> from rlcli.data.columns import SampleTable
    >>> from rlcli.types import Outcome, Sample, Verdict
    >>> def report(rewards):
    ...     numbered = [(group, i, score) for group, scores in rewards.items() for i, score in enumerate(scores)]
    ...     verdicts = [(group, i, Verdict(score, Outcome.OK)) for group, i, score in numbered]
    ...     samples = SampleTable.of(Sample(g, i, 0, 0, 4, 9, "stop", v, 1) for g, i, v in verdicts)
    ...     return RolloutBatch(samples, ["shard"])
    >>> unequal = lambda groups: [group for group in groups if group.samples.score.max() > group.samples.score.min()]
    >>> buffer = GroupBuffer(samples_per_prompt=2, greedy=False, keep=unequal)
    >>> buffer.fill([Group(step=1, prompt_index=7), Group(step=1, prompt_index=8)])
    >>> for number, group in enumerate(buffer.queued):
    ...     buffer.start(group, number)
    >>> [group.state.value for group in buffer.finish(report({0: [1.0, 1.0], 1: [0.0, 1.0]}))]
    ['dropped', 'complete']
    >>> [group.prompt_index for group in buffer.take(buffer.complete)], buffer.groups
    ([8], [])
    """

    def __init__(self, samples_per_prompt: int, greedy: bool, keep: KeepRule) -> None:
        self.samples_per_prompt = samples_per_prompt
        """G, samples of a complete group."""
        self.greedy = greedy
        """Whether a complete group has a verdict on a greedy response, too."""
        self.keep = keep
        """Dynamic sampling."""
        self.groups: list[Group] = []
        """QUEUED, RUNNING and COMPLETE groups."""

    @property
    def queued(self) -> list[Group]:
        """Groups that wait for an engine, oldest first."""
        return self._in(GroupState.QUEUED)

    @property
    def running(self) -> list[Group]:
        """Groups that engines generate, oldest first."""
        return self._in(GroupState.RUNNING)

    @property
    def complete(self) -> list[Group]:
        """Groups that wait for a step, oldest first."""
        return self._in(GroupState.COMPLETE)

    def fill(self, groups: Sequence[Group]) -> None:
        """Queue new groups."""
        self.groups += groups

    def start(self, group: Group, number: int) -> None:
        """Mark a queued group as sent to an engine, which identifies it by `number`."""
        assert group.state is GroupState.QUEUED, f"the group is {group.state.value}"
        group.state, group.number = GroupState.RUNNING, number

    def finish(self, report: RolloutBatch) -> list[Group]:
        """Add verified samples and partial responses to their groups. Returns the groups that are complete now, in the
        order of their numbers: each is COMPLETE or, if dynamic sampling rejects it, DROPPED."""
        running = {group.number: group for group in self.running}
        samples = {int(table.prompt[0]): table for table in split_by_prompt(report.samples)}
        partial: dict[int, list[PartialRollout]] = {}
        for rollout in report.partial:
            partial.setdefault(rollout.prompt, []).append(rollout)
        finished = []
        for number in sorted(samples.keys() | partial.keys() | report.baselines.keys()):
            group = running[number]
            group.add(
                samples.get(number, NO_SAMPLES), partial.get(number, ()), report.shards, report.baselines.get(number)
            )
            if not self.missing(group) and not (self.greedy and group.baseline is None):
                group.state = GroupState.COMPLETE
                finished.append(group)
        kept_ids = set(map(id, self.keep(finished)))
        self._drop([group for group in finished if id(group) not in kept_ids])
        return finished

    def missing(self, group: Group) -> int:
        """Number of the group's samples that are not verified yet."""
        return self.samples_per_prompt - len(group.samples)

    def requeue(self) -> None:
        """Return running groups to the queue at the end of a round."""
        for group in self.running:
            group.state = GroupState.QUEUED

    def expire(self, oldest_step: int) -> int:
        """Drop complete groups that were drawn for a step before `oldest_step`; returns how many."""
        expired = [group for group in self.complete if group.step < oldest_step]
        self._drop(expired)
        return len(expired)

    def take(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Remove complete groups, which a step trains on, and return them."""
        assert all(group.is_complete for group in groups), "a step takes complete groups"
        for group in groups:
            group.state = GroupState.TAKEN
        self._remove_ended()
        return groups

    def clear(self) -> None:
        """Drop all groups."""
        self._drop(self.groups)

    def restore(self, groups: Sequence[Group]) -> None:
        """Replace all groups by those of a checkpoint."""
        self.clear()
        self.groups = list(groups)

    def _drop(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.state = GroupState.DROPPED
        self._remove_ended()

    def _remove_ended(self) -> None:
        ended = (GroupState.TAKEN, GroupState.DROPPED)
        self.groups = [group for group in self.groups if group.state not in ended]

    def _in(self, state: GroupState) -> list[Group]:
        return [group for group in self.groups if group.state is state]
