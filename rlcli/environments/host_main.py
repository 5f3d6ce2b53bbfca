"""The process that environments run in. It needs the standard library alone, so that any interpreter can run it:

    python host_main.py TARGET MEMORY_BYTES

TARGET: `module:Class` or `/path/to/file.py:Class`, or a function or a list of functions that are tools. MEMORY_BYTES:
limit of its address space; 0: none. Requests and replies are lines of JSON on standard input and output; what
environments print goes to standard error. An image, a part `{"type": "image", "image": …}` of a message's content, is
`bytes` for an environment, and `{"base64": …}` in JSON.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import io
import json
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlcli.environments.environment import Environment

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 64
"""Calls of environments that are not async, at once."""


class OptionDescription(TypedDict):
    """An argument of an environment's constructor."""

    name: str
    """Its name."""
    type: str
    """Its annotation; empty if it has none."""
    required: bool
    """True if it has no default."""
    default: str
    """Its default, as Python writes it; empty if it is required."""


class Description(TypedDict):
    """An environment for `rlcli env show`."""

    doc: str
    """Its docstring; empty if it has none."""
    options: list[OptionDescription]
    """Arguments of its constructor."""


def environment_of(target: str) -> Callable[..., Environment]:
    """The class that TARGET names; of a function, or a list of functions, an environment whose tools they are."""
    target_object = find(target)
    objects = target_object if isinstance(target_object, list | tuple) else [target_object]
    if not objects:
        raise TypeError(f"{target} is an empty list, and needs a function to be a tool")
    functions = [function for function in objects if inspect.isfunction(function)]
    if len(functions) == len(objects):
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools.py")
        spec = importlib.util.spec_from_file_location("rlcli_tools", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.ToolEnvironment(functions)  # what cannot be a tool is refused now
        tools = "\n\n".join(f"{function.__name__}: {inspect.getdoc(function)}" for function in functions)

        def make(**options: object) -> Environment:
            return cast("Environment", module.ToolEnvironment(functions, **options))

        make.__doc__ = tools if len(functions) > 1 else inspect.getdoc(functions[0])
        return make
    if not hasattr(target_object, "reset") or not hasattr(target_object, "step"):
        raise TypeError(f"{target} is no environment: it has no reset and step, and is no function")
    return cast("Callable[..., Environment]", target_object)  # the rest shows when it is called


def find(target: str) -> object:
    """The object that TARGET names."""
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        sys.path.append(os.path.dirname(os.path.abspath(path)))
        spec = importlib.util.spec_from_file_location("rlcli_environment", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    value: object = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise AttributeError(f"{path} has no {name}")
        value = getattr(value, part)
    return value


def described(make: Callable[..., Environment]) -> Description:
    """Docstring and options of an environment."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    options: list[OptionDescription] = []
    for parameter in inspect.signature(make).parameters.values():
        if parameter.kind in variable:
            continue
        kind = (
            parameter.annotation
            if isinstance(parameter.annotation, str)
            else inspect.formatannotation(parameter.annotation)
        )
        required = parameter.default is parameter.empty
        options.append(
            {
                "name": parameter.name,
                "type": "" if parameter.annotation is parameter.empty else kind,
                "required": required,
                "default": "" if required else repr(parameter.default),
            }
        )
    return {"doc": inspect.getdoc(make) or "", "options": options}


def plain(value: object) -> object:
    """numpy's numbers and arrays as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def sendable(returned: object) -> object:
    """The result of an environment, with its images as JSON."""
    if isinstance(returned, list | tuple):
        return [sendable(item) for item in returned]
    if not isinstance(returned, dict) or not isinstance(returned.get("content"), list | tuple):
        return returned
    return {**returned, "content": [_part(part) for part in returned["content"]]}


def _part(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "image":
        return part
    return {"type": "image", "image": {"base64": base64.b64encode(_encoded_image(part.get("image"))).decode()}}


def _encoded_image(image: object) -> bytes:
    """An image as the bytes of a file: those, a struct of `bytes` as the hub's datasets have it, an image of Pillow,
    or an array of numpy `[height, width, 3]`."""
    if isinstance(image, dict):
        image = image.get("bytes")
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image)
    if not hasattr(image, "save"):
        raise TypeError(f"{type(image).__name__} is no image: give its bytes, Pillow's or numpy's")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def received(row: dict[str, object]) -> dict[str, object]:
    """A row with the images in its messages as bytes."""
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image":
                part["image"] = base64.b64decode(part["image"]["base64"])
    return row


def encoded(request: int, returned: object) -> str:
    """The reply to a request: what was returned, else why it cannot be sent."""
    try:
        return json.dumps({"id": request, "ok": sendable(returned)}, default=plain)
    except (TypeError, ValueError, RecursionError, ImportError, OSError) as error:
        return json.dumps({"id": request, "unsendable": str(error)[:500]})


class Host:
    """Answers requests. make: constructs an environment from its options. write: writes a line."""

    def __init__(self, make: Callable[..., Environment], write: Callable[[str], None]) -> None:
        self.make, self.write = make, write
        self.sessions: dict[int, Environment] = {}
        self.threads = ThreadPoolExecutor(THREADS)
        self.encoder = ThreadPoolExecutor(1)  # images take long, and calls may hold all of the threads
        self.began: ContextVar[int] = ContextVar("began")
        """The request that the current task answers."""

    async def answer(self, line: bytes) -> None:
        request = json.loads(line)
        try:
            self.began.set(request["id"])
            returned = await self.call(request["do"], request["session"], request.get("arguments", []))
            text = await asyncio.get_running_loop().run_in_executor(self.encoder, encoded, request["id"], returned)
        except BaseException as error:  # an environment may call sys.exit
            where = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {str(error)[:500]} ({os.path.basename(where.filename)}:{where.lineno})"
            text = json.dumps({"id": request["id"], "error": detail})
        self.write(text)

    async def call(self, do: str, session: int, arguments: list[Any]) -> object:
        """Call a method of a session's environment. arguments: its arguments, from JSON."""
        if do == "describe":
            return described(self.make)
        if do == "reset":
            options, row, seed = arguments
            self.sessions[session] = await self.run(self.make, **options)
            return await self.run(self.sessions[session].reset, received(row), seed)
        if do == "step":
            return await self.run(self.sessions[session].step, *arguments)
        environment = self.sessions.pop(session, None)
        if environment is not None and hasattr(environment, "close"):
            await self.run(environment.close)
        return None

    async def run(self, function: Callable[P, T | Awaitable[T]], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a method of an environment, in a thread unless it is async."""
        request = self.began.get()

        def call() -> T | Awaitable[T]:
            self.say_began(request)  # before the call, which may end the process
            return function(*arguments, **options)

        if inspect.iscoroutinefunction(function):
            returned = call()
        else:
            returned = await asyncio.get_running_loop().run_in_executor(self.threads, call)
        return await returned if inspect.isawaitable(returned) else returned

    def say_began(self, request: int) -> None:
        self.write(json.dumps({"began": request}))


def end_with(owner: int) -> None:
    """End this process once its owner is gone, whatever its environments do."""
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(0)


async def serve(make: Callable[..., Environment], requests: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)

    def write(text: str) -> None:  # from any thread: one call of `write` is one line
        replies.write(text.encode() + b"\n")
        replies.flush()

    host, tasks = Host(make, write), set()
    write(json.dumps({"ready": True}))
    while line := await reader.readline():
        task = loop.create_task(host.answer(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # its owner is gone: threads that hang must not keep it


def main(target: str, memory_bytes: str) -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    if int(memory_bytes):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    try:
        make = environment_of(target)
    except BaseException as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {str(error)[:500]}"}).encode() + b"\n")
        replies.flush()
        raise SystemExit(1) from error
    asyncio.run(serve(make, requests, replies))


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # the user's PYTHONSAFEPATH; not in Python 3.10
        sys.path.pop(0)  # this folder, whose modules have names that others may have too
    main(*sys.argv[1:])
