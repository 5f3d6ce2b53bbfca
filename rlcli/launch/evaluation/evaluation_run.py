"""Runs one evaluation on several datasets: keeps existing samples, generates missing ones, reports all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.prompt_table import images_per_prompt, read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import ConfigError, RlcliError
from rlcli.evaluation.equal_problems import check_rows
from rlcli.evaluation.evaluation_folder import REPORT, EvalStore, dataset_names, settings_of
from rlcli.evaluation.evaluation_report import MOST_CATEGORIES, EvalReport, generate, labels_of, report_of, score_bounds
from rlcli.evaluation.evaluation_settings import day_in, local_model, prompts_mark, settings_of_evaluation
from rlcli.evaluation.responses import COLUMNS, Responses, joined
from rlcli.evaluation.statistics import Estimate, average_of
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.runs.folder import write_json
from rlcli.types import Prompt

if TYPE_CHECKING:
    from rlcli.launch.prepared_run import Prepared
    from rlcli.runs.tracking.run_console import View


@dataclass(frozen=True)
class Request:
    """An evaluation request."""

    config: RunConfig
    """Model, sampling and limits."""
    paths: tuple[str, ...]
    """Paths of the datasets; none: numbered rows of the environment."""
    greedy: bool = False
    """One greedy response to each prompt besides the samples."""
    by: tuple[str, ...] = ()
    """Further fields to report by category."""
    out: Path | None = None
    """Folder for the samples, if they are kept."""
    force: bool = False
    """Discard samples there that were generated with other settings."""
    omit: tuple[str, ...] = ()
    """Sampling values that are not sent to an endpoint."""


@dataclass(frozen=True)
class Evaluation:
    """The results."""

    model: str
    """Path or id."""
    data: dict[str, str]
    """Dataset → path."""
    prompts: Sequence[Prompt]
    """Prompts of all datasets."""
    reports: dict[str, EvalReport]
    """Dataset → its report."""
    overall: EvalReport
    """All prompts of all datasets together."""
    averages: Mapping[str, Estimate]
    """Averages of the datasets' pass@1 and mean@1, with equal weights."""
    generated: int
    """Number of responses of this call; the others existed."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: the overall report, and each dataset's."""
        return {
            "model": self.model,
            "data": self.data,
            **self.overall.as_dict(),
            "average_of_datasets": {name: asdict(average) for name, average in self.averages.items()},
            "generated": self.generated,
            "datasets": {name: report.as_dict() for name, report in self.reports.items()},
        }


@dataclass
class _Dataset:
    """One of the datasets."""

    name: str
    """Unique among the datasets."""
    prompts: Sequence[Prompt]
    """The rows to evaluate."""
    left_out: Mapping[str, int]
    """Reason → number of further rows of the data."""
    mark: str
    """Digest of all prompts in the file."""
    existing: Responses | None = None
    """Responses that are in the sample folder already."""
    wanted: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """For each prompt, the missing samples."""

    @property
    def missing(self) -> int:
        return sum(map(len, self.wanted))

    def look(self, samples: int, greedy: bool, store: EvalStore | None) -> None:
        """Read existing samples."""
        every = (*([GREEDY] if greedy else []), *range(samples))
        self.wanted = [every] * len(self.prompts)
        table = store.samples(self.name, ("prompt_id", *COLUMNS)) if store else None
        if table is None:
            return
        responses = Responses.of_table(table, {prompt.id: index for index, prompt in enumerate(self.prompts)})
        self.existing = responses.where((responses.sample < samples) & (responses.sample >= (GREEDY if greedy else 0)))
        have: list[set[int]] = [set() for _ in self.prompts]
        for index, sample in zip(self.existing.prompt.tolist(), self.existing.sample.tolist(), strict=True):
            have[index].add(sample)
        self.wanted = [tuple(s for s in every if s not in existing) for existing in have]


Respond = Callable[[_Dataset, str], Responses]
"""Generates the missing samples of a dataset, and saves them as the pattern says, unless it is empty."""


