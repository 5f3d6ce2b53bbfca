"""Write the model card of an export: the model, its training and data, and its evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from rlcli import __version__
from rlcli.config.changes import PATHS
from rlcli.config.load import to_toml
from rlcli.config.schema import RunConfig
from rlcli.data.prompts.provenance import recorded
from rlcli.evaluation.statistics import Estimate, shown_estimate
from rlcli.export.checkpoint_source import Origin
from rlcli.export.export_types import Export, shown
from rlcli.model.io.mxfp4 import quantization
from rlcli.runs.record_files import evaluations_of
from rlcli.runs.run_measure import MEAN

PRIVATE = (*PATHS, "cluster.address", "verifier.sandbox")
"""Settings that hold paths or addresses of the training machine."""
WHOLE_PATH = re.compile(r"(?<![\w:/.])~?/(?:[^\s'\",|/]+/)+(?=[^\s'\",|/])")
"""The folders of an absolute path, or one from home, anywhere: in a verifier, an argument, a setting."""
REPORT = "report"
"""The folder of the run's report in an export."""
LOADING = {
    "model": """from transformers import pipeline

ask = pipeline("text-generation", model="PATH")
print(ask([{"role": "user", "content": "What is 17 + 25?"}], max_new_tokens=256)[0]["generated_text"][-1])""",
    "adapter": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")""",
    "value model": """from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("PATH")""",
    "process reward model": """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")""",
}


