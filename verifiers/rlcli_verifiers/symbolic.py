"""Compare the values of two formulas by math-verify and sympy, after limits that bound the cost.

Problems found in math-verify 0.9 and latex2sympy2_extended 1.11, and how they are prevented here:

- `math_verify.parse` reads plain expressions, and the parser reads its number tokens, by sympy's `parse_expr`, which
  evaluates Python. Here the LaTeX parser is called directly, and makes its numbers from digits by `Fraction`.
- `\\operatorname{name}(1)` becomes a function of that name, and evaluating it calls the attribute `name` of mpmath,
  whatever that is; `\\operatorname{zeros}(10^9, …)`, `\\det`, `\\gcd` and `\\binom` compute while they are parsed.
  Here only the commands of `_COMMANDS` are accepted.
- Its timeouts are `signal.alarm`, which fails off the main thread and does not stop C code: gmpy2, if sympy finds
  it, computes `(10^9)!` in one call. Here they are never set; the size of numbers is limited, and the process is
  killed.
- Its comparison treats two values as equal that agree to six decimals. Here no decimal fraction becomes a float.
- Versions 4.9.3, 4.11 and 4.13.2 of antlr read `42\\%` differently. Here percent signs are removed before.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
    from mpmath import MPContext, mpc, mpf
    from sympy import Basic, Expr, Rational

MAX_CHARS = 300
MAX_DEPTH = 12
MAX_DIGITS = 60
MAX_NUMBERS = 80
MAX_CELLS = 64
"""Maximum number of entries of a matrix, all rows together."""

MAX_POWER_DIGITS = 5000
"""Maximum digits of a power of a plain number."""

MAX_EXPANSION = (200, 60, 30)
"""Maximum product of all exponents over brackets and functions, in a formula with no, one or two unknowns."""

MAX_EXPANSION_OF_MANY = 12
"""The same for more unknowns, or for trigonometric functions, whose identities take long to try."""

VALUE_DIGITS = 50
"""Digits to which values are computed when two formulas are compared by number; exponents in them add their own."""

MAX_VALUE_DIGITS = 2000

_GUARD_DIGITS = 10
"""Digits of two equal values that may differ."""

_CANCELLED_BITS = 20
"""No more certain bits than this are left where two equal terms cancel."""

_EXPONENT = re.compile(r"\^\s*[{(]?\s*-?\s*([0-9]{1,4})|([0-9]{1,3})\s*!")

_ROOTS = re.compile(r"\\(?:sqrt|ln|log)(?![A-Za-z])|\^\s*\{?\s*(?:\\frac|-?\d+\s*/|\d*\.\d)")

_COMMANDS = frozenset(
    re.findall(
        r"\w+",
        """frac sqrt pi infty cdot times div pm mp binom le leq ge geq ne neq lt gt in cup cap setminus mathbb emptyset
        varnothing begin end left right lfloor rfloor lceil rceil triangle angle overline vec log ln sin cos tan cot
        sec csc arcsin arccos arctan alpha beta delta epsilon varepsilon zeta eta theta iota kappa
        lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Delta Theta Lambda Sigma Phi Omega""",
    )
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(\w+)\}")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_NUMBER = re.compile(r"[0-9]+")
_PLAIN = re.compile(r"[A-Za-z0-9\s.+\-*/^_=<>!|,;()\[\]{}&\\]*")
_FACTORIAL = re.compile(r"(?<![0-9])(?P<of>[0-9]{1,3}|\([0-9]{1,3}\)|[a-z]|\([a-z]\s*[+-]\s*[0-9]{1,3}\))\s*!(?!\s*!)")
_BINOMIAL = re.compile(r"\\binom\s*\{\s*(?:[0-9]{1,3}|[a-z])\s*\}\s*\{\s*(?:[0-9]{1,3}|[a-z])\s*\}")
_POWER = re.compile(
    r"(?P<base>[0-9]+|[A-Za-z]|\\[A-Za-z]+|[)}\]|!]|^|.)\s*\^\s*(?P<exponent>\{|\(|-?[0-9]+|\\?[A-Za-z]+|-\w+|.)", re.S
)
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_SUBSCRIPT = re.compile(r"(?<![0-9\s])_\s*(?:\{\s*\w{1,8}\s*\}|\w)")


@lru_cache(maxsize=8192)
def same(gold: str, answer: str) -> bool:
    """True if two formulas in LaTeX are equal in value; False for one that `is_tame` refuses or that cannot be read.

    Unknowns are real. Where one of the two has a root or a logarithm of them, they are positive, unless a sign is lost
    in it: `\\sqrt{x^2}` is not `x`, and `\\ln(x^2)` is not `2\\ln x` (but is right for it, where that is defined).
    """
    if not (is_tame(gold) and is_tame(answer)):
        return False
    from math_verify import verify
    from math_verify.grader import should_treat_as_complex

    is_complex = should_treat_as_complex(gold) or should_treat_as_complex(answer)
    ours, theirs = _parse(gold, is_complex), _parse(answer, is_complex)
    if ours is None or theirs is None:
        return False
    if _differ_in_number(ours, theirs, _digits(gold + answer)):
        return False
    # No timeouts: they are signal.alarm, useless against C code and wrong off the main thread. Our process is killed.
    if verify(ours, theirs, timeout_seconds=None):
        return True
    if not (_ROOTS.search(gold + answer) and "|" not in gold):
        return False
    is_signed = _loses_sign(_parse(gold, True), with_logarithms=True) or _loses_sign(
        _parse(answer, True), with_logarithms=False
    )
    return _equal_for_signs(ours, theirs, is_signed)


def _equal_for_signs(ours: Basic, theirs: Basic, every_sign: bool) -> bool:
    """True if two formulas are equal for positive unknowns; every_sign: and with any one of them negative."""
    from sympy import Expr, Symbol

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)):
        return False
    unknowns = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    positive = {unknown: Symbol(unknown.name, positive=True) for unknown in unknowns}
    cases = [positive, *({**positive, unknown: -positive[unknown]} for unknown in unknowns if every_sign)]
    return bool(unknowns) and all(_is_zero(ours.subs(case), theirs.subs(case)) for case in cases)


def _loses_sign(parsed: Basic, *, with_logarithms: bool) -> bool:
    """True if a formula has a root (or a logarithm) of an even power, `\\sqrt{x^2}`, `\\sqrt{x^2 - 2x + 1}`.

    With another unknown, as in `\\sqrt{x^2 y}`, all unknowns are assumed positive.
    """
    from sympy import factor_list, log, preorder_traversal
    from sympy.polys.polyerrors import PolynomialError

    for node in preorder_traversal(parsed):
        is_root = getattr(node, "is_Pow", False) and node.exp.is_Rational and not node.exp.is_Integer
        if not (is_root or (with_logarithms and isinstance(node, log))) or not node.args[0].free_symbols:
            continue
        try:
            factors = [factor for part in node.args[0].as_numer_denom() for factor in factor_list(part)[1]]
        except (PolynomialError, NotImplementedError):
            return True
        # (x^4)^{1/2} and (x^2)^{1/3} lose no sign.
        even = [base for base, times in factors if times % 2 == 0 and not (is_root and (times * node.exp).p % 2 == 0)]
        odd = [base for base, times in factors if times % 2]
        unknowns = {unknown for base in even for unknown in base.free_symbols}
        if even and all(base.free_symbols <= unknowns for base in odd):
            return True
    return False


def _is_zero(ours: Expr, theirs: Expr) -> bool:
    """True if the difference of two formulas is provably zero."""
    from sympy import expand_log, simplify

    try:
        difference = ours - theirs
        return bool(simplify(difference) == 0 or simplify(expand_log(difference)) == 0)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return False


def _digits(text: str) -> int:
    """Digits that distinguish two values which differ by the smallest power in a text, such as `2^{-99}`."""
    exponents = (int(power or 2 * factorial) for power, factorial in _EXPONENT.findall(text))
    return min(VALUE_DIGITS + sum(exponents), MAX_VALUE_DIGITS)


def _differ_in_number(ours: Basic, theirs: Basic, digits: int) -> bool:
    """True if two expressions differ in value at certain values of their unknowns: quicker than a proof.

    Two equations differ if their sides' differences, without denominators, are not proportional. The test is relative:
    a distance of 1e-12 is negligible between values of 1e40, and not between 1e-12 and 0. math-verify's own test is
    absolute.
    """
    from sympy import Eq, Expr, MatrixBase, Symbol, Tuple, together

    if isinstance(ours, Symbol) or isinstance(theirs, Symbol):
        return False
    if isinstance(ours, (Tuple, MatrixBase)) and isinstance(theirs, type(ours)) and len(ours) == len(theirs):
        return any(
            _differ_in_number(our_value, their_value, digits)
            for our_value, their_value in zip(ours, theirs, strict=True)
        )
    try:
        if isinstance(ours, Eq) and isinstance(theirs, Eq):
            pair = tuple(together(equation.lhs - equation.rhs).as_numer_denom()[0] for equation in (ours, theirs))
            (our_value, their_value), (our_second, their_second) = _values(pair, 137, digits), _values(pair, 59, digits)
            our_value, their_value = our_value * their_second, their_value * our_second
        elif isinstance(ours, Expr) and isinstance(theirs, Expr):
            rationals = _rational(ours), _rational(theirs)
            if None not in rationals:
                return bool(rationals[0] != rationals[1])
            our_value, their_value = _values((ours, theirs), 137, digits)
        else:
            return False
        size, distance = max(abs(our_value), abs(their_value)), abs(our_value - their_value)
        return bool(size < float("inf") and distance > size * _context(digits).mpf(10) ** (_GUARD_DIGITS - digits))
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return False  # undefined there


def _rational(formula: Expr) -> Rational | None:
    """The exact value of a formula without unknowns and roots; None for any other."""
    if formula.free_symbols or not formula.is_rational:
        return None
    value = formula.doit()
    return value if value.is_Rational else None


def _values(pair: tuple[Expr, ...], start: int, digits: int) -> tuple[mpc, mpc]:
    """The values of two expressions if the first of their unknowns is `start` hundredths."""
    from sympy import Rational

    unknowns = sorted(pair[0].free_symbols | pair[1].free_symbols, key=str)
    point = {unknown: Rational(start * 100 + 2173 * i, 10_000) for i, unknown in enumerate(unknowns)}
    first, second = (_number_of(side.evalf(digits, subs=point), digits) for side in pair)
    return first, second


def _number_of(value: Expr, digits: int) -> mpc:
    """Convert a sympy number to mpmath. Raises `TypeError` for any other value, and if its digits are not certain."""
    real, imaginary = (_certain(part, digits) for part in value.as_real_imag())
    return _context(digits).mpc(real, imaginary)


def _certain(part: Expr, digits: int) -> mpf:
    """Convert a real sympy number to mpmath; 0 if no digit is certain, because equal terms cancel."""
    from sympy import Float

    if not (part.is_Float or part.is_Rational):
        raise TypeError(f"{part} is no number")
    if part.is_Float and part._prec < 3.3 * (digits - 1):
        if part._prec > _CANCELLED_BITS:
            raise TypeError(f"{part} has too few certain digits")
        return _context(digits).mpf(0)
    return _context(digits).mpf(Float(part, digits))


@lru_cache(maxsize=16)
def _context(digits: int) -> MPContext:
    """An mpmath context with this precision."""
    from mpmath import MPContext

    context = MPContext()
    context.dps = digits
    return context


@lru_cache(maxsize=1024)
def decimal(formula: str) -> Fraction | None:
    """The value of a real formula without unknowns, to 40 digits; None otherwise."""
    if not is_tame(formula) or (parsed := _parse(formula, False)) is None:
        return None
    from sympy import Expr

    if not isinstance(parsed, Expr) or not parsed.is_number:  # evalf of a matrix recurses indefinitely
        return None
    value = parsed.evalf(40)
    return Fraction(str(value)) if value.is_Float and value.is_finite else None


def is_tame(text: str) -> bool:
    """True if a formula may be parsed and evaluated: only known commands, and no very large number or structure."""
    if len(text) > MAX_CHARS or not _PLAIN.fullmatch(text) or not set(_COMMAND.findall(text)) <= _COMMANDS:
        return False
    if not all(name.rstrip("*") in ("pmatrix", "bmatrix", "matrix") for name in _ENVIRONMENT.findall(text)):
        return False
    numbers = _NUMBER.findall(text)
    if len(numbers) > MAX_NUMBERS or any(len(number) > MAX_DIGITS for number in numbers):
        return False
    if text.count("&") + text.count(r"\\") > MAX_CELLS or _depth(text) > MAX_DEPTH:
        return False
    if len(_FACTORIAL.findall(text)) != text.count("!") or len(_BINOMIAL.findall(text)) != text.count(r"\binom"):
        return False
    return len(_SUBSCRIPT.findall(text)) == text.count("_") and _powers_are_tame(text)


def _powers_are_tame(text: str) -> bool:
    """True if every power is small: no tower of numbers, no large expansion."""
    expansion, powers = [1], 0
    for match in _POWER.finditer(text):
        powers += 1
        base, exponent = match["base"], match["exponent"]
        if exponent in ("{", "("):
            exponent = _group(text, match.end() - 1)
            rest = text[match.end() + len(exponent) + 1 :]
        else:
            rest = text[match.end() :]
        if rest.lstrip()[:1] in ("^", "!"):
            return False  # a tower; and a factorial of a power
        if base.isdigit():
            if not _exponent_fits(base, exponent):
                return False
        elif not base.isalpha():
            if "^" in exponent or "!" in exponent:
                return False
            expansion += [int(number[:5]) for number in _NUMBER.findall(exponent)]
        elif not _tower_fits(exponent):
            return False
    unknowns = len(set(re.findall("[A-Za-z]", _COMMAND.sub(" ", text))))
    many = unknowns >= len(MAX_EXPANSION) or (unknowns and _TRIGONOMETRIC.search(text))
    bound = MAX_EXPANSION_OF_MANY if many else MAX_EXPANSION[unknowns]
    return powers == text.count("^") and prod(max(1, number) for number in expansion) <= bound


def _tower_fits(exponent: str) -> bool:
    """True if the exponent of a letter is small enough: `e^{9999}`, `e^{x^2}`, but no tower of three."""
    digits = max(map(len, _NUMBER.findall(exponent)), default=0)
    return digits <= 4 if "^" not in exponent else exponent.count("^") == 1 and digits <= 1


def _exponent_fits(base: str, exponent: str) -> bool:
    """True if a plain number to this power has at most `MAX_POWER_DIGITS` digits."""
    numbers = _NUMBER.findall(exponent)
    if "^" in exponent or "!" in exponent or "binom" in exponent or any(len(number) > 5 for number in numbers):
        return False
    # The exponent's value is at most the product of its numbers, or their sum.
    largest = prod(max(2, int(number)) for number in numbers) if len(numbers) > 1 else int((numbers or ["1"])[0])
    return largest * len(base) <= MAX_POWER_DIGITS


def _group(text: str, opening: int) -> str:
    """The content of the bracket at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in "({") - (text[position] in ")}")
        if depth == 0:
            return text[opening + 1 : position]
    return text[opening + 1 :]


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    # Roots and signs nest without brackets.
    return max(deepest, *(len(run) // 2 for run in re.findall(r"(?:[-+]\s*)+|(?:\\sqrt\s*)+|(?:\|\s*)+", text)), 0)


@lru_cache(maxsize=8192)
def _parse(text: str, is_complex: bool) -> Basic | None:
    """The formula as a sympy object, None if it cannot be read."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text).replace("\n", " ")
    if is_complex:
        text = re.sub(r"(?<![A-Za-z\\])i(?![A-Za-z])", "I", text)
    try:
        parser, config = _parser()
        return parser(is_real=not is_complex, config=config).parse(text)
    except Exception:  # any exception of the parser means that the text cannot be read
        return None


@cache
def _parser() -> tuple[type[_Latex2Sympy], ConversionConfig]:
    """latex2sympy2_extended's parser, with numbers made from their digits, exactly."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no timeout
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
    from sympy import Rational

    class Exact(_Latex2Sympy):
        def parse_number(self, text: str) -> Rational:
            value = Fraction(text.replace(",", ""))
            return Rational(value.numerator, value.denominator)

    return Exact, ConversionConfig(lowercase_symbols=False)  # N is not n
