"""Programs in several attempts: what the shown tests print comes back, and the next attempt counts."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rlcli_verifiers.code import verify
from rlcli_verifiers.code_truth import Scripts, read_truth

from rlcli.types import Outcome, VerifyRequest


class CodeRepair:
    """Write a program; a failure of the shown tests is answered with their output, and the next attempt counts.

    Rows as `rlcli prep mbpp` and `rlcli prep humaneval` make them, or any that the verifier code reads. The reward is
    1.0 for an attempt that passes all tests. Only tests that the prompt shows are answered: assertions and standard
    inputs that it holds word for word, and examples of a docstring (>>>). An attempt that passes these and fails a
    hidden one ends the conversation, so that nothing of a hidden test is ever seen.
    attempts: turns of the policy. timeout_s: CPU seconds of one run of the tests, of which an attempt has at most two,
    each of at most five times as many seconds of wall-clock time; keep ten times it below the deadline of the
    environment. memory_mb: of the program.
    """

    def __init__(self, attempts: int = 3, timeout_s: float = 4.0, memory_mb: int = 512) -> None:
        if attempts < 1:
            raise ValueError(f"attempts = {attempts} is below 1")
        self.attempts, self.timeout_s, self.memory_mb = attempts, timeout_s, memory_mb
        self.tried = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.row = row
        prompt = "\n".join(message["content"] for message in row["messages"])
        self.shown = shown_tests(row["ground_truth"], row.get("extra_info", {}), prompt)
        return row["messages"]

    def step(self, message: Mapping[str, Any]) -> Any:
        self.tried += 1
        info = {"attempts": self.tried}
        verdict = self._verdict(message["content"], self.row["ground_truth"])
        if verdict.outcome is Outcome.OK:
            return [], 1.0, True, info
        if self.tried < self.attempts:
            if verdict.outcome is not Outcome.NO_ANSWER and self.shown:
                verdict = self._verdict(message["content"], self.shown)
            if verdict.outcome is Outcome.NO_ANSWER or (self.shown and verdict.outcome is Outcome.WRONG):
                text = f"The tests fail: {verdict.detail}\n\nAnswer with the whole corrected program."
                return [{"role": "user", "content": text}], 0.0, False, info
        return [], 0.0, True, info

    def _verdict(self, text: str, truth: str) -> Any:
        request = VerifyRequest(text, truth, extra_info=self.row.get("extra_info", {}))
        return verify(request, timeout_s=self.timeout_s, memory_mb=self.memory_mb)


def shown_tests(ground_truth: str, extra_info: Mapping[str, Any], prompt: str) -> str:
    """The part of a ground truth that the prompt shows, as a ground truth; empty if it shows none. Raises `ValueError`
    for a ground truth that cannot be read."""
    truth = read_truth(ground_truth, extra_info)
    lines = "\n".join(["", *(line.strip() for line in prompt.splitlines()), ""])
    if isinstance(truth, Scripts):
        cases = [case for case in truth.cases if all(_holds(lines, case[part]) for part in ("input", "output"))]
        return json.dumps({"kind": "stdio", "cases": cases}) if cases else ""
    asserts = [assertion for assertion in truth.get("asserts", []) if _holds(lines, assertion)]
    asserts += _examples(prompt, truth.get("entry_point", ""))
    if not asserts:
        return ""
    return json.dumps({"kind": "asserts", "setup": truth.get("setup", ""), "asserts": asserts})


def _holds(lines: str, part: str) -> bool:
    wanted = "\n".join(line.strip() for line in part.strip().splitlines())
    return f"\n{wanted}\n" in lines


def _examples(prompt: str, entry_point: str) -> list[str]:
    """The examples of a docstring that call the function, as assertions, if what they expect is a plain value.

    >>> _examples(">>> twice(2)\\n4\\n>>> twice(x)\\n6", "twice")
    ['assert twice(2) == 4']
    """
    assertions = []
    lines = [line.strip() for line in prompt.splitlines()]
    for line, want in pairwise(lines):
        source = line.removeprefix(">>> ")
        try:
            ast.literal_eval(want)
            nodes = ast.walk(ast.parse(source, mode="eval"))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        known = all(hasattr(builtins, name) for name in names - {entry_point})
        if source != line and entry_point in names and known and "print" not in names:
            assertions.append(f"assert {source} == {want}")
    return assertions
