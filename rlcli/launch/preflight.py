"""All checks that need no worker: the model, the data, the machine, the derived plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcli.cluster.ray_session import check_local, cluster_address, resolve_device, with_origin
from rlcli.config.load import Resolved, with_length
from rlcli.config.rules import nearest_divisors
from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts
from rlcli.data.messages import Role
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.overlap import repeated_rows, rows_in
from rlcli.data.prompts.prompt_table import JoinedPrompts, read_sets, verifiers_of
from rlcli.data.prompts.template_choice import located
from rlcli.data.prompts.token_cache import OnProgress, tokenized
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts, control_token_in, load_tokenizer
from rlcli.errors import ConfigError, DataError, ModelError, RlcliError, SetupError
from rlcli.evaluation.equal_problems import Problems, check_rows, repeats_note
from rlcli.evaluation.evaluation_folder import dataset_names
from rlcli.evaluation.statistics import ks_of
from rlcli.export.export_folder import RECORD, with_model_folders
from rlcli.images.image_rule import ImageRule
from rlcli.launch.engine_checks import (
    check_adapter,
    check_engine,
    check_images,
    check_merged,
    check_quantized,
    check_states,
)
from rlcli.launch.environment_checks import check_environments, numbered_rows
from rlcli.launch.planner import planner
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.verifier_trial import check_rivals, check_verifiers
from rlcli.model.io.model_config import check_place, expert_count, plain_config
from rlcli.model.io.mxfp4 import quantization
from rlcli.rollout.model_servers.models_to_serve import models_of
from rlcli.rollout.scheduler.verifier_failures import part_weights
from rlcli.runs.checkpoint import TEMPLATE
from rlcli.support.attempt import is_restart
from rlcli.support.hub import offline_unless_reachable
from rlcli.support.machine import processor
from rlcli.support.machine.gpus import NVML, for_rocm, has_gpu, has_nvml
from rlcli.support.reading import read_json
from rlcli.support.served_models import ENGINE_KEY
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcli.model.io.model_checks import ModelFacts

MOST_LISTED = 5
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
    _check_given(config, train)
    check_engine(config, train=train)
    device = check_machine(config)
    _note_unused_gpu(config, device, on_note)
    _note_open_cluster(config, on_note)
    config, adapter = _located(with_model_folders(config, on_note), train)
    check_adapter(config, compute_dtype(config, device), device, adapter)
    train_rows, test_rows = sets = _rows(config, train)
    config, verifiers, sandbox = _scoring(config, train_rows, test_rows, on_note, loads=loads_verifiers)
    _check_place(config.model.path, on_note)
    config = with_cpu_dtype(config, device, partial(_parameters, config.model.path))
    dtype = compute_dtype(config, device)
    if train:
        _check_early(config, test_rows)
    on_checked(config, device)
    model = check_model(config.model.path, has_template=bool(config.model.chat_template))
    check_half(dtype, model.kind)
    check_states(config, dtype, device, adapter)
    check_merged(config, dtype, device, model.kind, adapter)
    if quantization(config.model.path):
        on_note(f"the experts of {config.model.path} are in MXFP4: they are read, and exported, as bfloat16 or float32")
    max_length = check_fit(config, model.max_positions, model.heads, model.experts)
    if train:
        check_quantized(config, dtype, model.experts)
    roles = _roles(config, model, train_rows, bool(test_rows)) if train else frozenset[Role](["engine"])
    tokenizer, template_day = _tokenizer(config, model.kind, day, sets, on_note)
    stops = chat_template.stop_tokens(tokenizer, config.model.path, config.rollout.stop_token_ids)
    thinking = chat_template.opens_thinking(tokenizer)
    max_images = check_images(config, model.kind, model.image_rule, dtype, sets, train=train)
    ready = partial(_tokenized, config, tokenizer, on_note, on_progress, rule=model.image_rule)
    prompts = ready(train_rows, "training", config.data.response) if train else ready(test_rows, "evaluation")
    held_out = ready(test_rows, "evaluation") if train and test_rows else None
    if train:
        _note_repeats(config, prompts, held_out, on_note)
        _check_best(config, held_out, on_note)
    facts = RunFacts(
        device=device,
        dtype=dtype,
        max_length=max_length,
        kv_cache_bytes=kv_cache_bytes(config, device, dtype, longest_of(config, prompts, held_out)),
        roles=roles,
        adapter=adapter,
        verifiers=verifiers,
        environments=check_environments(config, sets, tokenizer, stops, opened=thinking, rule=model.image_rule),
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
    return resolved, prepared.changed(with_length_of(prepared.config, resolved.config))


def with_length_of(config: RunConfig, counted: RunConfig) -> RunConfig:
    """`config` with the steps of `counted`."""
    length = ("steps", "epochs", "warmup_steps", "warmup_fraction")
    return config.changed(
        train={name: getattr(counted.train, name) for name in length},
        critic={"warmup_steps": counted.critic.warmup_steps},
    )


def _note_unused_gpu(config: RunConfig, device: str, on_note: Callable[[str], None]) -> None:
    """Print a note if the run uses the CPUs of a machine with a GPU because the installed packages are built for
    them."""
    device_set = config.cluster.device != "auto" or bool(cluster_address(config.cluster.address))
    if device == "cpu" and not device_set and has_gpu():
        on_note(
            "this machine has a GPU, but the installed torch or vLLM is built for CPUs: the run takes the CPUs. "
            "RLCLI_EXTRA=gpu scripts/env installs what uses the GPU; cluster.device = cpu ends this note"
        )


def _note_open_cluster(config: RunConfig, on_note: Callable[[str], None]) -> None:
    """Print a note if the run joins a cluster without a token."""
    address = with_origin(config.cluster.address)
    if address and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        on_note(
            f"the Ray cluster at {address} is joined without a token (RAY_AUTH_MODE is not token): whoever reaches its "
            "ports can run code on its machines"
        )


def _scoring(
    config: RunConfig,
    train_rows: Sequence[Prompt],
    test_rows: Sequence[Prompt],
    on_note: Callable[[str], None],
    *,
    loads: bool,
) -> tuple[RunConfig, tuple[str, ...], str]:
    """The configuration with the sandbox of this machine, the verifiers of these rows, and that sandbox, or empty if
    they need none. Raises the errors of `check_verifiers` and `check_rivals`."""
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
    _check_rivals(config, train_rows, test_rows)
    if sandbox:  # workers use the one found here or none, never another one silently
        config = config.changed(verifier={"sandbox": sandbox})
    return config, verifiers, sandbox


def _note_engine_key(config: RunConfig, on_note: Callable[[str], None]) -> None:
    """Note which servers get the key of RLCLI_ENGINE_KEY, if it is set."""
    if os.environ.get(ENGINE_KEY):
        teachers = (model.path for model in config.teacher.models if model.is_served)
        for url in dict.fromkeys((*config.rollout.server_urls, *teachers)):
            on_note(f"the key in {ENGINE_KEY} is sent to {url}")


def _check_place(model: str, on_note: Callable[[str], None]) -> None:
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
        _check_asked(config, test_rows)
    elif config.evaluates:
        test_rows = numbered_rows(config, evaluation=True)[: limit or None]
    return train_rows, test_rows


def _check_asked(config: RunConfig, test_rows: Sequence[Prompt]) -> None:
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
            "epoch, as a group of its own, so that a prompt weighs as much as it has rows"
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


def _check_best(config: RunConfig, held_out: TokenizedPrompts | None, on_note: Callable[[str], None]) -> None:
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


def _check_early(config: RunConfig, test_rows: Sequence[Prompt]) -> None:
    """Raise `ConfigError` for problems that config.json and rows show in milliseconds, before Ray starts: afterwards
    every check takes longer. Each is checked again when everything is known."""
    if (plain := plain_config(config.model.path)) is not None:
        check_fit(config, plain.max_position_embeddings, plain.num_attention_heads, expert_count(plain))
    if len(test_rows):
        _check_measure(config, test_rows)


def _check_given(config: RunConfig, train: bool) -> None:
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


NEVER_HALF = ("gemma3_text", "glm4", "gpt_oss")
"""Kinds of models that vLLM does not run in float16."""


def check_half(dtype: str, kind: str) -> None:
    if dtype == "float16" and kind in NEVER_HALF:
        raise ConfigError(
            f"model.dtype = float16: activations of '{kind}' models exceed its range, and vLLM refuses them",
            "give bfloat16 or float32",
        )


def check_fit(config: RunConfig, positions: int, heads: int, experts: int) -> int:
    """Tokens of the longest prompt and response. Raises `ConfigError` if the model has fewer positions,
    or other attention heads or experts than it is to divide, or no experts whose routes it is to replay."""
    length, shared = config.max_length, config.rollout.tensor_parallel
    if length > positions:
        raise ConfigError(
            f"{config.longest} = {length} is more than the {positions} positions of {config.model.path}",
            "lower one of them",
        )
    if heads % shared:
        raise ConfigError(
            f"rollout.tensor_parallel = {shared} does not divide the {heads} attention heads of {config.model.path}",
            "give a divisor of it",
        )
    _check_heads(config, config.model.path, heads)
    divided = config.parallel.expert
    if divided > 1 and not experts:
        raise ConfigError(f"parallel.expert = {divided}: {config.model.path} has no experts to divide", "leave it out")
    _check_experts(config, config.model.path, experts)
    if config.rollout.replay_routes and not experts:
        raise ConfigError(f"rollout.replay_routes: {config.model.path} has no experts", "leave it out")
    return length


def _check_heads(config: RunConfig, path: str, heads: int) -> None:
    """Raise `ConfigError` if the model at `path` has too few attention heads to be divided."""
    if config.parallel.context > heads:
        raise ConfigError(
            f"parallel.context = {config.parallel.context} is more than the {heads} attention heads of {path}, which "
            "it divides",
            f"give at most {heads}",
        )


def _check_experts(config: RunConfig, path: str, experts: int) -> None:
    """Raise `ConfigError` if the experts of each layer of the model at `path` cannot be divided as they are to be."""
    divided = config.parallel.expert
    if experts % divided:
        raise ConfigError(
            f"parallel.expert = {divided} does not divide the {experts} experts of each layer of {path}",
            f"give {nearest_divisors(math.gcd(experts, config.cluster.workers // config.parallel.replicate), divided)}",
        )


def with_cpu_dtype(config: RunConfig, device: str, parameters: Callable[[], int]) -> RunConfig:
    """The configuration with the precision that `model.dtype = auto` stands for on CPUs. parameters: counts those of
    the model.

    It is float32 unless bfloat16 is known to be faster and does as well: an adapter is added to the weights exactly in
    float32 alone, and the machines of a running cluster are not those that are measured here.
    """
    if config.model.dtype != "auto" or device != "cpu":
        return config
    if config.lora.rank or cluster_address(config.cluster.address):
        return config.changed(model={"dtype": "float32"})
    from rlcli.support.machine.precision import cpu_dtype

    return config.changed(model={"dtype": cpu_dtype(parameters())})


def _parameters(path: str) -> int:
    """Parameters of the model by its config.json, in milliseconds; 0 if it cannot be used, which `check_model`
    reports."""
    try:
        return planner().parameters(path)
    except RlcliError:
        return 0


def compute_dtype(config: RunConfig, device: str) -> str:
    """`float32`, `bfloat16` or `float16`; before the model is known, float32 on CPUs by `auto`."""
    return config.model.dtype if config.model.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"


def _check_rivals(config: RunConfig, train_rows: Sequence[Prompt], test_rows: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if a verifier compares the responses of a group and there are none to compare."""
    rollout = config.rollout
    check_rivals(verifiers_of(train_rows), "rollout.samples_per_prompt", rollout.samples_per_prompt, rollout.oversample)
    check_rivals(verifiers_of(test_rows), "evaluation.samples", config.evaluation.samples)


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
    """The rows that are short enough; the note counts the others. what: the prompts' kind, for the note. response: the
    field of extra_info with the response, if one is given."""
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