def evaluate_model(request: Request, view: View) -> Evaluation:
    """Evaluate a model on local engines, started once for all datasets, and not at all if nothing is missing."""
    from rlcli.launch.evaluation.template_check import day_of_run
    from rlcli.launch.preflight import prepare

    notes = cache(view.note)  # once each: every dataset gives the same notes about the model
    names, marks = _names(request)
    day = day_of_run(request.config.model.path) or day_in(settings_of(request.out) if request.out else {})
    prepared: dict[str, Prepared] = {}
    for name, path in zip(names, request.paths or [""], strict=True):
        prepared[name] = prepare(
            request.config.changed(evaluation={"data": path}),
            train=False,
            on_note=notes,
            on_progress=view.progress,
            day=day,
        )
    ready = _together(list(prepared.values()))
    _check_templates(request.config.model.path, prepared, notes)
    datasets = [
        _Dataset(name, dataset.prompts.prompts, dataset.prompts.left_out, mark)
        for (name, dataset), mark in zip(prepared.items(), marks, strict=True)
    ]
    _check_fields(request.by, datasets)
    model = local_model(ready.config.model.path, ready.facts.adapter, ready.facts.dtype, ready.facts.day)
    with ExitStack() as stack:
        store = _open(request, datasets, ready.config, model, stack)
        engines = partial(
            _engines, ready, {name: dataset.prompts for name, dataset in prepared.items()}, bool(store), view
        )
        fresh = _run_missing(engines, datasets, store, stack, view)
        return _evaluation(request, request.config.model.path, names, datasets, fresh, store)


def evaluate_endpoint(request: Request, endpoint: str, view: View) -> Evaluation:
    """Evaluate a served model."""
    from rlcli.launch.evaluation.endpoint_evaluation import ask, scoring, served_name
    from rlcli.rollout.openai_client import SAMPLING, ChatClient

    config = request.config
    names, marks = _names(request)
    limit = config.evaluation.max_prompts or None
    rows = {
        name: read_prompts(path, "test", config.verifier.name)[:limit]
        for name, path in zip(names, request.paths, strict=True)
    }
    if any(images_per_prompt(prompts).any() for prompts in rows.values()):
        raise ConfigError(
            "the data has images, and --endpoint sends text alone",
            "evaluate a model's folder, or data without images",
        )
    for path, prompts in zip(request.paths, rows.values(), strict=True):
        check_rows(prompts, path)
    datasets = [_Dataset(name, prompts, {}, mark) for (name, prompts), mark in zip(rows.items(), marks, strict=True)]
    _check_fields(request.by, datasets)
    scorers = scoring(config, [prompt for dataset in datasets for prompt in dataset.prompts], view.note)
    client = ChatClient(
        endpoint, config.model.path or None, concurrency=config.rollout.max_concurrent, omit=request.omit
    )
    if request.omit:
        view.note(f"not sent, so that the server's own default applies: {', '.join(sorted(request.omit))}")
    if client.sends_key:
        view.note(f"the key in OPENAI_API_KEY is sent to {client.base_url}")
    model = served_name(client)
    with ExitStack() as stack:
        sent = ", ".join(name for name in SAMPLING if name not in client.omit)
        identity = {"endpoint": client.base_url, "model": model, "sampling values sent": sent}
        store = _open(request, datasets, config, identity, stack)

        @contextmanager
        def server(logs: Path) -> Iterator[Respond]:
            with scorers() as scorer:
                yield lambda dataset, save_as: ask(
                    client,
                    scorer,
                    config,
                    dataset.prompts,
                    dataset.wanted,
                    save_as=save_as,
                    on_progress=view.progress,
                    on_note=view.note,
                )

        fresh = _run_missing(server, datasets, store, stack, view)
        _note_lower_limit(request, fresh, view)
        return _evaluation(request, model, names, datasets, fresh, store)


