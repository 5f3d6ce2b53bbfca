"""Test cases of code in the forms of public datasets, as ground truths that the verifier `code` reads.

| dataset | form |
|---|---|
| APPS, TACO, PRIME, Eurus, verl | `{"inputs": […], "outputs": […]}`: standard input and output; `"fn_name"`: calls |
| CodeContests | `{"input": […], "output": […]}` |
| verl with Sandbox Fusion | the same with `"assert_case": ["assert f(1) == 2"]` |
| LiveCodeBench, DeepCoder | `[{"input": "…", "output": "…", "testtype": "functional"}]`, also packed |
| Sandbox Fusion | `[{"input": {"stdin": "…"}, "output": {"stdout": "…"}}]` |
| PRIME's SYNTHETIC-1, DeepCoder | `[{"type": "function_call", "fn_name": "f", "input": […], "output": […]}]` |
| AceCode, MBPP | `["assert f(1) == 2"]`, with `test_setup_code` or `test_imports` in a column of its own |
| KodCode | source for pytest: `from solution import f`, and functions named test_… |
| HumanEval | source with `def check(candidate)`, and a column `entry_point` |

Nothing of a row is run or unpickled here.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.errors import DataError
from rlcli.reading import DATA_LINE_BYTES
from rlcli.value_text import value_text
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
_IMPORT = re.compile(r"^[ \t]*from[ \t]+solution[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n(]*))\n?", re.MULTILINE)
_IMPORTS_MODULE = re.compile(r"^[ \t]*import[ \t]+solution\b", re.MULTILINE)
_TEST = re.compile(r"^def[ \t]+(test\w*)[ \t]*\(([^)]*)\)", re.MULTILINE)
_CHECK = re.compile(r"^def[ \t]+check[ \t]*\(", re.MULTILINE)
_ASSERT = re.compile(r"^[ \t]*assert\b", re.MULTILINE)
_TOP_ASSERT = re.compile(r"^assert\b", re.MULTILINE)
_DEFINES = re.compile(r"^(?:class|def)\b", re.MULTILINE)
_PYTEST_USE = re.compile(r"\bpytest[ \t]*\.[ \t]*(\w+)")
_PYTEST_IMPORT = re.compile(r"^[ \t]*import[ \t]+pytest[ \t]*\n?", re.MULTILINE)
_METHOD = re.compile(r"^[ \t]+def[ \t]+([A-Za-z]\w*)[ \t]*\([ \t]*self\b", re.MULTILINE)
_PLAIN_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
_PICKLED_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_RAISES = """\
class _Raises:
    def __init__(self, expected, match=None):
        self.expected = expected
    def __enter__(self):
        return self
    def __exit__(self, kind, error, trace):
        assert kind is not None and issubclass(kind, self.expected)
        return True
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
    """What the text holds: JSON, JSON that LiveCodeBench has packed, else the text, which is source."""
    text = text_of(text, column).strip()
    found = unpacked(text)
    if found is not text and not isinstance(found, str):
        return found
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
            return _of_columns(_items(struct[inputs]), _items(struct[outputs]), struct.get("fn_name"), column)
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
    if bad := next((line for line in asserts if not re.search(r"\bassert\b", line)), ""):
        raise DataError(f"'{column}' holds a test that asserts nothing: {bad!r:.80}", _FIX)
    return {"kind": "asserts", "setup": _setup(row), "asserts": asserts}


def _setup(row: Mapping[str, Any]) -> str:
    """What MBPP runs before its tests."""
    parts = [row.get("test_setup_code"), *_items(row.get("test_imports") or [])]
    return "\n".join(part for part in parts if isinstance(part, str) and part.strip())


def _of_columns(inputs: list[Any], outputs: list[Any], fn_name: Any, column: str) -> dict[str, Any]:
    """Tests as a list of inputs and one of outputs."""
    if len(inputs) != len(outputs) or not inputs:
        raise DataError(f"'{column}' holds {len(inputs)} inputs and {len(outputs)} outputs", "fix that row")
    if fn_name:
        return {"inputs": inputs, "outputs": outputs, "fn_name": text_of(fn_name, "fn_name")}
    cases = [
        {"input": _lines(given, column), "output": _lines(wanted, column)}
        for given, wanted in zip(inputs, outputs, strict=True)
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
        named = sorted({str(item.get("testtype") or item.get("type")) for item in items})
        raise DataError(
            f"'{column}' holds tests of the kinds {', '.join(named)}", "give tests of one kind that is known"
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
    if _CHECK.search(source):
        return {"kind": "check", "test": source, "entry_point": _named(source, column, row)}
    if not re.search(r"\bassert\b|\bpytest\b", source):
        raise DataError(f"'{column}' holds no tests: {source.strip()!r:.80}", _FIX)
    tests = _TEST.findall(source)
    if not tests:
        if not _ASSERT.search(source) or (_DEFINES.search(source) and not _TOP_ASSERT.search(source)):
            raise DataError(f"'{column}' holds no function named test_…, and no assert that would run", _FIX)
        return {"kind": "asserts", "setup": _setup(row), "asserts": [_IMPORT.sub("", source)]}
    if with_arguments := next((name for name, arguments in tests if arguments.strip()), ""):
        raise DataError(f"'{column}' holds the test {with_arguments}, which takes arguments (fixtures)", _FIX)
    return _of_pytest(source, [name for name, _ in tests], column, row)


def _of_pytest(source: str, tests: list[str], column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    used = set(_PYTEST_USE.findall(source))
    if unknown := sorted(used - {"raises"}):
        raise DataError(f"'{column}' holds tests that use pytest.{unknown[0]}, which the sandbox lacks", _FIX)
    if _IMPORTS_MODULE.search(source):
        raise DataError(f"'{column}' holds tests that import the module solution", "write: from solution import NAME")
    name = _named(source, column, row)
    body = _PYTEST_IMPORT.sub("", _IMPORT.sub("", source))
    if "raises" in used:
        body = _RAISES + re.sub(r"\bpytest[ \t]*\.[ \t]*raises\b", "_Raises", body)
    calls = "".join(f"    {test}()\n" for test in tests)
    return {"kind": "check", "test": f"{body.rstrip()}\n\ndef check(candidate):\n{calls}", "entry_point": name}


def _named(source: str, column: str, row: Mapping[str, Any]) -> str:
    """The function that source tests: the first that it imports from `solution`, else the one that the row names."""
    match = _IMPORT.search(source)
    imported = [name.strip() for name in (match[1] or match[2] or "").split(",")] if match else []
    if any(" as " in f" {name} " or name == "*" for name in imported):
        raise DataError(f"'{column}' imports {', '.join(imported)} from solution", "import each name as it is")
    name = next(filter(None, imported), "") or _function(row, row)
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
