"""Test cases of code in the forms of public datasets, as ground truths that the verifier `code` reads.

| dataset | form |
|---|---|
| APPS, TACO, PRIME, Eurus, verl | `{"inputs": […], "outputs": […]}`: standard input and output; `"fn_name"`: calls |
| CodeContests | `{"input": […], "output": […]}` |
| verl with Sandbox Fusion | the same with `"assert_case": ["assert f(1) == 2"]` |
| LiveCodeBench, DeepCoder | `[{"input": "…", "output": "…", "testtype": "functional"}]`, also packed |
| Sandbox Fusion | `[{"input": {"stdin": "…"}, "output": {"stdout": "…"}}]` |
| PRIME's SYNTHETIC-1, DeepCoder | `[{"type": "function_call", "fn_name": "f", "input": […], "output": […]}]` |
| AceCode, MBPP | `["assert f(1) == 2"]`, with `test_setup_code` or `test_imports` in a separate column |
| KodCode | source for pytest: `from solution import f`, and functions named test_… |
| HumanEval | source with `def check(candidate)`, and a column `entry_point` |

Nothing of a row is run or unpickled here; source is parsed.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcli.errors import DataError
from rlcli.support.reading import DATA_LINE_BYTES
from rlcli.support.value_text import value_text
from rlcli_data_prep.columns import unpacked
from rlcli_data_prep.sources import text_of

STDIN, CALL = "standard input", "calls"
KINDS = {
    "stdin": STDIN,
    "stdin_stdout": STDIN,
    "stdio": STDIN,
    "standard_input": STDIN,
    "functional": CALL,
    "function_call": CALL,
    "call_based": CALL,
}
"""A case's `testtype` or `type` → what it tests."""
HOLDERS = ("test_cases", "input_output", "tests", "unit_tests", "ground_truth")
"""Fields of a struct that hold the tests."""
_FIX = "give that column's tests in one of the forms of docs/datasets.md, or leave such rows out"
MAX_SOURCE_CHARS = 1 << 20
"""Maximum length of tests as source: a parsed text takes a hundred times its memory."""
_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+solution[ \t]+import[ \t]+(?:\(([^()]*)\)|([^\n(;#]*))[ \t]*(?:#.*)?$\n?", re.MULTILINE
)
_PYTEST_IMPORT = re.compile(r"^[ \t]*import[ \t]+pytest[ \t]*(?:#.*)?$\n?", re.MULTILINE)
_ASSERT = re.compile(r"^[ \t]*assert\b", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SETUPS = {"setup_module", "setup_function", "teardown_module", "teardown_function"}
_RAISED = {"value", "type", "match"}
"""Attributes of the exception caught by `pytest.raises` that tests may read."""
_METHOD = re.compile(r"^[ \t]+def[ \t]+([A-Za-z]\w*)[ \t]*\([ \t]*self\b", re.MULTILINE)
_PLAIN_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
_PICKLED_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_PYTEST = """\
class pytest:
    class raises:
        value = type = None
        def __init__(self, expected_exception, match=None):
            self.expected, self.pattern = expected_exception, match
        def __enter__(self):
            return self
        def __exit__(self, kind, error, trace):
            self.type, self.value = kind, error
            is_expected = kind is not None and issubclass(kind, self.expected)
            assert is_expected and (self.pattern is None or self.match(self.pattern))
            return True
        def match(self, pattern):
            import re
            return re.search(pattern, str(self.value)) is not None
"""
"""`pytest.raises` for the sandbox, which has no pytest."""


def code_tests(value: Any, column: str, row: Mapping[str, Any]) -> str:
    """The tests in a column as JSON text that the verifier `code` reads. row: other columns may name the function, or
    hold what runs before the tests. Raises `DataError` for a form that is not known, and for no tests."""
    tests = _tests(value, column, row, 0)
    return json.dumps({name: part for name, part in tests.items() if part is not None}, ensure_ascii=False)


def _tests(value: Any, column: str, row: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > 4:
        raise DataError(f"'{column}' holds tests within tests", _FIX)
    if isinstance(value, str):
        value = _read(value, column)
    if isinstance(value, str):
        return _of_source(value, column, row)
    if isinstance(value, Mapping):
        struct = {str(name): part for name, part in value.items() if part is not None}
        return _of_struct(struct, column, row, depth)
    if isinstance(value, list | tuple):
        return _of_list(list(value), column, row)
    raise DataError(f"'{column}' holds no tests: {value!r:.80}", _FIX)


def _read(text: str, column: str) -> Any:
    """Parse JSON, or JSON that LiveCodeBench has packed; any other text is source, and returned as it is."""
    text = text_of(text, column).strip()
    parsed = unpacked(text)
    if parsed is not text and not isinstance(parsed, str):
        return parsed
    if text.startswith("eJ") and not re.search(r"\s", text):
        return unpacked(_unzipped(text, column))
    if text[0] in "[{" and not _ASSERT.search(text):
        raise DataError(
            f"'{column}' holds tests that are not JSON: {text!r:.80}",
            "store them as JSON (json.dumps), not as Python prints them",
        )
    return text


def _unzipped(text: str, column: str) -> str:
    """The text within base64 and zlib, and within a pickle of one text, which is read and not loaded."""
    try:
        packed = base64.b64decode(text, validate=True)
        unzip = zlib.decompressobj()
        content = unzip.decompress(packed, DATA_LINE_BYTES)
        if unzip.unconsumed_tail:
            raise DataError(f"'{column}' holds packed tests of more than {DATA_LINE_BYTES >> 20} MiB", _FIX)
        return content.decode() if content[:1] in (b"[", b"{") else _pickled_text(content)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise DataError(f"'{column}' holds packed tests that cannot be read: {error!s:.80}", _FIX) from error


def _pickled_text(content: bytes) -> str:
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _PICKLED_TEXT and isinstance(argument, str):
            texts.append(argument)
        elif operation.name not in _PLAIN_PICKLE:
            raise ValueError(f"a pickle of more than one text ({operation.name})")
    if len(texts) != 1:
        raise ValueError("a pickle of no text")
    return texts[0]


def _of_struct(struct: Mapping[str, Any], column: str, row: Mapping[str, Any], depth: int) -> dict[str, Any]:
    language = struct.get("language")
    if isinstance(language, str) and language.lower() not in ("python", "python3", "py"):
        raise DataError(f"'{column}' holds tests of {language:.40}, not of Python", "leave such rows out")
    if "kind" in struct or isinstance(struct.get("functional"), str):
        return dict(struct)
    if any(_items(struct.get("assert_case", []))):  # verl takes as many empty texts as none
        return _of_assert_case(struct, column, row)
    if isinstance(struct.get("pytest"), str):
        return _of_source(struct["pytest"], column, row)
    for inputs, outputs in (("inputs", "outputs"), ("input", "output")):
        if inputs in struct and outputs in struct:
            inputs_list, outputs_list = _columns(struct[inputs], struct[outputs], bool(struct.get("fn_name")), column)
            return _of_columns(inputs_list, outputs_list, struct.get("fn_name"), column)
    if isinstance(struct.get("test"), str):
        return _of_source(struct["test"], column, {**row, **struct})
    holder = next((name for name in HOLDERS if struct.get(name)), "")
    if holder:
        return _tests(struct[holder], column, {**row, **struct}, depth + 1)
    raise DataError(f"'{column}' holds no form of tests that is known (it has {', '.join(struct) or 'nothing'})", _FIX)


def _of_assert_case(struct: Mapping[str, Any], column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    values = [*_items(struct.get("inputs") or []), *_items(struct.get("outputs") or [])]
    if any(value not in (None, "", []) for value in values):
        raise DataError(f"'{column}' has assert_case and also inputs or outputs that are not empty", _FIX)
    return _asserts(_items(struct["assert_case"]), column, row)


def _asserts(lines: Sequence[Any], column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    asserts = [text_of(line, column) for line in lines]
    if not asserts:
        raise DataError(f"'{column}' holds no tests", _FIX)
    if bad := next((line for line in asserts if not any(map(_can_fail, ast.walk(_parsed(line, column))))), ""):
        raise DataError(f"'{column}' holds a test that asserts nothing: {bad!r:.80}", _FIX)
    return {"kind": "asserts", "setup": _setup(row), "asserts": asserts}


def _setup(row: Mapping[str, Any]) -> str:
    """The code that MBPP runs before its tests."""
    parts = [row.get("test_setup_code"), *_items(row.get("test_imports") or [])]
    return "\n".join(part for part in parts if isinstance(part, str) and part.strip())


def _columns(inputs: Any, outputs: Any, is_call: bool, column: str) -> tuple[list[Any], list[Any]]:
    """The inputs and the outputs of a struct: lists, JSON texts of lists, or one input and one output.

    `"[1, 2, 3]"` is the standard input or the arguments of one case. Raises `DataError` if a text may be one case or
    several.
    """
    values = (inputs, outputs)
    lists = [_listed(value, is_call, column) for value in values]
    texts = [items for items, value in zip(lists, values, strict=True) if isinstance(value, str)]
    several = any(texts)
    if texts == [[], []] or (several and (not all(lists) or (len(texts) == 1 and len(lists[0] or []) == 1))):
        raise _ambiguous(column)
    first, second = (
        [value] if items is None or (isinstance(value, str) and not several) else items
        for items, value in zip(lists, values, strict=True)
    )
    return first, second


def _listed(value: Any, is_call: bool, column: str) -> list[Any] | None:
    """The items of a list, or of the JSON text of a list of texts or lists; None for one value."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else None
    items = unpacked(value)
    if not isinstance(items, list):
        return None
    if all(isinstance(item, str) for item in items):
        return items
    if not all(isinstance(item, list) for item in items):
        return None
    if not is_call and not all(isinstance(line, str) for item in items for line in item):
        raise _ambiguous(column)  # a matrix, or the numbers of several cases
    return items


def _ambiguous(column: str) -> DataError:
    return DataError(
        f"'{column}' holds an input or output as a text that may be one case or a list of several",
        "give inputs and outputs as lists, with one item for each case",
    )


def _of_columns(inputs: list[Any], outputs: list[Any], fn_name: Any, column: str) -> dict[str, Any]:
    """Tests as a list of inputs and one of outputs."""
    if len(inputs) != len(outputs) or not inputs:
        raise DataError(f"'{column}' holds {len(inputs)} inputs and {len(outputs)} outputs", "fix that row")
    if fn_name:
        return {"inputs": inputs, "outputs": outputs, "fn_name": text_of(fn_name, "fn_name")}
    cases = [
        {"input": _lines(stdin, column), "output": _lines(stdout, column)}
        for stdin, stdout in zip(inputs, outputs, strict=True)
    ]
    return {"kind": "stdio", "cases": cases}


def _of_list(items: list[Any], column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A list of asserts or of cases."""
    items = [unpacked(item) for item in items]
    if not items:
        raise DataError(f"'{column}' holds no tests", _FIX)
    if all(isinstance(item, str) for item in items):
        return _asserts(items, column, row)
    if not all(isinstance(item, Mapping) and "input" in item and "output" in item for item in items):
        raise DataError(f"'{column}' holds a test that is neither an assert nor an input and output", _FIX)
    kinds = {KINDS.get(str(item.get("testtype") or item.get("type") or "stdin").lower(), "") for item in items}
    if len(kinds) > 1 or "" in kinds:
        kind_names = sorted({str(item.get("testtype") or item.get("type")) for item in items})
        raise DataError(
            f"'{column}' holds tests of the kinds {', '.join(kind_names)}", "give tests of one kind that is known"
        )
    name = _function(items[0], row) if kinds == {CALL} else ""
    if kinds == {CALL} and not name:
        raise DataError(
            f"'{column}' tests a function whose name is nowhere", "add fn_name to each case, or a column func_name"
        )
    return _of_columns([item["input"] for item in items], [item["output"] for item in items], name, column)


def _function(case: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The function that a case calls, by the case or by the row."""
    records = (unpacked(row.get(column)) for column in ("metadata", "extra_info"))
    for holder in (case, unpacked(case.get("metadata")), row, *records):
        for field in ("fn_name", "func_name", "entry_point", "function_name"):
            if isinstance(holder, Mapping) and isinstance(holder.get(field), str) and holder[field].strip():
                return str(holder[field]).strip()
    info = unpacked(row.get("test_info"))
    if isinstance(info, list) and info and isinstance(info[0], Mapping):
        return _function(info[0], {})
    starter = row.get("starter_code")
    methods = _METHOD.findall(starter) if isinstance(starter, str) else []
    return str(methods[-1]) if methods else ""


def _of_source(source: str, column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Tests as Python source: HumanEval's check, functions for pytest, or lines of asserts."""
    source = source.replace("\r\n", "\n")
    body = _PYTEST_IMPORT.sub("", _IMPORT.sub("", source))
    tree = _parsed(body, column)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if any(function.name == "check" for function in functions):
        return {"kind": "check", "test": source, "entry_point": _named(source, column, row)}
    if not re.search(r"\bassert\b|\bpytest\b", source):
        raise DataError(f"'{column}' holds no tests: {source.strip()!r:.80}", _FIX)
    tests = [function for function in functions if function.name.startswith("test")]
    if not tests and not any(isinstance(node, ast.Assert) for node in _outside_functions(tree)):
        raise DataError(f"'{column}' holds no function named test_…, and no assert that would run", _FIX)
    _check_all_run(tree, tests, column)
    _check_imports(tree, column)
    has_raises = _check_pytest(tree, column)
    if not has_raises and not any(map(_can_fail, ast.walk(tree))):
        raise DataError(f"'{column}' holds tests that assert nothing: {source.strip()!r:.80}", _FIX)
    stand_in = _PYTEST if has_raises else ""
    if not tests:
        _imported(source, column)
        return {"kind": "asserts", "setup": "\n".join(filter(None, [stand_in, _setup(row)])), "asserts": [body]}
    calls = "".join(f"    {name}()\n" for name in dict.fromkeys(test.name for test in tests))
    test = f"{stand_in}{body.rstrip()}\n\ndef check(candidate):\n{calls}"
    return {"kind": "check", "test": test, "entry_point": _named(source, column, row)}


def _parsed(source: str, column: str) -> ast.Module:
    if len(source) > MAX_SOURCE_CHARS:
        raise DataError(f"'{column}' holds tests of more than {MAX_SOURCE_CHARS >> 20} MiB of source", _FIX)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d" in the tests
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"'{column}' holds tests that are not Python source: {error!s:.80}", _FIX) from error


def _outside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when the source does; of functions and classes, only themselves."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.expr)):
            nodes.extend(ast.iter_child_nodes(node))


def _check_all_run(tree: ast.Module, tests: Sequence[ast.FunctionDef], column: str) -> None:
    """Raise `DataError` for what pytest would run and a call of each test would not."""
    for node in _outside_functions(tree):
        if isinstance(node, ast.ClassDef):
            is_collected = node.name.startswith("Test") or bool(node.bases)
            unread = is_collected and any(isinstance(n, _FUNCTIONS) and n.name.startswith("test") for n in node.body)
        else:
            unread = isinstance(node, _FUNCTIONS) and (
                (node.name.startswith("test") and node not in tests) or node.name in _SETUPS
            )
        if unread:
            raise DataError(
                f"'{column}' holds {getattr(node, 'name', '')}, which only pytest would run",
                "write each test as a function of the module without async, or leave such rows out",
            )
    for test in tests:
        arguments = test.args
        if any((arguments.posonlyargs, arguments.args, arguments.vararg, arguments.kwonlyargs, arguments.kwarg)):
            raise DataError(f"'{column}' holds the test {test.name}, which takes arguments (fixtures)", _FIX)


def _check_imports(tree: ast.Module, column: str) -> None:
    """Raise `DataError` for imports of pytest and of the solution that are left."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        modules = {name.partition(".")[0] for name in names}
        if "pytest" in modules:
            raise DataError(f"'{column}' imports pytest in another form than 'import pytest'", "write: import pytest")
        if "solution" in modules:
            raise DataError(
                f"'{column}' holds tests that import the module solution",
                "write: from solution import NAME, on a line without other statements",
            )


def _check_pytest(tree: ast.Module, column: str) -> bool:
    """True if the tests use `with pytest.raises(…)`. Raises `DataError` for any other use of pytest."""
    contexts = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    raising = [item for item in contexts if _is_raises(item.context_expr)]
    known = {id(item.context_expr.func) for item in raising if isinstance(item.context_expr, ast.Call)}
    caught = {item.optional_vars.id for item in raising if isinstance(item.optional_vars, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == "pytest" and node.attr == "raises" and id(node) not in known:
            raise DataError(f"'{column}' holds a call of pytest.raises", "write: with pytest.raises(ERROR, match=…):")
        if node.value.id == "pytest" and node.attr != "raises":
            raise DataError(f"'{column}' holds tests that use pytest.{node.attr:.40}, which the sandbox lacks", _FIX)
        if node.value.id in caught and node.attr not in _RAISED:
            raise DataError(f"'{column}' reads {node.attr:.40} of what pytest.raises has caught", _FIX)
    return bool(raising)


def _is_raises(node: ast.expr) -> bool:
    """True if this is `pytest.raises(ERROR)`, also with `match`, and without a function to call."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) == ("pytest", "raises")
        and len(node.args) == 1
        and not isinstance(node.args[0], ast.Starred)
        and all(keyword.arg == "match" for keyword in node.keywords)
    )


def _can_fail(node: ast.AST) -> bool:
    """True if a wrong result can make this fail: an `assert`, a `raise`, `self.assertEqual(…)`."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and node.test.value)
    if isinstance(node, ast.Call):
        return str(getattr(node.func, "attr", getattr(node.func, "id", ""))).startswith("assert")
    return isinstance(node, ast.Raise)


def _imported(source: str, column: str) -> list[str]:
    """The names that the source imports from `solution`. Raises `DataError` for an import under another name."""
    names = [name.strip() for match in _IMPORT.finditer(source) for name in (match[1] or match[2] or "").split(",")]
    if any(" as " in f" {name} " or name == "*" for name in names):
        raise DataError(f"'{column}' imports {', '.join(names)!r:.80} from solution", "import each name as it is")
    return [name for name in names if name]


def _named(source: str, column: str, row: Mapping[str, Any]) -> str:
    """The function that source tests: the first that it imports from `solution`, else the one that the row names."""
    name = next(iter(_imported(source, column)), "") or _function(row, row)
    if not name.isidentifier():
        raise DataError(f"'{column}' tests a function whose name is nowhere", "add a column entry_point")
    return name


def _items(value: Any) -> list[Any]:
    """The items of a list, of a JSON list, or one value."""
    value = unpacked(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _lines(value: Any, column: str) -> str:
    """A standard input or output: text, a list of its lines, or Sandbox Fusion's struct of it."""
    if isinstance(value, Mapping) and len(value) == 1:
        (value,) = (value.get("stdin", value.get("stdout")),)
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(_lines(line, column) for line in value)
    text = value_text(value)
    if text is None:
        raise DataError(f"'{column}' holds an input or output that is no text: {value!r:.80}", "fix that row")
    return text
