"""Programs that start others, stay behind or hurt others. Bounded: at most 200 forks, 400 threads, 20 s of life each."""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("processes")
deed, forgery = ATTACKS.deed, ATTACKS.forgery

deed(
    "fork",
    "import os\ndef deed():\n    pid = os.fork()\n    if pid == 0:\n        os._exit(0)\n    return os.waitpid(pid, 0)",
)
forgery(
    "fork bomb",
    """
import os, time
def f(n):
    for _ in range(200):
        try:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
        except OSError:
            pass
    return n
""",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery(
    "fork bomb that ignores signals",
    """
import os, signal, time
def f(n):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(50):
        try:
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
        except OSError:
            pass
    os._exit(0)
""",
)
deed(
    "multiprocessing",
    "import multiprocessing as m\ndef deed():\n    with m.get_context('fork').Pool(1) as p:\n        return p.apply(abs, (-1,))",
)
deed(
    "multiprocessing spawn",
    "import multiprocessing as m\ndef deed():\n    p = m.get_context('spawn').Process(target=print)\n    p.start()\n    p.kill()\n    return p.pid",
    bare=False,
)
deed(
    "process pool",
    "from concurrent.futures import ProcessPoolExecutor as P\ndef deed():\n    with P(1) as p:\n        return p.submit(abs, -1).result(5)",
)
deed("subprocess", "import subprocess\ndef deed():\n    return subprocess.run(['/bin/true']).returncode == 0")
deed("os.system", "import os\ndef deed():\n    return os.system('true') == 0")
deed(
    "posix_spawn", "import os\ndef deed():\n    return os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)[1] == 0"
)
deed(
    "pty fork",
    "import os, pty\ndef deed():\n    pid, _ = pty.fork()\n    if pid == 0:\n        os._exit(0)\n    return pid",
)
deed(
    "exec of itself",
    "import os, sys\ndef f_in_new():\n    pass\ndef deed():\n    os.execv('/bin/echo', ['echo', 'BROKEN'])",
)
deed(
    "exec of python",
    "import os, sys\ndef deed():\n    os.execv(sys.executable, [sys.executable, '-c', 'print(\"BROKEN\")'])",
)
deed(
    "exec from memory",
    "def deed():\n    fd = call('memfd_create', b'x', 0)\n    with open('/bin/echo', 'rb') as file:\n        os.write(fd, file.read())\n    os.execve(fd, ['echo', 'BROKEN'], {})",
    syscalls=True,
)
deed(
    "syscall fork",
    "def deed():\n    pid = call('fork')\n    if pid == 0:\n        os._exit(0)\n    return os.waitpid(pid, 0)",
    syscalls=True,
)
deed(
    "syscall clone",
    "def deed():\n    pid = call('clone', 17, 0, 0, 0, 0)\n    if pid == 0:\n        os._exit(0)\n    return os.waitpid(pid, 0)",
    syscalls=True,
)
deed(
    "syscall clone as sibling",
    "def deed():\n    pid = call('clone', 17 | 0x8000, 0, 0, 0, 0)\n    if pid == 0:\n        os._exit(0)\n    return pid > 0",
    syscalls=True,
)
deed(
    "syscall clone in new namespaces",
    "def deed():\n    pid = call('clone', 17 | 0x10000000, 0, 0, 0, 0)\n    if pid == 0:\n        os._exit(0)\n    return pid > 0",
    syscalls=True,
    bare=False,
)
deed(
    "syscall clone3",
    """
def deed():
    arguments = (ctypes.c_uint64 * 11)()
    arguments[4] = 17
    pid = call("clone3", ctypes.byref(arguments), 88)
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)
""",
    syscalls=True,
    bare=False,
)
deed(
    "fork by the 32-bit gate",
    """
import mmap
def deed():
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("b802000000cd80c3"))
    entry = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    pid = entry()
    if pid == 0:
        os._exit(0)
    return pid > 0
""",
    syscalls=True,
    bare=False,
)
deed(
    "fork by the x32 numbers",
    "def deed():\n    pid = libc.syscall(ctypes.c_long(0x40000000 + 57))\n    if pid == 0:\n        os._exit(0)\n    return pid > 0",
    syscalls=True,
    bare=False,
)
deed(
    "vfork",
    "def deed():\n    pid = libc.syscall(ctypes.c_long(NR['vfork'][0])) if not ARM else -1\n    if pid == 0:\n        libc._exit(0)\n    return pid > 0",
    syscalls=True,
    bare=False,
)
forgery(
    "daemonised grandchild",
    """
import os, time
def f(n):
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(256):
                    try:
                        os.close(fd)
                    except OSError:
                        pass
                time.sleep(20)
            os._exit(0)
    except OSError:
        pass
    return n
""",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery(
    "outlives its parent's death signal",
    """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)
libc.prctl(36, 1, 0, 0, 0)
def f(n):
    try:
        if os.fork() == 0:
            libc.prctl(1, 0, 0, 0, 0)
            os.setsid()
            time.sleep(20)
    except OSError:
        pass
    os._exit(0)
""",
)
forgery(
    "leaves its own session, then hangs",
    "import os, time\ndef f(n):\n    try:\n        os.setsid()\n    except OSError:\n        pass\n    time.sleep(60)",
)
forgery(
    "leaves its own process group, then hangs",
    "import os, time\ndef f(n):\n    try:\n        os.setpgid(0, 0)\n    except OSError:\n        pass\n    time.sleep(60)",
)
forgery(
    "closes everything, then hangs",
    "import os, time\ndef f(n):\n    os.closerange(0, 4096)\n    time.sleep(60)",
    kinds=("functional", "stdio"),
)
forgery(
    "thread bomb",
    """
import threading, time
def f(n):
    for _ in range(400):
        try:
            threading.Thread(target=time.sleep, args=(20,)).start()
        except RuntimeError:
            break
    return n
""",
    kinds=("functional", "stdio"),
)
forgery(
    "thread bomb by clone",
    """
import _thread, time
for _ in range(400):
    try:
        _thread.start_new_thread(time.sleep, (20,))
    except RuntimeError:
        break
def f(n):
    return n
""",
)
deed("kills the victim", "import os, signal\ndef deed():\n    os.kill(@VICTIM@, signal.SIGKILL)\n    return True")
deed(
    "stops the victim",
    "import os, signal\ndef deed():\n    os.kill(@VICTIM@, signal.SIGSTOP)\n    return True",
    bare=False,
)
deed(
    "kills the victim's group",
    "import os, signal\ndef deed():\n    os.killpg(@VICTIM@, signal.SIGKILL)\n    return True",
    bare=False,
)
deed(
    "kills the victim by a queue",
    "def deed():\n    info = (ctypes.c_int * 32)()\n    info[0], info[2] = 9, -1\n    call('rt_sigqueueinfo', @VICTIM@, 9, ctypes.byref(info))\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "kills the victim by a handle",
    "def deed():\n    fd = call('pidfd_open', @VICTIM@, 0)\n    call('pidfd_send_signal', fd, 9, 0, 0)\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "kills the victim's thread",
    "def deed():\n    call('tkill', @VICTIM@, 9)\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "kills the victim by a file's owner",
    "import fcntl, os, signal\ndef deed():\n    r, w = os.pipe()\n    fcntl.fcntl(r, fcntl.F_SETOWN, @VICTIM@)\n    fcntl.fcntl(r, 10, 9)\n    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n    os.write(w, b'x')\n    import time\n    time.sleep(0.1)\n    return False",
    bare=False,
)
deed("may signal its parent", "import os\ndef deed():\n    os.kill(os.getppid(), 0)\n    return os.getppid() > 0")
deed("may signal everybody", "import os\ndef deed():\n    os.kill(-1, 0)\n    return True")
deed("may signal process 1", "import os\ndef deed():\n    os.kill(1, 0)\n    return os.getpid() != 1", bare=False)
forgery(
    "terminates its parent",
    "import os, signal\ndef f(n):\n    if os.getppid() > 1:\n        os.kill(os.getppid(), signal.SIGTERM)\n    return n",
    pool=True,
)
forgery(
    "kills its parent",
    "import os, signal\nif os.getppid() > 1:\n    os.kill(os.getppid(), signal.SIGKILL)\ndef f(n):\n    return n",
)
forgery(
    "kills itself",
    "import os, signal\ndef f(n):\n    os.kill(os.getpid(), signal.SIGKILL)",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery("terminates itself", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\ndef f(n):\n    return n")
forgery("aborts", "import os\ndef f(n):\n    os.abort()")
forgery("reads address zero", "import ctypes\ndef f(n):\n    ctypes.string_at(0)", kinds=("functional", "stdio"))
forgery(
    "a bell at the deadline's end",
    "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ndef f(n):\n    while True: pass",
)
deed(
    "traces the victim",
    "def deed():\n    call('ptrace', 16, @VICTIM@, 0, 0)\n    call('ptrace', 17, @VICTIM@, 0, 0)\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "traces its parent",
    "def deed():\n    call('ptrace', 16, os.getppid(), 0, 0)\n    call('ptrace', 17, os.getppid(), 0, 0)\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "lowers the victim's limits",
    "import resource\ndef deed():\n    resource.prlimit(@VICTIM@, resource.RLIMIT_CPU, (1000000, 1000000))\n    return True",
)
deed("renices the victim", "def deed():\n    call('setpriority', 0, @VICTIM@, 5)\n    return True", syscalls=True)
deed(
    "schedules the victim",
    "import os\ndef deed():\n    os.sched_setaffinity(@VICTIM@, os.sched_getaffinity(@VICTIM@))\n    return True",
)
