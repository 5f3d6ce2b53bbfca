"""Programs that ask the kernel for more than they have. Bounded: values that are in force already, or that it refuses.

Most need root; run without a sandbox as an ordinary user they fail as well, so few of them are proven that way.
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("system")
deed, forgery = ATTACKS.deed, ATTACKS.forgery


def kernel(name: str, source: str, bare: bool = False) -> None:
    deed(name, source, syscalls=True, bare=bare)


kernel("user namespace", "def deed():\n    call('unshare', 0x10000000)\n    return True")
kernel("mount namespace", "def deed():\n    call('unshare', 0x20000)\n    return True")
kernel("network namespace", "def deed():\n    call('unshare', 0x40000000)\n    return True")
kernel("process namespace", "def deed():\n    call('unshare', 0x20000000)\n    return True")
kernel(
    "namespace of its parent",
    "def deed():\n    call('setns', os.open(f'/proc/{os.getppid()}/ns/mnt', os.O_RDONLY), 0)\n    return True",
)
kernel(
    "namespace of process 1",
    "def deed():\n    call('setns', os.open('/proc/1/ns/net', os.O_RDONLY), 0)\n    return True",
)
kernel(
    "changed root", "def deed():\n    os.mkdir('root-@TOKEN@')\n    call('chroot', b'root-@TOKEN@')\n    return True"
)
kernel(
    "mount",
    "def deed():\n    os.mkdir('m-@TOKEN@')\n    call('mount', b'none', b'm-@TOKEN@', b'tmpfs', 0, 0)\n    call('umount2', b'm-@TOKEN@', 0)\n    return True",
)
kernel(
    "mount that can be written",
    "def deed():\n    call('mount', b'none', b'/usr', b'none', 32 | 4096, 0)\n    return os.access('/usr', os.W_OK)",
)
kernel("mount by the new calls", "def deed():\n    return call('fsopen', b'tmpfs', 0)")
kernel("tree of mounts", "def deed():\n    return call('open_tree', -100, b'/', 1)")
kernel(
    "another user",
    "def deed():\n    now = os.getuid()\n    os.setresuid(12345, 12345, now)\n    os.setresuid(now, now, now)\n    return True",
)
kernel("another group", "def deed():\n    os.setgroups([12345])\n    return True")
kernel(
    "root again",
    "def deed():\n    if os.getuid() == 0:\n        return bool(int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16))\n    os.setuid(0)\n    return True",
)
kernel(
    "capabilities",
    "def deed():\n    text = open('/proc/self/status').read()\n    return any(int(text.split(name)[1].split()[0], 16) for name in ('CapEff:', 'CapPrm:', 'CapInh:', 'CapAmb:'))",
)
kernel("new privileges", "def deed():\n    return libc.prctl(39, 0, 0, 0, 0) != 1", bare=False)
kernel("no filter", "def deed():\n    return 'Seccomp:\\t2' not in open('/proc/self/status').read()", bare=False)
kernel(
    "limits raised",
    "import resource\ndef deed():\n    raised = 0\n    for name in ('RLIMIT_AS', 'RLIMIT_NOFILE', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_CPU', 'RLIMIT_CORE', 'RLIMIT_MEMLOCK'):\n        soft, hard = resource.getrlimit(getattr(resource, name))\n        try:\n            if hard != resource.RLIM_INFINITY:\n                resource.setrlimit(getattr(resource, name), (hard + 1, hard + 1))\n                raised += 1\n        except (OSError, ValueError):\n            pass\n    return raised",
)
kernel(
    "limits absent",
    "import resource\ndef deed():\n    return any(resource.getrlimit(getattr(resource, name))[1] == resource.RLIM_INFINITY for name in ('RLIMIT_FSIZE', 'RLIMIT_CORE'))",
    bare=True,
)
kernel(
    "limits of its parent",
    "import resource\ndef deed():\n    resource.prlimit(os.getppid(), resource.RLIMIT_CORE)\n    return True",
    bare=True,
)
kernel(
    "real-time scheduling",
    "def deed():\n    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\n    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\n    return True",
)
kernel("higher priority", "def deed():\n    os.nice(-5)\n    return True")
kernel(
    "real-time input and output",
    "def deed():\n    call('ioprio_set', 1, 0, (1 << 13) | 4)\n    call('ioprio_set', 1, 0, 0)\n    return True",
)
kernel("keys of the session", "def deed():\n    return call('add_key', b'user', b'@TOKEN@', b'x', 1, -2)")
kernel("a keyring", "def deed():\n    return call('keyctl', 0, -3, 0)")
kernel(
    "programs in the kernel",
    "def deed():\n    call('bpf', 0, ctypes.byref((ctypes.c_uint32 * 32)(2, 4, 4, 1)), 72)\n    return True",
)
kernel(
    "performance counters",
    "def deed():\n    attributes = (ctypes.c_uint32 * 32)(1, 128)\n    attributes[10] = 0x21\n    return call('perf_event_open', ctypes.byref(attributes), 0, -1, -1, 0) >= 0",
)
kernel("page faults in user space", "def deed():\n    return call('userfaultfd', 1)")
kernel(
    "segments that stay",
    "def deed():\n    segment = call('shmget', 0, 4096, 0o1600)\n    call('shmctl', segment, 0, 0)\n    return True",
    bare=True,
)
kernel(
    "messages that stay", "def deed():\n    libc.msgctl(call('msgget', 0, 0o1600), 0, 0)\n    return True", bare=True
)
kernel(
    "semaphores that stay",
    "def deed():\n    libc.semctl(call('semget', 0, 1, 0o1600), 0, 0)\n    return True",
    bare=True,
)
kernel(
    "file handles",
    "def deed():\n    handle = (ctypes.c_uint32 * 64)(128)\n    call('name_to_handle_at', -100, b'/', ctypes.byref(handle), ctypes.byref((ctypes.c_int * 1)()), 0)\n    return os.getuid() == 0 and False",
)
kernel("watch on a whole file system", "def deed():\n    return call('fanotify_init', 0, 0)")
kernel(
    "kernel module",
    "def deed():\n    try:\n        call('finit_module', -1, b'', 0)\n    except OSError as error:\n        return error.errno == 9\n    return True",
)
kernel(
    "restart of the machine",
    "def deed():\n    try:\n        call('reboot', 0, 0, 0, 0)\n    except OSError as error:\n        return error.errno == 22\n    return True",
)
kernel(
    "name of the machine",
    "def deed():\n    name = os.uname().nodename.encode()\n    call('sethostname', name, len(name))\n    return True",
)
kernel(
    "clock",
    "import time\ndef deed():\n    try:\n        time.clock_settime_ns(time.CLOCK_REALTIME, -1)\n    except OSError as error:\n        return error.errno == 22 and False\n    return True",
)
kernel(
    "core dump",
    "import resource\ndef deed():\n    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\n    return True",
    bare=True,
)
kernel("secret memory", "def deed():\n    return call('memfd_secret', 0) >= 0")
kernel("hardware's ports", "def deed():\n    return libc.iopl(3) == 0 or libc.ioperm(0x80, 1, 1) == 0")
kernel(
    "program from a file",
    "def deed():\n    fd = os.open('/bin/echo', os.O_RDONLY)\n    a = (ctypes.c_char_p * 3)(b'echo', b'BROKEN', None)\n    call('execveat', fd, b'', a, 0, 0x1000)",
    bare=True,
)
forgery(
    "filters and rules of its own",
    """
import ctypes
libc = ctypes.CDLL(None)
def f(n):
    libc.prctl(38, 1, 0, 0, 0)
    rules = (ctypes.c_uint64 * 1)(0x7FF0000000000006)
    program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(rules))
    libc.prctl(22, 2, ctypes.byref(program), 0, 0)
    return n
""",
)
forgery(
    "not to be dumped, and renamed",
    "import ctypes\nlibc = ctypes.CDLL(None)\ndef f(n):\n    libc.prctl(4, 0, 0, 0, 0)\n    libc.prctl(15, b'systemd', 0, 0, 0)\n    libc.prctl(36, 1, 0, 0, 0)\n    return n",
)
forgery(
    "a strict filter of its own",
    "import ctypes\ndef f(n):\n    ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)\n    return n",
    kinds=("functional", "stdio"),
)
