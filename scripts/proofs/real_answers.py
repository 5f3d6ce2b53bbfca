"""Verdicts of `math` and `gsm8k` on the solutions of MATH and GSM8K, and those that a change of the verifiers alters.

    python scripts/proofs/real_answers.py --data FOLDER [--every 4] [--write before.json] [--compare before.json]

FOLDER holds `math/math_test_5000.jsonl.gz` (problem, solution) and `gsm8k/test.jsonl.gz` (question, answer). Each
solution is judged against its own answer: as it is, in which case it must be right, and without its box or mark, as
prose that states an answer. Both are judged against the next row's answer too, where that is another one: they must be
wrong.
Run it with `PYTHONPATH=CHECKOUT/verifiers` and `--write` for the verifiers of another checkout, then with `--compare`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlcli_verifiers import gsm8k, math
from rlcli_verifiers.answers import boxes

from rlcli.types import VerifyRequest

SHOWN = 20
"""Maximum number of changed verdicts that are printed."""


class Solution(NamedTuple):
    """A solution of a dataset, its answer, and the prose that is left without its box or mark."""

    name: str
    """`dataset:row`."""
    text: str
    """Full solution."""
    prose: str
    """Solution without the box or mark of its answer."""
    answer: str
    """Ground-truth answer."""


def solutions(data: Path) -> Iterator[Solution]:
    for number, row in enumerate(_rows(data / "math" / "math_test_5000.jsonl.gz")):
        text = row["solution"]
        marked = boxes(text)
        prose = text
        for start, end, content in reversed(marked):
            prose = prose[:start] + content + prose[end:]
        if marked:
            yield Solution(f"math:{number}", text, prose, marked[-1][2])
    for number, row in enumerate(_rows(data / "gsm8k" / "test.jsonl.gz")):
        prose, _, answer = row["answer"].rpartition("####")
        yield Solution(f"gsm8k:{number}", row["answer"], re.sub("<<.*?>>", "", prose).strip(), answer.strip())


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def verdicts(solutions: list[Solution]) -> dict[str, bool]:
    """Acceptance of a text by a verifier; the keys are `dataset:row verifier form against`."""
    accepted: dict[str, bool] = {}
    for solution, following in zip(solutions, [*solutions[1:], solutions[0]], strict=True):
        verifiers = {"math": math.verify}
        if solution.name.startswith("gsm8k"):
            verifiers["gsm8k(mode=flexible)"] = lambda request: gsm8k.verify(request, mode="flexible")
        for name, verify in verifiers.items():
            for form, text in (("solution", solution.text), ("prose", solution.prose)):
                accepted[f"{solution.name} {name} {form} own"] = verify(VerifyRequest(text, solution.answer)).score == 1
                if not math.verify(VerifyRequest(rf"\boxed{{{solution.answer}}}", following.answer)).score:
                    other = VerifyRequest(text, following.answer)
                    accepted[f"{solution.name} {name} {form} next"] = _score(verify, other) == 1
    return accepted


def _score(verify: object, request: VerifyRequest) -> float:
    try:
        return float(verify(request).score)  # type: ignore[operator]
    except ValueError:  # the next row's answer is no number
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=4, help="judge one row in so many")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    accepted = verdicts(list(solutions(options.data))[:: options.every])
    counts = Counter((name.split(":")[0], *name.split(" ")[1:], value) for name, value in accepted.items())
    print(f"{'dataset':<8} {'verifier':<22} {'text':<10} {'answer':<6} {'accepted':>9} {'rejected':>9}")
    for dataset, verifier, form, against in sorted({key[:-1] for key in counts}):
        yes, no = (counts[dataset, verifier, form, against, value] for value in (True, False))
        print(f"{dataset:<8} {verifier:<22} {form:<10} {against:<6} {yes:>9} {no:>9}")
    if options.write:
        options.write.write_text(json.dumps(accepted))
    worse = 0
    if options.compare:
        previous = json.loads(options.compare.read_text())
        changed = [name for name, value in accepted.items() if name in previous and previous[name] != value]
        lost = [name for name in changed if accepted[name] == name.endswith("next")]
        worse = len(lost)
        print(f"\n{len(changed)} verdicts changed, {worse} of them for the worse")
        for name in lost[:SHOWN]:
            print(f"  {name}: {'accepted' if accepted[name] else 'rejected'} now")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
