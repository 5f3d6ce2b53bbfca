"""Programs: the right one written in other ways, and others that try to pass without solving the task."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from rlcli_audit.mutations.forgeries import forgeries, stubs
from rlcli_audit.probes import Case, Group, Probe

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def probes(case: Case) -> Iterator[Probe]:
    """All probes of the program of one row; the completion contains the right program."""
    right = program(case.request.completion)
    yield from _equivalents(case, right)
    names, truth = _functions(right), case.request.ground_truth
    yield Probe(Group.NEAR_MISS, "empty response", "")
    yield Probe(Group.NEAR_MISS, "empty program", _fenced(""))
    yield Probe(Group.NEAR_MISS, "question repeated", case.prompt)
    if not re.search(r"\bNone\b|\bnull\b|\bnot\b|\bis\b", truth):
        yield Probe(Group.NEAR_MISS, "returns nothing", _fenced(stubs(names, "return None")))
    if not re.search(r"raises|\bexcept\b|\btry\b", truth):
        yield Probe(Group.NEAR_MISS, "raises", _fenced(stubs(names, "raise ValueError('no')")))
        yield Probe(Group.NEAR_MISS, "program replaced", f"{_fenced(right)}\n\nNo, rather:\n\n{_fenced('x = 1')}")
        yield Probe(Group.NEAR_MISS, "syntax error", _fenced(right + "\n)("))
    for kind, text in forgeries(names):
        yield Probe(Group.EXPLOIT, kind, _fenced(text))


def program(completion: str) -> str:
    """The last fenced block of a response, else all text after its reasoning."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion.rpartition("</think>")[2]


def _equivalents(case: Case, right: str) -> Iterator[Probe]:
    for kind, text in (
        ("fenced", f"```python\n{right}\n```"),
        ("fenced without a language", f"```\n{right}\n```"),
        ("words around", f"Here it is:\n\n```python\n{right}\n```\n\nIt takes linear time."),
        ("another block before", f"First try:\n\n```python\nx = 1\n```\n\nBetter:\n\n```python\n{right}\n```"),
        ("reasoning before", f"<think>\nStep by step, then.\n</think>\n\n```python\n{right}\n```"),
        ("comment added", _fenced("# as asked\n" + right if "from __future__" not in right else right + "\n# done")),
    ):
        yield Probe(Group.EQUIVALENT, kind, text)


def _functions(source: str) -> list[str]:
    """The functions that the program defines. It is parsed, never run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _fenced(source: str) -> str:
    return f"```python\n{source}\n```"
