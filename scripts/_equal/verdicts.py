"""Verdicts of each verifier on each response of the test data, correct ones and corrupted ones."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tree import ROOT, Tree

VERIFIERS = [
    *("exact", "format", "gsm8k", "gsm8k(mode=flexible)", "math", "repetition"),
    *(
        "length(target=64, unit=words)",
        "overlong(max_tokens=256, buffer=64, unit=words)",
        r"regex(pattern=\d+$)",
        "math + 0.1 * format",
    ),
]
CODE = ["code"]
COUNTDOWN = ["countdown"]
CHOICE = ["multiple_choice"]
"""It reads no other ground truth than a letter, and a file whose first rows crash is refused."""
CHUNK = 50
"""Rows under one digest: small enough to find a difference, and few enough to keep."""
Row = dict[str, Any]


def verdicts(tree: Tree, work: Path) -> dict[str, Any]:
    """Digests of score, outcome and answer of each CHUNK rows, by verifier and file."""
    folder = work / "verdicts"
    folder.mkdir(exist_ok=True)
    recorded: dict[str, Any] = {}
    for names, files in ((VERIFIERS, texts(tree)), (CODE, programs(tree)), (COUNTDOWN, sums()), (CHOICE, choices())):
        for file, rows in files:
            if not rows:
                continue
            path = folder / f"{file}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            for number, name in enumerate(names):
                scored = folder / f"{file}.{number}.scored.jsonl"
                tree.rlcli("verifiers", "run", name, "--input", path, "--output", scored, writes=scored)
                recorded[f"{name} on {file}"] = digests(scored)
    return recorded


def digests(scored: Path) -> list[str]:
    lines = []
    for line in scored.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        lines.append(repr((row["score"], row["outcome"], row["extracted"])))
    chunks = ("\n".join(lines[begin : begin + CHUNK]) for begin in range(0, len(lines), CHUNK))
    return [hashlib.sha256(chunk.encode()).hexdigest()[:12] for chunk in chunks]


def responses(solution: str, truth: str) -> Iterator[Row]:
    """A solution as it is, in the form that `format` wants, with another number, and cut off."""
    other = solution.translate(str.maketrans("0123456789", "1234567890"))
    for text in (solution, f"<think>{solution}</think><answer>{truth}</answer>", other, solution[: len(solution) // 2]):
        yield {"completion": text, "ground_truth": truth}


def texts(tree: Tree) -> Iterator[tuple[str, list[Row]]]:
    """Names and rows of what the verifiers of text read; the project's own pairs first."""
    pairs = (ROOT / "tests" / "unit" / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for form, truth, text, _ in map(json.loads, pairs):
        rows.append({"completion": f"So we get $\\boxed{{{text}}}$." if form == "box" else text, "ground_truth": truth})
    yield "pairs", rows
    yield (
        "gsm8k-test",
        [
            row
            for each in lines_of(tree.data / "gsm8k" / "test.jsonl.gz")
            for row in responses(each["answer"], each["answer"].rpartition("#### ")[2])
        ],
    )
    for name in ("math_test_5000", "math500"):
        yield (
            name,
            [
                row
                for each in lines_of(tree.data / "math" / f"{name}.jsonl.gz")
                for row in responses(each["solution"], str(each.get("answer") or boxed(each["solution"])))
            ],
        )


def boxed(solution: str) -> str:
    """The content of the last boxed{}, braces balanced."""
    start = solution.rfind("\\boxed{") + len("\\boxed{")
    depth, end = 1, start
    while depth and end < len(solution):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        end += 1
    return solution[start : end - 1]


def programs(tree: Tree) -> Iterator[tuple[str, list[Row]]]:
    """HumanEval and MBPP: each reference program, and the next task's in its place."""
    tasks = [
        (
            each["prompt"] + each["canonical_solution"],
            {"kind": "check", "test": each["test"], "entry_point": each["entry_point"]},
        )
        for each in lines_of(tree.data / "code" / "HumanEval.jsonl.gz")
    ]
    file = tree.data / "code" / "sanitized-mbpp.json.gz"
    if file.exists():
        for each in json.loads(gzip.decompress(file.read_bytes())):
            setup = "\n".join(each["test_imports"])
            tasks.append((each["code"], {"kind": "asserts", "setup": setup, "asserts": each["test_list"]}))
    rows = []
    for index, (program, truth) in enumerate(tasks):
        for text in (program, tasks[index - 1][0]):
            rows.append({"completion": f"```python\n{text}\n```", "ground_truth": json.dumps(truth)})
    yield "programs", rows


def sums() -> Iterator[tuple[str, list[Row]]]:
    """Countdown: right, wrong, and with a number that is not there."""
    truth = json.dumps({"target": 24, "numbers": [2, 3, 4]})
    answers = ["2*3*4", "4*(2*3)", "2+3+4", "4*6", "2*3*4*1", r"\frac{4}{2}*3", "(2*3", ""]
    yield "countdown", [{"completion": f"<answer>{answer}</answer>", "ground_truth": truth} for answer in answers]


def choices() -> Iterator[tuple[str, list[Row]]]:
    """Multiple choice: the letter in each form that answers take, and other letters."""
    forms = ["The answer is ({})", "\\boxed{{{}}}", "{}", "{}. seven", "It is {} or D", "**{}**", "no idea"]
    letters = "ABC"
    yield (
        "choices",
        [
            {"completion": form.format(letter), "ground_truth": truth}
            for form in forms
            for letter in letters
            for truth in letters
        ],
    )


def lines_of(file: Path) -> list[Row]:
    """Rows of a compressed file of JSON lines; none where the machine does not have it."""
    if not file.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
