"""Rendezvous of the ranks of a process group: torch's store.

On one machine it is a file that only this user can open. Across machines it listens on the address of rank 0 alone;
torch's own would listen on all addresses of the machine. It requires no token.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.support.files import private_folder

if TYPE_CHECKING:
    from torch.distributed import Store


def rendezvous_address(address: str, folder_name: str) -> tuple[str, int]:
    """The address and port of a new group's store. If all ranks are on this machine (its address is on loopback), the
    path of a new file, and 0; else this machine's `address` and a free port of it. folder_name: name of the file's
    folder in shared memory, which only this user may enter.

    Raises `SetupError` if another user has a folder of that name.
    """
    if not _is_loopback(address):
        with _listener(address, 0) as probe:
            return address, int(probe.getsockname()[1])
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    folder = private_folder(Path(memory, folder_name))
    return str(folder / secrets.token_hex(8)), 0


def store_at(address: str, port: int, rank: int, world: int, timeout: timedelta) -> Store:
    """The store at the result of `rendezvous_address`, which every rank opens. One with an address is served by rank 0.

    Raises an error of torch's if the others do not connect in time, `OSError` if rank 0 cannot listen there.
    """
    import torch.distributed as dist

    if address.startswith("/"):
        file = dist.FileStore(address, world)
        file.set_timeout(timeout)
        return file
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, with `ray start --node-ip-address NAME`
        return False


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
