"""Plans of which processes are killed and when, sampled from a seed, so that the same seed gives the same plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

RECIPES = ["grpo", "dapo", "ppo", "async"]
STEPS, LAST_AIM = 10, 7
"""Steps of every run, and the last step at which a kill is aimed, since it happens a little later."""
EVALUATE_EVERY = 3
PER_RUN = 5
"""Most blows that one run gets: each costs another start, but so does another run."""

VICTIMS = ("driver", "worker", "scoring worker", "supervisor", "gcs_server", "raylet", "fork server", "scoring service")
QUIET = {"scoring worker", "fork server", "scoring service"}
"""A run may continue without these: their death causes no restart."""

PHASES = {"start": 1.0, "generate": 0.3, "update": 0.15, "sync": 0.15, "checkpoint": 0.1, "evaluate": 0.2, "any": 1.0}
"""Maximum delay of a kill after the start of its phase: seconds; for `start`, a share of the start-up time."""


@dataclass(frozen=True)
class Kind:
    """A kind of short run."""

    recipe: str
    """A recipe of rlcli, or "async": grpo whose generation continues through weight updates."""
    workers: int
    """Number of workers."""
    every: int
    """Steps between checkpoints."""
    cluster: bool = False
    """Run on a cluster of two machines."""

    @property
    def trains(self) -> str:
        """The recipe."""
        return "grpo" if self.recipe == "async" else self.recipe

    @property
    def name(self) -> str:
        where = ", cluster" if self.cluster else ""
        return f"{self.recipe}, {self.workers} worker{'s' * (self.workers > 1)}{where}"

    @property
    def reference(self) -> Kind:
        """The uninterrupted run that this one has to equal: how often it is saved and where it runs change nothing."""
        return Kind(self.recipe, self.workers, 1)


@dataclass(frozen=True)
class Aim:
    """Kill `victim` at the fraction `delay` of the phase `phase` of step `step` (`start`: while the run starts)."""

    victim: str
    """One of VICTIMS, or `node`."""
    step: int
    """Step of the kill."""
    phase: str
    """Key of PHASES; `start`: while the run starts."""
    delay: float
    """Fraction of the phase's maximum delay."""


@dataclass(frozen=True)
class Plan:
    """One run and the blows that it gets, one after another."""

    number: int
    kind: Kind
    aims: tuple[Aim, ...]


def draw(kills: int, seed: int, recipes: list[str], workers: list[int], *, cluster: bool = True) -> list[Plan]:
    """Plans with `kills` aims in all, at most PER_RUN a run. The kinds of runs take turns, and so do the victims, in an
    order drawn anew for each round. cluster: of ten blows one hits a whole machine."""
    rng = random.Random(seed)
    on_cluster = round(kills / 10) if cluster else 0
    victims = _turns(rng, VICTIMS, kills - on_cluster)
    synchronous = [recipe for recipe in recipes if recipe != "async"]
    kinds = [Kind(recipe, min(workers), 1) for recipe in synchronous]
    kinds += [Kind(recipe, size, 1) for size in workers if size > min(workers) for recipe in synchronous[:1]]
    kinds += [Kind("async", min(workers), 1)] * ("async" in recipes)
    groups = _parts(["node"] * on_cluster, PER_RUN) + _parts(victims, PER_RUN)
    plans, turns = [], itertools.cycle(kinds)
    for number, group in enumerate(groups, 1):
        kind = Kind(kinds[0].recipe, 1, 1, cluster=True) if group[0] == "node" else next(turns)
        kind = replace(kind, every=rng.choice([1, 1, 2]))
        plans.append(Plan(number, kind, _aims(rng, group, kind.every)))
    return plans


def _turns(rng: random.Random, names: tuple[str, ...], count: int) -> list[str]:
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(names, len(names))
    return order[:count]


def _parts(items: list[str], limit: int) -> list[list[str]]:
    """`items` in as few parts as hold at most `limit` each, of nearly equal sizes."""
    count = -(-len(items) // limit)
    bounds = [round(index * len(items) / count) for index in range(count + 1)] if count else []
    return [items[low:high] for low, high in itertools.pairwise(bounds)]


def _aims(rng: random.Random, victims: list[str], every: int) -> tuple[Aim, ...]:
    aims = []
    steps = sorted(rng.randint(1, LAST_AIM) for _ in victims)
    previous = ""
    for victim, step in zip(victims, steps, strict=True):
        phases = [phase for phase in PHASES if _happens(phase, step, every)]
        if previous in QUIET:  # the run does not start again
            phases.remove("start")
        aims.append(Aim(victim, step, rng.choice(phases), rng.random()))
        previous = victim
    return tuple(aims)


def _happens(phase: str, step: int, every: int) -> bool:
    return step % {"checkpoint": every, "evaluate": EVALUATE_EVERY}.get(phase, 1) == 0