def _roles(config: RunConfig, policy: ModelFacts, rows: Sequence[Prompt], evaluates: bool) -> frozenset[Role]:
    """The roles of the policy's workers. Raises `ConfigError` for an algorithm whose parts do not fit together,
    `ModelError` for a critic that cannot be trained, and the errors of `_check_teachers`."""
    from rlcli.algorithms.build import build_algorithm
    from rlcli.launch.algorithm_rules import check_algorithm
    from rlcli.model.io.model_checks import check_model, check_value_model

    algorithm = build_algorithm(**config.algorithm.model_dump())
    check_algorithm(config, algorithm)
    part_weights(config.algorithm.advantage, verifiers_of(rows))
    if policy.image_rule is not None and (
        algorithm.needs_critic or algorithm.needs_process_rewards or algorithm.needs_teacher
    ):
        raise ConfigError(
            "critics, process reward models and teachers do not support images, which the policy reads",
            "give a recipe without them, such as grpo",
        )
    roles: set[Role] = {"policy"}
    if not config.rollout.workers and (evaluates or not config.data.response):
        roles.add("engine")
    critic = config.critic.path or config.model.path
    if algorithm.needs_critic:
        heads, experts = check_value_model(critic, policy.tokenizer_size)
        _check_heads(config, critic, heads)
        _check_experts(config, critic, 0 if config.critic.workers else experts)
        roles |= set() if config.critic.workers else {"critic"}
    if algorithm.needs_process_rewards:
        process = check_model(critic, key="critic.path")
        _check_heads(config, critic, process.heads)
        _check_experts(config, critic, process.experts)
        if process.vocab_size < policy.tokenizer_size:  # it reads the policy's tokens
            raise ModelError(
                f"critic.path = '{config.critic.path}': its vocabulary ends at {process.vocab_size - 1}, but the "
                f"policy's tokenizer has ids up to {policy.tokenizer_size - 1}",
                "give a process reward model of the policy's family, or leave critic.path out",
            )
        roles.add("process_reward")
    if algorithm.needs_teacher:
        _check_teachers(config, rows)
        roles |= set() if config.teacher.workers else {"teacher"}
    return frozenset(roles)