def _note_lower_limit(request: Request, fresh: Mapping[str, Responses], view: View) -> None:
    """Note how many responses a server cut off before the limit that it was sent."""
    limit = request.config.rollout.max_response_tokens
    cut = sum(int((responses.truncated & (responses.tokens < limit)).sum()) for responses in fresh.values())
    if cut and "max_tokens" not in request.omit:
        view.note(
            f"the server cut {cut} responses off before --max-tokens = {limit}: its context ends there, or the model's "
            "generation config has a lower max_new_tokens"
        )


@contextmanager
def _engines(
    ready: Prepared, prompts: Mapping[str, TokenizedPrompts], shared: bool, view: View, logs: Path
) -> Iterator[Respond]:
    """Local engines. shared: whether their machines must see the folder of samples."""
    view.phase("load torch and the engine")  # done by the next import, takes seconds
    from rlcli.cluster.supervisor.stop_signals import StopOnSignal
    from rlcli.launch.launch import check_shared, running_workers

    with StopOnSignal(lambda: None), running_workers(ready, logs, on_phase=view.phase) as groups:
        if shared:
            check_shared(logs, groups.spec.name, len(groups.policy))
        yield lambda dataset, save_as: generate(
            groups.policy,
            prompts[dataset.name],
            dataset.wanted,
            ready.config,
            save_as=save_as,
            on_progress=view.progress,
        )


def _run_missing(
    source: Callable[[Path], AbstractContextManager[Respond]],
    datasets: Sequence[_Dataset],
    store: EvalStore | None,
    stack: ExitStack,
    view: View,
) -> dict[str, Responses]:
    """The missing samples of each dataset. source: started, with a folder for logs, only if something is missing; its
    errors get a hint that no sample is lost."""
    import tempfile

    if not any(dataset.missing for dataset in datasets):
        view.note(f"every sample is in {store.path if store else ''} already: nothing to generate")
        return {}
    # Workers write their logs here; if nothing is kept, the logs are deleted with this folder.
    logs = (
        store.logs if store else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlcli-eval-"))) / "logs"
    )
    fresh: dict[str, Responses] = {}
    try:
        with source(logs) as respond:
            for dataset in datasets:
                if dataset.missing:
                    view.phase(_phase(dataset, len(datasets)))
                    fresh[dataset.name] = respond(dataset, store.pattern(dataset.name) if store else "")
        return fresh
    except RlcliError as error:
        if store is None or not any(map(store.holds, (dataset.name for dataset in datasets))):
            raise
        hint = f"the same command continues from the samples in {store.path}"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
        error.args = (f"{error.message}; {error.hint}",)
        raise


def _evaluation(
    request: Request,
    model: str,
    names: Sequence[str],
    datasets: Sequence[_Dataset],
    fresh: Mapping[str, Responses],
    store: EvalStore | None,
) -> Evaluation:
    reports: dict[str, EvalReport] = {}
    by_dataset: list[Responses] = []
    offsets: list[int] = []
    prompts: list[Prompt] = []
    for dataset in datasets:
        parts = [part for part in (dataset.existing, fresh.get(dataset.name)) if part is not None]
        responses = joined(parts, [0] * len(parts))
        reports[dataset.name] = _report(request, responses, dataset.prompts, [dataset])
        by_dataset.append(responses)
        offsets.append(len(prompts))
        prompts += dataset.prompts
        if store:
            store.finish(dataset.name)
    every = joined(by_dataset, offsets)
    overall = _report(request, every, prompts, datasets) if len(reports) > 1 else next(iter(reports.values()))
    averages = {
        name: average_of([report.values[name] for report in reports.values()], bounds=bounds)
        for name, bounds in (("pass@1", (0.0, 1.0)), ("mean@1", score_bounds(every)))
    }
    evaluation = Evaluation(
        model,
        dict(zip(names, request.paths or [request.config.environment.name], strict=True)),
        prompts,
        reports,
        overall,
        averages,
        sum(map(len, fresh.values())),
    )
    if store:
        write_json(store.path / REPORT, evaluation.as_dict())
    return evaluation


