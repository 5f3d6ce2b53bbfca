"""How fast the scoring pool verifies, how soon it recovers, and what a storm of hostile answers does to it.

    python scripts/bench/verify.py [--processes 2] [--seconds 5] [--out verify.json]

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
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlcli.scoring.pool import ScoringPool
from rlcli.types import Verdict, VerifyRequest

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


def gsm8k_group(random_: random.Random) -> list[VerifyRequest]:
    number = random_.randint(2, 999_999)
    return [VerifyRequest(f"{FILLER}\n#### {number + random_.randint(0, 1)}", str(number)) for _ in range(8)]


def throughput(
    pool: ScoringPool, name: str, make: Callable[[random.Random], list[VerifyRequest]], seconds: float
) -> float:
    """Verifications a second, kept saturated for about `seconds`."""
    random_, done, started = random.Random(0), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        futures = [pool.submit(name, request) for _ in range(64) for request in make(random_)]
        done += sum(future.result().score is not None for future in futures)
    return done / elapsed


def beside_a_busy_thread(pool: ScoringPool, seconds: float) -> float:
    """Throughput of `math` while another thread of this process computes in Python, as a generation loop does."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        return throughput(pool, "math", math_group, seconds)
    finally:
        stop.set()
        thread.join()


def storm(processes: int) -> dict[str, float | dict[str, int]]:
    """80 hostile answers under a deadline of 0.5 s, then ordinary ones."""
    with ScoringPool(processes, 0.5, ["math"]) as pool:
        asked = [VerifyRequest(rf"\boxed{{{HOSTILE[i % len(HOSTILE)]}}}", "x^2+1") for i in range(80)]
        started = time.perf_counter()
        verdicts: list[Verdict] = [future.result() for future in [pool.submit("math", request) for request in asked]]
        seconds = time.perf_counter() - started
        after = [pool.submit("math", VerifyRequest(r"\boxed{42}", "42")) for _ in range(100)]
        killed = [verdict.latency_s - 0.5 for verdict in verdicts if verdict.outcome == "timeout"]
        return {
            "seconds": seconds,
            "scored": sum(verdict.score for verdict in verdicts),
            "outcomes": dict(Counter(str(verdict.outcome) for verdict in verdicts)),
            "replacement_ms_median": 1000 * statistics.median(killed) if killed else 0.0,
            "replacement_ms_worst": 1000 * max(killed, default=0.0),
            "right_afterwards_of_100": sum(future.result().score for future in after),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("verify.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    started = time.perf_counter()
    with ScoringPool(options.processes, 5.0, ["math", "gsm8k"]) as pool:
        start_s = time.perf_counter() - started
        rates = {
            "math": throughput(pool, "math", math_group, options.seconds),
            "gsm8k": throughput(pool, "gsm8k", gsm8k_group, options.seconds),
            "math, owner busy": beside_a_busy_thread(pool, options.seconds),
        }
    figures = {
        "processes": options.processes,
        "cores": os.cpu_count(),
        "load_before": load,
        "start_s": start_s,
        "verifications_per_s": rates,
        "storm": storm(options.processes),
    }
    for name, rate in rates.items():
        print(f"{name:<18} {rate:>10,.0f} verifications/s")
    print(f"{'start':<18} {start_s:>10.2f} s   (load average before: {load:.1f} on {os.cpu_count()} cores)")
    for name, value in figures["storm"].items():
        print(f"storm: {name} = {value if isinstance(value, dict) else round(value, 1)}")
    partial = options.out.with_suffix(".partial")
    partial.write_text(json.dumps(figures, indent=2))
    os.replace(partial, options.out)


if __name__ == "__main__":
    main()
