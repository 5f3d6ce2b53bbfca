"""All checks that need no worker, cheapest first: the configuration, the machine, the model, the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcli.config.load import Resolved, with_length
from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts
from rlcli.data.messages import Role
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.overlap import repeated_rows, rows_in
from rlcli.data.prompts.prompt_table import JoinedPrompts, read_sets, verifiers_of
from rlcli.data.prompts.token_cache import OnProgress, tokenized
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts, control_token_in, load_tokenizer
from rlcli.errors import ConfigError, DataError
from rlcli.evaluation.equal_problems import Problems, check_rows, repeats_note
from rlcli.evaluation.evaluation_folder import dataset_names
from rlcli.evaluation.statistics import ks_of
from rlcli.export.export_folder import with_model_folders
from rlcli.images.image_rule import ImageRule
from rlcli.launch.device_checks import (
    check_float16,
    check_machine,
    compute_dtype,
    kv_cache_bytes,
    note_open_cluster,
    note_unused_gpu,
    parameter_count,
    with_cpu_dtype,
)
from rlcli.launch.engine_checks import (
    check_adapter,
    check_engine,
    check_images,
    check_quantized,
    check_recurrent_layers,
    check_separate_adapter,
)
from rlcli.launch.environment_checks import check_environments, numbered_rows
from rlcli.launch.model_paths import with_absolute_paths, with_adapter_base
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.role_checks import check_layout, policy_roles
from rlcli.launch.verifier_trial import check_comparisons, check_verifiers
from rlcli.model.io.model_config import check_place, expert_count, plain_config
from rlcli.model.io.mxfp4 import quantization
from rlcli.rollout.model_servers.models_to_serve import models_of
from rlcli.support.attempt import is_restart
from rlcli.support.hub import offline_unless_reachable
from rlcli.support.served_models import ENGINE_KEY
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALWAYS_MEASURED = ("pass@1", "mean@1")
"""Measures of every evaluation."""


def prepare(
    config: RunConfig,
    *,
    train: bool = True,
    on_note: Callable[[str], None] = lambda text: None,
    on_checked: Callable[[RunConfig, str], None] = lambda config, device: None,
    on_progress: OnProgress = lambda done, total: None,
    day: date | None = None,
    loads_verifiers: bool = True,
) -> Prepared:
    """Check what can be checked and tokenise the prompts.

    train=False checks for evaluation alone: `config.evaluation.data` is then the only data. on_checked: called with the
    configuration and the device before the slow checks, of the model and the prompts. on_progress: how many of a set's
    prompts are tokenized. day: for a chat template that uses the date; None: today (UTC). loads_verifiers: False leaves
    their code alone, and so the sandbox open. Raises RlcliError with the problem and a hint.
    """
    from rlcli.model.io.model_checks import check_model

    # Cheapest checks first: those that import torch and transformers, which takes seconds, come last.
    _check_required_keys(config, train)
    check_engine(config, train=train)
    device = check_machine(config)
    note_unused_gpu(config, device, on_note)
    note_open_cluster(config, on_note)
    config = with_model_folders(config, on_note)
    given_path = config.model.path
    config, adapter = with_adapter_base(with_absolute_paths(config), train=train, given_path=given_path)
    check_adapter(config, compute_dtype(config, device), device, adapter)
    train_rows, test_rows = sets = _rows(config, train)
    config, verifiers, sandbox = _with_verifiers(config, train_rows, test_rows, on_note, loads=loads_verifiers)
    _check_model_exists(config.model.path, on_note)
    config = with_cpu_dtype(config, device, partial(parameter_count, config.model.path))
    dtype = compute_dtype(config, device)
    if train:
        _check_cheap_rules(config, test_rows)
    on_checked(config, device)
    model = check_model(config.model.path, has_template=bool(config.model.chat_template))
    check_float16(dtype, model.kind)
    check_recurrent_layers(config, dtype, device, adapter)
    check_separate_adapter(config, dtype, device, model.kind, adapter)
    if quantization(config.model.path):
        on_note(f"the experts of {config.model.path} are in MXFP4: they are read, and exported, as bfloat16 or float32")
    max_length = check_layout(config, model.max_positions, model.heads, model.experts)
    if train:
        check_quantized(config, dtype, model.experts)
    roles = policy_roles(config, model, train_rows, bool(test_rows)) if train else frozenset[Role](["engine"])
    tokenizer, template_day = _tokenizer(config, model.kind, day, sets, on_note)
    stops = chat_template.stop_tokens(tokenizer, config.model.path, config.rollout.stop_token_ids)
    thinking = chat_template.opens_thinking(tokenizer)
    max_images = check_images(config, model.kind, model.image_rule, dtype, sets, train=train)
    tokenize = partial(_tokenized, config, tokenizer, on_note, on_progress, rule=model.image_rule)
    prompts = tokenize(train_rows, "training", config.data.response) if train else tokenize(test_rows, "evaluation")
    held_out = tokenize(test_rows, "evaluation") if train and test_rows else None
    if train:
        _note_repeats(config, prompts, held_out, on_note)
        _check_keep_best(config, held_out, on_note)
    facts = RunFacts(
        device=device,
        dtype=dtype,
        max_length=max_length,
        kv_cache_bytes=kv_cache_bytes(config, device, dtype, longest_of(config, prompts, held_out)),
        roles=roles,
        adapter=adapter,
        verifiers=verifiers,
        environments=check_environments(config, sets, tokenizer, stops, thinking=thinking, rule=model.image_rule),
        stop_tokens=stops,
        thinking=thinking,
        day=template_day,
        image_rule=model.image_rule,
        max_images=max_images,
    )
    return Prepared(
        RunContext(config, facts), prompts, held_out, model.parameters, sandbox=sandbox, served=models_of(verifiers)
    )


def with_epochs_counted(resolved: Resolved, prepared: Prepared) -> tuple[Resolved, Prepared]:
    """Both with the number of steps that follows from `train.epochs`, if it is given, and the number of prompts. Raises
    `ConfigError` if these steps break a rule."""
    if resolved.config.train.epochs is None:
        return resolved, prepared
    resolved = with_length(resolved, len(prepared.prompts))
    return resolved, prepared.changed(with_steps_of(prepared.config, resolved.config))


def with_steps_of(config: RunConfig, counted: RunConfig) -> RunConfig:
    """`config` with the steps of `counted`."""
    length = ("steps", "epochs", "warmup_steps", "warmup_fraction")
    return config.changed(
        train={name: getattr(counted.train, name) for name in length},
        critic={"warmup_steps": counted.critic.warmup_steps},
    )


def _with_verifiers(
    config: RunConfig,
    train_rows: Sequence[Prompt],
    test_rows: Sequence[Prompt],
    on_note: Callable[[str], None],
    *,
    loads: bool,
) -> tuple[RunConfig, tuple[str, ...], str]:
    """The configuration with the sandbox of this machine, the verifiers of these rows, and that sandbox, or empty if
    they need none. Raises the errors of `check_verifiers` and `check_comparisons`."""
    verifiers, sandbox = check_verifiers(
        JoinedPrompts([train_rows, test_rows]),
        config.verifier,
        on_note,
        # A first attempt has tried them; with given responses nothing is rewarded.
        tried=() if is_restart() or config.data.response else (train_rows, test_rows),
        converses=bool(config.environment.name),
        loads=loads,
        oversample=config.rollout.oversample,
        group=config.rollout.samples_per_prompt,
    )
    _note_engine_key(config, on_note)
    _check_comparisons(config, train_rows, test_rows)
    if sandbox:  # workers use the one found here or none, never another one silently
        config = config.changed(verifier={"sandbox": sandbox})
    return config, verifiers, sandbox


def _note_engine_key(config: RunConfig, on_note: Callable[[str], None]) -> None:
    """Note which servers get the key of RLCLI_ENGINE_KEY, if it is set."""
    if os.environ.get(ENGINE_KEY):
        teachers = (model.path for model in config.teacher.models if model.is_served)
        for url in dict.fromkeys((*config.rollout.server_urls, *teachers)):
            on_note(f"the key in {ENGINE_KEY} is sent to {url}")


def _check_model_exists(model: str, on_note: Callable[[str], None]) -> None:
    """Raise `ModelError` if no such model can exist; use only the hub's cache if the hub cannot be reached."""
    if not Path(model).is_dir():
        offline_unless_reachable(on_note)
    check_place(model)


