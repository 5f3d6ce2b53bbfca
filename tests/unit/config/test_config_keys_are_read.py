"""Every key of the configuration is read by some code: a key that nothing reads is a promise that nothing keeps."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import rlcli
from rlcli.algorithms.build import build_algorithm
from rlcli.config.keys import keys
from rlcli.config.load import resolve
from rlcli.config.schema import RunConfig

PACKAGE = Path(rlcli.__file__).parent
PACKAGES = PACKAGE.parent / "packages"
SECTIONS = set(RunConfig.model_fields)
"""As the code calls them; `async_` is Python's way to write `async`."""


def keys_read_in(tree: ast.AST) -> set[str]:
    """`section.key` wherever `….section.key` stands, or `name.key` after `name = ….section`."""
    variables: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=True) if is_pair else [(target, node.value)]  # type: ignore[attr-defined]
                for variable, right in pairs:
                    if isinstance(variable, ast.Name) and isinstance(right, ast.Attribute) and right.attr in SECTIONS:
                        variables.setdefault(variable.id, set()).add(right.attr)
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Attribute) and node.value.attr in SECTIONS:
                keys.add(f"{node.value.attr}.{node.attr}")
            elif isinstance(node.value, ast.Name):
                keys |= {f"{section}.{node.attr}" for section in variables.get(node.value.id, ())}
    return {key.replace("async_.", "async.") for key in keys}


def test_what_counts_as_reading() -> None:
    code = "r, t = self.config.rollout, config.train\nx = r.temperature + t.lr + config.lora.rank\nconfig.data.path = r"
    assert keys_read_in(ast.parse(code)) == {"rollout.temperature", "train.lr", "lora.rank"}


def test_every_key_is_read_outside_the_configuration_itself() -> None:
    files = [
        file for file in (*PACKAGE.rglob("*.py"), *PACKAGES.rglob("*.py")) if PACKAGE / "config" not in file.parents
    ]
    read = set().union(*(keys_read_in(ast.parse(file.read_text())) for file in files))
    # This section goes as a whole, by keyword, to the function that composes an algorithm.
    read |= {f"algorithm.{name}" for name in inspect.signature(build_algorithm).parameters}
    # The supervisor reads this one from the run's file: the schema takes longer to import than it needs to start.
    by_the_supervisor = {"fault_tolerance.max_restarts"}
    # This one becomes train.warmup_steps, which the trainer reads, once the number of steps is known.
    becomes_steps = {"train.warmup_fraction"}
    train = resolve("grpo", {}, [f"{key}=0.5" for key in becomes_steps]).config.train
    assert train.warmup_steps == train.steps // 2
    assert set(keys()) - read == by_the_supervisor | becomes_steps
