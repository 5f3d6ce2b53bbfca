"""Find the division of the devices and the staleness with the fastest steps, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rlcli.config.rules import broken
from rlcli.config.schema import RunConfig
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.asynchrony.simulate import Layout, Simulated, Speeds, simulate
from rlcli_planner.engine_memory import full_responses
from rlcli_planner.fitting.solve import fits
from rlcli_planner.plan_input import RunPlanInput
from rlcli_planner.step_time import decode_seconds, prefill_seconds, times

STALENESS = (1, 2, 4)
STEPS = 8
"""Steps that are simulated besides those that fill the pipeline."""
MOST_SAMPLES = 512
"""Samples of a simulated step: a larger one is simulated on proportionally fewer engines."""
PAYS, NEAR = 1.1, 0.97
"""Gain from which asynchrony is recommended; share of the best gain that a smaller staleness must reach."""


@dataclass(frozen=True)
class Option:
    """A simulated division of the devices with a staleness."""

    train: int
    """Workers that train: `cluster.workers`."""
    generate: int
    """Dedicated engine workers, `rollout.workers`; 0: the same devices do both."""
    staleness: int
    """`async.staleness`."""
    simulated: Simulated
    """Times and idle shares of a step."""
    gain: float
    """Speedup over a synchronous step on all devices."""

    @property
    def keys(self) -> dict[str, int]:
        division = {"cluster.workers": self.train, "rollout.workers": self.generate} if self.generate else {}
        return division | {"async.staleness": self.staleness}

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.keys.items())

    def as_dict(self) -> dict[str, object]:
        return {**self.keys, "gain": self.gain, **asdict(self.simulated)}


@dataclass(frozen=True)
class Advice:
    """Result of the simulation of all options."""

    options: list[Option]
    """All simulated options."""
    synchronous: Simulated
    """A synchronous step on all devices."""
    configured: Option | None
    """The run as configured, if it is asynchronous."""
    best: Option | None
    """The recommended option; None if none gains enough."""
    refused: str
    """Why the run as configured cannot be asynchronous; empty if it can."""
    lengths: str
    """Description of the assumed or measured response lengths."""
    assumed: bool
    """True if the lengths are assumed, not measured."""

    @property
    def better(self) -> Option | None:
        """The best option, if it is faster than the configured one by enough."""
        configured_gain = self.configured.gain if self.configured else 1.0
        return self.best if self.best and self.best.gain >= PAYS * configured_gain else None

    @property
    def summary(self) -> str:
        """The advice in one line."""
        configured, better = self.configured, self.better
        if configured is None and better is None:
            best_gain = max((option.gain for option in self.options), default=0.0)
            return "asynchrony would not pay" + f" (at best {best_gain:.2f} ×)" * (best_gain > 0)
        sentences = (
            [f"{configured.label} makes steps {configured.gain:.2f} × as fast as synchronous ones"]
            if configured
            else []
        )
        if better and configured:
            sentences.append(f"{better.label} {better.gain:.2f} ×")
        elif better:
            sentences.append(f"{better.label} would make steps {better.gain:.2f} × as fast")
            sentences += [f"first: {self.refused}"] * bool(self.refused)
        return "; ".join(sentences)

    def as_dict(self) -> dict[str, object]:
        return {
            "simulated": True,
            "lengths": self.lengths,
            "synchronous": asdict(self.synchronous),
            "configured": self.configured.as_dict() if self.configured else None,
            "best": self.best.as_dict() if self.best else None,
            "refused": self.refused or None,
            "options": [option.as_dict() for option in self.options],
        }


def speeds_of(setting: RunPlanInput, mean: float) -> Speeds:
    """Estimated speeds, for responses of this mean length. Raises `ValueError` if the device's rates are not
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


