"""What the samples of an evaluation depend on, by names that a user knows: where one differs they are others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.scoring.spec import parse
from rlcli.types import Prompt

LOOKS = 64
"""Places at which a file of weights is read: an update changes all of them, and reading them takes milliseconds."""
LOOK_BYTES = 4096
DAY = "the day in the chat template"
SMALL = (".json", ".jinja", ".txt", ".model")
WEIGHTS = (".safetensors", ".bin")


def settings_of_evaluation(config: RunConfig, prompts: Sequence[Prompt], model: dict[str, Any]) -> dict[str, Any]:
    """model: what names the model, and tells whether it has changed."""
    found = {
        **model,
        "temperature": config.evaluation.temperature,
        "max_tokens": config.rollout.max_response_tokens,
        "seed": config.train.seed,
        "verifier": config.verifier.name,
        "verifier.deadline_s": config.verifier.deadline_s,
    }
    if config.data.chat_template_kwargs:
        found["data.chat_template_kwargs"] = dict(sorted(config.data.chat_template_kwargs.items()))
    if config.rollout.stop_token_ids:
        found["rollout.stop_token_ids"] = sorted(config.rollout.stop_token_ids)
    for file in sorted({file for row in {prompt.verifier for prompt in prompts} for file in _files(row)}):
        found[f"the content of {file}"] = _digest(Path(file).read_bytes())
    return found


def day_in(evaluation: Mapping[str, Any]) -> date | None:
    """The day that the chat template took for today when the first samples of a folder were generated."""
    day = evaluation.get("settings", {}).get(DAY)
    return date.fromisoformat(day) if day else None


def local_model(path: str, adapter: str, dtype: str, day: date | None = None) -> dict[str, Any]:
    """Of a model that is evaluated here. path: folder or hub id; adapter: folder of a LoRA adapter on it, or empty.
    day: which its chat template takes for today, if it asks."""
    found: dict[str, Any] = {"model": path, "weights": _mark(path), "model.dtype": dtype}
    found |= {DAY: day.isoformat()} if day else {}
    return found | ({"adapter": adapter, "weights of the adapter": _mark(adapter)} if adapter else {})


def prompts_mark(prompts: Sequence[Prompt]) -> str:
    """Hexadecimal; another where any prompt, its place or what it is verified by is another."""
    found = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        found.update(repr(prompt).encode(errors="surrogatepass"))
    return found.hexdigest()


def _mark(path: str) -> str:
    """Hexadecimal, another where the model's weights, tokenizer or template are others; of a hub id, the commit."""
    folder = Path(path)
    if not folder.is_dir():
        return _commit(path)
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in SMALL and file.is_file():
            found.update(f"{file.name}\0".encode() + file.read_bytes())
        elif file.suffix in WEIGHTS and file.is_file():
            found.update(f"{file.name}\0".encode() + _looked_at(file))
    return found.hexdigest()


def _looked_at(file: Path) -> bytes:
    size = file.stat().st_size
    looks = [str(size).encode()]
    with file.open("rb") as opened:
        for number in range(LOOKS):
            opened.seek(max(0, (size - LOOK_BYTES) * number // (LOOKS - 1)))
            looks.append(opened.read(LOOK_BYTES))
    return b"".join(looks)


def _commit(hub_id: str) -> str:
    """Of the files that the hub's cache holds; empty where nothing tells."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(hub_id, "config.json")
    return Path(file).parent.name if isinstance(file, str) else ""


def _files(expression: str) -> list[str]:
    """Of verifiers that stand in files of the user's own."""
    refs = [term.ref.rpartition(":")[0] for term in parse(expression).terms]
    return [ref for ref in refs if ref.endswith(".py") and Path(ref).is_file()]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
