"""Answers written to hang, crash or fool a mathematical verifier, for the tests. None of them equals x^2+1."""

from __future__ import annotations

TOWERS = [
    "10^{10^{10}}",
    "10^(10^10)",
    "{10^{10}}^{10^{10}}",
    "((9^9)^9)^9",
    "9^{9^{9^{9}}}",
    "2^{99999999999}",
    "x^{2^{2^{2^{99}}}}",
    "(x+1)^{9999}",
    "(((x+1)^{99})^{99})^{99}",
    "(a+b+c+d+e+f)^{100}",
    r"\left(1+\sqrt{2}\right)^{9999}",
    r"\sqrt[99999999]{2}",
    r"e^{e^{e^{e^{e^{99}}}}}",
    "2^{2^{10}!}",
    "0.1^{-99999999}",
    "10^{-10^{10}}",
    r"\frac{1}{10^{10^{10}}}",
    "9^{99999}",
    "(-1)^{10^{30}}",
    r"2^{999 \cdot 999 \cdot 999}",
    r"\left(2^{9999}\right)^{9999}",
    "10^999999999",
    r"\exp(\exp(\exp(\exp(99))))",
    "2^2^2^2^2^2^2",
    "x^{999999999}",
    "(2)^{(9)^{(9)^{(9)}}}",
    "99999999e99999999",
    "1e999999999",
    r"1.5 \times 10^{9999}",
]
FACTORIALS = [
    "1000000000!",
    "(10^9)!",
    "9!!!!",
    "99!!!",
    "(99!)!",
    "(9^9)!",
    r"\binom{99999999}{44444444}",
    r"\binom{999}{\binom{999}{499}}",
    r"{10^9 \choose 5}",
    r"\Gamma(10^{9})",
    r"\gamma(999999999)",
    r"\left(\frac{1}{3}\right)!",
    "(-5)!",
    r"\operatorname{superfac}(10^9)",
    r"\operatorname{zeros}(10^5, 10^5)",
    r"\operatorname{eye}(99999999)",
    r"\operatorname{plot}(1)",
    r"\operatorname{runtests}(1)",
    r"\gcd(10^{99999999}, 6)",
    r"\lcm(99999999999!, 7)",
]
SUMS = [
    r"\sum_{n=1}^{10^9} n",
    r"\sum_{n=1}^{9999999} \sin(n)",
    r"\sum_{n=1}^{\infty} \frac{\sin n}{n^2+\cos n}",
    r"\prod_{n=1}^{10^9} n",
    r"\int_0^{1} e^{e^{x}} \sin(x^x) dx",
    r"\int \frac{1}{\sqrt{x^9+x+1}} dx",
    r"\lim_{x \to 0} \frac{\sin(x^{99})}{x^{99}}",
    r"\frac{d}{dx} (x+1)^{9999}",
    r"\det \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"x^5 - x + 1 = 0",
    r"\sin(x)^{99}+\cos(x)^{99} = \tan(x)^{99}",
    r"x^{99} + y^{98} < z^{97} + \sin(x y z)",
    r"10^{10} \bmod 7",
]
NESTED = [
    "{" * 300 + "1" + "}" * 300,
    r"\frac{" * 60 + "1" + "}{2}" * 60,
    r"\frac{1}{" * 40 + "x" + "}" * 40,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    r"\sqrt" * 80,
    r"\sqrt{1+" * 30 + "x" + "}" * 30,
    "(" * 390,
    ")" * 390,
    "[" * 100 + "1" + "]" * 100,
    "-" * 390 + "1",
    "+" * 300 + "1",
    "|" * 99 + "x" + "|" * 99,
    r"\lfloor" * 40 + "x" + r"\rfloor" * 40,
    r"\boxed{" * 50 + "1" + "}" * 50,
    r"\text{" * 90 + "a" + "}" * 90,
    r"\left(" * 40 + "1" + r"\right)" * 40,
    "1" + "'" * 390,
    "x_{" * 90 + "1" + "}" * 90,
    "\\" * 400,
    "}{" * 150,
    r"\frac",
    r"\frac{1}",
    r"\sqrt[",
    "f(" * 100 + "x" + ")" * 100,
]
LARGE = [
    "9" * 5000,
    "9" * 399,
    "1." + "0" * 5000,
    "0." + "3" * 390,
    "9" * 61 + "/7",
    "1" * 4301,
    "1,111" * 70,
    "+".join(["x"] * 5000),
    "+".join(["x"] * 199),
    "*".join(["(x+1)"] * 60),
    ",".join("123456789" * 20),
    r"\pm " * 60 + "1",
    ",".join([r"\pm 1"] * 60),
    "=".join(["x"] * 190),
    "<".join(["x"] * 190),
    " or ".join("abcdefghijklmnop" * 4),
    r"\cup".join(["(1,2)"] * 50),
    r"\begin{pmatrix}" + r"\\".join([" & ".join(["x"] * 40)] * 40) + r"\end{pmatrix}",
    r"\begin{pmatrix}" + r"\\".join([" & ".join(["9"] * 9)] * 9) + r"\end{pmatrix}^{99}",
    r"\begin{pmatrix}" * 9,
    "x" * (1 << 20),
    "{" * (1 << 20),
    r"\frac{1}{" * (1 << 16),
    " " * (1 << 20),
    "1" * (1 << 20),
    r"\boxed{" * (1 << 15),
]
STRANGE = [
    "x²+２",
    "²",
    "1\0",
    "\0" * 50,
    "\u202e1+2^x",
    "\u200f42\u200e",
    "\ud800",
    "x^2\u200b+2",
    "∑∫∏√∞",
    "ⅷ",
    "½½",
    "\ufeff",
    "🙂",
    "a\u0301" * 90,
    "\x1b[31m1",
    "\r\n\t\v\f",
    "__import__('os').system('true')",
    r"\text{__import__('os')}",
    "().__class__.__bases__",
    "lambda: 0",
    "x^2+1 = x^2+2",
    "nan",
    "inf",
    "-inf",
    r"\infty - \infty",
    r"\frac{0}{0}",
    "1/0",
    "zoo",
    "None",
    "True",
    "%" * 300,
    r"\%" * 150,
    ":" * 300,
    "1:" * 100,
    "," * 390,
    ";" * 390,
    "=" * 390,
    "<" * 390,
    "^" * 390,
    "_" * 390,
    "!" * 390,
    "$" * 390,
    "&" * 390,
    "~" * 390,
    "#" * 390,
    "1" + "e" * 390,
    "1 2 3 4 5 6 7 8 9 " * 20,
]
ANSWERS = TOWERS + FACTORIALS + SUMS + NESTED + LARGE + STRANGE
GOLD = "x^2+1"

if __name__ == "__main__":
    # python tests/unit/hostile_math.py: the outcome and time of each, as JSON, for one set of installed libraries
    import json
    import signal
    import sys
    import time

    from rlcli_verifiers.math import preload, verify

    from rlcli.types import VerifyRequest

    preload()
    armed: list[object] = []
    signal.alarm = lambda *args: armed.append(args) or 0  # type: ignore[assignment, func-returns-value]
    rows = []
    for answer in ANSWERS:
        for gold in (GOLD, "42"):
            started = time.monotonic()
            verdict = verify(VerifyRequest(rf"\boxed{{{answer}}}", gold))
            rows.append((verdict.score, str(verdict.outcome), round(time.monotonic() - started, 2)))
    from sympy.external.gmpy import GROUND_TYPES

    json.dump({"ground_types": GROUND_TYPES, "alarms": len(armed), "rows": rows}, sys.stdout)
