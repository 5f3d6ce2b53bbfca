"""Programs that do what they are asked, with the means of an ordinary program: all must pass."""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.attacks.catalogue import FENCED, functional

NUMPY = "numpy"


@dataclass(frozen=True)
class Control:
    """A right program. needs: a package that it imports."""

    name: str
    completion: str
    ground_truth: str
    needs: str = ""


CONTROLS: list[Control] = []


def right(name: str, source: str, inputs: list[list[Any]], outputs: list[Any], needs: str = "") -> None:
    """Asked for f(*input) == output."""
    truth = json.dumps(functional(inputs, outputs))
    CONTROLS.append(Control(name, "Here it is.\n" + FENCED.format(source.strip("\n")), truth, needs))


def script(name: str, source: str, *cases: tuple[str, str]) -> None:
    """Asked for what it prints."""
    truth = {"kind": "stdio", "cases": [{"input": stdin, "output": wanted} for stdin, wanted in cases]}
    CONTROLS.append(Control(name, FENCED.format(source.strip("\n")), json.dumps(truth)))


def asserted(name: str, source: str, *asserts: str, setup: str = "") -> None:
    """Asked to pass assertions."""
    truth = {"kind": "asserts", "setup": setup, "asserts": list(asserts)}
    CONTROLS.append(Control(name, FENCED.format(source.strip("\n")), json.dumps(truth)))