def _report(
    request: Request, responses: Responses, prompts: Sequence[Prompt], datasets: Sequence[_Dataset]
) -> EvalReport:
    left_out: Counter[str] = Counter()
    for dataset in datasets:
        left_out.update(dataset.left_out)
    conversing = bool(request.config.environment.name)
    return report_of(responses, prompts, request.by, conversing=conversing, left_out=left_out)


def _names(request: Request) -> tuple[list[str], list[str]]:
    """The datasets' names, and the mark of each one's prompts, empty if no sample is kept. A dataset that the sample
    folder knows keeps its name: `dataset_names` renames it if another one has the same name."""
    config = request.config
    names = dataset_names(request.paths or [config.environment.name.rpartition(":")[2]])
    if not request.out:
        return names, [""] * len(names)
    # Of all rows of the file: with --max-prompts fewer rows are evaluated, and the samples stay valid.
    if request.paths:
        marks = [prompts_mark(read_prompts(path, "test", config.verifier.name)) for path in request.paths]
    else:
        from rlcli.launch.environment_checks import numbered_rows

        marks = [prompts_mark(numbered_rows(config, evaluation=True))]
    stored = settings_of(request.out).get("datasets", {}) if request.out.is_dir() else {}
    known = {mark: name for name, mark in stored.items()}
    stored_names = [known.get(mark, name) for name, mark in zip(names, marks, strict=True)]
    return (stored_names if len(set(stored_names)) == len(stored_names) else names), marks


def _check_fields(by: Sequence[str], datasets: Sequence[_Dataset]) -> None:
    prompts = [prompt for dataset in datasets for prompt in dataset.prompts] if by else []
    for field in by:
        labels = labels_of(prompts, field)
        if labels is None:
            fields = ", ".join(sorted({name for prompt in prompts for name in prompt.extra_info})) or "none"
            raise ConfigError(f"--by {field}: no row has that field in extra_info", f"give one of: {fields}")
        if len(set(labels)) > MOST_CATEGORIES:
            raise ConfigError(
                f"--by {field}: it has {len(set(labels))} different values",
                f"give a field with at most {MOST_CATEGORIES}",
            )


def _open(
    request: Request, datasets: Sequence[_Dataset], config: RunConfig, model: dict[str, Any], stack: ExitStack
) -> EvalStore | None:
    """Open the sample folder, if requested, and find the existing samples of each dataset."""
    store = None
    if request.out:
        prompts = [prompt for dataset in datasets for prompt in dataset.prompts]
        settings = settings_of_evaluation(config, prompts, model)
        marks = {dataset.name: dataset.mark for dataset in datasets}
        store = stack.enter_context(
            EvalStore.open(request.out, settings, marks, request.force, shared=config.run.shared)
        )
    for dataset in datasets:
        dataset.look(request.config.evaluation.samples, request.greedy, store)
    return store


def _together(prepared: Sequence[Prepared]) -> Prepared:
    """One `Prepared` for workers that serve all of them: with every verifier, and the sandbox if one needs it."""
    first = next((run for run in prepared if run.sandbox), prepared[0])
    verifiers = sorted({name for run in prepared for name in run.facts.verifiers})
    return first.changed(first.config, verifiers=tuple(verifiers))


def _check_templates(model: str, prepared: Mapping[str, Prepared], notes: Callable[[str], None]) -> None:
    from rlcli.launch.evaluation.template_check import rendered_with, trained_with

    first = next(iter(prepared.values()))
    template_kwargs = first.config.data.chat_template_kwargs
    template = first.config.model.chat_template  # by the user, or that of an adapter's run
    trained = [] if template else trained_with(first.config.model.path, first.facts.adapter)
    for note in trained + rendered_with(model, template_kwargs):
        notes(note)


def _phase(dataset: _Dataset, datasets: int) -> str:
    existing = (
        f", {len(dataset.existing)} samples kept" if dataset.existing is not None and len(dataset.existing) else ""
    )
    return "evaluate" + (f" {dataset.name}" if datasets > 1 else "") + existing
