"""Programs that write without end, or reply with what is hard to read. Bounded by the sandbox's deadline and 1.5 GiB."""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import KINDS, Group

ATTACKS = Group("output")
forgery = ATTACKS.forgery

forgery("standard output", "def f(n):\n    while True:\n        print('x' * 4096)", kinds=KINDS, pool=True)
forgery(
    "standard error",
    "import sys\ndef f(n):\n    while True:\n        sys.stderr.write('x' * 4096)",
    kinds=("functional", "stdio"),
)
forgery(
    "both in turn",
    "import os\ndef f(n):\n    while True:\n        os.write(1, b'x' * 512)\n        os.write(2, b'y' * 512)",
)
forgery(
    "both at once",
    "import os, threading\ndef pour(fd):\n    while True:\n        os.write(fd, b'z' * 65536)\ndef f(n):\n    threading.Thread(target=pour, args=(2,), daemon=True).start()\n    pour(1)",
    kinds=("functional", "stdio"),
)
forgery("at import", "import os\nwhile True:\n    os.write(1, b'x' * 65536)\ndef f(n):\n    return n")
forgery(
    "one line without an end",
    "import sys\ndef f(n):\n    while True:\n        sys.stdout.write('x' * 65536)",
    kinds=("functional", "stdio"),
)
forgery(
    "null bytes",
    "import os\ndef f(n):\n    while True:\n        os.write(1, bytes(65536))",
    kinds=("functional", "stdio"),
)
forgery(
    "bytes that are no text",
    "import os\ndef f(n):\n    os.write(1, bytes(range(128, 256)) * 64)\n    os.write(2, b'\\xff' * 4096)\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "terminal's control characters",
    "def f(n):\n    print('\\x1b[2J\\x1b]0;@TOKEN@\\x07\\r\\n' * 99)\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "every open descriptor",
    """
import os
def f(n):
    for fd in range(256):
        try:
            os.set_blocking(fd, False)
            os.write(fd, b"\\x00\\xff{}[]\\n" * 512)
        except OSError:
            pass
    return n
""",
    kinds=KINDS,
    pool=True,
)
forgery(
    "every open descriptor for ever",
    """
import os
def f(n):
    while True:
        for fd in range(64):
            try:
                os.write(fd, b"x" * 4096)
            except OSError:
                pass
""",
)
forgery(
    "zeros to every descriptor",
    "import os\ndef f(n):\n    for fd in range(256):\n        try:\n            os.write(fd, bytes(8192))\n        except OSError:\n            pass\n    return n",
    kinds=("functional", "asserts"),
)
forgery(
    "large length to every descriptor",
    "import os\ndef f(n):\n    for fd in range(256):\n        try:\n            os.write(fd, b'\\xff' * 8 + b'9' * 64 + b'\\n')\n        except OSError:\n            pass\n    return n",
)
forgery(
    "partial answer, then nothing",
    "import os, time\ndef f(n):\n    for fd in range(256):\n        try:\n            os.write(fd, b'{\"value\": ')\n        except OSError:\n            pass\n    time.sleep(60)",
)
forgery(
    "reads what it is sent",
    "import os\ndef f(n):\n    for fd in range(256):\n        try:\n            os.set_blocking(fd, False)\n            os.read(fd, 1 << 20)\n        except OSError:\n            pass\n    return n",
)
forgery("huge string", "def f(n):\n    return 'x' * (200 << 20)", kinds=KINDS)
forgery("huge list", "def f(n):\n    return [0] * (20 << 20)")
forgery("huge integer", "def f(n):\n    return 1 << 10 ** 6", kinds=KINDS)
forgery("huge bytes", "def f(n):\n    return bytes(200 << 20)")
forgery("a million digits as text", "def f(n):\n    return '9' * 10 ** 6", kinds=("functional", "stdio"))
forgery(
    "deeply nested", "def f(n):\n    x = []\n    for _ in range(10 ** 5):\n        x = [x]\n    return x", kinds=KINDS
)
forgery(
    "nested to just above the limit",
    "def f(n):\n    x = 0\n    for _ in range(990):\n        x = [x]\n    return x",
    kinds=("functional", "asserts", "check"),
)
forgery("deeply nested tables", "def f(n):\n    x = {}\n    for _ in range(5000):\n        x = {'a': x}\n    return x")
forgery(
    "holds itself", "def f(n):\n    x = []\n    x.append(x)\n    return x", kinds=("functional", "asserts", "check")
)
forgery("table that holds itself", "def f(n):\n    x = {}\n    x['x'] = x\n    return x")
forgery(
    "a thousand million leaves",
    "def f(n):\n    x = 'lol'\n    for _ in range(40):\n        x = [x, x]\n    return x",
    kinds=("functional", "asserts"),
)
forgery(
    "a million leaves as tuples", "def f(n):\n    x = ()\n    for _ in range(20):\n        x = (x, x)\n    return x"
)
forgery("lone surrogates", "def f(n):\n    return '\\ud800\\udfff'", kinds=KINDS)
forgery("null in text", "def f(n):\n    return '\\0' * 99", kinds=KINDS)
forgery("not a number", "def f(n):\n    return float('nan')", kinds=("functional", "asserts", "check"))
forgery("infinity", "def f(n):\n    return [float('inf'), -float('inf'), 1e308 * 10]")
forgery(
    "keys of all sorts",
    "def f(n):\n    return {None: 1, 1: 2, '1': 3, (1,): 4, 1.5: 5, True: 6, b'x': 7, float('nan'): 8}",
)
forgery("set of sets", "def f(n):\n    return {frozenset({frozenset(), 1}), frozenset({2})}")
forgery(
    "keys that clash",
    "def f(n):\n    m = (1 << 61) - 1\n    return {i * m: 0 for i in range(20000)}",
    kinds=("functional", "asserts"),
)
forgery(
    "words of the protocol",
    "def f(n):\n    return {'value': {'type': 'str', 'ok': True}, '__type__': 'set', 't': 'set', 'v': [[]], 'error': None}",
)
forgery("lists that look encoded", "def f(n):\n    return ['set', [['list', [1]]]]", kinds=("functional", "asserts"))
forgery("memory view", "def f(n):\n    return memoryview(b'x')")
forgery(
    "complex and decimal",
    "from decimal import Decimal\ndef f(n):\n    return [complex('nan'), Decimal('sNaN'), Decimal('1e999999')]",
)
forgery(
    "error with a huge message",
    "def f(n):\n    raise ValueError('x' * (50 << 20))",
    kinds=("functional", "asserts", "check"),
)
forgery(
    "error whose text raises",
    "class E(Exception):\n    def __str__(self):\n        raise self\n    __repr__ = __str__\ndef f(n):\n    raise E",
    kinds=("functional", "check", "stdio"),
)
forgery(
    "error with a chain of causes",
    "def f(n):\n    e = None\n    for _ in range(5000):\n        g = ValueError('x')\n        g.__cause__, e = e, g\n    raise e",
)
forgery(
    "error that is its own cause",
    "def f(n):\n    e = ValueError('x')\n    e.__cause__ = e.__context__ = e\n    raise e",
)
forgery(
    "group of errors",
    "def f(n):\n    e = ValueError(1)\n    for _ in range(900):\n        e = ExceptionGroup('g', [e])\n    raise e",
)
