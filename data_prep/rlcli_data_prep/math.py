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
_COMMAND = re.compile(r"\\f?box(?:ed)?\s*(?=\{)")
_SEVERAL = "separated by comma"


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    return read_splits(options, HUB_ID, join=True)


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The ground truth is the solution's last \\boxed{}, or the column `answer` if there is no solution. If the
    problem asks for several answers, separated by commas, and each is in a box, it is all of them."""
    problem = text(row, "problem")
    extra = {name: str(row[name]) for name in ("level", "type", "difficulty") if row.get(name) is not None}
    if first(row, "solution")[1] is None and "answer" in row:
        return boxed_prompt(problem, text(row, "answer"), HUB_ID, **extra)
    solution = text(row, "solution")
    answers = [answer for _, answer in boxes(solution) if answer]
    if _SEVERAL in problem and len(answers) > 1:
        answer = ", ".join(dict.fromkeys(answers))
        solution = f"{_COMMAND.sub('', solution)}\n\nThe answers are $\\boxed{{{answer}}}$."
    else:
        answer = last_boxed(solution) or ""
    if not answer:
        raise DataError(f"'solution' has no \\boxed{{}} answer: …{solution[-80:]!r}", "fix that row of the source")
    return boxed_prompt(problem, answer, HUB_ID, solution, **extra)


def boxed_prompt(problem: str, answer: str, data_source: str, solution: str | None = None, **extra: Any) -> Prompt:
    """A problem to be answered in a box and scored by the verifier `math`. extra: more fields for `extra_info`.

    solution: kept as the worked response if it ends with this answer in a box; other boxes are removed.
    """
    answer = answer.strip()
    answers = boxes(solution) if solution is not None else []
    if solution is not None and answers and answers[-1][1] == answer:
        start = answers[-1][0]
        extra["response"] = _COMMAND.sub("", solution[:start]) + solution[start:]
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
    """The content of the last box of a solution; None if there is none, or if it is not closed."""
    answers = boxes(solution)
    return answers[-1][1] if answers else None


def boxes(solution: str) -> list[tuple[int, str | None]]:
    r"""The start and content of each `\boxed{…}` or `\fbox{…}` (None: not closed). Some solutions have `\boxed 2`,
    whose content is the text up to the dollar.

    >>> boxes(r"$\boxed{1}$, or rather $\boxed{\frac{1}{2}}$.")
    [(1, '1'), (24, '\\frac{1}{2}')]
    """
    return [(box.start(), _content(solution, box)) for box in _BOX.finditer(solution)]


def _content(solution: str, box: re.Match[str]) -> str | None:
    if box["bare"]:
        return box["bare"].strip(" .")
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", solution[box.start("open") :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return solution[box.end("open") : box.start("open") + brace.start()].strip()
    return None


CONVERTER = Converter(
    name="math",
    summary="MATH: 7500 + 5000 competition problems with solutions",
    source=HUB_ID,
    verifier="math",
    read=read,
    prompt=prompt,
    options={"source": SOURCE_HELP, "subset": "one subject, if the source is split by subject, e.g. algebra (all)"},
    reference="Hendrycks et al., 2021, arXiv:2103.03874; MIT",
)