def _tokenizer(
    config: RunConfig, kind: str, day: date | None, sets: Sequence[Sequence[Prompt]], on_note: Callable[[str], None]
) -> tuple[PreTrainedTokenizerBase, date | None]:
    """The tokenizer, with its chat template fixed and checked on these rows, and the date that the template uses as
    today; None if it uses none."""
    tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
    template_day = (day or datetime.now(UTC).date()) if chat_template.asks_for_date(tokenizer) else None
    chat_template.fix(tokenizer, config.data.chat_template_kwargs, template_day, on_note)
    for note in chat_template.check_family(tokenizer, config.model.path, kind):
        on_note(note)
    for note in dict.fromkeys(note for rows in sets for note in chat_template.check(tokenizer, rows)):
        on_note(note)
    return tokenizer, template_day


def _rows(config: RunConfig, train: bool) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The rows to train and to evaluate on: of the datasets, or numbered ones of the environment."""
    data, held_out = config.data.paths, config.evaluation.paths
    train_rows: Sequence[Prompt] = []
    test_rows: Sequence[Prompt] = []
    name, limit = config.verifier.name, config.evaluation.max_prompts
    if train and data:
        names = dataset_names(data, "--data", "train")
        # Responses that the data gives (data.response) are not verified.
        train_rows = read_sets(data, names, "train", name, verified=not config.data.response)
    elif train:
        train_rows = numbered_rows(config)
    if held_out:
        test_rows = read_sets(held_out, dataset_names(held_out, "--eval-data"), "test", name, limit)
        _check_evaluation_rows(config, test_rows)
    elif config.evaluates:
        test_rows = numbered_rows(config, evaluation=True)[: limit or None]
    return train_rows, test_rows


def _check_evaluation_rows(config: RunConfig, test_rows: Sequence[Prompt]) -> None:
    """Raise `DataError` for an evaluation set whose rows all ask one prompt. An environment may ask something else for
    each of them."""
    if config.environment.name:
        return
    sets = test_rows.parts if isinstance(test_rows, JoinedPrompts) else [test_rows]
    for path, rows in zip(config.evaluation.paths, sets, strict=True):
        check_rows(rows, path)


def _note_repeats(
    config: RunConfig, prompts: TokenizedPrompts, held_out: TokenizedPrompts | None, on_note: Callable[[str], None]
) -> None:
    """Print a note each for repeated training rows, for repeated evaluation rows, and for training rows that are also
    evaluated."""
    conversing = bool(config.environment.name)
    if not conversing and (copies := repeated_rows(prompts)):
        on_note(
            f"{copies} of {len(prompts)} training rows repeat the prompt of another one: each row is drawn once an "
            "epoch, as a separate group, so that a prompt weighs as much as it has rows"
        )
    if held_out is None:
        return
    repeats = repeats_note(len(held_out), len(Problems.of_prompts(held_out.prompts, conversing=conversing)))
    if repeats:
        on_note(f"evaluation: {repeats}")
    if shared := rows_in(prompts, held_out, conversing=conversing):
        on_note(
            f"{shared} of {len(prompts)} training rows are evaluated too (the same prompt): the evaluation shows what "
            "was memorised; take them out with: rlcli prep … --decontaminate EVALUATION"
        )


def _check_keep_best(config: RunConfig, held_out: TokenizedPrompts | None, on_note: Callable[[str], None]) -> None:
    """Print a note if `checkpoint.keep_best` cannot find the best checkpoint. Raises `ConfigError` for a measure that
    the evaluations will not have."""
    rules, every, steps = config.checkpoint, config.evaluation.every, config.train.steps
    setting = f"checkpoint.keep_best = {rules.keep_best}"
    if held_out is None:
        if rules.keep_best:
            on_note(
                f"{setting} has no effect: nothing is evaluated (evaluation.data is unset), so no checkpoint is the "
                "best"
            )
        return
    _check_measure(config, held_out.prompts)
    if rules.keep_best and not every:
        on_note(f"{setting} has no effect: of the checkpoints only the last is evaluated; set evaluation.every")
    elif rules.keep_best:
        evaluated = range(every, steps, every)
        lost = sum(not rules.every or step % rules.every != 0 for step in evaluated)
        if lost:
            on_note(
                f"{setting}: {lost} of {len(evaluated)} evaluations before the last are of steps without a checkpoint "
                f"(evaluation.every = {every}, checkpoint.every = {rules.every}), so the best of them cannot be kept"
            )


def _check_measure(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if evaluations on these prompts do not have the measure `checkpoint.best_by`."""
    if config.checkpoint.best_by in ALWAYS_MEASURED:
        return
    problems = Problems.of_prompts(prompts, conversing=bool(config.environment.name))
    ks = ks_of(int(np.bincount(problems.of_row).min()) * config.evaluation.samples)
    measures = [*(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks[1:]), *dict.fromkeys(("mean@1", f"mean@{ks[-1]}"))]
    if config.checkpoint.best_by not in measures:
        raise ConfigError(
            f"checkpoint.best_by = {config.checkpoint.best_by}: the evaluations measure {', '.join(measures)}",
            "give one of them, or raise evaluation.samples",
        )


