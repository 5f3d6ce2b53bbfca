"""Runs a Python script inside the sandbox, where all packages but the standard library are stubs, and records which
configurations and trainers it makes, with their arguments.

No module imports this file: its text is the first code of a sandboxed interpreter (`inside.py` of `rlcli_sandbox`). It
reads an order from standard input as JSON: `name`, `text`, `arguments` and `variables` (of the environment) of the
script, `files` (name → text), which are laid out beside it, and `varied`: whether stubs have other numbers and texts
than usually, so that a value that depends on them differs. It prints a JSON object:

calls: of configurations and trainers, each with `name` (of the class), `line`, `args` and `kwargs`. loads: of datasets
and models, each with `name`, `line`, `args`, `kwargs` and `steps` (functions that the rows are passed through). parsed:
the names of the classes that a parser of the command line fills, null if none does. invented: whether the script has
read a number or a text of a stub, or a variable that is not set. error: what ended the script, with its line.

A value is itself if it is plain. Else it is a table: `function` (with `line` and `file`), `call` (a number of `calls`),
or `text` (how the value came about), with `load` (a number of `loads`) if it was made from one.
"""

import dataclasses
import dis
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")

LONGEST_TEXT = 200
MAX_CALLS = 200
DEEPEST = 6
LARGEST = 1e18
LOADERS = (
    *(
        "load_dataset",
        "load_from_disk",
        "from_list",
        "from_dict",
        "from_pandas",
        "from_json",
        "from_csv",
        "from_parquet",
    ),
    *("from_pretrained", "get_peft_model", "read_csv", "read_json", "read_parquet"),
)
ROW_FUNCTIONS = ("map", "filter")
DECORATORS = ("no_grad", "contextmanager", "tool", "dataclass", "wraps", "function", "record")
RECORDED = ("Config", "Trainer", "Arguments")
PARSERS = ("TrlParser", "HfArgumentParser")

calls: "list[dict[str, Any]]" = []
loads: "list[dict[str, Any]]" = []
parsed: "list[str] | None" = None
invented = False


def unknown_value(usual: "T", other: "T") -> "T":
    """A stand-in for a value that is not known here."""
    global invented
    invented = True
    return other if VARIED else usual


