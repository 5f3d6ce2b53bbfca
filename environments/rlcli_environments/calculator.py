"""A calculator: exact arithmetic on numbers that the policy writes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARS = 300
"""Longest expression that is read."""
MAX_BITS = 4096
"""Largest numerator or denominator of a result, so that powers of powers end early."""
MAX_PLACES = 30
"""Longest decimal fraction that is shown in full."""
SHOWN_DIGITS = 12
"""Significant digits of a result that is not shown in full."""

_NUMBER = re.compile(r"(\d{1,100}(\.\d{0,100})?|\.\d{1,100})", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "⋅": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Calculates an expression of numbers, + - * / // % ** and brackets, exactly.

    Args:
        expression: for example (12 + 30) * 1.5
    """
    text = expression.strip().translate(_SIGNS)
    if len(text) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError("this is not an expression of numbers, + - * / // % ** and brackets") from None
    try:
        return shown(value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("it divides by zero") from None


def value(node: ast.expr, text: str) -> Fraction:
    """The value of a parsed expression, whose nodes are visited: nothing is executed. text: its source. Raises
    `ValueError`, `ZeroDivisionError`."""
    match node:
        case ast.Constant():
            written = ast.get_source_segment(text, node) or ""
            if not _NUMBER.fullmatch(written):
                raise ValueError("an expression holds numbers in decimal digits, and no names or texts")
            return Fraction(written)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
            operand = value(node.operand, text)
            return -operand if isinstance(sign, ast.USub) else operand
        case ast.BinOp(op=ast.Pow()):
            return bounded(power(value(node.left, text), value(node.right, text)))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return bounded(_OPERATORS[type(node.op)](value(node.left, text), value(node.right, text)))
    raise ValueError("an expression holds only numbers, + - * / // % ** and brackets")


def power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length(), 1) > MAX_BITS:
        raise ValueError("the result is too large")
    return Fraction(base**exponent.numerator)


def bounded(result: Fraction | int) -> Fraction:
    number = Fraction(result)
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the result is too large")
    return number


def shown(number: Fraction) -> str:
    """As an integer or a decimal if that is exact, else as a fraction and its first digits.

    >>> shown(Fraction(84, 2)), shown(Fraction(-1, 8)), shown(Fraction(2, 3))
    ('42', '-0.125', '2/3 (about 0.666666666667)')
    """
    decimals = next((n for n in range(MAX_PLACES + 1) if 10**n % number.denominator == 0), None)
    if decimals is None:
        about = Context(prec=SHOWN_DIGITS).divide(Decimal(number.numerator), Decimal(number.denominator))
        return f"{number} (about {about})"
    digits = f"{abs(number.numerator) * 10**decimals // number.denominator:0{decimals + 1}d}"
    sign = "-" if number < 0 else ""
    return sign + (f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits)
