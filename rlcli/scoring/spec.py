"""What a configuration, or a row, writes to name its verifiers: `math * 1.0 + format * 0.1`, `gsm8k(mode=flexible)`.

    expression := ["-"] term (("+" | "-") term)*
    term       := factors joined by "*": one verifier and any numbers, its weight
    verifier   := reference ["(" option "=" value ("," option "=" value)* ")"]
    reference  := a name (`math`, `my-verifier`), `path/to/file.py:function`, `package.module:function`, in quotes where
                  it holds spaces or operators, or `auto`, which stands for what the row names
    value      := a TOML value; a bare word is text

It is read by hand and by tomllib: nothing is evaluated.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rlcli.config.load import to_toml
from rlcli.errors import ConfigError

AUTO = "auto"

_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./:])")
_WORD = re.compile(r"[^\s()*+,=\"']+")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"")
_OPTION = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_BARE = re.compile(r"[^\s()\[\]{},=\"']+")


@dataclass(frozen=True, slots=True)
class Term:
    """One verifier of an expression: how it is referred to, its options, and the weight of its score."""

    ref: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weight: float = 1.0

    @property
    def short(self) -> str:
        """The name, or of a reference to code the function's."""
        return self.ref.rpartition(":")[2]

    @property
    def verifier(self) -> str:
        """The term without its weight, as an expression."""
        plain = _WORD.fullmatch(self.ref) and not _NUMBER.match(self.ref) and not self.ref.startswith("-")
        ref = self.ref if plain else to_toml(self.ref)
        options = ", ".join(f"{name}={_value_text(value)}" for name, value in self.options.items())
        return f"{ref}({options})" if options else ref


@dataclass(frozen=True, slots=True)
class Composition:
    """One or more verifiers, whose scores are added up by weight.

    >>> str(parse("math*1.0 + 0.1 * format(strict=true)"))
    'math + 0.1 * format(strict=true)'
    >>> parse("gsm8k(mode=flexible) - 0.5 * length").terms[1]
    Term(ref='length', options={}, weight=-0.5)
    """

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        """The canonical text: equal for what means the same, and read back as the same."""
        first, *others = self.terms
        text = _weighted(first.weight, first)
        for term in others:
            text += f" {'-' if term.weight < 0 else '+'} {_weighted(abs(term.weight), term)}"
        return text

    @property
    def names(self) -> tuple[str, ...]:
        """What each term's part of the reward is called: its name; of code the function's, where no other has it."""
        short = [term.short for term in self.terms]
        return tuple(name if short.count(name) == 1 else term.ref for name, term in zip(short, self.terms, strict=True))

    @property
    def is_sum(self) -> bool:
        """Whether scores are weighted or added, so that each term is a part of its own."""
        return len(self.terms) > 1 or self.terms[0].weight != 1.0

    @property
    def weights(self) -> dict[str, float]:
        """Part → weight; empty where the score is that of one verifier."""
        return {name: term.weight for name, term in zip(self.names, self.terms, strict=True)} if self.is_sum else {}

    @property
    def names_rows_own(self) -> bool:
        """Whether `auto` is among the terms."""
        return any(term.ref == AUTO for term in self.terms)

    def with_rows_own(self, own: Composition) -> Composition:
        """`auto` replaced by what the row names, weights multiplied. Raises `ConfigError` for one named twice."""
        terms: list[Term] = []
        for term in self.terms:
            if term.ref == AUTO:
                terms += [replace(one, weight=term.weight * one.weight) for one in own.terms]
            else:
                terms.append(term)
        return _checked(Composition(tuple(terms)), str(self))

    def located(self) -> Composition:
        """Paths of files made absolute: scoring processes may have another working directory."""
        return Composition(tuple(replace(term, ref=_located(term.ref)) for term in self.terms))


def parse(text: str) -> Composition:
    """The expression in `text`. Raises `ConfigError` with the position of what cannot be read.

    Names and options are not looked up: that takes the verifiers.
    """
    line = re.sub(r"[\t\n\r\f\v]", " ", text)
    return _checked(Composition(tuple(_Reader(line).expression())), line)


def is_file(ref: str) -> bool:
    """Whether a reference leads to a function in a file: `path/to/file.py:function`."""
    return ref.rpartition(":")[0].endswith(".py")


class _Reader:
    """Reads one expression from left to right."""

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
        weight, found = sign, None
        while True:
            number = self.number()
            if number is not None:
                weight *= number
            elif found is not None:
                raise self.error("expected a number: two verifiers cannot be multiplied")
            else:
                found = (self.reference(), self.options())
            if not self.takes("*"):
                break
        if found is None:
            raise self.error("expected the name of a verifier beside the weight")
        ref, options = found
        if ref == AUTO and options:
            raise self.error("auto takes no options: they stand with what the row names")
        if not isfinite(weight):
            raise self.error(f"the weight of {ref} must be a finite number")
        return Term(ref, options, weight)

    def number(self) -> float | None:
        """A number, which may have signs; None where a reference follows."""
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
                raise self.error("a \\ in double quotes starts an escape: put this in single quotes")
            self.skip(quoted.end())
            return str(ref)
        word = _WORD.match(self.text, self.at)
        if word is None or word[0].startswith("-"):
            raise self.error("expected a verifier or a number")
        self.skip(word.end())
        return word[0]

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
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

    def value(self) -> Any:
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
        """Go on to the first character at or after `to` that is no space."""
        while to < len(self.text) and self.text[to].isspace():
            to += 1
        self.at = to

    def error(self, what: str) -> ConfigError:
        found = f"'{self.text[self.at : self.at + 20]}'" if not self.ended() else "the end"
        return ConfigError(
            f"the verifier '{self.text}': {what}, and found {found} at character {min(self.at, len(self.text)) + 1}",
            "write for instance: math * 1.0 + format * 0.1",
        )


def _toml_value(text: str) -> Any:
    """The value that `text` writes, None where it writes none. A date is text, as is what only a comment would end."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    if len(document) == 1 and _is_plain(document["value"]) and ("#" not in text or text[0] in "\"'[{"):
        return document["value"]
    return text if _BARE.fullmatch(text) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | float | str)


def _value_text(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and _toml_value(value) == value:
        return value
    return _literal(value)


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(name)} = {_literal(one)}" for name, one in value.items()) + "}"
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else to_toml(value)


def _weighted(weight: float, term: Term) -> str:
    return term.verifier if weight == 1 else f"{weight!r} * {term.verifier}"


def _checked(composition: Composition, text: str) -> Composition:
    refs = [term.ref for term in composition.terms]
    twice = next((ref for ref in refs if refs.count(ref) > 1), None)
    if twice:
        raise ConfigError(f"the verifier '{text}' names {twice} twice", "name it once, with the sum of the weights")
    return composition


def _located(ref: str) -> str:
    if not is_file(ref):
        return ref
    path, _, function = ref.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"the verifier '{ref}': there is no file {file}", "give the path of a .py file")
    return f"{file}:{function}"
