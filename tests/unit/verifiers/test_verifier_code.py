"""The verifier `code`: which program it reads, which tests, and what it says of real datasets' solutions."""

from __future__ import annotations

import ast
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rlcli_sandbox import open_sandbox
from rlcli_verifiers import code, fences
from rlcli_verifiers.code_truth import Scripts, read_truth

from rlcli.errors import SetupError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Outcome, Verdict, VerifyRequest
from tests.cpu_limit import cpu_limit
from tests.shared_data import shared_data

CHECK = {"kind": "check", "test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"}
RIGHT = "def f(x):\n    return x + 1"


@pytest.fixture(autouse=True)
def needs_sandbox() -> None:
    try:
        open_sandbox()
    except SetupError as error:
        pytest.skip(f"no sandbox here: {error}")


def judge(completion: str, truth: Any, extra_info: Mapping[str, Any] | None = None, **options: Any) -> Verdict:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return code.verify(VerifyRequest(completion, text, extra_info=extra_info or {}), **options)


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n\n```{language}\n{program}\n```\nThat is all."


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (fenced("x = 1"), "x = 1\n"),
        (fenced("x = 1", ""), "x = 1\n"),
        (fenced("x = 1", "py"), "x = 1\n"),
        (fenced("x = 1", "Python"), "x = 1\n"),
        (fenced("x = 1") + fenced("x = 2"), "x = 2\n"),
        (fenced("x = 1") + fenced("1", "text"), "x = 1\n"),
        (fenced("x = 1") + "It prints:\n" + fenced("1", ""), "x = 1\n"),
        (f"<think>{fenced('x = 1')}</think>{fenced('x = 2')}", "x = 2\n"),
        ("<think>x = 1</think>\nx = 2", "\nx = 2"),
        ("def f(): pass", "def f(): pass"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = '''\n  ```inline``` \n'''\n```", "x = '''\n  ```inline``` \n'''\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("no program", None),
        ("", None),
        ("```python\n```", None),
        (fenced("int x = 1;", "cpp"), None),
        (f"<think>{fenced('x = 1')}</think>I give up.", None),
    ],
)
def test_the_program_is_the_last_fenced_block(completion: str, program: str | None) -> None:
    assert fences.program(VerifyRequest(completion, "").answer_text() or "") == program


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("1. So:\n\n    ```python\n    def f(x):\n        return x\n    ```\n", "def f(x):\n    return x\n"),
        ("- ```python\n  def f(x):\n      return x\n  ```", "def f(x):\n    return x\n"),
        ("\t```python\n\tdef f(x):\n\t    return x\n\t```", "def f(x):\n    return x\n"),
        ("      ```python\ndef f(x):\n    return x\n      ```", "def f(x):\n    return x\n"),
        ("~~~python\ndef f(x): pass\n~~~", "def f(x): pass\n"),
        ("~~~~\ndef f(x): pass\n~~~\n~~~~", "def f(x): pass\n~~~\n"),
        ("<answer>\n```python\ndef f(x): pass\n```\n</answer>", "def f(x): pass\n"),
        ("<answer>```python\ndef f(x): pass\n```</answer>", "def f(x): pass\n"),
        ("<answer>```python\ndef f(x): pass```</answer>", "def f(x): pass\n"),
        ("<answer>\ndef f(x): pass\n</answer>", "def f(x): pass"),
        (fenced("def f(x): 1") + "<answer>" + fenced("def f(x): 2") + "</answer>" + fenced("f(3)"), "def f(x): 2\n"),
        ("```python\ndef f(x): pass\n``` This works because f is short.", "def f(x): pass\n"),
        ("```python\ndef f(x): pass\n```  \nIt is short.\n", "def f(x): pass\n"),
        (fenced("def f(x): pass") + "For example:\n" + fenced("print(f(3))"), "def f(x): pass\n"),
        (fenced("def f(x): 1") + "Better:\n" + fenced("def f(x): 2") + fenced(">>> f(3)\n2"), "def f(x): 2\n"),
        (
            fenced("class Solution:\n    def f(self): 1") + fenced("Solution().f()"),
            "class Solution:\n    def f(self): 1\n",
        ),
        (fenced("f = lambda x: x") + fenced("assert f(1) == 1"), "f = lambda x: x\n"),
        (fenced("x = 1") + fenced("y = 2"), "y = 2\n"),
        (fenced("def f(x):\n    return '``` no end'"), "def f(x):\n    return '``` no end'\n"),
    ],
)
def test_the_block_is_found_however_it_is_fenced(completion: str, program: str) -> None:
    assert fences.program(completion, ["f"]) == program


def test_a_usage_example_does_not_hide_a_program_that_reads_its_input() -> None:
    truth = {"kind": "stdio", "cases": [{"input": "1 2\n", "output": "3\n"}]}
    assert judge(fenced(ECHO) + "Example:" + fenced("print(3)"), truth).outcome is Outcome.OK
    assert judge(fenced("print(4)") + fenced("print(3)"), truth).outcome is Outcome.OK


@pytest.mark.parametrize("backend", ["bwrap", "landlock"])
def test_each_case_of_standard_input_starts_in_a_clean_folder(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        open_sandbox(backend)
    except SetupError as error:
        pytest.skip(f"no {backend} here: {error}")
    monkeypatch.setenv("RLCLI_SANDBOX", backend)
    program = """
import os
print(len(os.listdir('.')))
os.makedirs('deep/er')
open('deep/er/file', 'a').write('x')
open('log', 'a').write('x')
os.symlink('/usr', 'link')
os.chmod('deep/er', 0) if os.environ.get('HOME') == '/tmp' else None
os.chdir('deep')
print(len(open('../log').read()))
"""
    cases = [{"input": str(i), "output": "0\n1\n"} for i in range(4)]
    verdict = judge(fenced(program), {"kind": "stdio", "cases": cases})
    assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
    # What cannot be removed costs a new process, and no case its clean folder.
    stubborn = program + "def refuse(*args, **kwargs):\n    raise OSError\nos.unlink = os.rmdir = refuse\n"
    assert judge(fenced(stubborn), {"kind": "stdio", "cases": cases}).outcome is Outcome.OK


@pytest.mark.long
@pytest.mark.parametrize(
    "unit",
    [
        "```",
        "\n",
        " ",
        "```a",
        "a",
        '"""\n',
        "''' \"\"\" ",
        '"',
        '```python\n"""\n',
        "```python\n",
        "```\n``",
        "a ",
        "\t",
        "`" * 500 + "x\n",
    ],
)
def test_no_text_makes_the_search_for_a_program_long(unit: str) -> None:
    with cpu_limit():
        for tail in ("", "`", "!"):
            fences.program(unit * (1_000_000 // len(unit)) + tail)


def test_a_right_program_scores_one_and_is_the_answer() -> None:
    verdict = judge(fenced(RIGHT), CHECK)
    assert (verdict.score, verdict.outcome, verdict.answer) == (1.0, Outcome.OK, RIGHT + "\n")
    assert verdict.parts == {}


def test_a_wrong_program_scores_zero_and_the_detail_says_where() -> None:
    verdict = judge(fenced("def f(x):\n    return x"), CHECK)
    assert (verdict.score, verdict.outcome, verdict.detail) == (0.0, Outcome.WRONG, "assert candidate(1) == 2")


def test_no_program_is_no_answer() -> None:
    assert judge("I do not know.", CHECK).outcome is Outcome.NO_ANSWER


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "ran past 1 s"),
        ("x = bytearray(300 << 20)\nwhile True: pass", "used more than 100 MB"),
        ("import os; os._exit(0)", "ended with status 0"),
        ("def f(x) return 2", "SyntaxError"),
    ],
)
def test_a_program_that_breaks_a_limit_is_wrong_and_not_our_failure(program: str, says: str) -> None:
    # On a busy machine a second of CPU time takes long.
    verdict = judge(fenced(program), CHECK, timeout_s=1.0, wall_s=120.0, memory_mb=100)
    assert verdict.outcome is Outcome.WRONG
    assert says in verdict.detail


