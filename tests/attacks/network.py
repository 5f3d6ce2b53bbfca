"""Programs that speak to others. Bounded: the harness's own port on loopback, one outside address, a few packets.

The harness listens on TCP, UDP and two unix sockets, and counts who came.
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("network")
deed, forgery = ATTACKS.deed, ATTACKS.forgery

deed(
    "loopback",
    "import socket\ndef deed():\n    socket.create_connection(('127.0.0.1', @PORT@), 1).close()\n    return True",
    pool=True,
)
deed(
    "loopback by its new name",
    "import socket\ndef deed():\n    socket.create_connection(('localhost', @PORT@), 1).close()\n    return True",
    bare=False,
)
deed(
    "loopback by zero",
    "import socket\ndef deed():\n    socket.create_connection(('0.0.0.0', @PORT@), 1).close()\n    return True",
)
deed(
    "loopback by IPv6",
    "import socket\ndef deed():\n    s = socket.socket(socket.AF_INET6)\n    s.connect(('::ffff:127.0.0.1', @PORT@))\n    return True",
    bare=False,
)
deed(
    "outside",
    "import socket\ndef deed():\n    socket.create_connection(('192.0.2.1', 80), 0.3).close()\n    return True",
    bare=False,
)
deed("a TCP socket at all", "import socket\ndef deed():\n    return socket.socket()")
deed("a UDP socket at all", "import socket\ndef deed():\n    return socket.socket(type=socket.SOCK_DGRAM)")
deed("a unix socket at all", "import socket\ndef deed():\n    return socket.socket(socket.AF_UNIX)")
deed(
    "packet to the harness",
    "import socket\ndef deed():\n    return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@))",
)
deed(
    "fast open",
    "import socket\ndef deed():\n    return socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', @PORT@))",
    bare=False,
)
deed(
    "name service",
    "import socket\ndef deed():\n    s = socket.socket(type=socket.SOCK_DGRAM)\n    s.settimeout(0.2)\n    s.sendto(bytes.fromhex('12340100000100000000000007696e76616c69640000010001'), ('192.0.2.1', 53))\n    return True",
    bare=False,
)
deed("resolver", "import socket\ndef deed():\n    return socket.getaddrinfo('example.invalid', 80)", bare=False)
deed(
    "unix socket of the harness",
    "import socket\ndef deed():\n    socket.socket(socket.AF_UNIX).connect('@UNIX@')\n    return True",
)
deed(
    "unnamed unix socket of the harness",
    "import socket\ndef deed():\n    socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@')\n    return True",
)
deed(
    "datagram by a socket pair",
    "import socket\ndef deed():\n    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n    a.connect('\\0@ABSTRACT@-d')\n    return a.send(b'x')",
)
deed(
    "datagram by a socket pair to a name",
    "import socket\ndef deed():\n    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n    return a.sendto(b'x', '\\0@ABSTRACT@-d')",
    bare=False,
)
deed(
    "listens by a socket pair",
    "import socket\ndef deed():\n    a, b = socket.socketpair()\n    a.bind('\\0listen-@TOKEN@')\n    return True",
    bare=False,
)
deed(
    "listens",
    "import socket\ndef deed():\n    s = socket.socket()\n    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n    s.bind(('127.0.0.1', @LISTEN@))\n    s.listen()\n    return True",
)
forgery(
    "listens and hangs",
    "import socket, time\ndef f(n):\n    try:\n        s = socket.socket()\n        s.bind(('127.0.0.1', @LISTEN@))\n        s.listen()\n    except OSError:\n        pass\n    time.sleep(60)",
)
deed(
    "listens on a unix socket",
    "import socket\ndef deed():\n    s = socket.socket(socket.AF_UNIX)\n    s.bind('\\0listen-@TOKEN@')\n    s.listen()\n    return True",
)
deed("netlink", "import socket\ndef deed():\n    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)")
deed("raw", "import socket\ndef deed():\n    return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", bare=False)
deed(
    "packets of the link",
    "import socket\ndef deed():\n    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    bare=False,
)
deed("vsock", "import socket\ndef deed():\n    return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", bare=False)
deed(
    "kernel's ciphers",
    "import socket\ndef deed():\n    return socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    bare=False,
)
deed(
    "bluetooth and can",
    "import socket\ndef deed():\n    for family in (31, 29, 44, 43, 41):\n        try:\n            return socket.socket(family, socket.SOCK_RAW, 1)\n        except OSError:\n            pass\n    return False",
    bare=False,
)
deed("raw call for a socket", "def deed():\n    return call('socket', 2, 1, 0)", syscalls=True)
deed(
    "raw call with a wide family",
    "def deed():\n    return libc.syscall(ctypes.c_long(NR['socket'][ARM]), ctypes.c_long((1 << 32) | 2), ctypes.c_long(1), ctypes.c_long(0)) >= 0",
    syscalls=True,
)
deed(
    "socket by the 32-bit gate",
    """
import mmap
def deed():
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("53b867010000bb02000000b90100000031d2cd805bc3"))
    entry = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    return entry() >= 0
""",
    syscalls=True,
    bare=False,
)
deed(
    "io_uring",
    "def deed():\n    return call('io_uring_setup', 4, ctypes.byref((ctypes.c_char * 120)()))",
    syscalls=True,
    bare=False,
)
deed(
    "web client",
    "import urllib.request\ndef deed():\n    try:\n        urllib.request.urlopen('http://127.0.0.1:@PORT@/', timeout=0.2)\n    except TimeoutError:\n        pass\n    return True",
    bare=False,
)
deed(
    "asyncio",
    "import asyncio\ndef deed():\n    asyncio.run(asyncio.open_connection('127.0.0.1', @PORT@))\n    return True",
)
deed(
    "message queue",
    # Where nothing forbids it the queue would outlive the test, and a user may have ten of them or so.
    "def deed():\n    call('mq_open', b'@TOKEN@', 0o102, 0o600, 0)\n    call('mq_unlink', b'@TOKEN@')\n    return True",
    syscalls=True,
)
deed(
    "a descriptor that is a socket",
    "import os, stat\ndef deed():\n    return any(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in range(256) if os.path.exists(f'/proc/self/fd/{fd}'))",
    bare=False,
)
