"""Error rates of `math` and math-verify's default on the set of pairs: wrong responses accepted, right ones rejected.

    python scripts/proofs/math_pairs.py [--examples 5] [--pairs FILE]

The set is tests/unit/math_pairs.jsonl: a ground truth, a response and the verdict of a careful reader. math-verify is
used as its README says: `verify(parse("${gold}$"), parse(response))` with its default extraction and time-outs, on the
main thread, because these are `signal.alarm`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rlcli.types import VerifyRequest

PAIRS = Path(__file__).resolve().parents[2] / "tests" / "unit" / "math_pairs.jsonl"


class Pair(NamedTuple):
    """A ground truth, a response and whether the response is right."""

    gold: str
    response: str
    right: bool


class Tally(NamedTuple):
    """One verifier's mistakes on the pairs."""

    name: str
    false_accepts: list[Pair]
    false_rejects: list[Pair]


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    """The pairs of a file: lines of [form, gold, text, right], where form "box" puts the text into a box."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        form, gold, text, right = json.loads(line)
        pairs.append(Pair(gold, rf"So we get $\boxed{{{text}}}$." if form == "box" else text, right))
    return pairs


def by_math(gold: str, response: str) -> bool:
    """The verdict of the verifier `math`."""
    from rlcli_verifiers.math import verify

    return verify(VerifyRequest(response, gold)).score == 1.0


def by_math_verify(gold: str, response: str) -> bool:
    """The verdict of math-verify with its default configuration."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(response)))


def tally(name: str, judge: Callable[[str, str], bool], pairs: Iterable[Pair]) -> Tally:
    """Mistakes of a verifier; one that raises rejects."""
    counts = Tally(name, [], [])
    for pair in pairs:
        try:
            accepted = judge(pair.gold, pair.response)
        except Exception:  # whatever it raises, the response has no reward
            accepted = False
        if accepted != pair.right:
            (counts.false_accepts if accepted else counts.false_rejects).append(pair)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--examples", type=int, default=0, help="mistakes of each kind that are shown")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # math-verify logs each text that it cannot parse
    pairs = read_pairs(options.pairs)
    right = sum(pair.right for pair in pairs)
    tallies = [tally("math", by_math, pairs), tally("math-verify, default", by_math_verify, pairs)]
    print(f"{len(pairs)} pairs: {right} right, {len(pairs) - right} wrong\n")
    print(f"{'verifier':<22} {'false accepts':>14} {'false rejects':>14} {'accuracy':>9}")
    for counts in tallies:
        mistakes = len(counts.false_accepts) + len(counts.false_rejects)
        accuracy = 1 - mistakes / len(pairs)
        print(f"{counts.name:<22} {len(counts.false_accepts):>14} {len(counts.false_rejects):>14} {accuracy:>9.1%}")
    for counts in tallies:
        for kind, mistaken in (("accepts", counts.false_accepts), ("rejects", counts.false_rejects)):
            for pair in mistaken[: options.examples]:
                print(f"{counts.name} {kind}: {pair.response!r} for {pair.gold!r}")
    sys.exit(bool(tallies[0].false_accepts or tallies[0].false_rejects))


if __name__ == "__main__":
    main()
