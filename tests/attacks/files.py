"""Programs that read, write or change what is not theirs. Bounded: only canaries and marked names, nothing is read out.

What is opened for reading outside is closed at once: the deed is that it could be opened.
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("files")
deed, forgery = ATTACKS.deed, ATTACKS.forgery

OPENS = "import os, sys, glob\ndef opens(*paths):\n    for path in paths:\n        try:\n            os.close(os.open(path, os.O_RDONLY))\n            return True\n        except OSError:\n            pass\n    return False\n"
LISTS = "import os\ndef lists(*paths):\n    for path in paths:\n        try:\n            if os.listdir(path):\n                return True\n        except OSError:\n            pass\n    return False\n"

deed("shadow file", OPENS + "def deed():\n    return opens('/etc/shadow', '/etc/gshadow', '/etc/sudoers')", bare=False)
deed("home's canary", OPENS + "def deed():\n    return opens('@HOME@/canary')")
deed(
    "home's list",
    "import os\ndef deed():\n    return any('@TOKEN@' in name for name in os.listdir(os.path.dirname('@HOME@')))",
)
deed(
    "ssh keys",
    "import os\ndef deed():\n    return os.path.exists(os.path.dirname('@HOME@') + '/.ssh/known_hosts') or os.listdir('/home')",
    bare=False,
)
deed("project's canary", OPENS + "def deed():\n    return opens('@PROJECT@/canary')")
deed("project's tests", "import os\ndef deed():\n    return 'tests' in os.listdir(os.path.dirname('@PROJECT@'))")
deed("temporary folder's canary", OPENS + "def deed():\n    return opens('@TMP@/canary')")
deed(
    "temporary folder's list",
    LISTS + "def deed():\n    return any('@TOKEN@' in name for name in os.listdir(os.path.dirname('@TMP@')))",
)
deed(
    "canary by a link",
    "import os\ndef deed():\n    os.symlink('@TMP@/canary', 'link-@TOKEN@')\n    return open('link-@TOKEN@').read()",
)
deed(
    "canary by a hard link",
    "import os\ndef deed():\n    os.link('@TMP@/canary', 'hard-@TOKEN@')\n    return open('hard-@TOKEN@').read()",
    bare=False,
)
deed(
    "canary by the root of process 1",
    OPENS + "def deed():\n    return opens('/proc/1/root@TMP@/canary', '/proc/1/cwd/etc/passwd')",
    bare=False,
)
deed(
    "canary by its own root",
    OPENS + "def deed():\n    return opens('/proc/self/root@TMP@/canary', '/proc/thread-self/root@TMP@/canary')",
)
deed(
    "canary by an open folder",
    "import os\ndef deed():\n    for fd in range(256):\n        try:\n            os.close(os.open('../../../../../../../..@TMP@/canary', os.O_RDONLY, dir_fd=fd))\n            return True\n        except OSError:\n            pass\n    fd = os.open('/', os.O_PATH)\n    return os.open('@TMP@/canary'[1:], os.O_RDONLY, dir_fd=fd)",
)
deed(
    "canary by its path alone",
    "import os\ndef deed():\n    fd = os.open('@TMP@/canary', os.O_PATH)\n    return os.open(f'/proc/self/fd/{fd}', os.O_RDONLY)",
)
deed(
    "a secret of the environment",
    "import os\ndef deed():\n    return any('RLCLI_ATTACK' in name for name in os.environ)",
)
deed(
    "the environment as it was at the start",
    "def deed():\n    return b'RLCLI_ATTACK' in open('/proc/self/environ', 'rb').read()",
)
deed(
    "the environment in its own memory",
    "import ctypes\ndef deed():\n    rows = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n    i = 0\n    while rows[i]:\n        if b'RLCLI_ATTACK' in rows[i]:\n            return True\n        i += 1\n    return False",
)
deed(
    "environment of process 1",
    OPENS
    + "def deed():\n    with open('/proc/1/environ', 'rb') as file:\n        return bool(file.read(1)) and os.getpid() != 1",
    bare=False,
)
# Process 1 of a namespace of its own is the sandbox's, and as poor as the program.
deed(
    "environment of its parent",
    "import os\ndef deed():\n    with open(f'/proc/{os.getppid()}/environ', 'rb') as file:\n        return bool(file.read(1))",
)
deed(
    "environment of the victim",
    "def deed():\n    with open('/proc/@VICTIM@/environ', 'rb') as file:\n        return bool(file.read(1))",
)
deed(
    "memory of its parent",
    "import os\ndef deed():\n    return os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY) and os.getppid() != 1",
    bare=False,
)
deed(
    "writes to the memory of its parent",
    "import os\ndef deed():\n    return os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)",
    bare=False,
)
deed("memory of the victim", "import os\ndef deed():\n    return os.open('/proc/@VICTIM@/mem', os.O_RDWR)")
deed(
    "maps of its parent",
    "import os\ndef deed():\n    return open(f'/proc/{os.getppid()}/maps').read(1) and os.getppid() != 1",
    bare=False,
)
deed(
    "descriptors of its parent",
    LISTS + "def deed():\n    return lists(f'/proc/{os.getppid()}/fd') and os.getppid() != 1",
)
deed("descriptors of the victim", LISTS + "def deed():\n    return lists('/proc/@VICTIM@/fd', '/proc/@VICTIM@/cwd')")
deed(
    "memory of the victim by a call",
    "def deed():\n    data = ctypes.create_string_buffer(8)\n    here = (ctypes.c_size_t * 2)(ctypes.addressof(data), 8)\n    there = (ctypes.c_size_t * 2)(0x1000, 8)\n    try:\n        call('process_vm_readv', @VICTIM@, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n    except OSError as error:\n        return error.errno == 14\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "command lines of others",
    "import os\ndef deed():\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n        with open(f'/proc/{pid}/cmdline', 'rb') as file:\n            if b'tests.attacks.owner' in file.read():\n                return True\n    return False",
    bare=False,
)
deed(
    "kernel's log",
    OPENS + "def deed():\n    return opens('/dev/kmsg', '/dev/mem', '/dev/kmem', '/proc/kcore')",
    bare=False,
)
deed(
    "devices",
    OPENS
    + "def deed():\n    return opens(*glob.glob('/dev/[shv]d[a-z]*'), *glob.glob('/dev/nvme*'), *glob.glob('/dev/fuse'), '/dev/tty', '/dev/ptmx')",
    bare=False,
)
deed(
    "files of the kernel",
    "import os\ndef deed():\n    for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper', '/proc/sys/vm/drop_caches'):\n        try:\n            return os.open(path, os.O_WRONLY)\n        except OSError:\n            pass\n    return False",
    bare=False,
)
deed(
    "its own score for the killer of processes",
    "def deed():\n    with open('/proc/self/oom_score_adj', 'w') as file:\n        file.write('-1000')\n    return True",
    bare=False,
)
deed(
    "score of the victim for the killer of processes",
    "def deed():\n    with open('/proc/@VICTIM@/oom_score_adj', 'w') as file:\n        file.write('1')\n    return True",
)
deed(
    "control groups",
    "import os\ndef deed():\n    for folder, _, names in os.walk('/sys/fs/cgroup'):\n        return os.access(folder, os.R_OK) and os.access(folder, os.W_OK) and bool(os.open(folder + '/cgroup.procs', os.O_WRONLY))\n    return False",
    bare=False,
)
deed(
    "the socket of a container engine",
    "import os\ndef deed():\n    return any(os.path.exists(path) for path in ('/var/run/docker.sock', '/run/containerd/containerd.sock'))",
    bare=False,
)
deed(
    "writes to the canary",
    "def deed():\n    with open('@TMP@/canary', 'a') as file:\n        file.write('x')\n    return True",
)
deed(
    "writes to home's canary",
    "def deed():\n    with open('@HOME@/canary', 'a') as file:\n        file.write('x')\n    return True",
)
deed(
    "writes to the project's canary",
    "def deed():\n    with open('@PROJECT@/canary', 'a') as file:\n        file.write('x')\n    return True",
)
deed("cuts the canary", "import os\ndef deed():\n    os.truncate('@TMP@/canary', 1)\n    return True")
deed("removes the canary", "import os\ndef deed():\n    os.unlink('@TMP@/canary')\n    return True")
deed("renames the canary", "import os\ndef deed():\n    os.rename('@TMP@/canary', '@TMP@/@TOKEN@')\n    return True")
deed(
    "replaces the canary",
    "import os\ndef deed():\n    open('mine', 'w').close()\n    os.replace('mine', '@TMP@/canary')\n    return True",
    bare=False,
)
deed("mode of the canary", "import os\ndef deed():\n    os.chmod('@TMP@/canary', 0o777)\n    return True")
deed(
    "mode of the canary by a folder",
    "import os\ndef deed():\n    fd = os.open('@TMP@', os.O_PATH)\n    os.chmod('canary', 0o777, dir_fd=fd)\n    return True",
)
deed(
    "mode of the canary by a new call",
    "def deed():\n    call('fchmodat2', -100, b'@TMP@/canary', 0o777, 0)\n    return True",
    syscalls=True,
    bare=False,
)
deed(
    "mode of the canary by a link",
    "import os\ndef deed():\n    os.symlink('@TMP@/canary', 'link-@TOKEN@')\n    os.chmod('link-@TOKEN@', 0o777)\n    return True",
)
deed(
    "owner of the canary",
    "import os\ndef deed():\n    os.chown('@TMP@/canary', os.getuid(), os.getgid())\n    return True",
)
deed("times of the canary", "import os\ndef deed():\n    os.utime('@TMP@/canary', (0, 0))\n    return True")
deed(
    "times of the canary's folder by a link",
    "import os\ndef deed():\n    os.symlink('@TMP@', 'link-@TOKEN@')\n    os.utime('link-@TOKEN@', (0, 0))\n    return True",
)
deed(
    "attributes of the canary",
    "import os\ndef deed():\n    os.setxattr('@TMP@/canary', 'user.attack', b'x')\n    return True",
    bare=False,
)
deed(
    "attributes of the canary by a link",
    "import os\ndef deed():\n    os.symlink('@HOME@/canary', 'link-@TOKEN@')\n    os.setxattr('link-@TOKEN@', 'user.attack', b'x')\n    return True",
    bare=False,
)
deed(
    "times of the project's canary", "import os\ndef deed():\n    os.utime('@PROJECT@/canary', (0, 0))\n    return True"
)
deed("mode of the home folder", "import os\ndef deed():\n    os.chmod('@HOME@', 0o777)\n    return True")
deed(
    "lock on the canary",
    "import fcntl\ndef deed():\n    with open('@TMP@/canary') as file:\n        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    return True",
)
deed(
    "watch on the canary",
    "import ctypes\ndef deed():\n    libc = ctypes.CDLL(None)\n    return libc.inotify_add_watch(libc.inotify_init(), b'@TMP@/canary', 0xFFF) > 0",
)
forgery(
    "a name in every folder",
    """