def _check_teachers(config: RunConfig, rows: Sequence[Prompt]) -> None:
    """Raise `ModelError` for a teacher that cannot score the policy's tokens, and `ConfigError` for rows without a
    teacher, for a data source that no row has and for a malformed URL."""
    from rlcli.model.io.model_checks import check_teacher
    from rlcli.support.json_link import checked_url
    from rlcli.training.worker.served_teacher import check_served_teacher

    models = config.teacher.models
    for path in dict.fromkeys(model.path for model in config.teacher.held):
        facts = check_teacher(path, config.model.path, config.max_length, config.parallel.context)
        _check_experts(config, path, 0 if config.teacher.workers else facts.experts)
    for path in dict.fromkeys(model.path for model in models if model.is_served):
        check_served_teacher(checked_url(path), config.model.path, config.max_length, config.teacher.top_k)
    if not any(model.sources for model in models):
        return
    data_sources = sorted({row.data_source for row in rows})
    listed = ", ".join(data_sources[:MOST_LISTED]) + (", …" if len(data_sources) > MOST_LISTED else "")
    for source in (source for model in models for source in model.sources if source not in data_sources):
        raise ConfigError(f"teacher.path: no row has the data source '{source}'", f"the data has {listed}")
    for source in (source for source in data_sources if config.teacher.number_of(source) is None):
        raise ConfigError(
            f"teacher.path: rows of the data source '{source}' have no teacher",
            "name it in a teacher's sources, or give one teacher without sources, which teaches all others",
        )


