"""The side that runs the program under test: it is not trusted, and has no tests and no expected values.

Two ways to run it, each in a separate sandboxed process:

`serve_calls`: the program is loaded once as a module; each request names one of its functions (or a method of its
class `Solution`), or an object made by a call and its method, and contains arguments; the reply contains the value,
the handle of an object, or the exception. Whatever the program does to this process, the other side gets only values
to compare.

`serve_scripts`: each request contains a standard input; the program runs from its first line as `__main__` in a fresh
namespace, writes to a pipe that the verifier reads, and the reply reports how it ended.

This file runs inside the sandbox: it may import only the standard library and `wire`.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import operator
import os
import sys
import threading
from types import CodeType, ModuleType
from typing import Any

from rlcli_sandbox.judge.wire import NotPlain, TooBig, decode, encode, receive, send

RECURSION_LIMIT = 50_000
"""LiveCodeBench's limit for programs: depth-first searches need more than 1,000 frames."""

MAX_TEXT_CHARS = 500

PROVIDED_NAMES = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cmp_to_key lru_cache reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby pairwise permutations product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log2 sqrt",
    "typing": "Any Callable Dict Generator Iterable Iterator List Optional Sequence Set Tuple Union",
}
"""Names that a program may use without importing them: module → its names.

LeetCode and LiveCodeBench provide them all, and the modules in `_PROVIDED_MODULES` as well; other programs get those of
typing, which only replace the imports of a prompt.
"""

OPERATORS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul")},
    **{"contains": operator.contains, "getitem": operator.getitem, "setitem": operator.setitem},
    **{"len": len, "str": str, "repr": repr, "list": list, "setattr": setattr},
}
"""Operations that tests may apply to an object of a class, besides calling its methods."""

_PROVIDED_MODULES = (*PROVIDED_NAMES, "re", "string", "random", "operator", "datetime", "json")


def serve_calls(program: str, requests: int, replies: int, all_names: bool) -> None:
    """Load the program, and answer calls until they end. all_names: provide all of `PROVIDED_NAMES`, else
    only those of typing."""
    send(replies, {"started": True})
    _setup_interpreter()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    try:
        code = compile(program, "<program>", "exec")
        _provide_names(code, module, all_names)
        _load(code, module)
    except BaseException as error:
        send(replies, {"loaded": False, **_error_reply(error)})
        return
    send(replies, {"loaded": True})
    objects: list[Any] = []
    while (request := receive(requests)) is not None:
        try:
            send(replies, {"id": request["id"], **_answer(module, request, objects)})
        except TooBig as error:
            send(replies, {"id": request["id"], **_error_reply(error)})


def _setup_interpreter() -> None:
    """Add what `python prog.py` has and a bare interpreter lacks, and let integers of any length be printed."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.set_int_max_str_digits(0)


def _answer(module: ModuleType, request: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    """The value or exception of one request; any other object is kept in `objects`, and represented by its handle."""
    try:
        args, kwargs = (decode(request[name], objects=objects) for name in ("args", "kwargs"))
        if "operator" in request:
            value = OPERATORS[request["operator"]](*args)
        else:
            owner, name = request.get("of"), request["name"]
            attribute = _find(module, name) if owner is None else getattr(_owner(module, owner, objects), name)
            if request.get("get") and callable(attribute):
                return {"method": True}
            value = attribute if request.get("get") else attribute(*args, **kwargs)
        try:
            return {"value": encode(value)}
        except NotPlain:
            objects.append(value)
            return {"object": type(value).__name__, "true": bool(value), "handle": len(objects) - 1}
    except BaseException as error:
        return _error_reply(error)


def _owner(module: ModuleType, owner: int | str, objects: list[Any]) -> Any:
    return objects[owner] if isinstance(owner, int) else _find(module, owner)


def _find(module: ModuleType, name: str) -> Any:
    if name in vars(module):
        return vars(module)[name]
    solution = vars(module).get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the program defines no {name}")


def _error_reply(error: BaseException) -> dict[str, Any]:
    """An exception as the nearest built-in class, its text with its own class, and its message alone, with which the
    tests get it again."""
    name = next((c.__name__ for c in type(error).__mro__ if vars(builtins).get(c.__name__) is c), "Exception")
    try:
        text = str(error)[:MAX_TEXT_CHARS]
        only = error.args[0] if len(error.args) == 1 else None
        message = only[:MAX_TEXT_CHARS] if type(only) is str else text  # the text of a KeyError is quoted
    except BaseException:  # of the program's own class
        text = message = ""
    return {"error": name, "text": f"{type(error).__name__}: {text}", "message": message}


def _load(code: CodeType, module: ModuleType) -> None:
    sys.setrecursionlimit(RECURSION_LIMIT)
    exec(code, vars(module))


def _provide_names(code: CodeType, module: ModuleType, all_names: bool) -> None:
    """Put the provided names that the code uses into its module, before it runs and may define its own."""
    used: set[str] = set()
    codes = [code]
    while codes:
        part = codes.pop()
        used.update(part.co_names)
        codes += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    for name in used.intersection(_PROVIDED_MODULES if all_names else ()):
        vars(module)[name] = __import__(name)
    for provider in PROVIDED_NAMES if all_names else ("typing",):
        for name in used.intersection(PROVIDED_NAMES[provider].split()):
            vars(module)[name] = getattr(__import__(provider), name)


def serve_scripts(program: str, requests: int, replies: int, output: int) -> None:
    """Run the program once for each request, `{"stdin": text}`, its output to the descriptor `output`.

    Each run starts in an empty folder; a reply that is not `clean` means that the next one would not.
    """
    folder = os.getcwd()  # the program may leave it
    send(replies, {"started": True})
    _setup_interpreter()
    while (request := receive(requests)) is not None:
        _set_streams(decode(request["stdin"]), output, folder)
        outcome = _run_script(program)
        with contextlib.suppress(OSError, ValueError):  # the program closed it
            sys.stdout.flush()
        send(replies, outcome | {"clean": _clean_folder(folder)})


def _clean_folder(folder: str) -> bool:
    """Restore the working directory; False if that fails, and another process has to run the next case."""
    try:
        os.chdir(folder)
        for path, folders, files in os.walk(folder, topdown=False):
            for name in (*files, *folders):
                entry = os.path.join(path, name)
                (os.rmdir if name in folders and not os.path.islink(entry) else os.unlink)(entry)
        return not os.listdir(folder)
    except BaseException:  # the program may have replaced these functions
        return False


def _set_streams(text: str, output: int, folder: str) -> None:
    """Standard input from a file that has a real descriptor (`open(0)` is common), standard output to `output`."""
    path = os.path.join(folder, ".stdin")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(path)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    if fd != 0:  # it is 0 if the program closed its own
        os.dup2(fd, 0)
        os.close(fd)
    os.dup2(output, 1)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape")


def _run_script(program: str) -> dict[str, Any]:
    import atexit

    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        _load(compile(program, "<program>", "exec"), module)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    except SystemExit as stop:
        atexit._run_exitfuncs()
        if stop.code not in (None, 0):
            return _error_reply(stop)
    except BaseException as error:
        return _error_reply(error)
    finally:
        gc.collect()
    return {"error": ""}