def test_a_program_that_waits_for_a_core_is_not_wrong() -> None:
    waits = "import time\ntime.sleep(1.2)\ndef f(x): return x + 1"
    assert judge(fenced(waits), CHECK, timeout_s=1.0).outcome is Outcome.OK
    assert judge(fenced(waits), CHECK, timeout_s=1.0, wall_s=0.3).detail == "ran past 0.3 s"


def test_the_share_of_passed_tests_can_be_the_score() -> None:
    truth = {"kind": "asserts", "asserts": ["assert f(1) == 2", "assert f(1) == 3"], "setup": ""}
    verdict = judge(fenced(RIGHT), truth, score="share")
    assert (verdict.score, verdict.outcome, verdict.parts) == (0.5, Outcome.WRONG, {"passed": 0.5})
    assert judge(fenced(RIGHT), CHECK, score="share").parts == {"passed": 1.0}
    assert judge(fenced(RIGHT), truth).score == 0.0


SUM = "def f(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def f(self, a: List[int], b: int) -> List[int]:\n        return [x + b for x in a]"
ECHO = "a, b = map(int, open(0).read().split())\nprint(a + b)"
SHAPES: list[tuple[str, Any, dict[str, Any]]] = [
    (SUM, {"kind": "functional", "entry_point": "f", "cases": [{"input": [1, 2], "output": 3}]}, {}),
    (SOLUTION, {"kind": "functional", "entry_point": "f", "cases": [{"input": [[1, 2], 3], "output": [4, 5]}]}, {}),
    (ECHO, {"kind": "stdio", "cases": [{"input": "1 2\n", "output": "3\n"}]}, {}),
    (SUM, {"inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]], "fn_name": "f"}, {}),
    (SUM, {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "fn_name": "f"}, {}),
    (SUM, {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "f"}, {}),
    (ECHO, {"inputs": ["1 2\n", "2 2"], "outputs": ["3\n", "4"]}, {}),
    (ECHO, {"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": None}, {}),
    (ECHO, [{"input": "1 2\n", "output": "3", "testtype": "stdin"}], {}),
    (SOLUTION, [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}], {"func_name": "f"}),
    (SUM, {"kind": "asserts", "asserts": ["assert f(1, 2) == 3"], "setup": "import math"}, {}),
    (SUM, {"kind": "asserts", "asserts": ["assert f(1, 2) == 3"]}, {}),
    (SUM, {"functional": "def check(candidate):\n    assert candidate(1, b=2) == 3\n\n\ncheck(f)\n"}, {}),
    (SOLUTION, {"functional": "def check(g):\n    assert g([1, 2], 3) == [4, 5]\n\ncheck(Solution().f)"}, {}),
]


@pytest.mark.parametrize(("program", "truth", "extra_info"), SHAPES)
def test_every_shape_of_tests_is_read(program: str, truth: Any, extra_info: dict[str, Any]) -> None:
    assert judge(fenced(program), truth, extra_info).outcome is Outcome.OK
    wrong = program.replace("+ b", "- b")
    assert judge(fenced(wrong), truth, extra_info).outcome is Outcome.WRONG


STACK = """
class Stack:
    kind = "stack"
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def copy(self): return Stack(self.items)
    def __len__(self): return len(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __repr__(self): return f"Stack({self.items})"
    def __iter__(self): return iter(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    @classmethod
    def of(cls, *items): return cls(items)

def merge(a, b): return Stack(a.items + b.items)
"""
STACK_TESTS = """s = Stack()
s.push(1).push(2)
assert len(s) == 2
assert s.pop() == 2
assert s.items == [1]
assert Stack([1]) == s
assert s.copy() == s
assert Stack([2]) != s
assert (s + Stack([2])).items == [1, 2]
assert merge(s, Stack([3])).items == [1, 3]
assert repr(s) == str(s) == 'Stack([1])'
assert list(s) == [1]
assert 1 in s and 2 not in s
assert s[0] == 1
assert Stack.of(1, 2).items == [1, 2]
assert Stack.kind == 'stack'
assert not hasattr(s, 'nothing')
s.items = [7]
assert s.pop() == 7""".splitlines()


def test_tests_of_classes_and_their_methods_work() -> None:
    lines = [line.replace("Stack(", "candidate(").replace("Stack.", "candidate.") for line in STACK_TESTS]
    body = "\n    ".join(lines).replace("'candidate(", "'Stack(")
    check = {"kind": "check", "test": f"def check(candidate):\n    {body}", "entry_point": "Stack"}
    for truth in ({"kind": "asserts", "asserts": STACK_TESTS}, check):
        verdict = judge(fenced(STACK) + "For example:" + fenced("print(Stack([1]))"), truth)
        assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
        wrong = STACK.replace("return self.items.pop()", "return self.items[0]")
        assert judge(fenced(wrong), truth).outcome is Outcome.WRONG


EVERYTHING = """
class All:
    def __eq__(self, other): return True
    def __contains__(self, other): return True
    def __len__(self): return 3
    def __iter__(self): return iter([1, 2, 3])
    def __sub__(self, other): return 0
    __rsub__ = __mul__ = __add__ = __sub__
    def __lt__(self, other): return True
    def __getitem__(self, i): return All()
    def __getattr__(self, name): return All()
    def __call__(self, *args): return All()
def f(x): return All()
Area = f
"""


@pytest.mark.parametrize(
    "test",
    [
        "f(1) == 2",
        "2 in f(1)",
        "len(f(1)) == 3",
        "abs(f(1) - 2) < 1",
        "abs(Area(1) - 2) < 1",
        "Area(1) == 2",
        "Area(1) < 3",
        "f(1)[0] == 2",
        "list(f(1)) == [1, 2, 3]",
        "f(1) == f(2)",
        "set(f(1)) == {1, 2, 3}",
        "sorted(f(1)) == [1, 2, 3]",
        "not f(1) != 2",
        "f(1).x == 2",
        "f(f(1)) == 2",
        "2 in f(1).items",
        "2 in f(1).g()",
        "2 in Area(1).g()",
        "len(Area(1).x) == 3",
        "str(f(1)) == '2'",
    ],
)
def test_an_object_that_is_equal_to_everything_passes_for_nothing(test: str) -> None:
    assert judge(fenced(EVERYTHING), {"kind": "asserts", "asserts": [f"assert {test}"]}).outcome is Outcome.WRONG


def test_a_list_is_not_its_only_element_unless_the_shape_wraps_results() -> None:
    program = fenced("def f(x):\n    return x")
    assert (
        judge(program, {"kind": "functional", "entry_point": "f", "cases": [{"input": [3], "output": [3]}]}).score == 0
    )
    assert judge(program, {"inputs": ["3"], "outputs": ["[3]"], "fn_name": "f"}).score == 0


@pytest.mark.parametrize(
    "truth",
    [
        "def check(c): pass",
        "[]",
        "3",
        "{}",
        '{"kind": "poem"}',
        '{"kind": "check", "test": "x"}',
        '{"kind": "check", "test": 3, "entry_point": "f"}',
        '{"kind": "check", "test": "", "entry_point": "f()"}',
        '{"kind": "asserts", "asserts": []}',
        '{"kind": "asserts", "asserts": [3]}',
        '{"kind": "stdio", "cases": [{"input": "1"}]}',
        '{"kind": "functional", "entry_point": "f", "cases": [{"input": 1, "output": 1}]}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}',
        '[{"input": "1", "output": "1", "testtype": "functional"}]',
        "[" * 100_000,
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match=r"ground truth|func_name"):
        judge(fenced(RIGHT), truth)


def test_tests_that_do_not_compile_are_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="do not compile"):
        judge(fenced(RIGHT), {**CHECK, "test": "def check(candidate) assert"})


def test_stdio_stays_text() -> None:
    truth = read_truth('{"inputs": [["1", "2"]], "outputs": ["3"]}', {})
    assert truth == Scripts([{"input": "1\n2", "output": "3"}])


def test_a_reference_program_in_the_tests_does_not_replace_the_candidate() -> None:
    test = f"{RIGHT}\ndef check(candidate):\n    assert candidate(1) == 2\n    assert f(1) == 2\n"
    truth = {"kind": "check", "test": test, "entry_point": "f"}
    assert judge(fenced(RIGHT), truth).outcome is Outcome.OK
    assert judge(fenced("def f(x):\n    return 2 if x is None else 3"), truth).outcome is Outcome.WRONG


def test_gold_is_the_rows_own_response() -> None:
    request = VerifyRequest("", json.dumps(CHECK), extra_info={"response": fenced(RIGHT)})
    assert judge(code.gold(request), CHECK).outcome is Outcome.OK
    with pytest.raises(ValueError, match="response"):
        code.gold(VerifyRequest("", json.dumps(CHECK)))


@pytest.mark.long
def test_it_runs_in_the_scoring_pool_within_its_deadline() -> None:
    request = VerifyRequest(fenced(RIGHT), json.dumps(CHECK))
    slow = VerifyRequest(fenced("while True: pass"), json.dumps(CHECK))
    with ScoringPool(processes=2, deadline_s=5.0, verifiers=["code"]) as pool:
        futures = [pool.submit("code", submitted) for submitted in (request, slow, request)]
        outcomes = [future.result().outcome for future in futures]
    assert outcomes == [Outcome.OK, Outcome.WRONG, Outcome.OK]


# ---- real data: every reference solution passes, and none of them does with its bodies taken out


def humaneval() -> Iterator[tuple[str, str, Any]]:
    with gzip.open(shared_data("code/HumanEval.jsonl.gz"), "rt") as lines:
        for row in map(json.loads, lines):
            truth = {"kind": "check", "test": row["test"], "entry_point": row["entry_point"]}
            yield row["task_id"], row["prompt"] + row["canonical_solution"], truth


def mbpp() -> Iterator[tuple[str, str, Any]]:
    with gzip.open(shared_data("code/sanitized-mbpp.json.gz"), "rt") as file:
        for row in json.load(file):
            truth = {"kind": "asserts", "asserts": row["test_list"], "setup": "\n".join(row["test_imports"])}
            yield f"MBPP/{row['task_id']}", row["code"], truth


class _Gut(ast.NodeTransformer):
    def __init__(self, body: str) -> None:
        self.body = body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = ast.parse(self.body).body
        return node


def gutted(program: str, body: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Gut(body).visit(ast.parse(program))))


