"""Which division of the devices and which staleness make a run's steps fastest, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlcli.config.rules import broken
from rlcli.config.schema import RunConfig
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.asynchrony.simulate import Layout, Simulated, Speeds, simulate
from rlcli_planner.engine_memory import full_responses
from rlcli_planner.fitting.solve import fits
from rlcli_planner.run_setting import Setting
from rlcli_planner.step_time import decode_seconds, prefill_seconds, times

STALENESS = (1, 2, 4)
STEPS = 8
"""Steps that are simulated besides those that fill the pipeline."""
MOST_SAMPLES = 512
"""Samples of a simulated step: a larger one is simulated on proportionally fewer engines."""
PAYS, NEAR = 1.1, 0.97
"""A gain from which asynchrony is advised; and which share of the best gain a smaller staleness must reach."""


@dataclass(frozen=True)
class Option:
    """train, generate: `cluster.workers` and `rollout.workers`; 0 engines apart: the same devices do both. gain: the
    synchronous step's seconds on all of them over this one's."""

    train: int
    generate: int
    staleness: int
    simulated: Simulated
    gain: float

    @property
    def keys(self) -> dict[str, int]:
        own = {"cluster.workers": self.train, "rollout.workers": self.generate} if self.generate else {}
        return own | {"async.staleness": self.staleness}

    @property
    def told(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.keys.items())

    def as_dict(self) -> dict[str, Any]:
        return {**self.keys, "gain": self.gain, **asdict(self.simulated)}


@dataclass(frozen=True)
class Advice:
    """options: all that were simulated. synchronous: its seconds a step, on all devices. configured: the run's own, if
    it is asynchronous. best: the one to choose, or None if none gains enough. refused: why the run as configured cannot
    be asynchronous. lengths: of responses, in words. assumed: whether no run was measured."""

    options: list[Option]
    synchronous: Simulated
    configured: Option | None
    best: Option | None
    refused: str
    lengths: str
    assumed: bool

    @property
    def better(self) -> Option | None:
        """What to choose in place of the run's own; None if nothing is faster by enough."""
        own = self.configured.gain if self.configured else 1.0
        return self.best if self.best and self.best.gain >= PAYS * own else None

    @property
    def told(self) -> str:
        """What to do, in one line."""
        own, better = self.configured, self.better
        if own is None and better is None:
            most = max((one.gain for one in self.options), default=0.0)
            return "asynchrony would not pay" + f" (at best {most:.2f} ×)" * (most > 0)
        found = [f"{own.told} makes steps {own.gain:.2f} × as fast as synchronous ones"] if own else []
        if better and own:
            found.append(f"{better.told} {better.gain:.2f} ×")
        elif better:
            found.append(f"{better.told} would make steps {better.gain:.2f} × as fast")
            found += [f"first: {self.refused}"] * bool(self.refused)
        return "; ".join(found)

    def as_dict(self) -> dict[str, Any]:
        return {
            "simulated": True,
            "lengths": self.lengths,
            "synchronous": asdict(self.synchronous),
            "configured": self.configured.as_dict() if self.configured else None,
            "best": self.best.as_dict() if self.best else None,
            "refused": self.refused or None,
            "options": [one.as_dict() for one in self.options],
        }


def speeds_of(setting: Setting, mean: float) -> Speeds:
    """The planner's estimates, for responses of this mean length. Raises `ValueError` if the device's rates are not
    known."""
    seconds = {phase.name: phase.seconds for phase in times(setting)}
    if not seconds:
        raise ValueError("the device's rates are unknown")
    generating = ("generate", "sync", "checkpoint")
    update = sum(each for name, each in seconds.items() if name not in generating)
    return Speeds(
        decode=lambda running, tokens: decode_seconds(setting, running, tokens),
        prefill=prefill_seconds(setting),
        update=update * (setting.prompt_tokens + mean) / setting.sample_tokens,
        sync=seconds.get("sync", 0.0),
    )


