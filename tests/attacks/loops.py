"""Programs that do not end, or not soon. All stop at the sandbox's deadline; none starts another process."""

from __future__ import annotations

from tests.attacks.catalogue import KINDS, Group

ATTACKS = Group("loops")
forgery = ATTACKS.forgery

forgery("busy", "def f(n):\n    while True:\n        pass", kinds=KINDS, pool=True)
forgery("sleep", "import time\ndef f(n):\n    time.sleep(60)")
forgery("at import", "while True:\n    pass\ndef f(n):\n    return n", kinds=KINDS)
forgery("sleep at import", "import time\ntime.sleep(60)\ndef f(n):\n    return n")
forgery(
    "in a finaliser",
    """
class Sticky:
    def __del__(self):
        while True:
            pass
def f(n):
    Sticky()
    return n
""",
)
forgery(
    "in a finaliser at the end",
    """
class Sticky:
    def __del__(self):
        while True:
            pass
kept = Sticky()
def f(n):
    return n
""",
    kinds=("functional", "stdio"),
)
forgery(
    "at exit",
    """
import atexit, time
atexit.register(time.sleep, 60)
def f(n):
    return n
""",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery(
    "thread that is not a daemon",
    """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
def f(n):
    return n
""",
    kinds=("functional", "stdio"),
)
forgery(
    "threads that spin",
    """
import threading
def spin():
    while True:
        pass
for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
def f(n):
    return n
""",
)
forgery(
    "in a signal handler",
    """
import signal
def spin(*_):
    while True:
        pass
signal.signal(signal.SIGALRM, spin)
signal.setitimer(signal.ITIMER_REAL, 0.01)
def f(n):
    import time
    time.sleep(0.2)
    return n
""",
)
forgery(
    "all signals ignored",
    """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def f(n):
    while True:
        pass
""",
)
forgery(
    "all signals blocked",
    """
import signal, time
def f(n):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(60)
""",
)
forgery("endless generator as reply", "import itertools\ndef f(n):\n    return itertools.count()", kinds=KINDS)
forgery(
    "generator that replies for ever",
    """
def f(n):
    def drip():
        while True:
            yield 1
    return drip()
""",
)
forgery("catastrophic regex", "import re\ndef f(n):\n    return re.match('(a+)+$', 'a' * 40 + 'b') is None")
forgery("huge power", "def f(n):\n    return 7 ** (10 ** 9 + n)")
forgery("constant power at compile time", "def f(n):\n    return 9 ** 9 ** 9")
forgery("power tower in decimal", "from decimal import *\ndef f(n):\n    return Decimal(9) ** Decimal(10 ** 15 + n)")
forgery(
    "digits of a huge integer", "import sys\nsys.set_int_max_str_digits(0)\ndef f(n):\n    return str(1 << 10 ** 8)"
)
forgery("sum without end", "import itertools\ndef f(n):\n    return sum(itertools.repeat(1))")
forgery("list of a range", "def f(n):\n    return sum(1 for _ in range(10 ** 15))")
forgery("in C without the interpreter's lock", "def f(n):\n    return max(iter(int, 1))")
forgery("deadlock", "import threading\ndef f(n):\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()")
forgery(
    "waits for input", "import sys\ndef f(n):\n    return sys.stdin.read()", kinds=("functional", "check", "asserts")
)
forgery(
    "except that catches everything",
    """
def f(n):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
""",
    kinds=("functional", "asserts"),
)
forgery("opens a fifo", "import os\ndef f(n):\n    os.mkfifo('pipe-@TOKEN@')\n    return open('pipe-@TOKEN@').read()")
forgery(
    "stops itself",
    "import os, signal\ndef f(n):\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return n",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery("asyncio that never ends", "import asyncio\ndef f(n):\n    asyncio.run(asyncio.Event().wait())")
forgery(
    "comparison that never ends", "class X:\n    def __eq__(self, o):\n        while 1: pass\ndef f(n):\n    return X()"
)
forgery(
    "trace function that spins",
    "import sys\ndef spin(*_):\n    while 1: pass\nsys.settrace(spin)\nsys.setprofile(spin)\ndef f(n):\n    return n",
)
forgery("module attribute hook", "def __getattr__(name):\n    while True:\n        pass", kinds=("functional", "check"))