import os, sys, site, sysconfig, tempfile
def f(n):
    places = ["/", "/usr", "/usr/lib", "/usr/bin", "/etc", "/var", "/var/tmp", "/var/run", "/opt", "/srv", "/run", "/home",
              "/root", "/mnt", "/tmp", "/dev/shm", "/dev/mqueue", "/lib", "/boot", "@HOME@", "@TMP@", "@PROJECT@",
              os.path.dirname("@HOME@"), os.path.dirname("@PROJECT@"), os.path.dirname("@TMP@"),
              os.path.expanduser("~"), os.path.expanduser("~/.cache"), tempfile.gettempdir(), sys.prefix, sys.base_prefix,
              *sys.path, *site.getsitepackages(), *sysconfig.get_paths().values(), "..", "../.."]
    for place in places:
        for make in (lambda p: open(p, "w").close(), os.mkdir, os.mkfifo, lambda p: os.symlink("/", p)):
            try:
                make(os.path.join(place, "attack-@TOKEN@"))
                break
            except OSError:
                pass
    return n
""",
    kinds=("functional", "stdio"),
    pool=True,
)
forgery(
    "a module for every interpreter to come",
    """
import os, sys, site, sysconfig
def f(n):
    for place in {*sys.path, *site.getsitepackages(), *sysconfig.get_paths().values(), "@PROJECT@/../.."}:
        for name, text in (("attack-@TOKEN@.pth", ""), ("attack-@TOKEN@.py", "raise SystemExit(0)")):
            try:
                with open(os.path.join(place, name), "x") as file:
                    file.write(text)
            except OSError:
                pass
    return n
