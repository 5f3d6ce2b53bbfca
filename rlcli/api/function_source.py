"""The source of a function that a program gives as a verifier, as a Python file that other processes can import."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlcli.errors import VerifierError

CO_FUTURE_ANNOTATIONS = 0x1000000
"""The flag of code after `from __future__ import annotations`."""
TO_A_FILE = "write it to a file, and give verifier='FILE.py:FUNCTION'"


def source_of(function: Callable[..., Any]) -> str:
    """A Python file with `function` and the imports that it uses. Raises `VerifierError` for a function that does not
    fit into such a file: one without source, one that reads variables of the enclosing function, or one that uses other
    global names than builtins and imports.

    >>> print(source_of(textwrap.dedent))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlcli.errors.VerifierError: the verifier dedent uses the global _...
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, FunctionType) or name == "<lambda>":
        kind = "a lambda" if name == "<lambda>" else f"of type {type(function).__name__}"
        raise VerifierError(f"the verifier is {kind}, whose source cannot be stored", "give a function made with def")
    if function.__code__.co_freevars:
        names = ", ".join(function.__code__.co_freevars)
        raise VerifierError(
            f"the verifier {name} reads {names} of the function around it, which its source lacks",
            f"give it as the default value of a parameter after a *, or {TO_A_FILE}",
        )
    text = _text(function, name)
    imports = [*_imports(function, name, text)]
    head = f'"""The verifier `{name}`, as a program gave it."""\n\nfrom __future__ import annotations\n\n'
    return head + "".join(f"{line}\n" for line in dict.fromkeys(imports)) + ("\n\n" if imports else "\n") + text


def _text(function: FunctionType, name: str) -> str:
    """The function's definition, from the first decorator on. Raises `VerifierError` if the function is not compiled
    from it."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        flags = function.__code__.co_flags & CO_FUTURE_ANNOTATIONS
        compiled = compile(text, "<verifier>", "exec", flags, dont_inherit=True)
    except (OSError, TypeError, SyntaxError, ValueError):
        raise VerifierError(
            f"the source of the verifier {name} cannot be found", f"define it in a cell or a file, or {TO_A_FILE}"
        ) from None
    if _fingerprint(function.__code__) not in [_fingerprint(code) for code in _codes_in(compiled)]:
        raise VerifierError(
            f"the source of the verifier {name} has changed since it was defined, or a decorator has replaced it",
            f"run its cell again without decorators, or {TO_A_FILE}",
        )
    return text


def _fingerprint(code: CodeType) -> list[Any]:
    """A value that is equal for two compilations of one definition. The instructions are not: Python emits others for a
    call of a module's function if it compiles the module's import with it."""
    values = [value for value in code.co_consts if not isinstance(value, CodeType)]
    operators = [
        (instruction.opname, instruction.arg)
        for instruction in dis.get_instructions(code)
        if instruction.opname.endswith("_OP")
    ]
    return [code.co_name, code.co_names, code.co_varnames, values, operators, *map(_fingerprint, _codes_in(code))]


def _codes_in(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _imports(function: FunctionType, name: str, text: str) -> Iterator[str]:
    """The import of each global name that the definition uses."""
    tree = ast.parse(text)
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    annotated = _annotated(tree)
    plain = ast.unparse(_WithoutAnnotations().visit(ast.parse(text)))
    used = _globals(symtable.symtable(plain, "<verifier>", "exec")) - {name}
    for used_name in sorted(used | annotated):
        known = function.__globals__
        if used_name not in known and (hasattr(builtins, used_name) or used_name in annotated - used):
            continue
        statements = [*_import_of(used_name, known, chains)]
        if not statements and used_name in used:
            raise VerifierError(
                f"the verifier {name} uses the global {used_name}, which its source lacks",
                f"define or import {used_name} within {name}, or {TO_A_FILE}",
            )
        yield from statements


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The global names that a block and the blocks within it read or assign."""
    at_top = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if (symbol.is_global() or at_top) and (symbol.is_referenced() or not at_top)
    }
    return names.union(*map(_globals, table.get_children()))


def _import_of(name: str, known: Mapping[str, Any], chains: list[ast.Attribute]) -> Iterator[str]:
    """The statements that import the value of the global `name`; none if it was not imported."""
    value = known.get(name)
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value or value.__name__ == "__main__":
            return
        module = value.__name__
        yield f"import {module}" if module == name else f"import {module} as {name}"
        if module == name:
            yield from (f"import {inner}" for inner in _submodules(module, chains))
        return
    home, attribute = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(home, str) or not isinstance(attribute, str) or home == known.get("__name__"):
        return
    if getattr(sys.modules.get(home), attribute, None) is value:
        yield f"from {home} import {attribute}" + ("" if attribute == name else f" as {name}")


def _submodules(module: str, chains: list[ast.Attribute]) -> Iterator[str]:
    """Modules below `module` that the definition reads as its attributes, as in `concurrent.futures.wait`."""
    for chain in chains:
        dotted = ast.unparse(chain)
        if dotted.startswith(f"{module}.") and dotted in sys.modules:
            yield dotted


def _annotated(tree: ast.AST) -> set[str]:
    """The names in annotations, which need not be defined: annotations are not evaluated."""
    notes = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    notes += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {part.id for note in notes if note for part in ast.walk(note) if isinstance(part, ast.Name)}


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)
