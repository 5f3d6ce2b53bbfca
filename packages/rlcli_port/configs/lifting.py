"""Copies functions out of a script into a separate file, with the imports, helpers and constants that they need, so
that importing that file does not run the script. The script is parsed, never executed."""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_BUILTINS = frozenset(dir(builtins))
_MOST_STATEMENTS = 5_000
_LOGGING = (
    *("debug", "info", "warning", "warn", "error", "exception", "critical", "log"),
    *("setLevel", "addHandler", "addFilter", "close", "flush", "print"),
)
"""Methods that change nothing that a score depends on."""
_PARSING = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Lifted:
    """A file of functions."""

    text: str
    """Its Python source; empty if no function could be copied."""
    functions: list[str]
    """Names of the functions that it defines and that were asked for."""
    problems: dict[str, str] = field(default_factory=dict)
    """Name of a function that was not copied → why."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Name of a function → its parameters without a default that TRL does not fill: columns of the data."""


@dataclass(frozen=True)
class _Statement:
    """A statement that binds names in the script, or in the functions around a reward function."""

    node: ast.stmt
    binds: frozenset[str]


def lift(text: str, functions: Iterable[tuple[str, int]], origin: str) -> Lifted:
    """A file with these functions of the script `text`. functions: (name, line where the definition or its first
    decorator begins). origin: the script's name, for the docstring."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes in the script
            tree = ast.parse(text)
            statements, targets = _scopes(tree, set(functions))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Lifted("", [], {name: f"{origin} is not Python: {error}" for name, _ in functions})
    copied: dict[int, ast.stmt] = {}
    names: list[str] = []
    problems: dict[str, str] = {}
    columns: dict[str, list[str]] = {}
    for name, line in functions:
        target = targets.get((name, line))
        if target is None:
            problems[name] = "a lambda: give it a name" if name == "<lambda>" else f"no definition in line {line}"
            continue
        node, around = target
        try:
            needed, problem = _needed(node, [*around, *statements])
            problem = problem or _shadowed([*needed, node], around, statements) or _changed(needed, node, tree)
        except (SyntaxError, RecursionError, ValueError) as error:  # such as nonlocal of the function around it
            needed, problem = [], f"it does not stand alone: {getattr(error, 'msg', None) or type(error).__name__}"
        if problem:
            problems[name] = problem
            continue
        copied |= {id(statement): statement for statement in (*needed, node)}
        columns[name] = columns_of(node)
        if name not in names:
            names.append(name)
    if not names:
        return Lifted("", [], problems)
    try:
        source = _file(text, copied.values(), origin)
    except RecursionError:
        return Lifted("", [], problems | dict.fromkeys(names, "a statement that it needs is nested too deeply"))
    return Lifted(source, names, problems, columns)


def columns_of(function: Function) -> list[str]:
    """Parameters without a default that TRL does not fill itself.

    >>> columns_of(ast.parse("def f(completions, answer, level=1, **kwargs): ...").body[0])
    ['answer']
    """
    filled = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default
    ]
    return [argument.arg for argument in required if argument.arg not in filled]


def _scopes(
    tree: ast.Module, wanted: set[tuple[str, int]]
) -> tuple[list[_Statement], dict[tuple[str, int], tuple[Function, list[_Statement]]]]:
    """The module's statements that bind names; and each wanted function, with those of the functions around it."""
    statements = [*_statements(tree.body)]
    targets: dict[tuple[str, int], tuple[Function, list[_Statement]]] = {}

    def visit(body: Sequence[ast.AST], around: list[_Statement]) -> None:
        for node in body:
            if isinstance(node, Function):
                key = (node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
                if key in wanted:
                    targets[key] = (node, around)
                visit(node.body, [*_statements(node.body), *around])
            elif not isinstance(node, ast.ClassDef):
                visit([*ast.iter_child_nodes(node)], around)

    visit(tree.body, [])
    return statements, targets


def _statements(body: Sequence[ast.stmt]) -> Iterator[_Statement]:
    """Statements that bind names. Those of `if __name__ == "__main__":`, loops and `with` come one by one; `try` and
    other `if` stay whole."""
    for node in body[:_MOST_STATEMENTS]:
        if (isinstance(node, ast.If) and "__name__" in ast.dump(node.test)) or isinstance(
            node, ast.With | ast.For | ast.While
        ):
            yield from _statements(node.body)
        elif binds := frozenset(_bound(node)):
            yield _Statement(node, binds)


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.If | ast.Try):
        inner = [
            *node.body,
            *node.orelse,
            *(inner_statement for handler in getattr(node, "handlers", ()) for inner_statement in handler.body),
        ]
        for statement in inner:
            yield from _bound(statement)


