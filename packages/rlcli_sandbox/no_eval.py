"""Calls functions of a library that would evaluate texts of rows and answers as Python, without evaluating them.

The standard library alone, so that environments in another interpreter run this file as well.

Two things hold while a function from `without_eval` runs. The `eval` of the function's module reads values: literals
and arithmetic with numbers. And whatever else compiles a text and runs it (`eval` and `exec` elsewhere, sympy's
`parse_expr` and `sympify`), starts a program or unpickles is refused by an audit hook of the interpreter, which no
import and no `except` can get around.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_CHARS = 10_000
MAX_BITS = 10_000
"""Maximum size of a number that arithmetic makes."""

BY_SYMPY = re.compile(r"(?<!\.)\b(?:sympy\.|sp\.)?(?:exec|parse_expr|sympify)\(")
"""In the source of a function: it evaluates a text in a way that cannot be replaced by `value_of`."""

_REFUSED = frozenset(
    (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "subprocess.Popen",
        "_thread.start_new_thread",
        "pickle.find_class",
        "socket.connect",
    )
)
"""Further events of the interpreter that no scorer needs."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}


class Evaluated(ValueError):
    """A text that was to be evaluated as Python, and was not."""


def value_of(text: str) -> Any:
    """The value of a literal, or of arithmetic with numbers. Raises `ValueError` for any other text.

    >>> value_of("(0x1f + 1) << 2"), value_of("[1, 'a', (2.5,)]")
    (128, [1, 'a', (2.5,)])
    """
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        raise Evaluated(f"not a text of {MAX_CHARS} characters at most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _arithmetic(tree) if isinstance(tree, ast.BinOp | ast.UnaryOp) else ast.literal_eval(tree)
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise Evaluated(f"not a value: {error!r:.100}") from None


def without_eval(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, which then reads values where it would evaluate texts. name: of what it belongs to, for messages.

    Raises `Evaluated` for a function whose source uses sympy's parser, which evaluates Python; the call raises it if it
    was about to evaluate a text in another way, and nothing of what it does then counts.
    """
    if call := BY_SYMPY.search(_source(function)):
        raise Evaluated(f"{name} runs {call[0].rstrip('(')}() on the answer, which evaluates it as Python: refused")
    module = sys.modules[inspect.unwrap(function).__module__]
    vars(module)["eval"] = value_of

    def guarded(*arguments: Any) -> Any:
        with refusing_eval(name):
            return function(*arguments)

    return guarded


@contextmanager
def refusing_eval(name: str) -> Iterator[None]:
    """Refuse all that evaluates texts in this thread. Raises `Evaluated` at the end if something did."""
    _watch()
    _now.refused = ""
    try:
        yield
    finally:
        refused, _now.refused = _now.refused, None
        if refused:
            raise Evaluated(f"{name} {refused}: refused")


def _arithmetic(node: ast.expr) -> int | float:
    value: Any
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        first, second = _arithmetic(node.left), _arithmetic(node.right)
        if isinstance(node.op, ast.LShift) and second > MAX_BITS:
            raise Evaluated("a number that is too large")
        value = _BINARY[type(node.op)](first, second)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_arithmetic(node.operand))
    else:
        value = ast.literal_eval(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Evaluated("arithmetic of other values than numbers")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise Evaluated("a number that is too large")
    return value


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # without a source: the audit hook remains
        return ""


_now = threading.local()
"""refused: None outside of a call; in it, what was refused, empty until then. Each thread has its own."""
_watching: list[bool] = []


def _watch() -> None:
    """Install the audit hook, once; it cannot be removed."""
    if not _watching:
        _watching.append(True)
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if getattr(_now, "refused", None) is None:
        return
    action = ""
    if event == "exec" and not _imports():
        action = "evaluates a text as Python"
    elif event in _REFUSED:
        action = f"calls {event}"
    if action:
        _now.refused = action
        raise Evaluated(action)


def _imports() -> bool:
    """True if a module is being imported, which runs its code, and `exec` for its dataclasses."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
