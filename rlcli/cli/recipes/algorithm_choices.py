"""The functions that an algorithm key can name, and the numbers that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rlcli.config.keys import keys
from rlcli.errors import ConfigError
from rlcli.registry import near
from rlcli.support.extras import missing

MODULES = {
    "algorithm.advantage": "advantages",
    "algorithm.loss": "losses",
    "algorithm.select": "selection",
    "algorithm.aggregation": "aggregation",
    "algorithm.kl_estimator": "kl",
    "algorithm.correction": "correction",
}
OPTIONS = "algorithm.options"


@dataclass(frozen=True)
class Choice:
    """A function that a key can name."""

    name: str
    """The key's value; for `algorithm.options`, the setting that selects the function."""
    text: str
    """Description of the function, or of the numbers it takes."""
    options: dict[str, float | None] = field(default_factory=dict)
    """Number that it takes → default; None for a required one."""


def choices(key: str) -> list[Choice]:
    """The choices of `key`; empty for a key that names no function, and without torch, which they need.

    Raises `ConfigError` for a number that no function takes.
    """
    if (key not in MODULES and not key.startswith(OPTIONS)) or missing("torch"):
        return []
    if key in MODULES:
        return [Choice(name, _summary(function), _options(key, name)) for name, function in _functions(key)]
    number = key.removeprefix(OPTIONS).lstrip(".")
    from rlcli.algorithms.controllers import kl_controller

    controller_options = _numbers_of([kl_controller])
    readers = [
        Choice(f"{kind.partition('.')[2]} = {name}", _listed(options), options)
        for kind in MODULES
        for name, _ in _functions(kind)
        if (options := {o: d for o, d in _options(kind, name).items() if number in ("", o)})
    ]
    if number in ("", *controller_options):
        readers.append(Choice("kl_target, any", _listed(controller_options), controller_options))
    if not readers:
        known = {
            name for kind in MODULES for function_name, _ in _functions(kind) for name in _options(kind, function_name)
        } | {*controller_options}
        raise ConfigError(f"no function takes the number '{number}'", near(number, known))
    return readers


def _functions(key: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    module = import_module(f"rlcli.algorithms.{MODULES[key]}")
    return ((name, module.get(name)) for name in module.names())


def _options(key: str, name: str) -> dict[str, float | None]:
    """The numbers that the function takes from `algorithm.options`, without those that have separate keys."""
    from rlcli.algorithms.losses import selectors
    from rlcli.algorithms.losses.critic import process_rewards

    part = import_module(f"rlcli.algorithms.{MODULES[key]}").part(name)
    functions = [part.function]  # and the functions called for it
    if key == "algorithm.loss" and name in selectors.names():
        functions.append(selectors.get(name))
    if key == "algorithm.advantage" and "process_rewards" in part.needs:
        functions.append(process_rewards)
    return _numbers_of(functions)


def _numbers_of(functions: Sequence[Callable[..., Any]]) -> dict[str, float | None]:
    from rlcli.algorithms.function_registry import options_of

    defaults: Mapping[str, Any] = {
        option: default for each in functions for option, default in options_of(each).items()
    }
    numbers: dict[str, float | None] = {}
    for option, default in defaults.items():
        if default is inspect.Parameter.empty:
            numbers[option] = None
        elif isinstance(default, int | float) and f"algorithm.{option}" not in keys():
            numbers[option] = float(default)
    return numbers


def _listed(options: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{name} must be given" if default is None else f"{name} = {default:g}" for name, default in options.items()
    )


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of its docstring, and the formula that it introduces, in one line."""
    first, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    text = f"{first} {rest.partition(f'{chr(10)}{chr(10)}')[0]}" if first.rstrip().endswith(":") else first
    return " ".join(text.split())
