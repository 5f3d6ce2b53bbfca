"""Parse the expressions that name verifiers in a configuration or a row: `math * 1.0 + format * 0.1`.

    expression := ["-"] term (("+" | "-") term)*
    term       := factors joined by "*": one verifier and any numbers, its weight
    verifier   := reference ["(" option "=" value ("," option "=" value)* ")"]
    reference  := a name (`math`, `my-verifier`), `path/to/file.py:function`, `package.module:function`, in quotes if
                  it contains spaces or operators, or `auto`, which stands for the verifier that the row names
    value      := a TOML value, or True or False; a bare word is text

It is parsed by hand and with tomllib: nothing is evaluated.
"""

from __future__ import annotations

import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path

from rlcli.config.keys import RenamedKey
from rlcli.config.load import BOOLEANS, to_toml
from rlcli.config.paths import expanded
from rlcli.errors import ConfigError
from rlcli.support.served_models import ServedModel, served_model
from rlcli.types import OLD_OTHER_RESPONSES, OTHER_RESPONSES

AUTO = "auto"

_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./:])")
_WORD = re.compile(r"[^\s()*+,=\"']+")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"")
_OPTION = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_BARE = re.compile(r"[^\s()\[\]{},=\"']+")


@dataclass(frozen=True, slots=True)
class Term:
    """One verifier of an expression."""

    ref: str
    """Its reference: a name, `module:attribute`, `/path/file.py:function` or `auto`."""
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """TOML values by name."""
    weight: float = 1.0
    """Factor of its score in the sum."""

    @property
    def short(self) -> str:
        """The name; for a reference to code, the function's name."""
        return self.ref.rpartition(":")[2]

    @property
    def other_responses(self) -> int:
        """Number of other responses of its group with which the verifier compares one."""
        if OLD_OTHER_RESPONSES in self.options:
            text = (
                f"the option {OLD_OTHER_RESPONSES} of the verifier {self.ref} is now called {OTHER_RESPONSES}; "
                "the next release refuses the old name"
            )
            warnings.warn(text, RenamedKey, stacklevel=2)
        count = self.options.get(OTHER_RESPONSES, self.options.get(OLD_OTHER_RESPONSES, 0))
        return count if isinstance(count, int) else 0

    @property
    def serves(self) -> ServedModel | None:
        """The model that is to be served for the verifier. Raises `ConfigError` for an option `serve` that is none."""
        return served_model(self.options["serve"]) if "serve" in self.options else None

    @property
    def verifier(self) -> str:
        """The term without its weight, as an expression."""
        plain = _WORD.fullmatch(self.ref) and not _NUMBER.match(self.ref) and not self.ref.startswith("-")
        ref = self.ref if plain else to_toml(self.ref)
        options = ", ".join(f"{name}={_value_text(value)}" for name, value in self.options.items())
        return f"{ref}({options})" if options else ref


@dataclass(frozen=True, slots=True)
class Composition:
    """One or more verifiers, whose scores are added by weight.

    >>> str(parse("math*1.0 + 0.1 * format(strict=true)"))
    'math + 0.1 * format(strict=true)'
    >>> parse("gsm8k(mode=flexible) - 0.5 * length").terms[1]
    Term(ref='length', options={}, weight=-0.5)
    """

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        """The canonical text: equal for equal meaning, and parsed back to an equal composition."""
        first, *others = self.terms
        text = _weighted(first.weight, first)
        for term in others:
            text += f" {'-' if term.weight < 0 else '+'} {_weighted(abs(term.weight), term)}"
        return text

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each term's part of the reward: the verifier's; for code the function's, if it is unique."""
        short = [term.short for term in self.terms]
        return tuple(name if short.count(name) == 1 else term.ref for name, term in zip(short, self.terms, strict=True))

    @property
    def is_sum(self) -> bool:
        """True if scores are weighted or added, so that each term is a separate part."""
        return len(self.terms) > 1 or self.terms[0].weight != 1.0

    @property
    def weights(self) -> dict[str, float]:
        """Part → weight; empty if the score is that of one verifier."""
        return {name: term.weight for name, term in zip(self.names, self.terms, strict=True)} if self.is_sum else {}

    @property
    def names_rows_own(self) -> bool:
        """True if `auto` is among the terms."""
        return any(term.ref == AUTO for term in self.terms)

    def with_rows_own(self, row_verifiers: Composition) -> Composition:
        """Replace `auto` with what the row names; multiply weights. Raises `ConfigError` for a name given twice."""
        terms: list[Term] = []
        for term in self.terms:
            if term.ref == AUTO:
                terms += [replace(row_term, weight=term.weight * row_term.weight) for row_term in row_verifiers.terms]
            else:
                terms.append(term)
        return _checked(Composition(tuple(terms)), str(self))

    def located(self) -> Composition:
        """Makes paths absolute, of files and of models to be served: other processes may have another working
        directory."""
        return Composition(
            tuple(replace(term, ref=_located(term.ref), options=_with_model_located(term)) for term in self.terms)
        )