def _needed(function: Function, statements: Sequence[_Statement]) -> tuple[list[ast.stmt], str]:
    """The statements that a function needs; and why it cannot be copied, empty if it can."""
    needed: dict[int, ast.stmt] = {}
    done = {function.name}
    open_names = [*_free(function)]
    stars = [statement.node for statement in statements if "*" in statement.binds]
    optional = _annotations(function)
    while open_names:
        name = open_names.pop()
        if name in done:
            continue
        done.add(name)
        binding = [statement.node for statement in statements if name in statement.binds]
        if not binding and name not in _BUILTINS and name not in ("__file__", "__name__"):
            if stars:
                binding = stars
            elif name not in optional:
                return [], f"it uses `{name}`, which is an argument of the function around it, or is not defined"
        for node in binding:
            if id(node) in needed or node is function:
                continue
            if "Trainer" in ast.dump(node) and not isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
                return [], f"it uses `{name}`, which the training makes"
            needed[id(node)] = node
            if not isinstance(node, ast.Import | ast.ImportFrom):
                open_names += _free(node)
                optional |= _annotations(node)
    return [*needed.values()], ""


def _shadowed(copied: Sequence[ast.stmt], around: Sequence[_Statement], statements: Sequence[_Statement]) -> str:
    """The reason why these statements cannot share a module: some are of an enclosing function, and bind a name that a
    statement of the module binds or reads too. Empty if they can."""
    inner = {id(statement.node): statement.binds for statement in around}
    of_statements = {id(statement.node) for statement in statements}
    outer = [node for node in copied if id(node) not in inner and id(node) in of_statements]
    of_module = {name for statement in statements for name in statement.binds}
    used = {name for node in outer for name in (*_bound(node), *_free(node))}
    for node in copied:
        for name in sorted(inner.get(id(node), frozenset()) & of_module & used):
            return f"`{name}` of the function around it is another one than `{name}` of the module"
    return ""


def _changed(needed: Sequence[ast.stmt], function: Function, tree: ast.Module) -> str:
    """The reason why a copy would differ: a separate statement changes a value that the function needs, as
    `WORDS.append("x")`, or the value comes from the command line. Empty if neither."""
    names = {
        name for node in needed if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) for name in _bound(node)
    }
    for node in needed:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _PARSING:
                return f"it uses the command line, {call.func.attr}()"
    copied = {id(inner) for node in (*needed, function) for inner in ast.walk(node)}
    for statement in ast.walk(tree):
        if id(statement) in copied:
            continue
        target: ast.AST | None = None
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            target = called if isinstance(called, ast.Attribute) and called.attr not in _LOGGING else None
        elif isinstance(statement, ast.Delete):
            target = statement.targets[0]
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target.id in names:
            return f"it uses `{target.id}`, which line {target.lineno} changes"
    return ""


def _free(node: ast.stmt) -> list[str]:
    """Names that a statement reads from outside of itself."""
    table = symtable.symtable(ast.unparse(node), "<lifted>", "exec")
    free: list[str] = []
    tables = [table]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            outside = symbol.is_global() or (table.get_type() == "module" and not symbol.is_assigned())
            if outside and symbol.is_referenced():
                free.append(symbol.get_name())
    bound = {*_bound(node)}
    return [name for name in dict.fromkeys(free) if name not in bound]


def _annotations(node: ast.stmt) -> set[str]:
    """Names in annotations, which are never evaluated in the copy."""
    annotations: list[ast.AST] = []
    for inner in ast.walk(node):
        annotations += [part for part in (getattr(inner, "annotation", None), getattr(inner, "returns", None)) if part]
    return {name.id for part in annotations for name in ast.walk(part) if isinstance(name, ast.Name)}


def _file(text: str, nodes: Iterable[ast.stmt], origin: str) -> str:
    """The statements in the script's order, as they are written there."""
    lines = text.splitlines(keepends=True)
    ordered = sorted(nodes, key=lambda node: node.lineno)
    future = [node for node in ordered if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    imports = [node for node in ordered if isinstance(node, ast.Import | ast.ImportFrom) and node not in future]
    others = [node for node in ordered if node not in imports and node not in future]
    name = "".join(letter for letter in origin if letter.isprintable() and letter not in '\\"')
    parts = [
        f'"""Reward functions of {name}, copied by rlcli config import."""\n\nfrom __future__ import annotations\n'
    ]
    if imports:
        parts.append("".join(_source(node, lines) for node in imports))
    for node in others:
        blank = "\n" if isinstance(node, Function | ast.ClassDef) else ""
        parts.append(blank + _source(node, lines))
    return "\n".join(parts)


def _source(node: ast.stmt, lines: Sequence[str]) -> str:
    """A statement as written, without the indentation of the function around it."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    assert node.end_lineno is not None
    written = "".join(lines[first - 1 : node.end_lineno])
    try:
        source = textwrap.dedent(written)
        if ast.dump(ast.parse(source)) != ast.dump(ast.Module([node], [])):
            source = ast.unparse(
                node
            )  # it shares its lines with others, or a text of several lines has less indentation
    except SyntaxError:
        source = ast.unparse(node)
    return source.rstrip() + "\n"
