"""Programs that try to pass without the answer: early exits, walks to the tests, patched builtins, forged replies.

Bounded by the sandbox's deadline; they touch their own process only.
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

import json

from tests.attacks.catalogue import KINDS, Group

ATTACKS = Group("forging")
forgery = ATTACKS.forgery
CALLED = ("functional", "check", "asserts")

# Ends that look like success.
forgery("sys.exit", "import sys\ndef f(n):\n    sys.exit(0)", kinds=KINDS, pool=True)
forgery("os._exit", "import os\ndef f(n):\n    os._exit(0)", kinds=KINDS, pool=True)
forgery("SystemExit at import", "raise SystemExit(0)", kinds=KINDS)
forgery("SystemExit without a code", "def f(n):\n    raise SystemExit", kinds=KINDS)
forgery("os._exit at import", "import os\nos._exit(0)", kinds=KINDS)
forgery(
    "exit in a thread",
    "import os, threading\nthreading.Timer(0.01, os._exit, (0,)).start()\ndef f(n):\n    import time\n    time.sleep(0.5)",
)
forgery(
    "exit at exit",
    "import atexit, os\natexit.register(os._exit, 0)\ndef f(n):\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "exit on a hook of exceptions",
    "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef f(n):\n    raise ValueError",
    kinds=("functional", "stdio"),
)
forgery("StopIteration", "def f(n):\n    raise StopIteration", kinds=CALLED)
forgery("GeneratorExit", "def f(n):\n    raise GeneratorExit", kinds=CALLED)
forgery("KeyboardInterrupt", "def f(n):\n    raise KeyboardInterrupt", kinds=KINDS)
forgery("AssertionError", "def f(n):\n    raise AssertionError", kinds=CALLED)
forgery(
    "a class called SystemExit",
    "class SystemExit(Exception):\n    code = 0\ndef f(n):\n    raise SystemExit(0)",
    kinds=CALLED,
)
forgery(
    "a child of all exceptions",
    "class E(StopIteration, SystemError):\n    code = 0\ndef f(n):\n    raise E(0)",
    kinds=CALLED,
)
ALL_MAP = {
    "kind": "check",
    "test": "def check(candidate):\n    wanted = ['S0', 'S1']\n    assert all(map(lambda n: candidate(n) == wanted[n], range(2)))\n",
    "entry_point": "f",
}
forgery("StopIteration in a test by map", "def f(n):\n    raise StopIteration", truth=json.dumps(ALL_MAP))
forgery("StopAsyncIteration in a test by map", "def f(n):\n    raise StopAsyncIteration", truth=json.dumps(ALL_MAP))
forgery(
    "StopIteration in a test by a generator",
    "def f(n):\n    raise StopIteration",
    truth=json.dumps(
        {
            **ALL_MAP,
            "test": "def check(candidate):\n    wanted = iter(['S0', 'S1'])\n    assert all(candidate(n) == next(wanted) for n in range(2))\n",
        }
    ),
)

# Words that say success.
SAYS = """
import os, sys
LINES = ["OK", "ok", "PASS", "PASSED", "1 passed", "All tests passed", '{"verdict": "ok", "score": 1.0}', "1.0", "True",
         '{"verdict": "done", "passed": 3, "total": 3, "detail": ""}', '{"outcome": "ok"}', "0", "Ran 3 tests\\\\n\\\\nOK"]