def parse(text: str) -> Composition:
    """Parse the expression in `text`. Raises `ConfigError` with the position of the syntax error.

    Names and options are not looked up: that requires the verifiers.
    """
    line = re.sub(r"[\t\n\r\f\v]", " ", text)
    return _checked(Composition(tuple(_Parser(line).expression())), line)


def is_file(ref: str) -> bool:
    """True if a reference names a function in a file: `path/to/file.py:function`."""
    return ref.rpartition(":")[0].endswith(".py")


class _Parser:
    """Parses one expression from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def expression(self) -> Iterable[Term]:
        sign = -1.0 if self.takes("-") else 1.0
        yield self.term(sign)
        while not self.ended():
            if self.takes("+"):
                yield self.term(1.0)
            elif self.takes("-"):
                yield self.term(-1.0)
            else:
                raise self.error("expected + or - between verifiers, or * before a weight")

    def term(self, sign: float) -> Term:
        weight, verifier = sign, None
        while True:
            number = self.number()
            if number is not None:
                weight *= number
            elif verifier is not None:
                raise self.error("expected a number: two verifiers cannot be multiplied")
            else:
                verifier = (self.reference(), self.options())
            if not self.takes("*"):
                break
        if verifier is None:
            raise self.error("expected the name of a verifier beside the weight")
        ref, options = verifier
        if ref == AUTO and options:
            raise self.error("auto takes no options: give them with the verifier that the row names")
        if not isfinite(weight):
            raise self.error(f"the weight of {ref} must be a finite number")
        return Term(ref, options, weight)

    def number(self) -> float | None:
        """A number, which may have signs; None if a reference follows."""
        start, sign = self.at, 1.0
        while (minus := self.takes("-")) or self.takes("+"):
            sign = -sign if minus else sign
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            self.at = start
            return None
        self.skip(match.end())
        return sign * float(match[0])

    def reference(self) -> str:
        quoted = _QUOTED.match(self.text, self.at)
        if quoted:
            ref = _toml_value(quoted[0])
            if ref is None:
                raise self.error("a \\ in double quotes starts an escape: use single quotes")
            self.skip(quoted.end())
            return str(ref)
        word = _WORD.match(self.text, self.at)
        if word is None or word[0].startswith("-"):
            raise self.error("expected a verifier or a number")
        self.skip(word.end())
        return word[0]

    def options(self) -> dict[str, object]:
        options: dict[str, object] = {}
        if not self.takes("("):
            return options
        while not self.takes(")"):
            match = _OPTION.match(self.text, self.at)
            if match is None:
                raise self.error("expected option=value, or ) after the last option")
            if match[1] in options:
                raise self.error(f"the option {match[1]} is given twice")
            self.skip(match.end())
            options[match[1]] = self.value()
            if not self.takes(",") and not self.text.startswith(")", self.at):
                raise self.error("expected , or ) after the value")
        return options

    def value(self) -> object:
        """A TOML value, or a bare word as text."""
        start, depth = self.at, 0
        end = start
        while end < len(self.text):
            quoted = _QUOTED.match(self.text, end)
            if quoted:
                end = quoted.end()
                continue
            character = self.text[end]
            if depth == 0 and character in ",)":
                break
            depth += (character in "[{") - (character in "]}")
            end += 1
        value = _toml_value(self.text[start:end].strip())
        if value is None:
            raise self.error('expected a value: a number, true, false, a word, "text" or [a, list]')
        self.skip(end)
        return value

    def takes(self, character: str) -> bool:
        self.skip(self.at)
        if not self.text.startswith(character, self.at):
            return False
        self.skip(self.at + 1)
        return True

    def ended(self) -> bool:
        return self.at >= len(self.text)

    def skip(self, to: int) -> None:
        """Move to the first character at or after `to` that is not a space."""
        while to < len(self.text) and self.text[to].isspace():
            to += 1
        self.at = to

    def error(self, problem: str) -> ConfigError:
        remainder = f"'{self.text[self.at : self.at + 20]}'" if not self.ended() else "the end"
        position = min(self.at, len(self.text)) + 1
        return ConfigError(
            f"the verifier '{self.text}': {problem}, and found {remainder} at character {position}",
            "for example: math * 1.0 + format * 0.1",
        )


def _toml_value(text: str) -> object:
    """The value of `text`; None if it is not a value. A date is text, as is a value that only a comment would end.
    Booleans may be written as in Python: `False` is not the text."""
    if text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # TOML's; too many digits or brackets
        document = {}
    if len(document) == 1 and _is_plain(document["value"]) and ("#" not in text or text[0] in "\"'[{"):
        return document["value"]
    return text if _BARE.fullmatch(text) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | float | str)


def _value_text(value: object) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and _toml_value(value) == value:
        return value
    return _literal(value)


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(name)} = {_literal(item)}" for name, item in value.items()) + "}"
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else to_toml(value)


def _weighted(weight: float, term: Term) -> str:
    return term.verifier if weight == 1 else f"{weight!r} * {term.verifier}"


def _checked(composition: Composition, text: str) -> Composition:
    twice = next((ref for ref, count in Counter(term.ref for term in composition.terms).items() if count > 1), None)
    if twice:
        raise ConfigError(f"the verifier '{text}' names {twice} twice", "name it once, with the sum of the weights")
    vast = next((term.ref for term in composition.terms if not isfinite(term.weight)), None)
    if vast:
        raise ConfigError(f"the verifier '{text}': the weight of {vast} must be a finite number", "give smaller ones")
    return composition


def _located(ref: str) -> str:
    if not is_file(ref):
        return ref
    path, _, function = ref.rpartition(":")
    file = Path(expanded(path, f"the verifier '{ref}'")).resolve()
    if not file.is_file():
        raise ConfigError(f"the verifier '{ref}': there is no file {file}", "give the path of a .py file")
    return f"{file}:{function}"


def _with_model_located(term: Term) -> Mapping[str, object]:
    served = term.serves
    if served is None or not Path(served.model).expanduser().is_dir():
        return term.options
    model, option = str(Path(served.model).expanduser().resolve()), term.options["serve"]
    return {**term.options, "serve": {**option, "model": model} if isinstance(option, Mapping) else model}


def served_by(expression: str) -> list[ServedModel]:
    """The models that are to be served for the verifiers of an expression. Raises `ConfigError`.

    >>> served_by("math + 0.2 * judge(serve=my/judge)")
    [ServedModel(model='my/judge', workers=1, tensor_parallel=1)]
    """
    return [served for term in parse(expression).terms if (served := term.serves)] if expression else []


@cache
def other_responses_of(expression: str) -> int:
    """Number of other responses of its group with which the verifiers of an expression compare one; 0: none.

    >>> other_responses_of('math + 0.2 * judge(url="http://judge", model=m, other_responses=3)')
    3
    >>> other_responses_of("math")
    0
    """
    return max((term.other_responses for term in parse(expression).terms), default=0) if expression else 0
