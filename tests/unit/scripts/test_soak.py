"""The soak's own parts: a leak is distinguished from noise and one-time jumps, and every process is measured."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "_soak"))

from growth import Limit, Point, trend
from processes import measured

MEMORY = Limit(rate=3.0, least=6.0)
DESCRIPTORS = Limit(rate=2.0, least=3.0)


def values(steps: int, noise: float = 2.0, leak: float = 0.0, jumps: tuple[int, ...] = ()) -> list[Point]:
    """Values of each second step: a level, noise, `leak` per 1,000 steps and 50 more from each of `jumps` on."""
    draw = random.Random(steps)
    return [
        (float(step), 800 + draw.gauss(0, noise) + leak * step / 1000 + 50 * sum(step > at for at in jumps))
        for step in range(0, steps, 2)
    ]


@pytest.mark.parametrize(("steps", "leak"), [(600, 100.0), (3000, 25.0), (3000, 100.0)])
def test_a_leak_grows(steps: int, leak: float) -> None:
    fitted = trend(values(steps, leak=leak), 200, MEMORY)
    assert fitted.grows
    assert fitted.rate == pytest.approx(leak, rel=0.4)


@pytest.mark.parametrize(
    "series",
    [
        values(3000),
        values(3000, noise=30.0),
        values(3000, jumps=(1500,)),
        values(3000, jumps=(700, 2300)),
        values(3000, leak=-50.0),
        [(float(step), 800 - 300 * 0.99 ** (step / 4)) for step in range(0, 3000, 2)],  # a cache that fills
        [(float(step), 800.0 + step % 50) for step in range(3000)],  # between two checkpoints
        [(float(step), 57.0) for step in range(3000)],
    ],
    ids=["noise", "much noise", "one jump", "two jumps", "falls", "saturates", "saw", "constant"],
)
def test_noise_and_what_happens_once_do_not_grow(series: list[Point]) -> None:
    fitted = trend(series, 200, MEMORY)
    assert fitted.enough
    assert not fitted.grows


def test_a_descriptor_lost_at_each_checkpoint_is_seen() -> None:
    assert trend([(float(step), 40.0 + step // 50) for step in range(1500)], 200, DESCRIPTORS).grows


def test_what_was_there_for_too_few_steps_is_not_judged() -> None:
    assert not trend([(1000.0, 1.0), (1001.0, 9.0)], 200, MEMORY).enough
    assert not trend([(100.0, 1.0)], 200, MEMORY).enough


def test_every_process_below_the_supervisor_is_measured() -> None:
    hold = "import os, sys; held = [os.open('/dev/null', 0) for _ in range({})]; print(flush=True); sys.stdin.read()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold.format(30)!r}, 'rlcli.rewards'])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"HOME": "/"}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        values = measured(process.pid)
        process.communicate(b"")
    assert values["supervisor", "processes"] == values["scoring", "processes"] == 1
    assert values["scoring", "descriptors"] >= 33
    assert values["supervisor", "descriptors"] < 20
    assert 3 < values["scoring", "memory MiB"] < 60
    assert values["scoring", "threads"] == 1
