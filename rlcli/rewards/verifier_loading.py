"""Load a verifier from its reference and options; only in scoring processes, because it runs untrusted code."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcli.registry import near
from rlcli.rewards.combine import Verified, combine
from rlcli.rewards.function_adapters import adapt, is_rubric, options_of
from rlcli.support.importing import run_file
from rlcli.types import VerifyRequest

AT_ONCE = 32
"""Maximum number of requests in one call of a verifier that takes batches or is async."""
KIND_CHARS = 100
"""Maximum length of a module's ANSWER_KIND."""


class WrongOption(Exception):
    """An option that a verifier does not take, or not with this value: the text names it."""


class NotLoaded(Exception):
    """The verifier number `index` of an expression does not load; the cause is the reason."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


@dataclass(frozen=True, slots=True)
class Part:
    """A term of an expression as sent to scoring processes. name: of its part. target: where it is defined."""

    name: str
    target: str
    options: Mapping[str, Any]
    weight: float


@dataclass(frozen=True)
class Scorer:
    """A loaded expression. verify: returns the verdict or the exception for each request. at_once: maximum number of
    requests in one call; `begins` is called with the index of each term before it is verified. needs_sandbox: whether
    one of its verifiers runs programs. patience_s: how long its verifiers wait in total, by their option `timeout_s`.
    own_limits: of each term, its options `deadline_s` and `wait_s`, 0 if it has none. keys: environment variables whose
    values are sent, each with its address: of verifiers with options `url` and `key`. answer_kind: ANSWER_KIND of the
    first term's module; empty if it sets none. has_gold: whether that module has a function `gold`. groups: whether one
    of its verifiers has to get all responses to a prompt in one call."""

    verify: Callable[..., list[Verified]]
    at_once: int
    needs_sandbox: bool
    patience_s: float
    own_limits: tuple[tuple[float, float], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    answer_kind: str = ""
    has_gold: bool = False
    groups: bool = False


def load(expression: str, parts: Sequence[Part], *, is_sum: bool) -> Scorer:
    """Import the verifiers of an expression, check their options and run their modules' `preload()`.

    is_sum: whether scores are weighted or added, so that each verifier's is a separate part. Raises `WrongOption`, and
    `NotLoaded` for any exception of the modules and for an object that is not a verifier.
    """
    loaded, limits, sandbox, patience_s = [], [], False, 0.0
    kind, has_gold = "", False
    keys: list[tuple[str, str]] = []
    for index, part in enumerate(parts):
        try:
            module, function = find(part.target)
            if index == 0:
                kind = str(getattr(module, "ANSWER_KIND", ""))[:KIND_CHARS]
                has_gold = callable(getattr(module, "gold", None))
            options = _options(function, part)
            loaded.append(adapt(function, options))
            if preload := getattr(module, "preload", None):
                preload(**options) if inspect.signature(preload).parameters else preload()
        except WrongOption:
            raise
        except (Exception, SystemExit) as error:  # a module may call sys.exit at import
            raise NotLoaded(index) from error
        sandbox = sandbox or bool(getattr(module, "NEEDS_SANDBOX", False))
        patience_s += _seconds(function, options, "timeout_s")
        limits.append((_seconds(function, options, "deadline_s"), _seconds(function, options, "wait_s")))
        keys += _key(function, options)
    weights = {part.name: part.weight for part in parts} if is_sum else None

    def verify(requests: Sequence[VerifyRequest], begins: Callable[[int], None] = lambda index: None) -> list[Verified]:
        columns = []
        for index, one in enumerate(loaded):
            begins(index)
            columns.append(one.verify(requests))
        return [combine(expression, weights, row) for row in zip(*columns, strict=True)]

    return Scorer(
        verify,
        AT_ONCE if any(one.many for one in loaded) else 1,
        sandbox,
        patience_s,
        tuple(limits),
        tuple(keys),
        kind,
        has_gold,
        any(one.groups for one in loaded),
    )


def _seconds(function: Any, options: Mapping[str, Any], name: str) -> float:
    """The value that a verifier was given for its option `name`, else its default; 0 if it has no such option."""
    declared = {} if is_rubric(function) else options_of(function)[0]
    value = options.get(name, declared[name].default if name in declared else 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _key(function: Any, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The environment variable of the key that the verifier sends, and the address that it goes to, if it does."""
    declared = {} if is_rubric(function) else options_of(function)[0]
    if not options.get("url") or not {"url", "key"} <= set(declared):
        return []
    variable = options.get("key", declared["key"].default)
    return [(variable, str(options["url"]))] if isinstance(variable, str) and os.environ.get(variable) else []


def find(target: str) -> tuple[ModuleType, Any]:
    """The module and the object of `module:attribute` or `/path/to/file.py:attribute`."""
    place, _, attribute = target.rpartition(":")
    module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    try:
        return module, reduce(getattr, attribute.split("."), module)
    except AttributeError:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise AttributeError(f"{place} has no '{attribute}'; {near(attribute, public)}") from None


def _run_file(file: Path) -> ModuleType:
    """Import the Python file as a module, once; its folder is importable too, after all installed packages."""
    name = f"rlcli_verifier_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    return run_file(file, name)


def _options(function: Any, part: Part) -> dict[str, Any]:
    """The options of a term, each checked against the function's signature and converted to its annotation."""
    given = dict(part.options)
    if is_rubric(function):
        if given:
            raise WrongOption(f"{part.name} takes no options (it is an object of functions)")
        return {}
    taken, takes_any = options_of(function)
    for name in given:
        if name not in taken and not takes_any:
            raise WrongOption(f"{part.name} takes no option '{name}'; {near(name, taken)}")
    empty = inspect.Parameter.empty
    missing = [name for name, one in taken.items() if one.default is empty and name not in given]
    if missing:
        raise WrongOption(f"{part.name} must be given its option {missing[0]}: {part.name}({missing[0]}=…)")
    annotations = _annotations(function)
    return {
        name: _checked(part.name, name, value, annotations.get(name), taken[name].default) if name in taken else value
        for name, value in given.items()
    }


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    from typing import get_type_hints

    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # annotations with undefined names: the types are unknown
        return {}


def _checked(verifier: str, name: str, value: Any, annotation: Any, default: Any) -> Any:
    """`value` converted to the option's annotation, or else to the type of its default."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    if annotation is None and default not in (None, inspect.Parameter.empty):
        annotation = type(default)
    if annotation is None:
        return value
    try:
        # Strict, so that `true` is not 1; as JSON, where a list may be a tuple and an integer a float.
        return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except PydanticUserError:  # a type unknown to pydantic
        return value
    except ValidationError as error:
        wants = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise WrongOption(f"the option {name} of {verifier} is {json.dumps(value)} and should be {wants}") from None