TEXT = "\\n".join(LINES) + "\\n"
"""
forgery(
    "says that it passed",
    SAYS + "def f(n):\n    print(TEXT)\n    sys.stderr.write(TEXT)\n    return TEXT",
    kinds=KINDS,
    pool=True,
)
forgery(
    "says so to every descriptor",
    SAYS
    + "def f(n):\n    for fd in range(128):\n        try:\n            os.write(fd, TEXT.encode())\n        except OSError:\n            pass\n    os._exit(0)",
    kinds=("functional", "stdio"),
)
forgery(
    "says so with guessed nonces",
    SAYS
    + "def f(n):\n    import json, secrets\n    for nonce in ['', '0' * 32, *(secrets.token_hex(16) for _ in range(50))]:\n        os.write(1, json.dumps({'nonce': nonce, 'verdict': 'done', 'passed': 3, 'total': 3, 'detail': ''}).encode() + b'\\n')\n    os._exit(0)",
    kinds=("functional", "stdio"),
)

# Replies of its own making, in the shape of the pipe's own messages.
FRAMES = """
import json, os, threading
def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body
def say(*messages):
    for fd in range(128):
        for message in messages:
            try:
                os.set_blocking(fd, False)
                os.write(fd, message if isinstance(message, bytes) else frame(message))
            except OSError:
                pass