def check_machine(config: RunConfig) -> str:
    """The device that workers run on, after checking that they fit.

    On this machine's CPUs at most one worker a core; two are always allowed, so that features with several can be used.
    """
    device = resolve_device(config.cluster.device, config.cluster.address)
    check_device(config, device)
    if not cluster_address(config.cluster.address):
        check_local()
        if device == "cuda":
            check_nvml(config)
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" and not cluster_address(config.cluster.address) and config.all_workers > max(2, cores):
        pools = {
            "cluster": config.cluster.workers,
            "critic": config.critic.workers,
            "teacher": config.teacher.workers,
            "rollout": config.rollout.workers,
        }
        listed = " + ".join(f"{name}.workers = {count}" for name, count in pools.items() if count)
        raise ConfigError(
            f"{listed}, but this machine has {cores} CPU cores",
            f"give {max(2, cores)} workers or fewer in all, or name a Ray cluster with --ray-address",
        )
    return device


def check_nvml(config: RunConfig) -> None:
    """Raise `SetupError` if vLLM would find no GPU on this machine, although torch does."""
    rollout = config.rollout
    starts_vllm = rollout.engine == "vllm" or (rollout.engine == "server" and not rollout.server_urls)
    if starts_vllm and not for_rocm() and not has_nvml():
        raise SetupError(
            f"torch sees a GPU here, but NVIDIA's management library ({NVML}) does not work, through which vLLM looks "
            "for GPUs",
            "give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility, or --set rollout.engine=transformers",
        )


