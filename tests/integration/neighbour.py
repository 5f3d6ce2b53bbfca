"""Attempts of another user of the machine to access a run: reads a JSON object from standard input, and writes one.

    {"user": 65534, "paths": […], "sockets": […], "ports": […], "tokens": ["", …]}

user: 0 tries the same as root, to show that the attempts would succeed. paths: files and folders. sockets: paths of
Unix sockets. ports: of 127.0.0.1. tokens: for Ray's services. The answer lists the targets that succeeded for each kind
of attempt; `answers`: `PORT METHOD TOKEN` → the status of each call of Ray's services.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc

METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
"""Methods of the head, of a raylet, of a worker or driver. They change nothing, and take an empty message."""

PAGES = ("/", "/metrics", "/api/healthz", "/health", "/v1/models")
UNUSED_PORT = 1
"""A port at which nothing listens."""

WAIT_S, AT_ONCE = 10.0, 64


def become(user: int) -> None:
    """Raises OSError unless this process is root's."""
    # The other user may not be able to read Python's modules: import now what the attempts need.
    succeeds(lambda: fetch(UNUSED_PORT, "/"))
    status(UNUSED_PORT, METHODS[0], "")
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, http.client.HTTPException):
        return False
    return True


def read(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.listdir(path)
    else:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            file.read(1)


def write(path: str) -> None:
    """Leaves no change: a file that it creates in a folder is removed."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        name = os.path.join(path, f"neighbour-{os.getpid()}")
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(name)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def replace(path: str) -> None:
    os.rename(path, f"{path}.moved")
    os.rename(f"{path}.moved", path)


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def fetch(port: int, path: str) -> None:
    """Raises OSError unless an HTTP server gives the page."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as client:
        client.request("GET", path)
        if (status := client.getresponse().status) != 200:
            raise PermissionError(status)


def status(port: int, method: str, token: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        sent = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            channel.unary_unary(method)(b"", timeout=WAIT_S, metadata=sent)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def main() -> None:
    request: dict[str, Any] = json.load(sys.stdin)
    become(request["user"])
    attempts = {"read": read, "write": write, **({"replace": replace} if request["user"] else {})}
    results: dict[str, Any] = {
        name: [path for path in request["paths"] if succeeds(lambda path=path, act=act: act(path))]
        for name, act in attempts.items()
    }
    results["connect"] = [path for path in request["sockets"] if succeeds(lambda path=path: connect(path))]
    pages = [(port, page) for port in request["ports"] for page in PAGES]
    calls = [(port, method, token) for port in request["ports"] for method in METHODS for token in request["tokens"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a service of another protocol may never answer
        outcomes = pool.map(lambda page: succeeds(lambda: fetch(*page)), pages)
        results["fetch"] = [
            f"{port}{page}" for (port, page), succeeded in zip(pages, outcomes, strict=True) if succeeded
        ]
        statuses = pool.map(lambda call: status(*call), calls)
        results["answers"] = {" ".join(map(str, call)): code for call, code in zip(calls, statuses, strict=True)}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
