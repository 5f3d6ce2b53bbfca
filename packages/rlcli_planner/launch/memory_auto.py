"""Predicts a run's memory, time and disk, for `rlcli plan` and `rlcli train --memory auto`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from rlcli.cluster.ray_session import cluster_address
from rlcli.config.load import Resolved, is_given, layered, resolve, with_length
from rlcli.config.schema import RunConfig, Train
from rlcli.context import RunContext, RunFacts
from rlcli.data.messages import Role
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.prompt_table import read_sets, verifiers_of
from rlcli.data.prompts.token_cache import tokenized
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts, load_tokenizer
from rlcli.errors import ConfigError
from rlcli.evaluation.evaluation_folder import dataset_names
from rlcli.images.decoding import size_of
from rlcli.launch.algorithm_rules import check_algorithm
from rlcli.launch.device_checks import check_device, check_float16, compute_dtype, kv_cache_bytes, with_cpu_dtype
from rlcli.launch.engine_checks import check_frozen, check_quantized, check_recurrent_layers
from rlcli.launch.planner import Rows
from rlcli.launch.preflight import longest_of, with_steps_of
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.role_checks import check_layout
from rlcli.launch.run_plan import derived_plan
from rlcli.model.io.model_checks import image_rule
from rlcli.model.io.model_config import check_place
from rlcli.support.hub import offline_unless_reachable
from rlcli_planner.calibration import MIB
from rlcli_planner.fitting.solve import budget, cannot_fit, shortfall, sizes_on_cpu, smallest_microbatch
from rlcli_planner.fitting.suggest import Suggestions, suggest_layouts
from rlcli_planner.forecast import TOKENS, UTILIZATION, Forecast, forecast, largest_of
from rlcli_planner.known_devices import GIB, cpu, parse_gpus, with_rates
from rlcli_planner.launch.local_machine import own_device, rates_of
from rlcli_planner.launch.measured_lengths import lengths_like, prompt_stats
from rlcli_planner.model_shape import ModelShape, read_shape
from rlcli_planner.plan_input import RunPlanInput, Sections, by_section, setting_of

AUTO = "--memory auto"
FOLLOWED = "this machine's memory"
"""Origin of sizes that were lowered for it."""
KV_CACHE, CHECKPOINTING = "rollout.kv_cache_mb", "model.gradient_checkpointing"
NAMES = {TOKENS: f"{AUTO}, micro-batch", UTILIZATION: f"{AUTO}, engine"}
"""Keys that --memory auto sets → their names in the printed plan."""
ANY_LENGTH = 1 << 40
"""Tokens of a micro-batch that is longer than any sample."""


def planned(
    recipe: str,
    flags: Mapping[str, object],
    sets: Sequence[str],
    gpus: str,
    on_note: Callable[[str], None],
    like: Path | None = None,
    *,
    remeasure: bool = False,
) -> tuple[Forecast, Rows]:
    """The forecast of a run and its derived plan, without weights and without a device; data is optional, but prompt
    lengths make it more accurate. gpus: as `parse_gpus` reads them; empty: this machine's. like: a run
    whose responses are as long. remeasure: measure this machine even if that was done before. Raises RlcliError."""
    if gpus:
        device, count = parse_gpus(gpus)
        flags = {**flags, **_workers(recipe, flags, sets, gpus, count)}
    else:
        device = own_device(resolve(recipe, flags, sets).config)
    kind = "cpu" if device.is_cpu else "cuda"
    resolved = resolve(recipe, {**flags, "cluster.device": kind}, sets)
    config = resolved.config
    for note in resolved.notes:
        on_note(note)
    check_device(config, kind)
    teachers = [("teacher.path", teacher.path) for teacher in config.teacher.held]
    for key, path in (("model.path", config.model.path), ("critic.path", config.critic.path), *teachers):
        if path and not Path(path).is_dir():
            check_place(path, key)
            offline_unless_reachable(on_note)
    shape = read_shape(config.model.path)
    config = with_cpu_dtype(config, kind, lambda: shape.parameters)
    dtype = compute_dtype(config, kind)
    _check_shape(config, shape, dtype, kind)
    prompts = _prompts(config) if config.data.path else None
    config = _with_epochs_counted(config, resolved, prompts, on_note)
    stats = None if prompts is None else prompt_stats(prompts)
    cache = kv_cache_bytes(config, kind, dtype, longest_of(config, prompts))
    setting = setting_of(config, device, prompts=stats, kv_cache_bytes=cache)
    check_algorithm(config, setting.algorithm)
    if device.is_cpu or not gpus:  # else the machine that is described is another one
        setting = replace(
            setting, device=with_rates(device, rates_of(config, kind, "again" if remeasure else "unless known"))
        )
    lowered: Rows = []
    if device.is_cpu and not cluster_address(config.cluster.address):
        sections, lowered = _lowered(resolved, setting)
        setting = setting.with_keys(**sections)
        if setting.config.rollout.kv_cache_mb is not None:
            setting = replace(setting, kv_cache_bytes=setting.config.rollout.kv_cache_mb * MIB)
    if prompts is None:
        image_note = ", and as one image" if shape.vision_encoder is not None else ""
        on_note(f"without --data: every prompt counted as data.max_prompt_tokens long{image_note}")
    return forecast(setting, lengths_like(like) if like else None), _rows(setting, kind, prompts) + lowered


def _check_shape(config: RunConfig, shape: ModelShape, dtype: str, kind: str) -> None:
    """Raise `ConfigError` if a model of this shape cannot run with the configuration."""
    check_float16(dtype, shape.kind)
    check_recurrent_layers(config, dtype, kind)
    check_layout(config, shape.positions, shape.heads, shape.experts)
    check_quantized(config, dtype, shape.experts)
    if config.lora.rank and not shape.adapter_parameters(config.lora.rank, config.lora.targets):
        linear_names = list(dict.fromkeys(linear.name for _, layer in shape.kinds for linear in layer.linears))
        linear_names += ["experts"] * bool(shape.experts)
        raise ConfigError(
            f"lora.targets = '{config.lora.targets}': the model has no such linear layer",
            f"give all-linear, or some of {', '.join(linear_names)}",
        )
    check_frozen(config, has_vision_encoder=shape.vision_encoder is not None)


def _with_epochs_counted(
    config: RunConfig, resolved: Resolved, prompts: TokenizedPrompts | None, on_note: Callable[[str], None]
) -> RunConfig:
    """`config` with the steps that `train.epochs` are, if it is given and there are prompts."""
    if config.train.epochs is None:
        return config
    if prompts is None:
        on_note(f"without --data: train.epochs cannot be counted; planned for train.steps = {config.train.steps}")
        return config
    counted = with_length(resolved, len(prompts))
    for note in counted.notes[len(resolved.notes) :]:
        on_note(note)
    return with_steps_of(config, counted.config)


def suggest(predicted: Forecast, recipe: str, flags: Mapping[str, object], sets: Sequence[str]) -> Suggestions:
    """The layouts that `suggest_layouts` proposes for a forecast of `planned`, without those that the rules refuse."""
    workers = {"cluster.workers": predicted.setting.ranks, "cluster.device": predicted.setting.config.cluster.device}

    def allowed(keys: Mapping[str, object]) -> bool:
        with contextlib.suppress(ConfigError):
            resolve(recipe, {**flags, **workers, **keys}, sets)
            return True
        return False

    every = suggest_layouts(predicted.setting)
    return replace(every, layouts=[layout for layout in every.layouts if allowed(layout.keys)])


def _workers(recipe: str, flags: Mapping[str, object], sets: Sequence[str], gpus: str, count: int) -> dict[str, int]:
    """`cluster.workers` if it is not set: the rest of `count` devices. Raises `ConfigError` if none is left, or if more
    are set than exist."""
    _, values, origins = layered(recipe, flags, sets)  # rules between keys need the number computed here
    other_workers = sum(
        each for pool in ("critic", "teacher", "rollout") if isinstance(each := values.get(f"{pool}.workers", 0), int)
    )
    if is_given(origins.get("cluster.workers", "")):
        training_workers = values["cluster.workers"]
        total = training_workers + other_workers if isinstance(training_workers, int) else 0
        if count > 1 and total > count:
            raise ConfigError(
                f"--gpus {gpus}: cluster.workers + critic.workers + rollout.workers = {total} are more than {count}",
                "lower one of them, or give more devices",
            )
        return {}
    if count <= other_workers:
        raise ConfigError(
            f"--gpus {gpus}: critic.workers + rollout.workers = {other_workers} leave none of {count} for training",
            f"give {other_workers + 1} or more",
        )
    return {"cluster.workers": count - other_workers}


def resolve_auto(recipe: str, flags: Mapping[str, object], sets: Sequence[str]) -> Resolved:
    """Like `resolve`, but a micro-batch that is not set and that the rules would refuse as smaller than a sample gets
    the smallest allowed size; `with_auto_memory` replaces it."""
    _, values, origins = layered(recipe, flags, sets)
    if is_given(origins.get(TOKENS, "")):
        return resolve(recipe, flags, sets)
    config = resolve(recipe, {**flags, TOKENS: ANY_LENGTH}, sets).config
    least = smallest_microbatch(config)
    if values.get(TOKENS, Train().tokens_per_microbatch) >= least:
        return resolve(recipe, flags, sets)
    resolved = resolve(recipe, {**flags, TOKENS: least}, sets)
    return replace(resolved, origins=resolved.origins | {TOKENS: AUTO})


def with_auto_memory(resolved: Resolved, prepared: Prepared) -> tuple[Resolved, Prepared, Rows]:
    """Replace the sizes that are not set by the largest that fit; also returns rows for the printed plan with the
    values and the reasons. Raises `ConfigError` if nothing fits."""
    config = prepared.config
    device = own_device(config)
    stats = prompt_stats(prepared.prompts)
    setting = setting_of(config, device, prompts=stats, kv_cache_bytes=prepared.facts.kv_cache_bytes)
    wanted = {key for key in NAMES if not is_given(resolved.origins[key])}
    largest = largest_of(setting, wanted)
    rows = [(NAMES[key], f"{key} = {resolved.values()[key]}, as set") for key in NAMES if key not in wanted]
    sections = by_section(largest)
    predicted = forecast(setting.with_keys(**sections))
    if not predicted.fits and device.is_cpu and not cannot_fit(setting):  # a smaller cache or recomputing may be enough
        return with_sizes_for_cpus(resolved, prepared)
    if not predicted.fits:
        raise ConfigError(f"{AUTO}: {shortfall(predicted.setting)}", _first_fix(predicted))
    peak = predicted.peak
    for key, value in largest.items():
        why = f"the largest useful size: {peak.name} then takes {peak.total / GIB:.1f}"
        rows.append((NAMES[key], f"{key} = {value}, {why} of {predicted.budget / GIB:.1f} GiB"))
    origins = resolved.origins | dict.fromkeys(largest, AUTO)
    resolved = replace(resolved, config=resolved.config.changed(**sections), origins=origins)
    return resolved, prepared.changed(config.changed(**sections)), rows


def with_sizes_for_cpus(resolved: Resolved, prepared: Prepared) -> tuple[Resolved, Prepared, Rows]:
    """Lower sizes that are not set as far as the memory of this machine asks for it; also returns rows for the printed
    plan. On GPUs, in a cluster, and where the recipe's sizes fit, nothing changes."""
    config = prepared.config
    if prepared.facts.device != "cpu" or cluster_address(config.cluster.address):
        return resolved, prepared, []
    stats = prompt_stats(prepared.prompts)
    setting = setting_of(config, cpu(), prompts=stats, kv_cache_bytes=prepared.facts.kv_cache_bytes)
    sections, rows = _lowered(resolved, setting)
    if not sections:
        return resolved, prepared, []
    keys = [f"{section}.{name}" for section, values in sections.items() for name in values]
    origins = resolved.origins | dict.fromkeys(keys, FOLLOWED)
    resolved = replace(resolved, config=resolved.config.changed(**sections), origins=origins)
    config = config.changed(**sections)
    cache = prepared.facts.kv_cache_bytes if config.rollout.kv_cache_mb is None else config.rollout.kv_cache_mb * MIB
    return resolved, prepared.changed(config, kv_cache_bytes=cache), rows


