"""Checks that evaluation uses the chat template that the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from rlcli.runs.listing import config_of
from rlcli.runs.software_record import environment_of, recorded_day


def day_of_run(model: str) -> date | None:
    """The date used by the run whose folder contains `model`; None if it is in no run folder."""
    return next((recorded_day(environment_of(folder)) for folder in _runs(model)), None)


def rendered_with(model: str, values: Mapping[str, object]) -> list[str]:
    """A note if `model` is in the folder of a run whose chat template had other variables than `values`."""
    for folder in _runs(model):
        data = config_of(folder).get("data")
        if data and (then := data.get("chat_template_kwargs", {})) != dict(values):
            return [f"the run {folder.name} was trained with data.chat_template_kwargs = {then}, not {dict(values)}"]
    return []


def trained_with(model: str, adapter: str) -> list[str]:
    """A note if the model was trained with another chat template than it is now evaluated with.

    model: the folder evaluated, or the base of `adapter`, whose own tokenizer is not used. The training template is
    known if the folder is in a run folder.
    """
    now, folder = _template(model), Path(adapter or model)
    if now is None or not folder.is_dir():
        return []
    if adapter and (adapter_template := _template(adapter)) is not None and adapter_template != now:
        return [f"the tokenizer in {adapter} has another chat template than {model}, which is used"]
    for run in folder.resolve().parents[:3]:
        model_keys = config_of(run).get("model", {})
        if model_keys.get("chat_template"):  # its checkpoints and exports have it
            return []
        if base := model_keys.get("path"):
            return [
                f"the run {run.name} was trained with the chat template of {base}, and that of {model} is another: "
                "the model sees prompts that look different"
            ] * (_template(base) not in (None, now))
    return []


def _runs(model: str) -> list[Path]:
    """The folder of the run that `model` names or is in."""
    folder = Path(model)
    above = [folder.resolve(), *folder.resolve().parents[:3]] if folder.is_dir() else []
    return [parent for parent in above if (parent / "config.toml").is_file()][:1]


def _template(path: str) -> str | None:
    """The chat template of a folder's tokenizer; None if the folder does not exist or has none."""
    from transformers import AutoTokenizer

    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    try:
        template = AutoTokenizer.from_pretrained(path, trust_remote_code=False).chat_template
    except Exception:  # any error: the template is only needed for a note
        return None
    return template if isinstance(template, str) else None