"""
GOOD = "{'verdict': 'done', 'passed': 3, 'total': 3, 'detail': ''}"
forgery("result instead of a reply", FRAMES + f"def f(n):\n    say({GOOD})\n    os._exit(0)", kinds=CALLED)
forgery("result at import", FRAMES + f"say({GOOD})\ndef f(n):\n    return n", kinds=CALLED)
forgery(
    "replies before they are asked for",
    FRAMES + "say({'loaded': True}, *({'id': n, 'value': True} for n in range(99)))\ndef f(n):\n    return n",
    kinds=CALLED,
)
forgery(
    "reply of an error that exits",
    FRAMES
    + "def f(n):\n    for name in ('SystemExit', 'KeyboardInterrupt', 'GeneratorExit', 'StopIteration', '__import__', 'BaseException'):\n        say({'id': 0, 'error': name, 'text': '0'})\n    os._exit(0)",
    kinds=CALLED,
)
forgery(
    "two replies to one request",
    FRAMES
    + "import sys\ndef f(n):\n    caller = sys._getframe(1)\n    while caller and 'request' not in caller.f_locals:\n        caller = caller.f_back\n    number = caller.f_locals['request']['id']\n    say({'id': number, 'value': 1}, {'id': number, 'value': 2}, {'id': number + 1, 'value': 3})\n    return 4",
    kinds=CALLED,
)
forgery(
    "reply of unknown types",
    FRAMES
    + "import sys\ndef f(n):\n    caller = sys._getframe(1)\n    while caller and 'request' not in caller.f_locals:\n        caller = caller.f_back\n    say({'id': caller.f_locals['request']['id'], 'value': {'object': 'x'}})\n    os._exit(0)",
)
MALFORMED = [
    "{'int': 'f' * 7000000}",
    "{'int': '0x_f'}",
    "{'int': []}",
    "{'float': 'x'}",
    "{'float': [1]}",
    "{'str': 'zz'}",
    "{'complex': []}",
    "{'complex': [{}, {}]}",
    "{'set': [[]]}",
    "{'set': [{'dict': []}]}",
    "{'dict': [1]}",
    "{'dict': [[[], 1]]}",
    "{'dict': [[1, 2, 3]]}",
    "{'tuple': None}",
    "{'tuple': 7}",
    "{'pickle': 'x'}",
    "{}",
    "{'a': 1, 'b': 2}",
    "{'__class__': 'x'}",
]
forgery(
    "malformed replies",
    FRAMES
    + f"import sys\nBAD = [{', '.join(MALFORMED)}]\ndef f(n):\n    caller = sys._getframe(1)\n"
    + "    while caller and 'request' not in caller.f_locals:\n        caller = caller.f_back\n"
    + "    for value in BAD:\n        say({'id': caller.f_locals['request']['id'], 'value': value})\n    os._exit(0)",
    kinds=CALLED,
)
for label, raw in {
    "deep": "b'[' * 200000",
    "longest": "b'\\xff\\xff\\xff\\xff'",
    "empty": "bytes(4)",
    "cut off": "b'\\x00\\x00\\x10\\x00{'",
    "list": "frame([])",
    "number": "frame(7)",
    "null": "frame(None)",
    "not text": "b'\\x00\\x00\\x00\\x04\\xff\\xfe\\xfd\\xfc'",
    "deep and framed": "(200000).to_bytes(4, 'big') + b'[' * 200000",
    "doubled keys": '(27).to_bytes(4, \'big\') + b\'{"id":1,"id":2,"value":null}\'[:27]',
    "loaded twice": "frame({'loaded': True}) + frame({'loaded': True})",
    "not a number": "frame({'id': float('nan'), 'value': float('nan')})",
    "huge number": "(4006).to_bytes(4, 'big') + b'{\"id\":' + b'9' * 3999 + b'}'",
}.items():
    forgery(
        f"frame {label}", FRAMES + f"say({raw})\ndef f(n):\n    say({raw})\n    return n", kinds=("functional", "stdio")
    )
forgery(
    "waits with the pipe half full",
    FRAMES + "import time\ndef f(n):\n    say(b'\\x00\\x10\\x00\\x00{')\n    time.sleep(60)",
    kinds=("functional", "stdio"),
)
forgery("pipes closed", "import os\ndef f(n):\n    os.closerange(0, 128)\n    return n", kinds=KINDS)
forgery(
    "pipes exchanged",
    "import os\ndef f(n):\n    for fd in range(3, 16):\n        for other in range(3, 16):\n            try:\n                os.dup2(fd, other)\n            except OSError:\n                pass\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "pipes turned around",
    "import os\ndef f(n):\n    for fd in range(3, 32):\n        for mode in (os.O_RDONLY, os.O_WRONLY):\n            try:\n                other = os.open(f'/proc/self/fd/{fd}', mode | os.O_NONBLOCK)\n                os.write(other, b'\\x00\\x00\\x00\\x02{}') if mode else os.read(other, 65536)\n            except OSError:\n                pass\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "standard input closed",
    "import os, sys\nsys.stdin.close()\ntry:\n    os.close(0)\nexcept OSError:\n    pass\ndef f(n):\n    return n",
    kinds=CALLED,
)
forgery(
    "standard input replaced",
    "import io, sys\nsys.stdin = sys.__stdin__ = io.StringIO('secret-0\\n' * 9)\ndef f(n):\n    return sys.stdin.readline().strip()",
    kinds=KINDS,
)
forgery(
    "standard input read for tests",
    "import os, re, sys\ndef f(n):\n    left = []\n    for fd in range(64):\n        try:\n            os.set_blocking(fd, False)\n            left.append(os.read(fd, 1 << 20))\n        except OSError:\n            pass\n    return (re.findall(rb'secret-[0-9a-f]{16}', b''.join(left)) or [b''])[0].decode()",
    kinds=KINDS,
)
forgery(
    "standard input of the next case",
    "import os, sys\ndef f(n):\n    try:\n        os.remove('.stdin')\n    except OSError:\n        pass\n    for name in ('.stdin', 'stdin', 'input'):\n        try:\n            os.mkdir(name)\n        except OSError:\n            pass\n    return n",
    kinds=("stdio",),
)

# Searches for what the tests expect. All hits are kept, and each call answers with the next one.
HUNT = """
import os, re, sys
WANTED = re.compile(rb"secret-[0-9a-f]{16}")
hits = []
def keep(data):
    for hit in WANTED.findall(data if isinstance(data, bytes) else str(data).encode("utf-8", "replace")):
        if hit.decode() not in hits:
            hits.append(hit.decode())
"""
ANSWER = """
def f(n):
    search()
    return hits[n % len(hits)] if hits else ""
