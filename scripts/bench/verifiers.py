"""Throughput of each verifier in the scoring pool, its recovery time, and the effect of many hostile answers at once.

    python scripts/bench/verifiers.py [--processes 2] [--seconds 5] [--out verifiers.json]
    python scripts/bench/verifiers.py --model FOLDER    # what verifying takes of the processes that generate

The answers are made here, in proportions like those of competition mathematics (three answers in four of MATH-500 are
plain numbers): groups of 8 responses of about 2,000 characters to one problem; of the numbers half are right, of the
formulas a third are written as the gold is, a third in another form, a third nearly right. math-verify reads these two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlcli_sandbox import open_sandbox

from rlcli.errors import SetupError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.rewards.service.scoring_client import ScoringClient
from rlcli.rewards.service.scoring_service import Settings
from rlcli.support.files import replacing
from rlcli.types import Prompt, Verdict, VerifyRequest

FILLER = "We set up the equation and solve it step by step, checking each case. " * 28
FORMS = [  # gold, the same in another form, a near miss
    (r"\frac{\sqrt{%d}}{2}", r"0.5\sqrt{%d}", r"\frac{\sqrt{%d}}{3}"),
    (r"\left( %d, \frac{\pi}{2} \right)", r"(%d, \pi/2)", r"(%d, \pi/3)"),
    (r"x^2+2x+%d", r"(x+1)^2+%d-1", r"x^2+2x-%d"),
    (r"%d\pi", r"\pi \cdot %d", r"-%d\pi"),
    (r"[%d, \infty)", r"\left[%d, \infty\right)", r"(%d, \infty)"),
]
HOSTILE = [
    r"\binom{99999999}{44444444}",
    "10^{10^{10}}",
    "1000000000!",
    "(x+1)^{9999}",
    r"\sum_{n=1}^{99999999} \sin(n)",
    "(" * 390,
    r"\frac{" * 60 + "1" + "}{2}" * 60,
    "9" * 5000,
]


def math_group(random_: random.Random) -> list[VerifyRequest]:
    number = random_.randint(2, 999_999)
    if random_.random() < 0.75:
        gold, *others = str(number), str(number + 1)
    else:
        gold, *others = (form % number for form in random_.choice(FORMS))
    answers = [random_.choice([gold, *others]) for _ in range(8)]
    return [VerifyRequest(f"{FILLER}The answer is $\\boxed{{{answer}}}$.", gold) for answer in answers]


def others(random_: random.Random) -> dict[str, VerifyRequest]:
    """One request for each of the other verifiers, by the expression that names it."""
    number, letter = random_.randint(2, 999_999), random_.choice("ABCD")
    answered = f"<think>{FILLER}</think>\n<answer>{number}</answer>"
    return {
        "gsm8k": VerifyRequest(f"{FILLER}\n#### {number + random_.randint(0, 1)}", str(number)),
        "multiple_choice": VerifyRequest(f"{FILLER}\nThe answer is ({letter}).", random_.choice("ABCD")),
        "exact": VerifyRequest(str(number), str(number)),
        "format": VerifyRequest(answered, str(number)),
        "countdown": VerifyRequest(f"{FILLER}\n<answer>(3 + 5) * 7</answer>", '{"numbers": [3, 5, 7], "target": 56}'),
        "repetition": VerifyRequest(answered, ""),
        "math * 1.0 + format * 0.1": VerifyRequest(answered + f" \\boxed{{{number}}}", str(number)),
    }


def program(random_: random.Random) -> VerifyRequest:
    """A function and three tests of it."""
    added = random_.randint(0, 1)
    asserts = [f"assert total({list(range(n))}) == {sum(range(n))}" for n in (0, 1, 9)]
    code = f"def total(numbers):\n    return sum(numbers) + {added}\n"
    return VerifyRequest(f"```python\n{code}```", json.dumps({"kind": "asserts", "asserts": asserts, "setup": ""}))


@dataclass(frozen=True)
class Rate:
    """Verifications a second of a saturated pool, and what one took of a scoring process, in milliseconds."""

    name: str
    """Row of the table."""
    per_s: float
    """Verifications per second."""
    p50_ms: float
    """Median latency of a verification in its scoring process."""
    p99_ms: float
    """99th percentile of that latency."""


def throughput(
    pool: ScoringPool, name: str, make: Callable[[random.Random], Sequence[VerifyRequest]], seconds: float
) -> Rate:
    """Throughput of a pool kept saturated for about `seconds`."""
    random_, verdicts, started = random.Random(0), list[Verdict](), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        requests = [request for _ in range(8) for request in make(random_)]
        verdicts += [future.result() for future in [pool.submit(name, request) for request in requests]]
    failed = [verdict for verdict in verdicts if verdict.outcome in ("timeout", "crash")]
    assert not failed, f"{name}: {failed[0].detail}"
    cuts = statistics.quantiles([1000 * verdict.latency_s for verdict in verdicts], n=100)
    return Rate(name, len(verdicts) / elapsed, cuts[49], cuts[98])


def beside_a_busy_thread(pool: ScoringPool, seconds: float) -> Rate:
    """Throughput of `math` while another thread of this process computes in Python, as a generation loop does."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        return replace(throughput(pool, "math", math_group, seconds), name="math, while the owner computes")
    finally:
        stop.set()
        thread.join()


OVERRUN_S = 0.25 * 1.1
"""CPU seconds until a process is killed for its deadline of 0.25: a tenth is not counted."""

HANGS = "def verify(request):\n    while True:\n        pass\n"


