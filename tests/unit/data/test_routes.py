"""Routes travel with the tokens that they belong to."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rlcli.data.expert_routes import check_routes, continued, padded, route_type
from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.trajectories import Trajectory
from rlcli.errors import RunFailed
from rlcli.model.packed import pack
from rlcli.rollout.in_flight import RequestOutput, VersionedTokens

IDS = np.arange(30, dtype=np.int32)
UNKNOWN = 255


def routes(*experts: int) -> np.ndarray:
    """One layer of one expert."""
    return np.array(experts, np.uint8).reshape(-1, 1, 1)


def experts(values: np.ndarray | None) -> list[int]:
    assert values is not None
    return values.ravel().tolist()


def drawn(tokens: int, of_all: np.ndarray | None, version: int = 1) -> RequestOutput:
    return RequestOutput(0, [VersionedTokens(IDS[:tokens], np.zeros(tokens, np.float32), version)], "stop", of_all)


@pytest.mark.parametrize(
    ("shape", "expert", "message"),
    [
        ((3, 1, 2), 5, "routes [tokens, 1, 2], up to expert 5: the model has 2 layers of 6 experts, and 2 of them"),
        ((3, 3, 2), 5, "routes [tokens, 3, 2]"),
        ((3, 2, 1), 5, "routes [tokens, 2, 1]"),
        ((3, 4), 5, "routes [tokens, 4]"),
        ((3, 2, 2), 6, "up to expert 6"),
    ],
)
def test_routes_of_another_model_are_refused(shape: tuple[int, ...], expert: int, message: str) -> None:
    with pytest.raises(RunFailed) as refused:
        check_routes(np.full(shape, expert, np.uint8), 2, 2, 6)
    assert message in refused.value.message
    for right in (
        np.full((3, 2, 2), 5, np.uint8),
        np.full((3, 2, 2), UNKNOWN, np.uint8),
        np.zeros((0, 2, 2), np.uint8),
    ):
        check_routes(right, 2, 2, 6)


def test_a_turn_adds_the_routes_of_what_it_saw_and_drew() -> None:
    trajectory = drawn(2, routes(1, 2, 3, 4)).appended_to(Trajectory.of_prompt(IDS[:3]))
    assert experts(trajectory.routes) == [1, 2, 3, 4]  # the last token was not computed
    trajectory = trajectory.extended("environment", IDS[:2])
    assert experts(trajectory.routes) == [1, 2, 3, 4]
    trajectory = drawn(2, routes(9, 9, 9, 9, 5, 6, 7, 8)).appended_to(trajectory)
    assert experts(trajectory.routes) == [1, 2, 3, 4, 5, 6, 7, 8], "a token keeps the routes it was drawn with"
    assert experts(trajectory.until_turn(1).routes) == [1, 2, 3, 4, 5]
    assert experts(trajectory.without_last(2).routes) == [1, 2, 3, 4, 5, 6, 7]


def test_branches_keep_their_own() -> None:
    routed = drawn(1, routes(1, 2)).appended_to(Trajectory.of_prompt(IDS[:2]))
    none = Trajectory.single(IDS[:1], IDS[:2], np.zeros(2, np.float32))
    joined = Trajectory.joined([routed, none])
    assert experts(joined.routes) == [1, 2, *[UNKNOWN] * 4]
    assert [experts(branch.routes) for branch in joined.branches] == [[1, 2, UNKNOWN], [UNKNOWN] * 3]
    extended = drawn(1, routes(7, 8)).appended_to(Trajectory.joined([routed, Trajectory.of_prompt(IDS[:2])]))
    assert experts(extended.routes) == [1, 2, UNKNOWN, 7, 8]
    assert Trajectory.joined([none, none]).routes is None


def test_a_shard_gives_them_back() -> None:
    rows = [drawn(2, routes(1, 2, 3)).appended_to(Trajectory.of_prompt(IDS[:2])), Trajectory.of_prompt(IDS[:4])]
    rows.append(drawn(1, routes(4, 5)).appended_to(Trajectory.of_prompt(IDS[:2])))
    builder = ShardBuilder()
    for row in rows:
        builder.add(row)
    shard = builder.build()
    saved = io.BytesIO()
    np.savez(saved, **{name: value for name, value in vars(shard).items() if value is not None})
    saved.seek(0)
    for stored in (shard, SampleShard.of_arrays(dict(np.load(saved)))):
        assert [experts(stored.row(row).routes) for row in range(3)] == [[1, 2, 3], [], [4, 5]]
    empty = ShardBuilder()
    empty.add(rows[1])
    assert empty.build().routes is None
    assert empty.build().row(0).routes is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_pack_has_those_of_its_tokens(shared: bool) -> None:
    prompt = 12
    first = np.concatenate([IDS[:prompt], [20, 21]])
    second = np.concatenate([IDS[:prompt] if shared else IDS[1 : prompt + 1], [22]])
    known: Sequence[np.ndarray | None] = [routes(*range(1, prompt + 2)), routes(*range(101, 101 + prompt))]
    batch = pack([(first, prompt), (second, prompt)], torch.device("cpu"), routes=known)
    assert batch.routes is not None
    mine = [*range(1, prompt + 2), -1]
    theirs = [-1] if shared else [*range(101, 101 + prompt), -1]
    assert batch.routes.ravel().tolist() == [*mine, *theirs], "a shared prompt goes through the first one's experts"
    assert batch.routes.shape == (batch.tokens, 1, 1)
    assert pack([(first, prompt)], torch.device("cpu"), routes=[None]).routes is None


def test_many_experts_need_two_bytes() -> None:
    assert route_type(256) is np.uint16
    wide = np.array([[[300]]], np.uint16)
    assert padded(wide, 2).ravel().tolist() == [300, 65535]
    assert continued(None, None) is None