def _lowered(resolved: Resolved, setting: RunPlanInput) -> tuple[Sections, Rows]:
    """The keys that a run on this machine's CPUs changes to fit its memory, by section, and rows for the plan; none
    with train.deterministic, since other sizes sum in another order."""
    config = setting.config
    if config.train.deterministic:
        return {}, []
    lowered = sizes_on_cpu(
        setting,
        tokens=not is_given(resolved.origins[TOKENS]),
        cache=setting.has_engine and config.rollout.kv_cache_mb is None,
        recompute=not is_given(resolved.origins[CHECKPOINTING]),
    )
    sections: Sections = {}
    rows: Rows = []
    configured_tokens, configured_cache = config.train.tokens_per_microbatch, setting.kv_cache_bytes
    if lowered.tokens != configured_tokens:
        sections["train"] = {"tokens_per_microbatch": lowered.tokens}
        free = f"{budget(setting) / GIB:.1f} GiB a worker"
        rows.append(
            (f"{FOLLOWED}, micro-batch", f"{TOKENS} = {lowered.tokens} in place of {configured_tokens}: {free}")
        )
    if (
        lowered.kv_cache_bytes != configured_cache
        and lowered.kv_cache_bytes is not None
        and configured_cache is not None
    ):
        megabytes = -(-lowered.kv_cache_bytes // MIB)
        sections["rollout"] = {"kv_cache_mb": megabytes}
        rows.append(
            (
                f"{FOLLOWED}, engine",
                f"{KV_CACHE} = {megabytes}; {configured_cache // MIB} would hold all samples at once",
            )
        )
    if lowered.recompute:
        sections["model"] = {"gradient_checkpointing": True}
        rows.append((f"{FOLLOWED}, activations", f"{CHECKPOINTING} = true: each layer is computed twice"))
    return sections, rows


def _first_fix(predicted: Forecast) -> str:
    if not predicted.fixes:
        return "choose a smaller model or more devices; rlcli plan shows what uses memory"
    hint = predicted.fixes[0]
    keys = " ".join(f"--set {key}={str(value).lower()}" for key, value in hint.keys.items())
    return f"{keys} ({hint.cost}); rlcli plan shows more"


def _prompts(config: RunConfig) -> TokenizedPrompts:
    paths = config.data.paths
    response, max_response_tokens = config.data.response, config.rollout.max_response_tokens
    names = dataset_names(paths, "--data", "train")
    rows = read_sets(paths, names, "train", config.verifier.name, verified=not response)
    tokenizer = chat_template.fix(
        load_tokenizer(config.model.path, config.model.chat_template),
        config.data.chat_template_kwargs,
        datetime.now(UTC).date(),
    )
    return tokenized(
        rows,
        tokenizer,
        config.data.max_prompt_tokens,
        response=response,
        max_response_tokens=max_response_tokens,
        rule=image_rule(config.model.path),
        measured=size_of,
    )


def _rows(setting: RunPlanInput, kind: str, prompts: TokenizedPrompts | None) -> Rows:
    """The derived plan, as far as it is known without a machine and possibly without data."""
    config = setting.config
    roles: set[Role] = {"policy", "engine"} if setting.has_engine else {"policy"}
    none = TokenizedPrompts((), 0, np.zeros(0, np.int32), np.zeros(1, np.int64))
    facts = RunFacts(
        device=kind,
        dtype=compute_dtype(config, kind),
        max_length=setting.max_length,
        kv_cache_bytes=setting.kv_cache_bytes,
        roles=frozenset(roles),
        verifiers=tuple(sorted(verifiers_of(prompts.prompts))) if prompts else (),
    )
    return derived_plan(Prepared(RunContext(config, facts), prompts or none, None, setting.policy.parameters))