def advice(setting: RunPlanInput, lengths: Lengths | None = None) -> Advice | None:
    """Advice from estimated speeds; None if nothing is generated or no seconds are predicted."""
    config = setting.config
    if config.data.response or setting.untimed:
        return None
    lengths = lengths or Lengths.assumed(config.rollout.max_response_tokens)

    def speeds(train: int, generate: int) -> Speeds | None:
        divided = setting.with_keys(cluster={"workers": train}, rollout={"workers": generate})
        return speeds_of(divided, lengths.mean) if fits(divided) else None

    held = full_responses(setting) * setting.max_length / (setting.prompt_tokens + lengths.mean)
    return advised(config, lengths, speeds, setting.prompt_tokens, held)


SpeedsOf = Callable[[int, int], Speeds | None]
"""Training devices and dedicated engine devices → speeds; None if that does not fit."""


def advised(
    config: RunConfig, lengths: Lengths, speeds: SpeedsOf, prompt_tokens: float, held: float = math.inf
) -> Advice | None:
    """Simulate all layouts. held: samples that an engine's KV cache holds at once. None if not even the synchronous run
    fits."""
    devices = config.cluster.workers + config.rollout.workers
    together = speeds(devices, 0)
    if together is None:
        return None

    def result_of(train: int, generate: int, staleness: int, layout_speeds: Speeds) -> Simulated:
        return simulated(config, lengths, layout_speeds, (train, generate, staleness), prompt_tokens, held)

    synchronous = result_of(devices, 0, 0, together)
    options, configured = list[Option](), None
    present = config.cluster.workers, config.rollout.workers, config.async_.staleness
    for train, generate, staleness in _layouts(config, devices):
        layout_speeds = together if not generate else speeds(train, generate)
        if layout_speeds is None:
            continue
        result = result_of(train, generate, staleness, layout_speeds)
        options.append(Option(train, generate, staleness, result, synchronous.step_s / result.step_s))
        if (train, generate, staleness) == present:
            configured = options[-1]
    return Advice(
        options,
        synchronous,
        configured,
        _best(options),
        _refused(config),
        lengths.description,
        lengths.measured is None,
    )


def _layouts(config: RunConfig, devices: int) -> Iterator[tuple[int, int, int]]:
    """Training devices, dedicated engine devices and staleness: the candidates and the configured layout."""
    shared, copies = config.rollout.tensor_parallel, config.parallel.replicate * config.parallel.context
    split = {round(devices * part / 8) for part in range(2, 7)}
    splits = [(devices, 0), *((devices - engines, engines) for engines in sorted(split) if 0 < engines < devices)]
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
    """Simulate a run with this layout: training devices, dedicated engine devices and staleness."""
    train, generate, staleness = layout
    rollout, rules = config.rollout, config.dynamic_sampling
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    if rules.keep != "all":
        prompts = math.ceil(prompts * rules.oversample)
    engines = (generate or train) // rollout.tensor_parallel
    fewer = min(math.ceil(prompts * samples / MOST_SAMPLES), engines, prompts)
    slots = max(1, math.floor(min(rollout.max_concurrent, held)))
    sampled = lengths.draw(STEPS + 2 * staleness, math.ceil(prompts / fewer), samples, seed=config.train.seed)
    recompute = config.async_.on_update == "recompute" or not generate
    simulated_layout = Layout(math.ceil(engines / fewer), slots, bool(generate), staleness, recompute)
    return simulate(sampled, speeds, simulated_layout, prompt_tokens)


def _best(options: list[Option]) -> Option | None:
    """The least stale of the options that are about as fast as the fastest; None if that gains too little."""
    best_gain = max((option.gain for option in options), default=0.0)
    if best_gain < PAYS:
        return None
    near = [option for option in options if option.gain >= NEAR * best_gain]
    return min(near, key=lambda option: (option.staleness, -option.gain))


def _refused(config: RunConfig) -> str:
    """Why the run as configured cannot be asynchronous; empty if it can."""
    asynchronous = config.changed(async_={"staleness": max(1, config.async_.staleness)})
    return "; ".join(message for message in broken(asynchronous) if "async.staleness" in message)
