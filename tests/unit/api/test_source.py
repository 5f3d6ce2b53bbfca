"""The file generated from a function: it holds the function and its imports, or the function is refused."""

from __future__ import annotations

import concurrent.futures
import functools
import linecache
import re
from collections import Counter as Counted
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.api.function_source import source_of
from rlcli.errors import VerifierError
from rlcli.support.importing import run_file
from rlcli.types import Outcome, Verdict, VerifyRequest

BONUS = 0.5


def helper(text: str) -> str:
    return text.strip()


def made(function: Callable[..., Any], folder: Path) -> Any:
    """The function in the file generated from `function`."""
    file = folder / "made.py"
    file.write_text(source_of(function))
    return getattr(run_file(file, "made_of_a_function"), function.__name__)


def of_cells(*cells: str) -> dict[str, Any]:
    """The names that these cells of a notebook define; their source is found as IPython's is."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        file = f"<cell {number} of {hash(cells)}>"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        exec(compile(cell, file, "exec"), names)
    return names


def right(request: VerifyRequest, *, share: float = 1.0) -> Verdict:
    """True if the most frequent word is the answer."""
    words = Counted(re.findall(r"\w+", request.completion))
    best = max(words, key=lambda word: words[word], default="")
    is_right = best == request.ground_truth
    return Verdict(share * float(is_right), Outcome.OK if is_right else Outcome.WRONG, answer=best)


def digits(request: VerifyRequest) -> float:
    return float(np.mean([letter.isdigit() for letter in request.completion] or [0]))


def waits(request: Undefined) -> bool:  # type: ignore[name-defined] # noqa: F821
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(str.isdigit, request.completion).result()


def deep(request: VerifyRequest, depth: int = 0) -> float:
    def inner(count: int) -> float:
        return float(count)

    class Box:
        size = inner(depth)

    return deep(request, depth + 1) if depth < 3 else Box.size


def test_a_function_comes_with_the_modules_and_names_that_it_imports(tmp_path: Path) -> None:
    request = VerifyRequest("42 or 41 or 42", "42")
    assert made(right, tmp_path)(request, share=0.5) == Verdict(0.5, Outcome.OK, answer="42")
    assert made(digits, tmp_path)(VerifyRequest("a1", "")) == 0.5
    assert made(deep, tmp_path)(request) == 3.0
    text = source_of(right)
    imports = text.split("\n\n")[2].splitlines()
    names = ("Outcome", "Verdict", "VerifyRequest")
    assert imports == [
        "from collections import Counter as Counted",
        *(f"from rlcli.types import {name}" for name in names),
        "import re",
    ]
    assert "import numpy as np\n" in source_of(digits)


def test_a_submodule_that_is_used_as_an_attribute_is_imported() -> None:
    assert "import concurrent.futures\n" in source_of(waits)


def test_an_annotation_without_a_meaning_is_no_obstacle(tmp_path: Path) -> None:
    assert made(waits, tmp_path)(VerifyRequest("12", "")) is True


def test_a_function_of_a_notebook_is_found_with_imports_of_other_cells(tmp_path: Path) -> None:
    names = of_cells(
        "import re as patterns\nimport rlcli",
        "def boxed(request):\n    found = patterns.search('[(](.*)[)]', request.completion)\n"
        "    return rlcli.Verdict(1.0, rlcli.Outcome.OK, found[1]) if found else False\n",
    )
    check = made(names["boxed"], tmp_path)
    assert check(VerifyRequest("(7)", "")).answer == "7"
    assert check(VerifyRequest("7", "")) is False


def test_a_global_that_is_not_imported_is_refused_by_name() -> None:
    def reads(request: VerifyRequest) -> float:
        return BONUS

    def calls(request: VerifyRequest) -> float:
        return float(helper(request.completion))

    def by_default(request: VerifyRequest, bonus: float = BONUS) -> float:
        return bonus

    def writes(request: VerifyRequest) -> float:
        global SEEN
        SEEN = 1
        return 0.0

    def misspelt(request: VerifyRequest) -> float:
        return flaot(request.completion)  # type: ignore[name-defined,no-any-return] # noqa: F821

    missing_names = {reads: "BONUS", calls: "helper", by_default: "BONUS", writes: "SEEN", misspelt: "flaot"}
    for function, name in missing_names.items():
        with pytest.raises(VerifierError, match=f"{function.__name__} uses the global {name}") as refused:
            source_of(function)
        assert refused.value.hint.startswith(f"define or import {name} within {function.__name__}, or write it to")


def test_a_function_that_closes_over_a_variable_is_refused() -> None:
    bonus = 0.5

    def inner(request: VerifyRequest) -> float:
        return bonus

    with pytest.raises(VerifierError, match="inner reads bonus of the function around it"):
        source_of(inner)


def test_what_is_no_function_with_a_name_is_refused() -> None:
    class Rule:
        def __call__(self, request: VerifyRequest) -> float:
            return 0.0

    for odd, kind in (
        (lambda request: 0.0, "a lambda"),
        (Rule(), "of type Rule"),
        (functools.partial(digits), "of type partial"),
        (len, "of type builtin_function_or_method"),
    ):
        with pytest.raises(VerifierError, match=f"the verifier is {kind}, whose source cannot be stored"):
            source_of(odd)


def test_a_function_without_source_is_refused() -> None:
    names: dict[str, Any] = {}
    exec("def typed(request):\n    return 1.0\n", names)
    with pytest.raises(VerifierError, match="the source of the verifier typed cannot be found"):
        source_of(names["typed"])


def test_source_that_has_changed_meanwhile_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    for old_body, new_body in (("1.0", "2.0"), ("len(request) + 1", "len(request) - 1"), ("abs(1)", "int(1)")):
        file.write_text(f"def score(request):\n    return {old_body}\n")
        score = run_file(file, "edited_since").score
        assert old_body in source_of(score)
        file.write_text(f"def score(request):\n    return {new_body}\n\n")
        linecache.checkcache(str(file))
        with pytest.raises(VerifierError, match="has changed since it was defined"):
            source_of(score)


def test_a_function_that_a_decorator_has_replaced_is_refused() -> None:
    names = of_cells(
        "def twice(function):\n    def wrapper(request, count=2):\n        return count\n    return wrapper\n",
        "@twice\ndef scored(request):\n    return 1.0\n",
    )
    assert "def wrapper" in source_of(names["scored"])  # it is what runs
    cached = of_cells("import functools\n@functools.cache\ndef scored(request):\n    return 1.0\n")["scored"]
    with pytest.raises(VerifierError, match="of type _lru_cache_wrapper"):
        source_of(cached)
