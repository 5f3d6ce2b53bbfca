"""Compare a run's stored configuration with the requested one: some keys may change when a run is resumed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlcli.config.load import Resolved, resolve, to_toml
from rlcli.errors import ConfigError
from rlcli.support.reading import read_text

ROUNDING = "from here on results agree to rounding, not bitwise"
ALLOWED: Mapping[str, str] = {
    "if the prompts are the same, which is checked once they are read": "data.path",
    "the run's length changes": "train.steps train.epochs",
    "from here on the engine that samples has another precision": "rollout.quantization",
    "from here on the share of samples from older policies may change": "rollout.oversample async.*",
    "from here on verifications near the deadline may end differently": "verifier.deadline_s",
    "from here on experts are chosen otherwise in training": "rollout.replay_routes",
    "from here on a bad update may be handled differently": "fault_tolerance.*bad*",
    "": "train.offload cluster.address rollout.log_prob_check algorithm.mismatch_warning verifier.processes "
    "verifier.max_crash_rate verifier.sandbox checkpoint.* evaluation.every tracking.* fault_tolerance.* "
    "rollout.sync",
    "evaluations before and after cannot be compared": "evaluation.*",
    ROUNDING: "train.deterministic train.tokens_per_microbatch model.gradient_checkpointing model.compile cluster.* "
    "model.head_dtype teacher.workers rollout.engine rollout.workers rollout.tensor_parallel rollout.max_concurrent "
    "rollout.enforce_eager rollout.kv_cache_mb rollout.gpu_memory_utilization rollout.servers rollout.servers_folder "
    "rollout.speculate parallel.*",
}
"""The effect of a change (empty: none) → patterns of the keys that may change. The first that matches counts."""

SAME_VERIFIERS = "if each row named the same, which is checked once they are read"
"""The effect of naming the verifiers that the rows named: the prompts of a run have them in their fingerprint."""

PATHS = (
    "model.path",
    "model.chat_template",
    "critic.path",
    "teacher.path",
    "data.path",
    "evaluation.data",
    "algorithm.code",
)
"""Keys that may hold a path."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    key: str
    """Dotted name of the key."""
    was: Any
    """Value in the stored configuration."""
    now: Any
    """Requested value."""

    @property
    def effect(self) -> str | None:
        """The effect of the change; None if the key may not change."""
        if self.key == "critic.workers" and self.was and self.now:
            return ROUNDING
        if self.key == "verifier.name" and self.was == "auto":
            return SAME_VERIFIERS
        patterns = ((pattern, effect) for effect, keys in ALLOWED.items() for pattern in keys.split())
        return next((effect for pattern, effect in patterns if fnmatchcase(self.key, pattern)), None)

    def __str__(self) -> str:
        return f"{self.key}: was {to_toml(self.was)}, is {to_toml(self.now)}"


def read_run_config(run: Path, flags: Mapping[str, object] | None = None, sets: Sequence[str] = ()) -> Resolved:
    """The configuration in the folder `run` with `flags` and `sets` on top, each value with the origin that it had when
    the run began. Raises `ConfigError` if the file or a value is invalid."""
    file = run / "config.toml"
    resolved = resolve(str(file), flags, sets)
    saved_origins = origins_in(read_text(file))
    changed_keys = {key for key, value in (flags or {}).items() if value is not None}
    changed_keys |= {text.partition("=")[0].strip() for text in sets}
    return replace(
        resolved,
        origins={
            key: resolved.origins[key] if key in changed_keys else saved_origins.get(key, "default")
            for key in resolved.origins
        },
    )


def origins_in(toml: str) -> dict[str, str]:
    """Key → origin, from the comments of a configuration as `dump_toml` writes it; defaults have none.

    >>> origins_in('[train]\\nsteps = 7  # flag --steps\\nlr = 1e-6')
    {'train.steps': 'flag --steps'}
    """
    origins: dict[str, str] = {}
    section = ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        value, mark, origin = line.rpartition("  # ")
        name = value.partition(" = ")[0]
        if mark and _is_toml(value):
            origins[f"{section}.{name}"] = origin
    return origins


def changes(was: Resolved, now: Resolved, directory: Path) -> list[Change]:
    """The keys whose values differ. directory: base of relative paths in `was`; in `now` they are relative to the
    current directory."""
    old_values, new_values = was.values(), now.values()
    differing = []
    for key in sorted(old_values.keys() | new_values.keys()):
        old, new = old_values.get(key), new_values.get(key)
        if key in PATHS and _place(old, directory) == _place(new, Path.cwd()):
            continue
        if old != new:
            differing.append(Change(key, old, new))
    return differing


def check_changes(changed: Sequence[Change], run: Path) -> list[str]:
    """A message for each change. Raises `ConfigError` that names all changes that are not allowed."""
    refused = [change for change in changed if change.effect is None]
    if refused:
        moved = "; if a folder has moved, put a link at its old path"
        raise ConfigError(
            f"{run} cannot resume with a changed {'; '.join(map(str, refused))}",
            f"leave that out, or start a new run from this one's weights: rlcli train … --model {run}"
            + (moved if any(change.key in PATHS for change in refused) else ""),
        )
    return [f"{change}" + (f" ({change.effect})" if change.effect else "") for change in changed]


def whole_paths(flags: Mapping[str, object], sets: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """The same with every existing path made absolute: the run may be resumed in another directory."""
    directory = Path.cwd()
    absolute = {key: _place(value, directory) if key in PATHS else value for key, value in flags.items()}
    texts = []
    for text in sets:
        key, equals, value = text.partition("=")
        texts.append(f"{key}={_place(value.strip(), directory)}" if equals and key.strip() in PATHS else text)
    return absolute, texts


def _place(value: object, directory: Path) -> object:
    """The absolute path if `value` is an existing path, else the value itself (a hub id, nothing)."""
    if isinstance(value, Mapping):
        return {name: _place(item, directory) if name == "path" else item for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place(item, directory) for item in value]
    if not isinstance(value, str) or not value:
        return value
    path = directory / Path(value).expanduser()
    return os.path.normpath(path) if path.exists() else value


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True