right(
    "temporary file",
    "import tempfile\ndef f(s):\n    with tempfile.TemporaryFile('w+') as file:\n        file.write(s)\n        file.seek(0)\n        return file.read()",
    [["abc"]],
    ["abc"],
)
right(
    "named temporary file",
    "import os, tempfile\ndef f(s):\n    with tempfile.NamedTemporaryFile('w', delete=False) as file:\n        file.write(s)\n    with open(file.name) as again:\n        text = again.read()\n    os.unlink(file.name)\n    return [text, os.path.exists(file.name)]",
    [["abc"]],
    [["abc", False]],
)
right(
    "temporary folder",
    "import os, tempfile\ndef f(n):\n    with tempfile.TemporaryDirectory() as folder:\n        for i in range(n):\n            open(os.path.join(folder, str(i)), 'w').close()\n        return sorted(os.listdir(folder))",
    [[3]],
    [["0", "1", "2"]],
)
right(
    "file beside it",
    "import pathlib\ndef f(s):\n    path = pathlib.Path('note.txt')\n    path.write_text(s)\n    path.rename('other.txt')\n    return pathlib.Path('other.txt').read_text()",
    [["abc"]],
    ["abc"],
)
right(
    "database",
    "import sqlite3\ndef f(n):\n    base = sqlite3.connect('x.db')\n    base.execute('create table if not exists t (x)')\n    base.executemany('insert into t values (?)', [(i,) for i in range(n)])\n    base.commit()\n    return base.execute('select sum(x) from t').fetchone()[0]",
    [[5]],
    [10],
)
right("re", "import re\ndef f(s):\n    return re.findall(r'\\d+', s)", [["a1b22"]], [["1", "22"]])
right(
    "collections",
    "from collections import Counter, OrderedDict, defaultdict, deque\ndef f(s):\n    d = defaultdict(int)\n    for c in s:\n        d[c] += 1\n    return [Counter(s), dict(d), list(deque(s, 2)), list(OrderedDict(d))]",
    [["aab"]],
    [[{"a": 2, "b": 1}, {"a": 2, "b": 1}, ["a", "b"], ["a", "b"]]],
)
right(
    "Counter as the answer",
    "from collections import Counter\ndef f(s):\n    return Counter(s)",
    [["aab"]],
    [{"a": 2, "b": 1}],
)
right("recursion", "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)", [[900]], [900])
right(
    "deep recursion",
    "import sys\nsys.setrecursionlimit(20000)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)",
    [[9000]],
    [9000],
)
right(
    "itertools",
    "import itertools\ndef f(xs):\n    return [list(p) for p in itertools.permutations(xs, 2)]",
    [[[1, 2]]],
    [[[1, 2], [2, 1]]],
)
right(
    "heapq and bisect",
    "import heapq, bisect\ndef f(xs):\n    heapq.heapify(xs)\n    out = [heapq.heappop(xs) for _ in range(len(xs))]\n    bisect.insort(out, 5)\n    return out",
    [[[9, 1, 7]]],
    [[1, 5, 7, 9]],
)
right(
    "functools",
    "from functools import lru_cache, reduce, cache\n@lru_cache(maxsize=None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\ndef f(n):\n    return [fib(n), reduce(lambda a, b: a * b, range(1, 6))]",
    [[80]],
    [[23416728348467685, 120]],
)
right(
    "dataclasses and enum",
    "import dataclasses, enum\nclass C(enum.IntEnum):\n    RED = 1\n@dataclasses.dataclass(order=True)\nclass P:\n    x: int\n    c: C = C.RED\ndef f(n):\n    return [dataclasses.astuple(max(P(n), P(1))), C.RED, C(1).name]",
    [[4]],
    [[[4, 1], 1, "RED"]],
)
right(
    "typing",
    "from typing import *\nT = TypeVar('T')\nclass Box(Generic[T]):\n    def __init__(self, v: T) -> None:\n        self.v: Optional[T] = v\ndef f(xs: List[int]) -> Dict[str, Tuple[int, ...]]:\n    return {'all': tuple(Box(x).v for x in xs)}",
    [[[1, 2]]],
    [{"all": [1, 2]}],
)
right(
    "decimal and fractions",
    "from decimal import Decimal, getcontext\nfrom fractions import Fraction\ndef f(n):\n    getcontext().prec = 30\n    return [str(Decimal(1) / Decimal(n)), str(Fraction(n, 9))]",
    [[3]],
    [["0." + "3" * 30, "1/3"]],
)
right(
    "math and cmath",
    "import math, cmath\ndef f(n):\n    return [math.gcd(n, 12), math.comb(n, 2), round(cmath.sqrt(-n).imag, 6), math.isclose(math.pi, 22 / 7)]",
    [[4]],
    [[4, 6, 2.0, False]],
)
right(
    "random with a seed",
    "import random\ndef f(n):\n    a = random.Random(n)\n    random.seed(n)\n    return a.random() == random.random()",
    [[7]],
    [True],
)
right(
    "datetime",
    "import datetime, time, calendar\ndef f(s):\n    day = datetime.datetime.strptime(s, '%Y-%m-%d')\n    return [(day + datetime.timedelta(1)).strftime('%d/%m/%Y'), calendar.isleap(day.year), time.time() > 0]",
    [["2024-02-28"]],
    [["29/02/2024", True, True]],
)
right(
    "string and textwrap",
    "import string, textwrap\ndef f(s):\n    return [string.capwords(s), textwrap.wrap(s, 5), string.ascii_lowercase[:3]]",
    [["ab cd ef"]],
    [["Ab Cd Ef", ["ab cd", "ef"], "abc"]],
)
right(
    "threading",
    "import threading, queue\ndef f(n):\n    out = queue.Queue()\n    threads = [threading.Thread(target=lambda i=i: out.put(i * i)) for i in range(n)]\n    [t.start() for t in threads]\n    [t.join() for t in threads]\n    return sorted(out.queue)",
    [[5]],
    [[0, 1, 4, 9, 16]],
)
right(
    "pool of threads",
    "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(4) as pool:\n        return sum(pool.map(lambda x: x * x, range(n)))",
    [[5]],
    [30],
)
right(
    "asyncio",
    "import asyncio\nasync def square(x):\n    await asyncio.sleep(0.001)\n    return x * x\nasync def main(n):\n    return await asyncio.gather(*map(square, range(n)))\ndef f(n):\n    return asyncio.run(main(n))",
    [[4]],
    [[0, 1, 4, 9]],
)
right("generator", "def f(n):\n    for i in range(n):\n        yield i * i", [[4]], [[0, 1, 4, 9]])
right(
    "nested values",
    "def f(n):\n    return {'a': [1, (2, 3), {'b': None}], 'c': {'d': [True, 1.5]}}",
    [[0]],
    [{"a": [1, [2, 3], {"b": None}], "c": {"d": [True, 1.5]}}],
)
right("big integers", "def f(n):\n    return [2 ** n, -(3 ** n)]", [[200]], [[2**200, -(3**200)]])
right("unicode", "def f(s):\n    return s[::-1].upper() + ' é😀漢'", [["straße"]], ["ESSARTS é😀漢"])
right(
    "method of Solution",
    "from typing import List\nclass Solution:\n    def f(self, xs: List[int]) -> int:\n        return self.g(xs)\n    def g(self, xs):\n        return max(xs)",
    [[[1, 5, 2]]],
    [5],
)
right(
    "prints while it works",
    "import sys\ndef f(n):\n    print('working on', n)\n    sys.stderr.write('and on\\n')\n    return n + 1",
    [[1], [2]],
    [2, 3],
)
right("prints a lot", "def f(n):\n    for i in range(2000):\n        print('x' * 40)\n    return n", [[1]], [1])
right(
    "catches what it raises",
    "def f(n):\n    try:\n        return 1 // n\n    except ZeroDivisionError as error:\n        return str(error)\n    finally:\n        pass",
    [[0], [1]],
    ["integer division or modulo by zero", 1],
)
right("fifty megabytes", "def f(n):\n    xs = bytearray(50 << 20)\n    xs[n] = 7\n    return sum(xs[:100])", [[5]], [7])
right(
    "serialisers",
    "import json, pickle, copy, base64, zlib, struct, hashlib\ndef f(n):\n    x = pickle.loads(pickle.dumps({'a': [n]}))\n    return [json.loads(json.dumps(copy.deepcopy(x)))['a'], base64.b64decode(base64.b64encode(b'x')).decode(), zlib.decompress(zlib.compress(b'y')).decode(), struct.pack('>H', n)[1], hashlib.md5(b'').hexdigest()[:4]]",
    [[7]],
    [[[7], "x", "y", 7, "d41d"]],
)
right(
    "numpy",
    "import numpy as np\ndef f(xs):\n    a = np.array(xs)\n    return [int(a.sum()), a.mean(), (a * 2).tolist(), np.linalg.det(np.eye(3)), a]",
    [[[1, 2, 3]]],
    [[6, 2.0, [2, 4, 6], 1.0, [1, 2, 3]]],
    NUMPY,
)
right(
    "unittest and doctest",
    'import doctest, io, unittest\ndef f(n):\n    """\n    >>> f(0)[0]\n    0\n    """\n    class T(unittest.TestCase):\n        def test(self):\n            self.assertEqual(n, n)\n    run = unittest.TextTestRunner(io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n    return [n, run.testsRun, len(run.failures)]',
    [[3]],
    [[3, 1, 0]],
)
right(
    "abstract and operator classes",
    "import abc, contextlib, operator\nclass Shape(abc.ABC):\n    @abc.abstractmethod\n    def area(self): ...\nclass Square(Shape):\n    def __init__(self, a): self.a = a\n    def area(self): return operator.mul(self.a, self.a)\n@contextlib.contextmanager\ndef made(a):\n    yield Square(a)\ndef f(n):\n    with made(n) as s:\n        return s.area()",
    [[3]],
    [9],
)
right(
    "sys.exit under main",
    "import sys\ndef f(n):\n    return n\nif __name__ == '__main__':\n    sys.exit(f(0))",
    [[1]],
    [1],
)
script(
    "input()",
    "n = int(input())\nxs = list(map(int, input().split()))\nprint(sum(xs[:n]))",
    ("3\n1 2 3\n", "6\n"),
    ("1\n5 6\n", "5\n"),
)
script("sys.stdin.read", "import sys\nprint(len(sys.stdin.read().split()))", ("a b\nc\n", "3\n"), ("", "0"))
script(
    "lines of sys.stdin", "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", ("ab\ncd\n", "ba\ndc\n")
)
script(
    "sys.stdin.buffer",
    "import sys\ndata = sys.stdin.buffer.read()\nsys.stdout.buffer.write(data.upper())",
    ("ab\n", "AB\n"),
)
script("open(0)", "print(sum(map(int, open(0).read().split())))", ("1 2\n3\n", "6\n"))
script("os.read", "import os\nos.write(1, os.read(0, 100)[::-1])", ("abc", "cba"))
script(
    "main with sys.exit",
    "import sys\ndef main():\n    print(input())\nif __name__ == '__main__':\n    main()\n    sys.exit(0)",
    ("x\n", "x\n"),
    ("y\n", "y\n"),
)
script("ends by os._exit", "import os\nprint(input(), flush=True)\nos._exit(0)", ("x\n", "x\n"), ("y\n", "y\n"))
script(
    "thread with a large stack",
    "import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(64 << 20)\ndef deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)\nt = threading.Thread(target=lambda: print(deep(int(input()))))\nt.start()\nt.join()",
    ("5000\n", "5000\n"),
)
script(
    "debugging on standard error",
    "import sys\nprint('debug', file=sys.stderr)\nprint(int(input()) * 2)",
    ("4\n", "8\n"),
)
asserted(
    "not a number and infinity",
    "import math\ndef f(n):\n    return [float('nan'), math.inf, -math.inf, -0.0]",
    "assert math.isnan(f(0)[0])",
    "assert f(0)[1:3] == [math.inf, -math.inf]",
    setup="import math",
)
asserted(
    "sets, tuples and frozen sets",
    "def f(n):\n    return {1, 2}, (3, frozenset({4})), {(5, 6): b'x'}",
    "assert f(0) == ({1, 2}, (3, frozenset({4})), {(5, 6): b'x'})",
)
asserted(
    "raises what is expected",
    "def f(n):\n    if n < 0:\n        raise ValueError('negative')\n    return n",
    "assert f(1) == 1",
    "try:\n    f(-1)\n    raised = ''\nexcept ValueError as error:\n    raised = str(error)\nassert 'negative' in raised",
)
asserted("complex numbers", "def f(n):\n    return complex(n, 1) ** 2", "assert f(2) == 3 + 4j")
