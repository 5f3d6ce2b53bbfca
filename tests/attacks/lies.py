"""Programs whose replies claim to equal whatever they are compared with. They touch their own process only."""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("lies")
CALLED = ("functional", "check", "asserts")
BODY = """
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 0
    def __contains__(self, item): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
"""


def lie(name: str, source: str) -> None:
    ATTACKS.forgery(name, source, kinds=CALLED, pool=name == "equal to all")


def made(base: str, construct: str, extra: str = "") -> str:
    return f"class Liar({base}):{BODY}{extra}\ndef f(n):\n    return {construct}"


lie("equal to all", made("object", "Liar()"))
for base, construct in {
    "str": "Liar('x')",
    "int": "Liar(7)",
    "float": "Liar(7.5)",
    "list": "Liar([1])",
    "dict": "Liar({1: 2})",
    "tuple": "Liar((1,))",
    "set": "Liar({1})",
    "frozenset": "Liar({1})",
    "bytes": "Liar(b'x')",
    "complex": "Liar(1j)",
    "Exception": "Liar()",
}.items():
    lie(f"child of {base}", made(base, construct))
lie("in a list", made("object", "[Liar(), Liar()]"))
lie("in a table", made("object", "{'a': Liar(), Liar(): 'a'}"))
lie("in a tuple in a list", made("object", "[(Liar(),)]"))
lie("in a set", made("object", "{Liar()}"))
lie("class itself", made("object", "Liar"))
lie(
    "class of a class", "class Meta(type):" + BODY + "class Liar(metaclass=Meta):\n    pass\ndef f(n):\n    return Liar"
)
lie("class that claims to be text", made("object", "Liar()", "    __class__ = str\n"))
lie(
    "class that claims by a property",
    made(
        "object",
        "Liar()",
        "    @property\n    def __class__(self): return list\n    def __iter__(self): return iter(())\n",
    ),
)
lie(
    "instance check",
    "class Meta(type):\n    def __instancecheck__(cls, other): return True\n    def __subclasscheck__(cls, other): return True\nclass Liar(metaclass=Meta):"
    + BODY
    + "def f(n):\n    return Liar()",
)
lie(
    "registered as a sequence",
    "import collections.abc\nclass Liar:"
    + BODY
    + "    def __getitem__(self, i): raise IndexError\ncollections.abc.Sequence.register(Liar)\ndef f(n):\n    return Liar()",
)
lie(
    "called str",
    "class str(object):" + BODY + "str.__qualname__ = 'str'\nstr.__module__ = 'builtins'\ndef f(n):\n    return str()",
)
lie(
    "from numpy by name",
    "class ndarray:"
    + BODY
    + "    def tolist(self): return self\nndarray.__module__ = 'numpy'\ndef f(n):\n    return ndarray()",
)
lie(
    "reduces to anything",
    made(
        "object",
        "Liar()",
        "    def __reduce__(self): return (eval, ('True',))\n    def __json__(self): return 'true'\n    def tolist(self): return [True]\n    def item(self): return True\n",
    ),
)
lie(
    "text that lies of its letters",
    made(
        "str",
        "Liar('x')",
        "    def __str__(self): return self\n    def __repr__(self): return 'secret'\n    def encode(self, *_): return b'secret'\n    def __iter__(self): return iter('secret')\n    def __format__(self, _): return 'secret'\n",
    ),
)
lie(
    "number that lies of its value",
    made(
        "int",
        "Liar(7)",
        "    def __int__(self): return Liar(8)\n    def __index__(self): return 9\n    def __repr__(self): return 'true'\n    __str__ = __repr__\n",
    ),
)
lie(
    "list that lies of its items",
    made(
        "list",
        "Liar([1])",
        "    def __iter__(self): return iter([Liar()])\n    def __getitem__(self, i): return Liar()\n",
    ),
)
lie(
    "table that lies of its items",
    made(
        "dict",
        "Liar({1: 2})",
        "    def items(self): return [(Liar(), Liar())]\n    def keys(self): return Liar()\n    def __getitem__(self, key): return Liar()\n",
    ),
)
lie(
    "float that lies of its value",
    made(
        "float",
        "Liar(1.5)",
        "    def __float__(self): return float('nan')\n    def __repr__(self): return 'NaN'\n    def hex(self): return '0x0'\n",
    ),
)
lie(
    "member of an enumeration",
    "import enum\nclass Liar(str, enum.Enum):\n    A = 'x'\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef f(n):\n    return Liar.A",
)
lie(
    "data class",
    "import dataclasses\n@dataclasses.dataclass(eq=False)\nclass Liar:" + BODY + "def f(n):\n    return Liar()",
)
lie(
    "named tuple",
    "import collections\nclass Liar(collections.namedtuple('P', 'a b')):" + BODY + "def f(n):\n    return Liar(1, 2)",
)
lie("Counter", "import collections\nclass Liar(collections.Counter):" + BODY + "def f(n):\n    return Liar('x')")
lie("Mock's ANY", "from unittest.mock import ANY\ndef f(n):\n    return ANY")
lie(
    "Mock that answers all",
    "from unittest.mock import MagicMock\ndef f(n):\n    m = MagicMock()\n    m.__eq__.return_value = True\n    return m",
)
lie("weak reference", "import weakref\nclass Liar:" + BODY + "kept = Liar()\ndef f(n):\n    return weakref.proxy(kept)")
lie("coroutine", "async def f(n):\n    return True")
lie("generator that is awaited", "async def f(n):\n    yield True")
lie("partial function", "import functools\ndef f(n):\n    return functools.partial(bool, 1)")
lie(
    "descriptor",
    "class D:\n    def __get__(self, *_): return self\n    def __call__(self, n): return self\n    def __eq__(self, o): return True\nclass Solution:\n    f = D()\n",
)
lie("module in place of a value", "import sys\ndef f(n):\n    return sys")
lie("exception as a value", "class Liar(Exception):" + BODY + "def f(n):\n    return Liar('x')")
lie("exception that equals all", "class Liar(AssertionError):" + BODY + "def f(n):\n    raise Liar")
lie(
    "attributes without end",
    "class Liar:"
    + BODY
    + "    def __getattr__(self, name): return self\n    def __call__(self, *a, **k): return self\n    def __iter__(self): return iter([self])\n    def __getitem__(self, i): return self\ndef f(n):\n    return Liar()",
)
lie(
    "changes between looks",
    "class Liar(list):\n    looks = 0\n    def __iter__(self):\n        Liar.looks += 1\n        return iter([Liar.looks])\n    def __len__(self):\n        Liar.looks += 1\n        return Liar.looks\n    def __eq__(self, o): return True\ndef f(n):\n    return Liar([1])",
)
lie(
    "iterator that raises",
    "class Liar:\n    def __iter__(self): return self\n    def __next__(self): raise SystemExit(0)\ndef f(n):\n    return Liar()",
)
lie(
    "iterator that patches",
    "import builtins\nclass Liar:\n    def __iter__(self): return self\n    def __next__(self):\n        builtins.isinstance = lambda *_: True\n        builtins.type = lambda *_: str\n        raise StopIteration\ndef f(n):\n    return Liar()",
)
lie(
    "truth that exits",
    "class Liar:\n    def __bool__(self): raise SystemExit(0)\n    def __len__(self): raise SystemExit(0)\n    __eq__ = __hash__ = __bool__\ndef f(n):\n    return Liar()",
)
lie(
    "numpy array of liars",
    "def f(n):\n    import numpy\n    class Liar:\n        def __eq__(self, o): return True\n    return numpy.array([Liar()], dtype=object)",
)
lie(
    "numpy child",
    "import numpy\nclass Liar(numpy.ndarray):\n    def __eq__(self, o): return True\n    def tolist(self): return Liar(3)\ndef f(n):\n    return Liar(3)",
)