def _check_cheap_rules(config: RunConfig, test_rows: Sequence[Prompt]) -> None:
    """Raise `ConfigError` for problems that config.json and rows show in milliseconds, before Ray starts: afterwards
    every check takes longer. Each is checked again when everything is known."""
    if (plain := plain_config(config.model.path)) is not None:
        check_layout(config, plain.max_position_embeddings, plain.num_attention_heads, expert_count(plain))
    if len(test_rows):
        _check_measure(config, test_rows)


def _check_required_keys(config: RunConfig, train: bool) -> None:
    if not config.model.path:
        raise ConfigError("no model is given", "name a folder or hub id with --model")
    if train and not config.data.paths and not config.environment.name:
        raise ConfigError(
            "no data is given", "name a parquet file or folder with --data; make one with: rlcli prep gsm8k"
        )
    if not train and config.rollout.workers:
        raise ConfigError(
            f"rollout.workers = {config.rollout.workers}: in an evaluation all workers generate",
            "give 0, and their number with --workers",
        )


def _check_comparisons(config: RunConfig, train_rows: Sequence[Prompt], test_rows: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group and there are none to compare."""
    rollout = config.rollout
    check_comparisons(
        verifiers_of(train_rows), "rollout.samples_per_prompt", rollout.samples_per_prompt, rollout.oversample
    )
    check_comparisons(verifiers_of(test_rows), "evaluation.samples", config.evaluation.samples)


def _tokenized(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    on_note: Callable[[str], None],
    on_progress: OnProgress,
    rows: Sequence[Prompt],
    kind: str,
    response: str = "",
    rule: ImageRule | None = None,
) -> TokenizedPrompts:
    """The rows that are short enough, tokenized; a note counts the others. kind: `training` or `evaluation`, for the
    note. response: the field of extra_info with the response, if one is given."""
    prompts = tokenized(
        rows,
        tokenizer,
        config.data.max_prompt_tokens,
        on_progress,
        response=response,
        max_response_tokens=config.rollout.max_response_tokens,
        rule=rule,
    )
    for why, count in prompts.left_out.items():
        if count:
            on_note(f"{count} of {len(rows)} {kind} rows left out: {why}")
    if len(prompts.control):
        first = prompts.prompts[int(prompts.control[0])]
        token = control_token_in(first, chat_template.control_tokens(tokenizer))
        on_note(
            f"{len(prompts.control)} of {len(prompts)} {kind} rows have control tokens in their text ({token} in "
            f"{first.id}, for one): the model reads them as what they mean, not as text"
        )
    if isinstance(prompts.prompts, JoinedPrompts):
        for name, rows_of_set in zip(prompts.prompts.names, prompts.prompts.parts, strict=True):
            if not rows_of_set:
                raise DataError(
                    f"data: no row of {name} is within data.max_prompt_tokens = {config.data.max_prompt_tokens}"
                    + (f" and rollout.max_response_tokens = {config.rollout.max_response_tokens}" if response else ""),
                    "raise it, or leave that dataset out",
                )
    return prompts


def longest_of(config: RunConfig, *sets: TokenizedPrompts | None) -> int:
    """Tokens of the longest sample that the prompts of these sets allow."""
    longest = max((int(np.diff(prompts.offsets).max(initial=0)) for prompts in sets if prompts is not None), default=0)
    return config.longest_sample(longest or None)