def write_card(origin: Origin, written: Export, folder: Path) -> None:
    """Write README.md: YAML for the hub, and text for people. It contains no path of this machine."""
    licence = licence_of(written.base)
    sections = [
        f"# {origin.run.name if origin.run else origin.checkpoint.path.name}",
        _summary(origin, written, licence),
        f"```python\n{LOADING[written.kind].replace('PATH', Path(written.path).name)}\n```",
        _training(origin),
        _data(origin.resolved.config),
        _evaluation(origin),
        _proofs(written),
        _report(folder),
    ]
    body = WHOLE_PATH.sub("", "\n\n".join(section for section in sections if section))
    data = _metadata(origin.resolved.config, written, licence)
    (folder / "README.md").write_text(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n").content, encoding="utf-8")


def _metadata(config: RunConfig, written: Export, licence: str | None) -> ModelCardData:
    on_hub = not Path(written.base).is_dir()
    facts: dict[str, Any] = {
        "license": licence,
        "library_name": "peft" if written.kind == "adapter" else "transformers",
        "base_model": written.base if on_hub else None,
        "base_model_relation": ("adapter" if written.kind == "adapter" else "finetune") if on_hub else None,
        "datasets": _datasets(config) or None,
        "pipeline_tag": "text-generation" if written.kind in ("model", "adapter") else None,
        "tags": ["rlcli", "reinforcement-learning", "rlvr", config.algorithm.advantage],
    }
    return ModelCardData(**{name: value for name, value in facts.items() if value is not None})


def licence_of(base: str) -> str | None:
    """The licence in the base model's card; None if the card is missing or cannot be loaded."""
    card = Path(base) / "README.md"
    if Path(base).is_dir() and not card.is_file():
        return None
    try:
        licence = ModelCard.load(card if card.is_file() else base).data.get("license")
    except Exception:  # the hub's errors, those of the network under it, and YAML's
        return None
    return licence if isinstance(licence, str) else None


def _summary(origin: Origin, written: Export, licence: str | None) -> str:
    recipe, base = origin.resolved.recipe.header, shown(written.base)
    article = {"model": "A model", "adapter": "A LoRA adapter"}.get(written.kind, f"The {written.kind} of a run")
    return (
        f"{article} trained from {base} by reinforcement learning with verifiable rewards: {written.step} "
        f"step{'' if written.step == 1 else 's'} of the recipe `{recipe.name}` with rlcli {__version__}. The files "
        f"hold {written.dtype}"
        + (", also of the experts, which the base model has in MXFP4. " if quantization(written.base) else ". ")
        + (f"The base model's licence is {licence}." if licence else "See the base model for its licence.")
    )


def _training(origin: Origin) -> str:
    config, recipe = origin.resolved.config, origin.resolved.recipe.header
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    kl = f"{algorithm.kl_coef:g} × {algorithm.kl_estimator} in the {algorithm.kl_in}" if algorithm.kl_coef else "none"
    rows = [
        ("recipe", f"{recipe.name}: {recipe.summary}" if recipe.summary else recipe.name),
        ("paper", recipe.paper),
        ("advantage", algorithm.advantage),
        ("policy loss", f"{algorithm.loss}, {algorithm.aggregation}"),
        ("KL to the base", kl),
        ("correction of the engine's log-probs", algorithm.correction),
        ("verifier", config.verifier.name.replace("auto", "auto (named by each row)", 1)),
        ("steps", f"{origin.checkpoint.step} of {train.steps}"),
        ("a step", f"{rollout.prompts_per_step} prompts × {rollout.samples_per_prompt} samples"),
        ("learning rate", f"{train.lr:g}, {train.schedule}"),
        ("LoRA", f"rank {config.lora.rank}, alpha {config.lora.alpha:g}" if config.lora.rank else ""),
        ("trainer's precision", f"{origin.computed_in}, float32 master weights"),
        ("seed", str(train.seed)),
    ]
    changed = _changed(config)
    settings = f"\n\nEvery setting that is not rlcli's default:\n\n```toml\n{changed}\n```" if changed else ""
    return f"## Training\n\n{_table(('', ''), [row for row in rows if row[1]])}{settings}"


def _changed(config: RunConfig) -> str:
    """Non-default settings as TOML, section by section, without private ones."""
    default, lines = RunConfig().model_dump(mode="json"), []
    for section, values in config.model_dump(mode="json").items():
        settings = {
            name: value
            for name, value in values.items()
            if value != default[section][name] and f"{section}.{name}" not in PRIVATE
        }
        plain = [f"{name} = {to_toml(value)}" for name, value in settings.items() if not isinstance(value, dict)]
        tables = [
            f"{name}.{key} = {to_toml(v)}"
            for name, t in settings.items()
            if isinstance(t, dict)
            for key, v in t.items()
        ]
        if plain or tables:
            lines += [f"[{section}]", *plain, *tables, ""]
    return "\n".join(lines).rstrip()


def _data(config: RunConfig) -> str:
    sets = config.data.sets
    sections = [_made(Path(dataset.path)) for dataset in sets]
    if len(sets) > 1:
        titles = [
            Path(dataset.path).name + (f" (weight {dataset.weight:g})" if dataset.weight else "") for dataset in sets
        ]
        sections = [f"### {title}\n\n{section}" for title, section in zip(titles, sections, strict=True)]
    return "\n\n".join(["## Data", *sections]) if sections else ""


def _made(path: Path) -> str:
    """A table of how a dataset was made."""
    record = _provenance(path)
    if record is None:
        return f"{path.name}: how it was made is not recorded."
    arguments = ", ".join(f"{name} = {value}" for name, value in record.get("arguments", {}).items())
    rows = [
        ("dataset", record.get("dataset", "")),
        ("converter", f"{record.get('converter', '')}, rlcli {record.get('rlcli', '')}"),
        ("arguments", arguments),
        *(("source", _source(source)) for source in record.get("sources", [])),
        ("steps", "; ".join(_step(step) for step in record.get("steps", []))),
        ("made", record.get("date", "")),
    ]
    return _table(("", ""), [row for row in rows if row[1]])


def _provenance(path: Path) -> dict[str, Any] | None:
    """The provenance record in the file of training data."""
    import pyarrow
    import pyarrow.parquet

    file = path / "train.parquet" if path.is_dir() else path
    try:
        return recorded(pyarrow.parquet.read_schema(file).metadata)
    except (OSError, pyarrow.ArrowException, ValueError):
        return None


def _datasets(config: RunConfig) -> list[str]:
    """Hub ids of the sources of the training data."""
    records = [_provenance(Path(path)) or {} for path in config.data.paths]
    names = [source.get("hub", "") for record in records for source in record.get("sources", [])]
    return [name for name in dict.fromkeys(names) if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]


def _source(source: Mapping[str, str]) -> str:
    if "hub" in source:
        return source["hub"]
    return f"{Path(source.get('file', '')).name} (SHA-256 {source.get('sha256', '')})"


def _step(step: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in step.items())


def _evaluation(origin: Origin) -> str:
    """The evaluation of the base model and of the exported step, or of the last evaluated step before it."""
    evaluations = evaluations_of(origin.run) if origin.run else {}
    steps = [step for step in sorted(evaluations) if step <= origin.checkpoint.step]
    if not steps:
        return ""
    shown_steps = sorted({steps[0], steps[-1]})
    estimates = {step: _estimates(evaluations[step]) for step in shown_steps}
    rows = [[name, *(estimates[step].get(name, "") for step in shown_steps)] for name in estimates[steps[-1]]]
    settings = origin.resolved.config.evaluation
    data = " of " + ", ".join(Path(path).name for path in settings.paths) if settings.paths else ""
    sampling = "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    head = ["", *("before training" if step == 0 else f"after step {step}" for step in shown_steps)]
    return (
        f"## Evaluation\n\n{evaluations[steps[-1]]['prompts']} held-out prompts{data}, {sampling}; 95% "
        f"intervals over prompts.\n\n{_table(head, rows)}"
    )


def _estimates(report: Mapping[str, Any]) -> dict[str, str]:
    """Measure → figure with its interval."""
    estimates = {name: value for kind in ("pass", "maj", "mean") for name, value in report.get(kind, {}).items()}
    if MEAN in estimates:  # the other mean@k are the same figure
        estimates = {name: value for name, value in estimates.items() if name == MEAN or not name.startswith("mean@")}
    first = {name: estimates[name] for name in ("pass@1", MEAN) if name in estimates}
    return {
        name: shown_estimate(name, Estimate(value["mean"], value["low"], value["high"]))
        for name, value in (first | estimates).items()
    }


def _proofs(written: Export) -> str:
    lines = [str(fact) for fact in (written.change,) if fact]
    if written.log_probs:
        lines.append(f"log-probs by transformers in float32 are {written.log_probs}")
    return "## Checks of this export\n\n" + ("\n".join(f"- {line}" for line in lines) or "It was not checked.")


def _report(folder: Path) -> str:
    if not (folder / REPORT / "index.html").is_file():
        return ""
    return (
        f"## Report of the run\n\nDownload the folder `{REPORT}` and open `{REPORT}/index.html`: curves, samples with "
        "their verdicts, tokens and times. It needs no server and no network."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"

    return "\n".join([line(head), line(["---"] * len(head)), *(line(row) for row in rows)])
