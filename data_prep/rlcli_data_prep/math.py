"""MATH: competition problems with worked solutions (Hendrycks et al., 2021, arXiv:2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import DataError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.sources import SOURCE_HELP, first, read_splits, text

HUB_ID = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:(?P<open>\{)|(?P<bare>[^\s{$][^$\n]*))")


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return read_splits(options, HUB_ID, join=True)


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the solution's last \\boxed{}, or the column `answer` where there is no solution."""
    problem = text(row, "problem")
    extra = {name: str(row[name]) for name in ("level", "type", "difficulty") if row.get(name) is not None}
    if first(row, "solution")[1] is None and "answer" in row:
        return boxed_prompt(problem, text(row, "answer"), HUB_ID, **extra)
    solution = text(row, "solution")
    answer = last_boxed(solution)
    if not answer:
        raise DataError(f"'solution' has no \\boxed{{}} answer: …{solution[-80:]!r}", "mend that row of the source")
    return boxed_prompt(problem, answer, HUB_ID, solution, **extra)


def boxed_prompt(problem: str, answer: str, data_source: str, solution: str | None = None, **extra: Any) -> Prompt:
    """A problem to be answered in a box, and scored by the verifier `math`. extra: more for `extra_info`.

    solution: kept as the worked response if it ends in this answer, in a box.
    """
    answer = answer.strip()
    if solution is not None and last_boxed(solution) == answer:
        extra["response"] = solution
    return Prompt(
        id="",
        messages=({"role": "user", "content": f"{problem.strip()}\n\n{INSTRUCTION}"},),
        data_source=data_source,
        ability="math",
        verifier="math",
        ground_truth=answer,
        extra_info={"answer_format": "box", **extra},
    )


def last_boxed(solution: str) -> str | None:
    r"""What the last `\boxed{…}` or `\fbox{…}` of a solution holds; also of `\boxed 2`, which some solutions have.

    >>> last_boxed(r"Thus \boxed{1}, or rather $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    last = boxes[-1]
    if last["bare"]:
        return last["bare"].strip(" .")
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", solution[last.start("open") :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return solution[last.start("open") + 1 : last.start("open") + brace.start()].strip()
    return None


CONVERTER = Converter(
    name="math",
    summary="MATH: 7500 + 5000 competition problems with solutions",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP, "subset": "one subject of a source that is parted by them, e.g. algebra (all)"},
    reference="Hendrycks et al., 2021, arXiv:2103.03874; MIT",
)
