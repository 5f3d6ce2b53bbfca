"""Read the arguments of `GRPOConfig(...)` and related calls from a Python file. The file is parsed, never executed."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError
from rlcli_port.configs.key_report import Unresolved
from rlcli_port.configs.methods import method_of

BESIDE = {
    "GRPOTrainer": {"model": "model_name_or_path"},
    "LoraConfig": {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"},
}
"""Other calls whose arguments are read: their name → our name."""
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LARGEST = 1e18


def arguments(text: str, path: Path) -> tuple[dict[str, Any], str]:
    """Keyword → value of the only configuration in the file, `Unresolved` for values that are not literal there; and
    its method.

    Raises `ConfigError` if the file is not Python, or does not hold exactly one such call.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes in the user's file
            tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        constants = _constants(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise ConfigError(f"{path} is not Python: {reason}, line {getattr(error, 'lineno', '?')}", "") from error
    configs = [call for call in calls if _name(call).endswith("Config") and method_of(_name(call))]
    if len(configs) != 1:
        lines = ", ".join(str(call.lineno) for call in configs[:5])
        problem = f"{len(configs)} {_name(configs[0])}(...), in lines {lines}" if configs else "no GRPOConfig(...)"
        raise ConfigError(f"{path} holds {problem}", "give a file with one")
    values = _keywords(configs[0], constants)
    for call in calls:
        if _name(call) in BESIDE:
            keywords = _keywords(call, constants)
            values |= {ours: keywords[theirs] for theirs, ours in BESIDE[_name(call)].items() if theirs in keywords}
            if _name(call) == "LoraConfig":
                values["use_peft"] = True
    return values, method_of(_name(configs[0]))


def arithmetic(text: str) -> float | None:
    """The value of an arithmetic expression of numbers; None for anything else.

    >>> arithmetic("1024 * (2 + 20)"), arithmetic("__import__('os')"), arithmetic("9 ** 9 ** 9")
    (22528, None, None)
    """
    try:
        value: float | None = _number(ast.parse(text.strip(), mode="eval").body, {})
        return value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _keywords(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    return {
        keyword.arg or "**": _value(keyword.value, constants) if keyword.arg else Unresolved(_written(keyword.value))
        for keyword in call.keywords
    }


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = _number(node, constants)
        return Unresolved(_written(node)) if value is None else value
    if isinstance(value, tuple | list | set):
        plain = all(isinstance(item, str | int | float | bool) for item in value)
        return [*value] if plain else Unresolved(_written(node))
    return value if value is None or isinstance(value, str | int | float | bool) else Unresolved(_written(node))


def _number(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of an arithmetic expression of numbers and numeric constants; None for anything else."""
    if isinstance(node, ast.Constant | ast.Name):
        value = constants.get(node.id) if isinstance(node, ast.Name) else node.value
        return value if isinstance(value, int | float) and abs(value) <= LARGEST else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand, constants)
        return None if value is None else -value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return None
    first, second = _number(node.left, constants), _number(node.right, constants)
    if first is None or second is None or (second == 0 and isinstance(node.op, ast.Div | ast.FloorDiv)):
        return None
    value = OPERATORS[type(node.op)](first, second)
    return value if abs(value) <= LARGEST else None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that the module sets exactly once, at its top level, to a plain value."""
    constants: dict[str, Any] = {}
    stored = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    twice = {name for name in stored if stored.count(name) > 1} if len(stored) < 2_000 else {*stored}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, constants)
            if node.targets[0].id not in twice and not isinstance(value, Unresolved):
                constants[node.targets[0].id] = value
    return constants


def _name(call: ast.Call) -> str:
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _written(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "an expression"