def line_of_caller() -> int:
    """The line of the script that is being executed."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename != SCRIPT:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame else 0


class StubClass(type):
    """The class of stub classes: attributes that a class does not have are stubs, too."""

    def __getattr__(cls, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{cls.__name__}.{name}")

    def __or__(cls, other: "Any") -> "Any":
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: "Any") -> "Any":
        return cls


class Stub(metaclass=StubClass):
    """A value of which nothing is known but how it came about: it can be called, indexed, entered and computed with."""

    _text: str
    _load: "int | None"

    def __init__(self, *args: "Any", **kwargs: "Any") -> None:
        self.__dict__["_text"] = args[0] if args and isinstance(args[0], str) else type(self).__name__
        self.__dict__["_load"] = None

    def _next(self, text: str, load: "int | None" = None) -> "Stub":
        stub = Stub(text[:LONGEST_TEXT])
        stub.__dict__["_load"] = self._load if load is None else load
        return stub

    def __call__(self, *args: "Any", **kwargs: "Any") -> "Any":
        last = self._text.rpartition(".")[2]
        is_decorator = last in DECORATORS or last.endswith(("decorator", "reward", "()"))
        if is_decorator and len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        load = next((value._load for value in args if isinstance(value, Stub)), None)
        if last in LOADERS and len(loads) < MAX_CALLS:
            load = len(loads)
            about = {"name": self._text, "line": line_of_caller(), "steps": []}
            loads.append(about | {"args": plain(list(args)), "kwargs": plain(kwargs)})
        elif last in ROW_FUNCTIONS and self._load is not None and args:
            loads[self._load]["steps"].append({"name": last, "with": plain(args[0])})
        return self._next(f"{self._text}()", load)

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return self._next(f"{self._text}.{name}")

    def __setattr__(self, name: str, value: "Any") -> None:
        self.__dict__[name] = value

    def __getitem__(self, key: "Any") -> "Any":
        return self._next(f"{self._text}[{key!r:.60}]")

    def __setitem__(self, key: "Any", value: "Any") -> None:
        pass

    def __delitem__(self, key: "Any") -> None:
        pass

    def __contains__(self, key: "Any") -> bool:
        return False

    def __iter__(self) -> "Iterator[Any]":
        """As many parts as the caller unpacks; nothing for a loop."""
        frame = sys._getframe(1)
        code, at = frame.f_code.co_code, frame.f_lasti
        if dis.opname[code[at]] == "UNPACK_SEQUENCE":
            return iter([self._next(f"{self._text}[{part}]") for part in range(code[at + 1])])
        return iter(())

    def __len__(self) -> int:
        return unknown_value(0, 100_003)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> "Any":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return unknown_value(self._text, f"{self._text}…")

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __index__(self) -> int:
        return unknown_value(1, 100_004)

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __round__(self, digits: "Any" = None) -> int:
        return self.__index__()

    def _compare(self, other: "Any") -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compare

    def _compute(self, *_: "Any") -> "Any":
        return self._next(f"{self._text} …")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _compute
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __neg__ = _compute
    __or__ = __ror__ = __and__ = __rand__ = __xor__ = __invert__ = __lshift__ = __rshift__ = _compute

    def __mro_entries__(self, bases: "Any") -> "tuple[type, ...]":
        return (Stub,)

    def __await__(self) -> "Iterator[Any]":
        return iter(())


class Recorded(Stub):
    """A configuration or a trainer: its arguments are recorded, and are its attributes."""

    _kind = ""
    _call: int

    def __init__(self, *args: "Any", **kwargs: "Any") -> None:
        super().__init__()
        self.__dict__["_call"] = len(calls)
        if len(calls) < MAX_CALLS:
            about = {"name": self._kind, "line": line_of_caller()}
            calls.append(about | {"args": plain(list(args)), "kwargs": plain(kwargs)})
        self.__dict__.update(kwargs)

    def __setattr__(self, name: str, value: "Any") -> None:
        """An argument that is set afterwards counts like one that is given."""
        self.__dict__[name] = value
        if self._call < len(calls):
            calls[self._call]["kwargs"]["table"][name] = plain(value)

    def __call__(self, *args: "Any", **kwargs: "Any") -> "Any":
        return self._next(f"{self._text}()")


class Parser(Stub):
    """A parser that fills classes from the command line."""

    def __init__(self, kinds: "Any" = (), *args: "Any", **kwargs: "Any") -> None:
        super().__init__()
        kinds = kwargs.get("dataclass_types", kinds)
        self.__dict__["_kinds"] = [*kinds] if isinstance(kinds, list | tuple) else [kinds]

    def parse_args_and_config(self, *args: "Any", **kwargs: "Any") -> "tuple[Any, ...]":
        global parsed
        names = [getattr(kind, "__name__", str(kind)) for kind in self._kinds]
        parsed = [*(parsed or []), *names]
        filled = tuple(filled_from_arguments(kind) for kind in self._kinds)
        return (*filled, []) if kwargs.get("return_remaining_strings") else filled

    parse_args_into_dataclasses = parse_yaml_file = parse_json_file = parse_dict = parse_args_and_config


def filled_from_arguments(kind: "Any") -> "Any":
    """An instance of a class that the script itself defines, with the values of the command line; else a stub."""
    if not dataclasses.is_dataclass(kind):
        return Stub(getattr(kind, "__name__", str(kind)))
    values: dict[str, Any] = {}
    words = sys.argv[1:]
    for field in dataclasses.fields(kind):
        for option in (f"--{field.name}", f"--{field.name.replace('_', '-')}"):
            if option in words:
                first = words.index(option) + 1
                last = next((at for at in range(first, len(words)) if words[at].startswith("--")), len(words))
                values[field.name] = converted(words[first:last], str(field.type))
    make: Any = kind
    try:
        return make(**values)
    except Exception:
        return Stub(make.__name__)


def converted(words: "list[str]", kind: str) -> "Any":
    if "list" in kind.lower():
        return words
    text = words[0] if words else "true"
    if "bool" in kind:
        return text.lower() in ("true", "1", "yes")
    try:
        return int(text) if "int" in kind else float(text) if "float" in kind else text
    except ValueError:
        return text


class StubModule(types.ModuleType):
    """A package that is not there: each of its names is a stub, a recorded class or a parser."""

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name in PARSERS:
            value = StubClass(name, (Parser,), {})
        elif name.endswith(RECORDED):
            value = StubClass(name, (Recorded,), {"_kind": name})
        elif name[:1].isupper():
            value = StubClass(name, (Stub,), {})
        else:
            value = Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a stub for every package that is neither of the standard library nor beside the script."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        first = name.partition(".")[0]
        if first in sys.stdlib_module_names or os.path.exists(f"{first}.py"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: "Any") -> "Any":
        module = StubModule(spec.name)
        module.__dict__["__path__"] = []
        return module

    def exec_module(self, module: "Any") -> None:
        pass


def plain(value: "Any", depth: int = 0) -> "Any":
    """The value as JSON, as the docstring of this file says."""
    if isinstance(value, Recorded):
        return {"call": value._call}
    if isinstance(value, Stub):
        return {"text": value._text} | ({} if value._load is None else {"load": value._load})
    if isinstance(value, int | float) and not abs(value) < LARGEST:  # nan neither: JSON has none
        return {"text": repr(value)[:LONGEST_TEXT]}
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, functools.partial):
        bound = [*map(repr, value.args), *(f"{name}={item!r}" for name, item in value.keywords.items())]
        return {"partial": plain(value.func, depth + 1), "bound": ", ".join(bound)[:LONGEST_TEXT]}
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return {"function": value.__name__, "line": code.co_firstlineno, "file": code.co_filename}
    if isinstance(value, type):
        return {"text": getattr(value, "__name__", "a class")}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the order of texts in a set differs from run to run
    if depth < DEEPEST and isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in list(value)[:100]]
    if depth < DEEPEST and isinstance(value, dict):
        return {"table": {str(name): plain(item, depth + 1) for name, item in list(value.items())[:200]}}
    return {"text": repr(value)[:LONGEST_TEXT]}


class Variables(dict):  # type: ignore[type-arg]
    """The environment: a variable that is demanded has a text that says that it is not known."""

    def __missing__(self, name: str) -> str:
        return unknown_value(f"rlcli_unknown_{name}", f"rlcli_unknown_other_{name}")


def lenient_getattr(value: "Any", name: "Any", *default: "Any") -> "Any":
    return getattr(value, name, *default) if isinstance(name, str) else Stub(f"{value!r}.{name!r}")


def why(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SCRIPT]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}"[:LONGEST_TEXT] + where


def run(order: "dict[str, Any]", arguments: "Sequence[str]") -> str:
    """Run the script. Returns what ended it, nothing if it reached its end."""
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    sys.path[:] = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path]
    sys.path.append(os.getcwd())
    sys.meta_path.insert(0, Finder())
    sys.modules["subprocess"] = StubModule("subprocess")
    sys.argv = [order["name"], *arguments]
    os.__dict__["environ"] = Variables(os.environ | order["variables"])
    time.sleep = lambda seconds: None
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=order["name"], getattr=lenient_getattr)
    sys.modules["__main__"] = module
    try:
        exec(compile(order["text"], SCRIPT, "exec"), module.__dict__)
    except BaseException as error:
        return why(error)
    return ""


order = json.load(sys.stdin)
SCRIPT, VARIED = order["name"], order["varied"]
real_output, sys.stdout = sys.stdout, sys.stderr
error = run(order, order["arguments"])
report = {"calls": calls, "loads": loads, "parsed": parsed, "invented": invented, "error": error}
json.dump(report, real_output)
real_output.flush()
os._exit(0)