def storm(processes: int) -> dict[str, float | dict[str, int]]:
    """80 hostile answers, 40 verifications that hang, under a deadline of 0.25 s; then ordinary ones."""
    with tempfile.TemporaryDirectory() as folder, ScoringPool(processes, 0.25, ["math"]) as pool:
        hangs = Path(folder, "hangs.py")
        hangs.write_text(HANGS)
        calls = [("math", VerifyRequest(rf"\boxed{{{HOSTILE[i % len(HOSTILE)]}}}", "x^2+1")) for i in range(80)]
        calls += [(f"{hangs}:verify", VerifyRequest("", ""))] * 40
        random.Random(0).shuffle(calls)
        started = time.perf_counter()
        verdicts: list[Verdict] = [future.result() for future in [pool.submit(*call) for call in calls]]
        seconds = time.perf_counter() - started
        ordinary = [pool.submit("math", VerifyRequest(r"\boxed{42}", "42")) for _ in range(100)]
        killed = [
            500 * (verdict.latency_s - 2 * OVERRUN_S) for verdict in verdicts if verdict.detail.startswith(OVERRAN)
        ]
        return {
            "seconds": seconds,
            "scored": sum(verdict.score for verdict in verdicts),
            "outcomes": dict(Counter(str(verdict.outcome) for verdict in verdicts)),
            "replacement_ms_median": statistics.median(killed),
            "replacement_ms_worst": max(killed),
            "right_afterwards_of_100": sum(future.result().score for future in ordinary),
        }


def asking(model: str) -> list[dict[str, float]]:
    """CPU microseconds that verifying one response takes of the process that generates it, in it and by the service of
    its machine, which decodes as well. model: whose tokenizer."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer, costs = AutoTokenizer.from_pretrained(model), list[dict[str, float]]()
    for length, size in ((256, 10), (256, 100_000), (4096, 10), (4096, 100_000)):
        row = Prompt("bench:0", ({"role": "user", "content": "?"},), "bench", "", "gsm8k", "42", {"cases": "7" * size})
        ids = [np.random.default_rng(i).integers(3, len(tokenizer) - 1, length, np.int32) for i in range(512)]
        folder = Path(f"/tmp/rlcli-scoring-bench-{os.getpid()}")
        with ScoringPool(2, 5.0, ["gsm8k"]) as pool:

            def here(tokens: Any, pool: ScoringPool = pool, row: Prompt = row) -> Future[Any]:
                text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
                request = VerifyRequest(
                    text, row.ground_truth, row.messages, row.data_source, row.extra_info, array("i", tokens.tobytes())
                )
                return pool.submit("gsm8k", request)

            inside = _cpu_us(here, ids)
        service = ScoringClient(Settings(model, 2, 5.0, ("gsm8k",), "", ""), folder, tokenizer)
        service.wait_ready()

        def there(tokens: Any, service: ScoringClient = service, row: Prompt = row) -> Future[Any]:
            return service.submit(row, tokens.tobytes(), 0)

        costs.append({"tokens": length, "row_bytes": size, "inside_us": inside, "service_us": _cpu_us(there, ids)})
        service.close()
    return costs


def _cpu_us(ask: Callable[[Any], Future[Any]], ids: Sequence[Any]) -> float:
    """CPU microseconds of this process for each of `ids`: the median of three rounds after a warm-up round."""
    rounds = []
    for _ in range(4):
        cpu_start = time.process_time()
        for waiting in [ask(tokens) for tokens in ids]:
            waiting.result()
        rounds.append((time.process_time() - cpu_start) / len(ids) * 1e6)
    return statistics.median(rounds[1:])


def rates(processes: int, seconds: float) -> list[Rate]:
    measured = []
    with ScoringPool(processes, 5.0, ["math"]) as pool:
        measured.append(throughput(pool, "math", lambda r: [q for _ in range(8) for q in math_group(r)], seconds))
        measured.append(beside_a_busy_thread(pool, seconds))
        for name in others(random.Random(0)):
            measured.append(
                throughput(pool, name, lambda r, name=name: [others(r)[name] for _ in range(64)], seconds / 2)
            )
    for backend in ("bwrap", "landlock"):
        os.environ["RLCLI_SANDBOX"] = backend
        try:
            open_sandbox()
        except SetupError as error:
            print(f"code, {backend}: left out: {error}")
            continue
        with ScoringPool(processes, 5.0, ["code"]) as pool:
            rate = throughput(pool, "code", lambda r: [program(r)], seconds)
            measured.append(replace(rate, name=f"code, {backend}: a program and three tests"))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("verifiers.json"))
    parser.add_argument("--model", default="", help="measure also what engines' processes spend, with its tokenizer")
    options = parser.parse_args()
    if options.model:
        for cost in asking(options.model):
            print("  ".join(f"{name} {value:,.0f}" for name, value in cost.items()))
        return
    load = os.getloadavg()[0]
    measured = rates(options.processes, options.seconds)
    stormed = storm(options.processes)
    print(f"{options.processes} processes, {os.cpu_count()} cores, load average before: {load:.1f}\n")
    print(f"{'verifier':<44} {'a second':>9} {'p50':>9} {'p99':>9}")
    for rate in measured:
        print(f"{rate.name:<44} {rate.per_s:>9,.0f} {rate.p50_ms:>6.2f} ms {rate.p99_ms:>6.2f} ms")
    print("\na storm of 80 hostile answers and 40 verifications that hang, under a deadline of 0.25 s:")
    for name, value in stormed.items():
        print(f"  {name.replace('_', ' ')}: {value if isinstance(value, dict) else round(value, 1)}")
    figures = {"processes": options.processes, "cores": os.cpu_count(), "load_before": load}
    with replacing(options.out) as temporary:
        temporary.write_text(
            json.dumps({**figures, "rates": [asdict(rate) for rate in measured], "storm": stormed}, indent=2)
        )


if __name__ == "__main__":
    main()
