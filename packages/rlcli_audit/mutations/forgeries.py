"""Programs that do not solve the task but try to pass."""

from __future__ import annotations

import re
from collections.abc import Iterator

# `STUBS: body` stands for the functions that the tests call, each with that body.
_PROGRAMS = """\
### sys.exit(0)
import sys
sys.exit(0)
### os._exit(0)
import os
os._exit(0)
### SystemExit in the body
STUBS: raise SystemExit(0)
### os._exit in the body
import os
STUBS: os._exit(0)
### prints a verdict
print('OK'); print('PASSED'); print('{"score": 1.0, "outcome": "ok"}')
STUBS: return 'PASSED'
### always-equal object
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __sub__(self, other): return self
    __add__ = __radd__ = __rsub__ = __mul__ = __getitem__ = __round__ = __abs__ = __sub__
STUBS: return Anything()
### always-equal text
class Text(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
STUBS: return Text('no such answer')
### always-equal number
class Number(float):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    __hash__ = float.__hash__
STUBS: return Number('nan')
### always-equal list
class Many(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
STUBS: return Many([None, 'no such answer'])
### asserts patched
import builtins, sys
class AssertionError(BaseException): pass
builtins.AssertionError = AssertionError
sys.excepthook = lambda *a: None
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
STUBS: return 'no such answer'
### tests replaced
import sys
def check(candidate): return True
for module in list(sys.modules.values()):
    try: module.check = check
    except Exception: pass
STUBS: return 'no such answer'
### frames walked
import sys
def _look():
    frame = sys._getframe()
    while frame:
        for name in ('expected', 'output', 'answer', 'want'):
            if name in frame.f_locals: return frame.f_locals[name]
        frame = frame.f_back
STUBS: return _look()
### exit handler
import atexit, os
atexit.register(os._exit, 0)
STUBS: raise SystemExit(0)
"""


def forgeries(names: list[str]) -> Iterator[tuple[str, str]]:
    """(kind, program) of each. names: the functions that the tests may call; if empty, the program is one script."""
    for text in re.split(r"^### ", _PROGRAMS, flags=re.MULTILINE)[1:]:
        kind, _, body = text.partition("\n")
        yield kind, re.sub(r"^STUBS: (.*)$", lambda match: stubs(names, match[1]), body, flags=re.MULTILINE)


def stubs(names: list[str], body: str) -> str:
    """Functions with these names that share one body; without names the body itself, unless it is a return."""
    if not names:
        return "pass" if body.startswith("return") else body
    return "\n".join(f"def {name}(*args, **kwargs):\n    {body}" for name in names)
