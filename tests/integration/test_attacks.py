"""Hostile programs against the code verifier, under both backends; see `tests/attacks`.

All of it runs by default. `-m "not exhaustive"`, which `scripts/test` adds, takes every second program, alternates
between the backends, and leaves out what asks the same program in another way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rlcli_sandbox import open_sandbox

from rlcli.errors import SetupError
from tests.attacks.catalogue import Attack, collect, programs
from tests.attacks.controls import CONTROLS, Control
from tests.attacks.harness import Campaign, Report, World

pytestmark = pytest.mark.long

BACKENDS = ("bwrap", "landlock")
ATTACKS = collect()
Key = tuple[str, bool]


def cases(pool: bool) -> Iterator[Any]:
    attacks = [attack for attack in ATTACKS if attack.pool or not pool]
    for turn, backend in enumerate(BACKENDS):
        for number, attack in enumerate(attacks):
            repeats = attack.repeated or number % 4 != 2 * turn
            yield pytest.param(
                backend, attack, id=f"{backend}-{attack.id}", marks=[pytest.mark.exhaustive] if repeats else []
            )


def held(backend: str) -> Campaign:
    try:
        open_sandbox(backend)
    except SetupError as error:
        if backend == "bwrap" and os.environ.get("RLCLI_REQUIRE_BWRAP") == "1":
            pytest.fail(f"bwrap is required here: {error.message}")
        pytest.skip(f"no {backend} here: {error.message}")
    return Campaign(backend)


class Front:
    """A backend's campaign, with all the attacks that were asked for under way, and what became of them."""

    def __init__(self, backend: str, items: list[pytest.Item]) -> None:
        self.campaign = held(backend)
        self.attacks: dict[Key, tuple[Attack, Future[Report]]] = {}
        for item in items:
            callspec = getattr(item, "callspec", None)
            if callspec and callspec.params.get("backend") == backend and "attack" in callspec.params:
                attack, pool = callspec.params["attack"], "pool" in item.name.partition("[")[0]
                self.attacks[attack.id, pool] = attack, self.campaign.submit(self.campaign.run, attack, pool)

    def report(self, attack: Attack, pool: bool = False) -> Report:
        return self.attacks[attack.id, pool][1].result()


@pytest.fixture(scope="module")
def fronts(request: pytest.FixtureRequest) -> Iterator[dict[str, Front]]:
    by_backend: dict[str, Front] = {}
    yield by_backend
    for front in by_backend.values():
        front.campaign.close()


@pytest.fixture
def front(backend: str, fronts: dict[str, Front], request: pytest.FixtureRequest) -> Front:
    if backend not in fronts:
        fronts[backend] = Front(backend, request.session.items)
    return fronts[backend]


def judge(attack: Attack, report: Report) -> None:
    assert not report.forged, f"passed: {report}"
    assert report.outcome in attack.allowed, report
    assert not report.problems, report


def test_there_are_enough_attacks_and_controls() -> None:
    assert len(set(programs(ATTACKS))) >= 100
    assert len(CONTROLS) >= 25


def test_a_connection_that_ended_is_no_listener() -> None:
    """Another process may have had the port; the kernel keeps such connections for a minute."""
    world = World()
    try:
        with socket.create_server(("127.0.0.1", world.listen)) as server:
            assert len(world.listeners()) == 1
            with socket.create_connection(server.getsockname()) as client:
                server.accept()[0].close()
                assert client.recv(1) == b""
        rows = Path("/proc/net/tcp").read_text()
        assert f":{world.listen:04X} " in rows, "the connection lingers"
        assert world.listeners() == []
    finally:
        world.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name.replace(" ", "-"))
def test_a_right_program_passes(backend: str, front: Front, control: Control) -> None:
    if control.needs and find_spec(control.needs) is None:
        pytest.skip(f"{control.needs} is not installed")
    reply = front.campaign.verify(control.completion, control.ground_truth)
    assert reply.get("outcome") == "ok", reply


@pytest.mark.parametrize(("backend", "attack"), cases(pool=False))
def test_an_attack_fails_and_does_no_harm(backend: str, attack: Attack, front: Front) -> None:
    judge(attack, front.report(attack))


@pytest.mark.parametrize(("backend", "attack"), cases(pool=True))
def test_an_attack_fails_in_the_scoring_pool(backend: str, attack: Attack, front: Front) -> None:
    judge(attack, front.report(attack, pool=True))


@pytest.mark.parametrize("backend", BACKENDS[-1:])
def test_the_deeds_succeed_where_there_is_no_sandbox(backend: str, front: Front) -> None:
    deeds = [attack for attack in ATTACKS if attack.deed and attack.bare]
    answers = zip(deeds, front.campaign.submit_all(front.campaign.bare, deeds), strict=True)
    blanks = {attack.id: answer for attack, answer in answers if not answer.startswith("BROKEN")}
    assert not blanks


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_of_it(backend: str, front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    rows: dict[str, list[int]] = {}
    for attack, future in front.attacks.values():
        report, row = future.result(), rows.setdefault(attack.group, [0, 0, 0])
        for column, number in enumerate((1, report.forged, bool(report.problems))):
            row[column] += number
    orphans = front.campaign.orphans()
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)] or [0, 0, 0]
    with capsys.disabled():
        print(f"\n\n{backend:12}{'runs':>8}{'forged passes':>16}{'broken conditions':>20}")
        for group, row in rows.items():
            print(f"{group:12}{row[0]:8}{row[1]:16}{row[2]:20}")
    assert rows["all"][1:] == [0, 0]
    assert not orphans