def check_device(config: RunConfig, device: str) -> None:
    """Refuse GPU-only settings if workers run on CPUs, and vLLM on a processor that its builds do not run on."""
    if config.rollout.engine == "vllm" and device == "cpu" and not processor.runs_vllm():
        raise SetupError(
            f"this processor ({processor.name()}) has no AVX2, which vLLM's builds for CPUs need",
            "use another engine: --set rollout.engine=transformers",
        )
    if config.rollout.quantization and device == "cpu":
        raise ConfigError(
            f"rollout.quantization = {config.rollout.quantization}, but CPUs have no 8-bit floating point "
            "arithmetic, and workers run on them (cluster.device)",
            "leave it out",
        )
    if config.model.compile and device == "cpu":
        raise ConfigError(
            "model.compile = true, but workers run on CPUs (cluster.device), and layers are compiled only for GPUs",
            "leave it out",
        )


def _located(config: RunConfig, train: bool) -> tuple[RunConfig, str]:
    """The configuration with absolute paths (workers run in other directories), and the adapter in the model folder."""
    if config.critic.path and Path(config.critic.path).is_dir():
        config = config.changed(critic={"path": str(Path(config.critic.path).resolve())})
    teachers = config.teacher.placed(lambda path: str(Path(path).resolve()) if Path(path).is_dir() else path)
    config = config.changed(teacher=teachers)
    if config.algorithm.code:
        config = config.changed(algorithm={"code": str(Path(config.algorithm.code).expanduser().resolve())})
    config = config.changed(model={"chat_template": located(config.model.chat_template)})
    file, _, attribute = config.environment.name.rpartition(":")
    if file.endswith(".py"):
        config = config.changed(environment={"name": f"{Path(file).expanduser().resolve()}:{attribute}"})
    folder = Path(config.model.path)
    if not folder.is_dir():
        return config, ""
    folder = folder.resolve()
    note = folder / "adapter_config.json"
    if not note.is_file():
        return config.changed(model={"path": str(folder)}), ""
    if train:
        raise ModelError(
            f"model.path = '{config.model.path}' is a LoRA adapter",
            "train its base model, or merge the two first: rlcli export RUN --merge",
        )
    try:
        settings = read_json(note, links=True)
        base, rank = settings["base_model_name_or_path"], settings["r"]
        on_experts = bool(settings.get("target_parameters"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"cannot read adapter {note}: {type(error).__name__}: {error}", "copy the whole adapter again"
        ) from error
    lora = {"rank": rank, **({"targets": "all-linear,experts"} if on_experts else {})}
    model = {"path": base}
    if not config.model.chat_template and (folder / RECORD).is_file() and (folder / TEMPLATE).is_file():
        model["chat_template"] = str(folder / TEMPLATE)  # that of the run, which its base may lack
    return config.changed(model=model, lora=lora), str(folder)


def kv_cache_bytes(config: RunConfig, device: str, dtype: str, longest: int) -> int | None:
    """The configured size; else on CPUs as the workload requires; on GPUs None: vLLM measures free memory. longest:
    tokens of the longest sample that the run's prompts allow."""
    rollout = config.rollout
    if rollout.kv_cache_mb is not None:
        return rollout.kv_cache_mb << 20
    if device == "cuda":
        return None
    return planner().kv_cache_bytes(config, 4 if dtype == "float32" else 2, longest)


def longest_of(config: RunConfig, *sets: TokenizedPrompts | None) -> int:
    """Tokens of the longest sample that the prompts of these sets allow."""
    longest = max((int(np.diff(prompts.offsets).max(initial=0)) for prompts in sets if prompts is not None), default=0)
    return config.longest_sample(longest or None)
