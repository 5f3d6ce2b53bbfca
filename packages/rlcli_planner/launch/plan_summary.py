"""The plan of a run in five lines: model, data, batch, estimates of memory, time and disk, and its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli.config.schema import RunConfig
from rlcli.errors import RlcliError
from rlcli.launch.planner import Rows
from rlcli.launch.prepared_run import Prepared

if TYPE_CHECKING:
    from rlcli_planner.plan_input import RunPlanInput


def summary(prepared: Prepared, plan: Rows, target: Path, steps_done: int = 0) -> Rows:
    """The five lines as (label, text) rows. plan: all rows, as from `derived_plan`. target: the run's
    folder. steps_done: of a run that continues."""
    config, rows = prepared.config, dict(plan)
    workers = config.all_workers
    return [
        ("model", f"{rows['model']}, {rows['trained']}, {workers} worker{'s' * (workers != 1)}"),
        ("data", _data(prepared)),
        ("batch", _batch(config, len(prepared.prompts))),
        ("estimate", _estimate(prepared, config.train.steps - steps_done)),
        ("output", f"{target}; the whole plan: --plan"),
    ]


def _data(prepared: Prepared) -> str:
    config, prompts = prepared.config, prepared.prompts
    names = ", ".join(config.data.paths) or f"rows of {config.environment.name}"
    scored = f"responses given by extra_info.{config.data.response}" if config.data.response else ""
    scored = scored or f"scored by {', '.join(prepared.facts.verifiers[:3]) or 'the environment'}"
    left_out = f" ({prompts.too_long} too long)" if prompts.too_long else ""
    held_out = f"; evaluated on {len(prepared.held_out)}" if prepared.held_out is not None else ""
    return f"{len(prompts)} prompts of {names}{left_out}, {scored}{held_out}"


def _batch(config: RunConfig, prompts: int) -> str:
    rollout, train = config.rollout, config.train
    each = f"{rollout.prompts_per_step} prompts × {rollout.samples_per_prompt} samples a step"
    epochs = train.steps * rollout.prompts_per_step / prompts
    return f"{each}, responses of up to {rollout.max_response_tokens} tokens; {train.steps} steps, {epochs:.2g} epochs"


def setting_of_run(prepared: Prepared) -> RunPlanInput | None:
    """The planner's input for the run on this machine, with its rates if they are known; None if the machine, or the
    model's shape, is not."""
    try:
        return _setting(prepared, "never")
    except RlcliError:
        return None


def _setting(prepared: Prepared, measure: Literal["unless known", "never"]) -> RunPlanInput:
    from rlcli_planner.known_devices import with_rates
    from rlcli_planner.launch.local_machine import own_device, rates_of
    from rlcli_planner.launch.measured_lengths import prompt_stats
    from rlcli_planner.plan_input import setting_of

    config = prepared.config
    device = with_rates(own_device(config), rates_of(config, prepared.facts.device, measure))
    return setting_of(
        config, device, kv_cache_bytes=prepared.facts.kv_cache_bytes, prompts=prompt_stats(prepared.prompts)
    )


def estimates(prepared: Prepared, steps: int) -> Rows:
    """Memory, time and disk of a run as (label, text) rows, as `rlcli plan` predicts them."""
    try:
        setting = _setting(prepared, "unless known")
    except RlcliError as error:
        return [("memory", f"unknown: {error.message}")]
    return [("memory", _memory(setting)), ("time", _time(setting, steps)), ("disk", _disk(setting))]


def _estimate(prepared: Prepared, steps: int) -> str:
    """`estimates` in one line."""
    rows = estimates(prepared, steps)
    return "; ".join(text if label == "time" else f"{label} {text}" for label, text in rows).replace(
        "memory unknown", "unknown"
    )


def _memory(setting: RunPlanInput) -> str:
    from rlcli_planner.fitting.solve import all_phases, budget, shortfall, verdict
    from rlcli_planner.known_devices import GIB

    peak = max(phase.total for phase in all_phases(setting))
    fit = verdict(setting)
    if fit == "does not fit":
        return f"does not fit: {shortfall(setting)}: rlcli plan shows what would"
    text = f"at most {peak / GIB:.1f} of {budget(setting) / GIB:.1f} GiB a worker"
    return text if fit == "fits" else f"{text}, so it may not fit if responses are long: rlcli plan shows what would"


def _time(setting: RunPlanInput, steps: int) -> str:
    from rlcli.runs.tracking.text.step_figures import duration
    from rlcli_planner.step_time import step_seconds, times

    phases = times(setting)
    seconds = step_seconds(setting, phases)
    if not seconds:
        return f"time not predicted: {setting.untimed}"
    generating = sum(phase.seconds for phase in phases if phase.name == "generate")
    text = f"a step at most {_seconds(seconds)}, all {duration(math.ceil(seconds * steps))}"
    if generating:
        text += f" ({_seconds(generating)} generation; less as responses end early, or groups have equal rewards)"
    rates = setting.device.rates
    return text if rates is not None and rates.quiet else f"{text}, {setting.device.rates_from}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _disk(setting: RunPlanInput) -> str:
    from rlcli_planner.forecast import disk

    return f"{sum(disk(setting).values()) / 1e9:.2g} GB"
