"""The settings that determine the samples of an evaluation, by names that a user knows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.template_choice import template_text
from rlcli.rewards.expression import parse
from rlcli.types import Prompt

SAMPLED_BLOCKS = 64
"""Blocks of a weight file that are hashed: an update changes all of them, and reading them takes milliseconds."""
BLOCK_BYTES = 4096
DAY = "the day in the chat template"
SMALL = (".json", ".jinja", ".txt", ".model")
WEIGHTS = (".safetensors", ".bin")


def settings_of_evaluation(config: RunConfig, prompts: Sequence[Prompt], model: dict[str, Any]) -> dict[str, Any]:
    """The settings that samples depend on. model: the identity of the model, including a fingerprint of its files."""
    settings = {
        **model,
        "temperature": config.evaluation.temperature,
        "max_tokens": config.rollout.max_response_tokens,
        "seed": config.train.seed,
        "verifier": config.verifier.name,
        "verifier.deadline_s": config.verifier.deadline_s,
    }
    # Older folders have no such keys; their samples were generated with the defaults.
    if config.evaluation.top_p != 1:
        settings["top_p"] = config.evaluation.top_p
    if config.rollout.quantization:
        settings["rollout.quantization"] = config.rollout.quantization
    if config.model.head_dtype != "auto":
        settings["model.head_dtype"] = config.model.head_dtype
    if config.data.chat_template_kwargs:
        settings["data.chat_template_kwargs"] = dict(sorted(config.data.chat_template_kwargs.items()))
    template = config.model.chat_template
    if template and Path(template).parent != Path(model.get("adapter") or "/"):  # the adapter's mark has its own
        settings["model.chat_template"] = hashlib.blake2b(template_text(template).encode(), digest_size=16).hexdigest()
    if config.rollout.stop_token_ids:
        settings["rollout.stop_token_ids"] = sorted(config.rollout.stop_token_ids)
    if config.environment.name:
        left_out = {"python", "processes", "rows", "eval_rows", "variables"}
        if not config.environment.ground_truth:  # older folders have no such key
            left_out.add("ground_truth")
        settings["environment"] = config.environment.model_dump(exclude=left_out)
    for file in sorted({file for row in {prompt.verifier for prompt in prompts} for file in _files(row)}):
        settings[f"the content of {file}"] = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    return settings


def day_in(evaluation: Mapping[str, Any]) -> date | None:
    """The day that the chat template used as today when the first samples of a folder were generated."""
    day = evaluation.get("settings", {}).get(DAY)
    return date.fromisoformat(day) if day else None


def local_model(path: str, adapter: str, dtype: str, day: date | None = None) -> dict[str, Any]:
    """The settings of a locally evaluated model. path: folder or hub id; adapter: folder of a LoRA adapter for it, or
    empty. day: the day that its chat template uses as today, if any."""
    settings: dict[str, Any] = {"model": path, "weights": _mark(path), "model.dtype": dtype}
    settings |= {DAY: day.isoformat()} if day else {}
    return settings | ({"adapter": adapter, "weights of the adapter": _mark(adapter)} if adapter else {})


def prompts_mark(prompts: Sequence[Prompt]) -> str:
    """A hexadecimal hash that changes with any prompt, its position or its verifier."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.content())
    return digest.hexdigest()


def _mark(path: str) -> str:
    """A hexadecimal hash that changes with the model's weights, tokenizer or template; for a hub id, the commit."""
    folder = Path(path)
    if not folder.is_dir():
        return hub_commit(path)
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in SMALL and file.is_file():
            digest.update(f"{file.name}\0".encode())
            with file.open("rb") as opened:
                while piece := opened.read(1 << 20):
                    digest.update(piece)
        elif file.suffix in WEIGHTS and file.is_file():
            digest.update(f"{file.name}\0".encode() + sampled_blocks(file))
    return digest.hexdigest()


def sampled_blocks(file: Path) -> bytes:
    """The size of a file of weights, and SAMPLED_BLOCKS evenly spaced blocks, the first and the last included."""
    size = file.stat().st_size
    blocks = [str(size).encode()]
    with file.open("rb") as opened:
        for number in range(SAMPLED_BLOCKS):
            opened.seek(max(0, (size - BLOCK_BYTES) * number // (SAMPLED_BLOCKS - 1)))
            blocks.append(opened.read(BLOCK_BYTES))
    return b"".join(blocks)


def hub_commit(hub_id: str) -> str:
    """The commit of the files in the hub's cache; empty if unknown."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(hub_id, "config.json")
    return Path(file).parent.name if isinstance(file, str) else ""


def _files(expression: str) -> list[str]:
    """The files of user-defined verifiers in `expression`."""
    refs = [term.ref.rpartition(":")[0] for term in parse(expression).terms]
    return [ref for ref in refs if ref.endswith(".py") and Path(ref).is_file()]
