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
from typing import cast

from rlcli.registry import near
from rlcli.rewards.combine import Verified, combine
from rlcli.rewards.function_adapters import adapt, is_rubric, options_of
from rlcli.support.importing import run_file
from rlcli.types import OLD_OTHER_RESPONSES, OTHER_RESPONSES, VerifyRequest

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
    """A term of an expression as sent to scoring processes."""

    name: str
    """Name of its part of the reward."""
    target: str
    """Definition: `module:attribute` or `/path/file.py:attribute`."""
    options: Mapping[str, object]
    """JSON values by name."""
    weight: float
    """Factor of its score in the sum."""


@dataclass(frozen=True)
class Scorer:
    """A loaded expression."""

    verify: Callable[..., list[Verified]]
    """`verify(requests, begins)` returns the verdict or the exception for each request; the optional `begins` is called
    with the index of each term before it is verified."""
    at_once: int
    """Maximum number of requests in one call."""
    needs_sandbox: bool
    """True if one of its verifiers runs programs."""
    patience_s: float
    """Total time that its verifiers wait, by their option `timeout_s`, in seconds."""
    own_limits: tuple[tuple[float, float], ...] = ()
    """For each term its options `deadline_s` (CPU) and `wait_s` (wall clock), in seconds; 0 if it has none."""
    keys: tuple[tuple[str, str], ...] = ()
    """Environment variables whose values are sent, each with its address: of verifiers with options `url`, `key`."""
    answer_kind: str = ""
    """`ANSWER_KIND` of the first term's module; empty if it sets none."""
    has_gold: bool = False
    """True if the first term's module has a function `gold`."""
    groups: bool = False
    """True if one of its verifiers needs all responses to a prompt in one call."""


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
        for index, verifier in enumerate(loaded):
            begins(index)
            columns.append(verifier.verify(requests))
        return [combine(expression, weights, row) for row in zip(*columns, strict=True)]

    return Scorer(
        verify,
        AT_ONCE if any(verifier.prefers_batches for verifier in loaded) else 1,
        sandbox,
        patience_s,
        tuple(limits),
        tuple(keys),
        kind,
        has_gold,
        any(verifier.groups for verifier in loaded),
    )


def _seconds(function: object, options: Mapping[str, object], name: str) -> float:
    """The value of a verifier's option `name`, else its default; 0 if it has no such option."""
    declared = {} if is_rubric(function) else options_of(function)[0]
    value = options.get(name, declared[name].default if name in declared else 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _key(function: object, options: Mapping[str, object]) -> list[tuple[str, str]]:
    """The environment variable of the key that the verifier sends, and its address; empty if it sends none."""
    declared = {} if is_rubric(function) else options_of(function)[0]
    if not options.get("url") or not {"url", "key"} <= set(declared):
        return []
    variable = options.get("key", declared["key"].default)
    return [(variable, str(options["url"]))] if isinstance(variable, str) and os.environ.get(variable) else []


def find(target: str) -> tuple[ModuleType, object]:
    """The module and the object of `module:attribute` or `/path/to/file.py:attribute`."""
    location, _, attribute = target.rpartition(":")
    module = _run_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    try:
        return module, reduce(getattr, attribute.split("."), module)
    except AttributeError:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise AttributeError(f"{location} has no '{attribute}'; {near(attribute, public)}") from None


def _run_file(file: Path) -> ModuleType:
    """Import the Python file as a module, once; its folder is importable too, after all installed packages."""
    name = f"rlcli_verifier_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    return run_file(file, name)


def _options(function: object, part: Part) -> dict[str, object]:
    """The options of a term, each checked against the function's signature and converted to its annotation."""
    options = dict(part.options)
    if is_rubric(function):
        if options:
            raise WrongOption(f"{part.name} takes no options (it is an object of functions)")
        return {}
    declared, takes_any = options_of(function)
    is_renamed = OTHER_RESPONSES in declared and OLD_OTHER_RESPONSES not in declared
    # With both names the old one is refused below.
    if is_renamed and OLD_OTHER_RESPONSES in options and OTHER_RESPONSES not in options:
        options[OTHER_RESPONSES] = options.pop(OLD_OTHER_RESPONSES)
    for name in options:
        if name not in declared and not takes_any:
            raise WrongOption(f"{part.name} takes no option '{name}'; {near(name, declared)}")
    empty = inspect.Parameter.empty
    missing = [name for name, parameter in declared.items() if parameter.default is empty and name not in options]
    if missing:
        raise WrongOption(f"{part.name} must be given its option {missing[0]}: {part.name}({missing[0]}=…)")
    annotations = _annotations(function)
    return {
        name: _checked(part.name, name, value, annotations.get(name), declared[name].default)
        if name in declared
        else value
        for name, value in options.items()
    }


def _annotations(function: object) -> dict[str, object]:
    from typing import get_type_hints

    try:
        return dict(get_type_hints(function, include_extras=True))
    except Exception:  # annotations with undefined names: the types are unknown
        return {}


def _checked(verifier: str, name: str, value: object, annotation: object, default: object) -> object:
    """`value` converted to the option's annotation, or else to the type of its default."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    if annotation is None and default not in (None, inspect.Parameter.empty):
        annotation = type(default)
    if annotation is None:
        return value
    try:
        # Strict, so that `true` is not 1; as JSON, where a list may be a tuple and an integer a float.
        converted: object = TypeAdapter(cast("type", annotation)).validate_json(json.dumps(value), strict=True)
        return converted
    except PydanticUserError:  # a type unknown to pydantic
        return value
    except ValidationError as error:
        wants = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise WrongOption(f"the option {name} of {verifier} is {json.dumps(value)} and should be {wants}") from None