def advice(setting: Setting, lengths: Lengths | None = None) -> Advice | None:
    """What the planner's estimates say; None if nothing is generated or no seconds are predicted."""
    config = setting.config
    if config.data.response or setting.untimed:
        return None
    lengths = lengths or Lengths.assumed(config.rollout.max_response_tokens)

    def speeds(train: int, generate: int) -> Speeds | None:
        own = setting.with_keys(cluster={"workers": train}, rollout={"workers": generate})
        return speeds_of(own, lengths.mean) if fits(own) else None

    held = full_responses(setting) * setting.max_length / (setting.prompt_tokens + lengths.mean)
    return advised(config, lengths, speeds, setting.prompt_tokens, held)


SpeedsOf = Callable[[int, int], Speeds | None]
"""Training devices and engines' own → speeds; None if that does not fit."""


def advised(
    config: RunConfig, lengths: Lengths, speeds: SpeedsOf, prompt_tokens: float, held: float = math.inf
) -> Advice | None:
    """The best of all layouts. held: samples that an engine's cache holds at once. None if not even the synchronous run
    fits."""
    devices = config.cluster.workers + config.rollout.workers
    together = speeds(devices, 0)
    if together is None:
        return None

    def result_of(train: int, generate: int, staleness: int, own: Speeds) -> Simulated:
        return simulated(config, lengths, own, (train, generate, staleness), prompt_tokens, held)

    synchronous = result_of(devices, 0, 0, together)
    found, configured = list[Option](), None
    present = config.cluster.workers, config.rollout.workers, config.async_.staleness
    for train, generate, staleness in _layouts(config, devices):
        own = together if not generate else speeds(train, generate)
        if own is None:
            continue
        result = result_of(train, generate, staleness, own)
        found.append(Option(train, generate, staleness, result, synchronous.step_s / result.step_s))
        if (train, generate, staleness) == present:
            configured = found[-1]
    return Advice(
        found, synchronous, configured, _best(found), _refused(config), lengths.told, lengths.measured is None
    )


def _layouts(config: RunConfig, devices: int) -> Iterator[tuple[int, int, int]]:
    """Devices that train and that only generate, and a staleness: those to try, and the run's own."""
    shared, copies = config.rollout.tensor_parallel, config.parallel.replicate * config.parallel.context
    split = {round(devices * part / 8) for part in range(2, 7)}
    splits = [(devices, 0), *((devices - own, own) for own in sorted(split) if 0 < own < devices)]
    tried = [(*each, staleness) for each in splits for staleness in STALENESS]
    tried.append((config.cluster.workers, config.rollout.workers, config.async_.staleness))
    for train, generate, staleness in dict.fromkeys(tried):
        divides = train % copies == 0 and train // config.parallel.replicate % config.parallel.expert == 0
        if (staleness or generate) and divides and (generate or train) % shared == 0:
            yield train, generate, staleness


def simulated(
    config: RunConfig,
    lengths: Lengths,
    speeds: Speeds,
    layout: tuple[int, int, int],
    prompt_tokens: float,
    held: float,
) -> Simulated:
    train, generate, staleness = layout
    rollout, rules = config.rollout, config.dynamic_sampling
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    if rules.keep != "all":
        prompts = math.ceil(prompts * rules.oversample)
    engines = (generate or train) // rollout.tensor_parallel
    fewer = min(math.ceil(prompts * samples / MOST_SAMPLES), engines, prompts)
    slots = max(1, math.floor(min(rollout.max_concurrent, held)))
    drawn = lengths.draw(STEPS + 2 * staleness, math.ceil(prompts / fewer), samples, seed=config.train.seed)
    recompute = config.async_.on_update == "recompute" or not generate
    own = Layout(math.ceil(engines / fewer), slots, bool(generate), staleness, recompute)
    return simulate(drawn, speeds, own, prompt_tokens)


def _best(options: list[Option]) -> Option | None:
    """The least stale of those that are about as fast as the fastest, if that pays."""
    most = max((one.gain for one in options), default=0.0)
    if most < PAYS:
        return None
    near = [one for one in options if one.gain >= NEAR * most]
    return min(near, key=lambda one: (one.staleness, -one.gain))


def _refused(config: RunConfig) -> str:
    """Why the run could not generate ahead with the keys that it has."""
    asynchronous = config.changed(async_={"staleness": max(1, config.async_.staleness)})
    return "; ".join(message for message in broken(asynchronous) if "async.staleness" in message)