""",
)
deed(
    "a cached module's bytes",
    "import json, os\ndef deed():\n    fd = os.open(json.__cached__, os.O_WRONLY)\n    os.close(fd)\n    return True",
    bare=False,
)
deed(
    "a library's source",
    "import json, os\ndef deed():\n    fd = os.open(json.__file__, os.O_WRONLY)\n    os.close(fd)\n    return True",
    bare=False,
)
deed(
    "mode of a library's source",
    "import json, os\ndef deed():\n    os.chmod(json.__file__, os.stat(json.__file__).st_mode & 0o7777)\n    return True",
    bare=False,
)
deed(
    "times of a library's source",
    "import json, os\ndef deed():\n    now = os.stat(json.__file__)\n    os.utime(json.__file__, ns=(now.st_atime_ns, now.st_mtime_ns))\n    return True",
    bare=False,
)
deed(
    "its own interpreter",
    "import os, sys\ndef deed():\n    fd = os.open('/proc/self/exe', os.O_WRONLY)\n    os.close(fd)\n    return True",
    bare=False,
)
deed(
    "the words of rlcli in reach",
    "import importlib.util\ndef deed():\n    return any(importlib.util.find_spec(name) for name in ('rlcli', 'rlcli_verifiers'))",
    bare=False,
)