def outcomes(rows: list[tuple[str, str, Any]]) -> dict[str, Verdict]:
    """Verdicts with much time: MBPP/123 needs 2 s of one core alone, and others may be using this machine."""
    patient = "code(timeout_s=25)"
    with ScoringPool(processes=len(os.sched_getaffinity(0)), deadline_s=30.0, verifiers=[patient]) as pool:
        futures = {
            name: pool.submit(patient, VerifyRequest(fenced(program), json.dumps(truth)))
            for name, program, truth in rows
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["bwrap", "landlock"])
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_reference_solutions_pass_and_their_hulls_do_not(
    backend: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of HumanEval and MBPP: one in twenty, or all of them."""
    try:
        open_sandbox(backend)
    except SetupError as error:
        pytest.skip(f"no {backend} here: {error}")
    monkeypatch.setenv("RLCLI_SANDBOX", backend)
    rows = [*humaneval(), *mbpp()][::every]
    failed = {name: verdict.detail for name, verdict in outcomes(rows).items() if verdict.outcome is not Outcome.OK}
    assert failed == {}
    for body in ("return None", "raise ValueError"):
        hulls = outcomes([(name, gutted(program, body), truth) for name, program, truth in rows])
        assert {verdict.outcome for verdict in hulls.values()} == {Outcome.WRONG}


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()"])
def test_a_program_may_end_itself_as_any_script_may(end: str) -> None:
    truth = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
    assert judge(fenced(f"{ECHO}\n{end}\nprint(0)"), truth).outcome is Outcome.OK
    assert judge(fenced(f"{ECHO}\nexit(1)"), truth).outcome is Outcome.WRONG


def test_integers_may_have_any_length() -> None:
    digits = "9" * 5000
    assert judge(fenced("print(10**5000 - 1)"), {"inputs": ["1"], "outputs": [digits]}).outcome is Outcome.OK
    power = "def f(x):\n    return 10**x - 1"
    for truth in (
        f'{{"inputs": [[5000]], "outputs": [{digits}], "fn_name": "f"}}',
        f'{{"assert_case": ["assert f(5000) == {digits}"]}}',
    ):
        assert judge(fenced(power), truth).outcome is Outcome.OK
        assert judge(fenced(power.replace("- 1", "- 2")), truth).outcome is Outcome.WRONG


@pytest.mark.long
def test_verls_assert_case_is_read_or_refused() -> None:
    asserts = ["assert f(1,2)==3", "assert f(2,2)==4"]
    for other_fields in ({}, {"inputs": ["", ""], "outputs": ["", ""]}, {"inputs": [], "outputs": []}):
        assert judge(fenced(SUM), {"assert_case": asserts, **other_fields}).score == 1.0
        assert judge(fenced("def f(a, b): return 0"), {"assert_case": asserts, **other_fields}).score == 0.0
        assert judge(fenced("x = 1"), {"assert_case": asserts, **other_fields}).score == 0.0
    with pytest.raises(ValueError, match="beside 'assert_case'"):
        judge(fenced(SUM), {"assert_case": asserts, "inputs": ["1 2"], "outputs": ["3"]})


@pytest.mark.parametrize(
    "truth",
    [
        {"inputs": ["", "1"], "outputs": ["", "\n"]},
        {"kind": "stdio", "cases": [{"input": "1", "output": " "}]},
        [{"input": "1", "output": "", "testtype": "stdin"}],
        {"inputs": [[1, 2]], "outputs": [None], "fn_name": "f"},
        {"kind": "functional", "entry_point": "f", "cases": [{"input": [1, 2], "output": None}]},
        {"kind": "asserts", "asserts": ["f(1, 2)", "assert True"]},
        {"kind": "check", "test": "def check(candidate):\n    candidate(1, 2)\n", "entry_point": "f"},
    ],
)
def test_a_test_with_nothing_to_compare_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"nothing"):
        judge(fenced(SUM), truth)


def test_a_fence_inside_a_docstring_is_a_part_of_the_program() -> None:
    lines = ['    """', "    Adds.", "    ```", "    >>> f(1)", "    2", "    ```", '    """', "    return x + 1"]
    program = "\n".join(["def f(x):", *lines])
    assert fences.program(f"So:\n```python\n{program}\n```\nFor example:\n```\n2\n```", ["f"]) == program + "\n"
    unclosed = "```python\nx = '''a\n```\nand\n```python\ny = 1\n```"
    assert fences.program(unclosed, ["y"]) == "y = 1\n"