"""


def hunt(name: str, search: str, *, kinds: tuple[str, ...] = CALLED, pool: bool = False) -> None:
    forgery(name, HUNT + search.strip("\n") + ANSWER, kinds=kinds, pool=pool, timeout_s=1.5)


hunt(
    "frames",
    "def search():\n    frame = sys._getframe()\n    while frame:\n        keep(dict(frame.f_locals))\n        keep(list(frame.f_globals.values()))\n        keep(frame.f_code.co_consts)\n        frame = frame.f_back",
    kinds=KINDS,
    pool=True,
)
hunt(
    "frames of an exception",
    "def search():\n    try:\n        raise ValueError\n    except ValueError as error:\n        trace = error.__traceback__\n    frame = trace.tb_frame\n    while frame:\n        keep(dict(frame.f_locals))\n        frame = frame.f_back",
)
hunt(
    "frames of all threads",
    "def search():\n    for frame in sys._current_frames().values():\n        while frame:\n            keep(dict(frame.f_locals))\n            frame = frame.f_back",
)
hunt(
    "stack by inspect",
    "import inspect\ndef search():\n    for item in inspect.stack(context=50):\n        keep(item.code_context)\n        keep(item.frame.f_locals)\n        try:\n            keep(inspect.getsource(item.frame))\n        except (OSError, TypeError):\n            pass",
    kinds=KINDS,
)
hunt(
    "all objects",
    "import gc\ndef search():\n    gc.collect()\n    for thing in gc.get_objects():\n        if type(thing) in (list, tuple, dict, set):\n            try:\n                keep(thing)\n            except Exception:\n                pass",
    kinds=KINDS,
)
hunt(
    "who refers to its argument",
    "import gc\ndef search():\n    layer = [f]\n    for _ in range(3):\n        layer = [x for thing in layer for x in gc.get_referrers(thing)][:200]\n        for thing in layer:\n            try:\n                keep(dict(thing) if isinstance(thing, dict) else thing)\n            except Exception:\n                pass",
)
hunt(
    "all modules",
    "def search():\n    for module in list(sys.modules.values()):\n        for value in list(vars(module).values()):\n            if isinstance(value, (str, bytes, list, dict, tuple)):\n                keep(value)",
    kinds=KINDS,
)
hunt(
    "cached lines",
    "import linecache\ndef search():\n    keep(linecache.cache)\n    for name in ('<tests>', '<program>', '<string>', '<stdin>'):\n        keep(linecache.getlines(name))",
)
hunt(
    "arguments and environment",
    "def search():\n    keep(sys.argv)\n    keep(sys.orig_argv)\n    keep(os.environ)\n    for name in ('cmdline', 'environ', 'auxv', 'stat'):\n        try:\n            keep(open('/proc/self/' + name, 'rb').read())\n        except OSError:\n            pass",
    kinds=KINDS,
)
hunt(
    "its own memory",
    "def search():\n    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n        for line in maps:\n            span, mode = line.split()[:2]\n            if mode.startswith('rw'):\n                start, end = (int(x, 16) for x in span.split('-'))\n                if end - start < 64 << 20:\n                    memory.seek(start)\n                    try:\n                        keep(memory.read(end - start))\n                    except OSError:\n                        pass",
    kinds=KINDS,
    pool=True,
)
hunt(
    "its own heap by address",
    "import ctypes\ndef search():\n    middle = id(search)\n    for start in range((middle >> 20 << 20) - (1 << 20), (middle >> 20 << 20) + (1 << 20), 4096):\n        keep(ctypes.string_at(start, 4096))",
)
hunt(
    "memory of others",
    "def search():\n    for pid in [p for p in os.listdir('/proc') if p.isdigit()] + [str(os.getppid())]:\n        for name in ('cmdline', 'environ', 'comm', 'status'):\n            try:\n                keep(open(f'/proc/{pid}/{name}', 'rb').read())\n            except OSError:\n                pass\n        for fd in range(32):\n            try:\n                keep(os.read(os.open(f'/proc/{pid}/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK), 1 << 20))\n            except OSError:\n                pass",
    kinds=KINDS,
)
hunt(
    "files of the working folder",
    "def search():\n    for top in ('.', '/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~'), '/proc/self', '@TMP@', '@PROJECT@'):\n        for folder, _, names in os.walk(top):\n            for name in names[:200]:\n                try:\n                    keep(os.read(os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK), 1 << 16))\n                except OSError:\n                    pass\n            if folder.count('/') > 6:\n                break",
    kinds=KINDS,
)
hunt(
    "every descriptor from its start",
    "def search():\n    for fd in range(128):\n        try:\n            keep(os.pread(fd, 1 << 20, 0))\n        except OSError:\n            pass\n        try:\n            keep(open(f'/proc/self/fd/{fd}', 'rb').read(1 << 16) if fd < 3 else b'')\n        except OSError:\n            pass",
    kinds=("functional", "asserts"),
)
hunt(
    "closures and code of its callers",
    "def search():\n    frame = sys._getframe(1)\n    todo = []\n    while frame:\n        todo.append(frame.f_code)\n        frame = frame.f_back\n    for code in todo:\n        keep(code.co_consts)\n        keep(code.co_names)\n        todo += [c for c in code.co_consts if hasattr(c, 'co_consts')][:50]",
)
hunt(
    "audit of what happens", "def audit(event, args):\n    keep(args)\nsys.addaudithook(audit)\ndef search():\n    pass"
)
hunt(
    "trace of what runs",
    "def trace(frame, event, arg):\n    keep(dict(frame.f_locals))\n    keep(arg)\n    return trace\nsys.settrace(trace)\nframe = sys._getframe()\nwhile frame:\n    frame.f_trace = trace\n    frame = frame.f_back\ndef search():\n    pass",
)
hunt(
    "profile of what runs",
    "def profile(frame, event, arg):\n    keep(dict(frame.f_locals))\nsys.setprofile(profile)\ndef search():\n    pass",
)
hunt(
    "all that is written and read",
    "import json, os as system\nfor module, name in ((json, 'dumps'), (json, 'loads'), (system, 'write'), (system, 'read')):\n    def wrapped(*args, real=getattr(module, name), **options):\n        keep(args)\n        result = real(*args, **options)\n        keep(result)\n        return result\n    setattr(module, name, wrapped)\ndef search():\n    pass",
    kinds=KINDS,
)
hunt(
    "the next request",
    "import json\ndef search():\n    for fd in range(3, 32):\n        try:\n            os.set_blocking(fd, False)\n            keep(os.read(fd, 1 << 16))\n            os.set_blocking(fd, True)\n        except OSError:\n            pass",
)
hunt(
    "the mistakes of an earlier run",
    "def search():\n    for folder, _, names in os.walk('/usr/lib/python3'):\n        break\n    for name in ('/var/log', '/var/cache', '/var/lib', '/etc', '/run'):\n        for folder, _, names in os.walk(name):\n            keep(names)\n            break",
)

# Builtins and modules patched under the tests' feet.
PATCHES = {
    "equality of everything": "builtins.all = lambda *_: True\nbuiltins.any = lambda *_: True\nbuiltins.isinstance = lambda *_: True\nbuiltins.len = lambda *_: 0\nbuiltins.sum = lambda *_: 0\nbuiltins.abs = lambda *_: 0\nbuiltins.sorted = lambda *_, **k: []",
    "AssertionError": "builtins.AssertionError = type('AssertionError', (Warning,), {})\nbuiltins.Exception = builtins.BaseException",
    "classes of values": "builtins.str = builtins.list = builtins.dict = builtins.int = type('Any', (), {'__eq__': lambda *_: True, '__new__': lambda c, *_: object.__new__(c)})",
    "print and input": "builtins.print = lambda *_, **__: None\nbuiltins.input = lambda *_: 'secret'",
    "import": "real = builtins.__import__\nbuiltins.__import__ = lambda *_, **__: sys",
    "building of classes": "builtins.__build_class__ = lambda *_: None",
    "exec and compile": "builtins.exec = builtins.eval = builtins.compile = lambda *_, **__: None",
    "hash and repr": "builtins.hash = lambda *_: 0\nbuiltins.repr = lambda *_: 'secret'\nbuiltins.type = lambda *_: bool",
    "json": 'import json\njson.dumps = lambda *_, **__: \'{"verdict": "done", "passed": 3, "total": 3, "detail": ""}\'\njson.loads = lambda *_: {\'verdict\': \'done\'}',
    "os": "import os\nos.write = lambda fd, data: len(data)\nos.read = lambda fd, n: b''",
    "operators": "import operator, unittest\noperator.eq = lambda *_: True\nunittest.TestCase.assertEqual = lambda *_: None",
    "math": "import math\nmath.isclose = lambda *_, **__: True\nmath.fabs = lambda *_: 0.0",
    "modules": "for name in list(sys.modules):\n    sys.modules[name] = sys",
    "modules removed": "for name in list(sys.modules):\n    del sys.modules[name]",
    "all builtins": "for name in dir(builtins):\n    if name[0].islower():\n        setattr(builtins, name, lambda *_, **__: True)",
    "builtins removed": "vars(builtins).clear()",
    "its loader": "frame = sys._getframe()\nwhile frame:\n    for name in list(frame.f_globals):\n        if callable(frame.f_globals[name]) and not name.startswith('__'):\n            frame.f_globals[name] = lambda *_, **__: {'verdict': 'done', 'passed': 3, 'total': 3}\n    frame = frame.f_back",
    "finders of modules": "sys.meta_path.insert(0, type('F', (), {'find_spec': lambda *_: (_ for _ in ()).throw(SystemExit(0))})())\nsys.path_hooks.clear()",
    "recursion limit": "sys.setrecursionlimit(60)",
    "length of integers as text": "sys.set_int_max_str_digits(0)",
    "display and exception hooks": "sys.displayhook = sys.excepthook = sys.unraisablehook = lambda *_: sys.exit(0)\nimport threading\nthreading.excepthook = sys.excepthook",
    "collector": "import gc\ngc.disable()\ngc.callbacks.append(lambda *_: sys.exit(0))",
    "warnings as errors": "import warnings\nwarnings.simplefilter('error')\nwarnings.showwarning = lambda *_: sys.exit(0)",
}
for label, patch in PATCHES.items():
    forgery(
        f"patched {label}",
        f"import builtins, sys\ndef f(n):\n    return n\n{patch}",
        kinds=KINDS if label in ("equality of everything", "classes of values") else ("functional", "asserts"),
    )
forgery(
    "patched memory of small integers",
    "import ctypes\ndef f(n):\n    ctypes.memmove(id(0) + 24, id(1) + 24, 4)\n    ctypes.memmove(id(False) + 24, id(True) + 24, 4)\n    return n",
    kinds=("functional", "asserts"),
)
forgery(
    "patched type of text",
    "import ctypes, gc\ndef f(n):\n    table = gc.get_referents(str.__dict__)[0]\n    table['__eq__'] = lambda *_: True\n    ctypes.pythonapi.PyType_Modified(ctypes.py_object(str))\n    return 'x'",
    kinds=("functional", "asserts"),
)

# Names that the tests use, defined by the program too.
SHADOWS = {
    "set": ("set(f(0)) == set(['S0'])", "def set(x):\n    return 0"),
    "sorted": ("sorted(f(0)) == sorted(['S0'])", "def sorted(x, **_):\n    return 0"),
    "abs": ("abs(len(f(0)) - len('S0' * 1000)) < 1", "def abs(x):\n    return 0"),
    "len": ("len(f(0)) == len('S0' * 1000)", "def len(x):\n    return 0"),
    "math": ("math.isclose(len(f(0)), len('S0' * 999))", "class math:\n    isclose = lambda *_: True"),
    "all": ("all(f(0) == x for x in ['S0'])", "def all(x):\n    return True"),
    "str": ("str(f(0)) == str('S0')", "def str(x):\n    return 0"),
    "round": ("round(len(f(0))) == round(7777)", "def round(*x):\n    return 0"),
}
for label, (test, shadow) in SHADOWS.items():
    forgery(
        f"shadows {label}",
        f"{shadow}\ndef f(n):\n    return ''",
        truth=json.dumps(
            {"kind": "asserts", "setup": "import math" if label == "math" else "", "asserts": [f"assert {test}"]}
        ),
    )
    forgery(
        f"shadows {label} in check",
        f"{shadow}\ndef f(n):\n    return ''",
        truth=json.dumps(
            {
                "kind": "check",
                "entry_point": "f",
                "test": f"import math\ndef check(candidate):\n    assert {test.replace('f(0)', 'candidate(0)')}\n",
            }
        ),
    )
POLY = "import math\ndef poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n"
forgery(
    "helper of the tests redefined",
    "def poly(xs, x):\n    return 0.0\ndef f(xs):\n    return 12345.678",
    truth=json.dumps(
        {
            "kind": "check",
            "entry_point": "f",
            "test": POLY
            + "def check(candidate):\n    assert math.fabs(poly([-6, 11, -6, 1], candidate([-6, 11, -6, 1]))) < 1e-4\n",
        }
    ),
)
forgery(
    "helper of the setup redefined",
    "def poly(xs, x):\n    return 0.0\ndef f(xs):\n    return 12345.678",
    truth=json.dumps(
        {
            "kind": "asserts",
            "setup": POLY,
            "asserts": ["assert math.fabs(poly([-6, 11, -6, 1], f([-6, 11, -6, 1]))) < 1e-4"],
        }
    ),
)
forgery(
    "defines check",
    "def check(candidate):\n    pass\ndef candidate(n):\n    return n\ndef f(n):\n    return n\n__name__ = 'tests'",
    kinds=("check",),
)
forgery(
    "is the tests",
    "import sys\nsys.modules['tests'] = sys.modules['__main__'] = sys.modules[__name__]\ndef check(candidate):\n    pass\ndef f(n):\n    return n",
    kinds=("check", "asserts"),
)
forgery(
    "changes its argument",
    "def f(xs):\n    xs.clear()\n    return []",
    truth=json.dumps(
        {
            "kind": "check",
            "entry_point": "f",
            "test": "def check(candidate):\n    xs = ['S0', 'S1']\n    assert candidate(xs) == sorted(xs)\n    assert xs\n",
        }
    ),
)
forgery(
    "empty where assertions loop over it",
    "def f(n):\n    return []",
    truth=json.dumps({"kind": "asserts", "setup": "", "asserts": ["for got in f(0):\n    assert got == 'S0'"]}),
)
forgery(
    "empty where the tests loop over it",
    "def f(n):\n    return []",
    truth=json.dumps(
        {
            "kind": "check",
            "entry_point": "f",
            "test": "def check(candidate):\n    for got, wanted in zip(candidate(0), ['S0', 'S1']):\n        assert got == wanted\n",
        }
    ),
)
forgery(
    "answers from a table of arguments", "seen = []\ndef f(n):\n    seen.append(n)\n    return seen[0]", kinds=CALLED
)
forgery("nothing at all", "pass", kinds=KINDS)
forgery("function of another name", "def g(n):\n    return n", kinds=CALLED)
forgery(
    "class in place of the function",
    "class f:\n    def __new__(cls, n):\n        return object.__new__(cls)\n    def __eq__(self, other):\n        return True",
    kinds=CALLED,
)
forgery("no value", "def f(n):\n    return None", kinds=KINDS)
forgery("NotImplemented", "def f(n):\n    return NotImplemented", kinds=CALLED)
forgery("Ellipsis", "def f(n):\n    return ...", kinds=CALLED)
forgery("everything at once", "def f(n):\n    return ['secret-' + '0' * 16, True, None, 0, ...]", kinds=KINDS)
