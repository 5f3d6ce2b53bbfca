"""The store through which the ranks of a process group find each other. It listens on one address: torch's own would
listen on all of the machine's, and asks nobody for a token."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def free_port(address: str) -> int:
    """A port of this machine's `address` on which nothing listens."""
    with _listener(address, 0) as probe:
        return int(probe.getsockname()[1])


def tcp_store(address: str, port: int, rank: int, world: int, timeout: timedelta) -> TCPStore:
    """The store at `address`, which rank 0 serves and every rank joins. Returns when all have joined; raises what torch
    raises if they do not in time, `OSError` if rank 0 cannot listen there."""
    import torch.distributed as dist

    descriptor = None
    if rank == 0:
        listener = _listener(address, port)
        port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        address,
        port,
        world,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,  # several process groups of one process may use it
        master_listen_fd=descriptor,
    )


def _listener(address: str, port: int) -> socket.socket:
    """A listening socket on the address alone; on all addresses if it is none of this machine's: one that a router
    translates."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family)
