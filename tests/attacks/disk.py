"""Programs that fill the disk, or leave what is hard to clear away. Bounded: 1 GiB or 3,000 names each.

A deed here says that it holds three times what a sandbox allows (192 MiB).
"""

# ruff: noqa: E501 (a short program stands on one line)

from __future__ import annotations

from tests.attacks.catalogue import Group

ATTACKS = Group("disk")
deed, forgery = ATTACKS.deed, ATTACKS.forgery
SLOW = 4.0

PLACES = """
import os, tempfile
seen = set()
def places():
    for place in (os.getcwd(), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), "/run"):
        try:
            probe = os.path.join(place, "probe-@TOKEN@")
            open(probe, "w").close()
            os.unlink(probe)
            if os.path.realpath(place) not in seen:
                seen.add(os.path.realpath(place))
                yield place
        except OSError:
            pass
"""
"""The folders that a program may write to."""

deed(
    "one huge file",
    "def deed():\n    with open('big-@TOKEN@', 'wb') as file:\n        for _ in range(12):\n            file.write(b'x' * (16 << 20))\n    return True",
    timeout_s=SLOW,
    pool=True,
)
deed(
    "several large files",
    "def deed():\n    for i in range(12):\n        with open(f'big-@TOKEN@-{i}', 'wb') as file:\n            file.write(b'x' * (16 << 20))\n    return True",
    timeout_s=SLOW,
)
deed(
    "large files in every place",
    PLACES
    + """
def deed():
    held, names = 0, []
    try:
        for place in places():
            for i in range(24):
                names.append(os.path.join(place, f"big-@TOKEN@-{i}"))
                try:
                    with open(names[-1], "wb") as file:
                        held += file.write(b"x" * (8 << 20))
                except OSError:
                    break
        return held >= 192 << 20
    finally:
        for name in names:
            os.path.exists(name) and os.unlink(name)
""",
    timeout_s=SLOW,
)
deed(
    "files without a name",
    """
import os
def deed():
    kept, block = [], b"x" * (16 << 20)
    for i in range(12):
        fd = os.open(f"gone-@TOKEN@-{i}", os.O_CREAT | os.O_RDWR)
        os.unlink(f"gone-@TOKEN@-{i}")
        assert os.write(fd, block) == len(block)
        kept.append(fd)
    return len(kept) == 12
""",
    timeout_s=SLOW,
)
deed(
    "temporary files that never had a name",
    """
import os
def deed():
    kept, block = [], b"x" * (16 << 20)
    for i in range(12):
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR)
        assert os.write(fd, block) == len(block)
        kept.append(fd)
    return len(kept) == 12
""",
    bare=False,
    timeout_s=SLOW,
)
deed(
    "files in a map alone",
    """
import mmap, os
def deed():
    kept = []
    for i in range(24):
        fd = os.open(f"map-@TOKEN@-{i}", os.O_CREAT | os.O_RDWR)
        os.ftruncate(fd, 8 << 20)
        held = mmap.mmap(fd, 8 << 20)
        os.unlink(f"map-@TOKEN@-{i}")
        os.close(fd)
        for at in range(0, len(held), 4096):
            held[at] = 1
        held.madvise(mmap.MADV_DONTNEED)
        kept.append(held)
    import time
    time.sleep(0.5)
    return len(kept) == 24
""",
    timeout_s=SLOW,
)
deed(
    "files on their way in a socket",
    """
import array, os, socket
def deed():
    a, b = socket.socketpair()
    for i in range(24):
        fd = os.open(f"sent-@TOKEN@-{i}", os.O_CREAT | os.O_RDWR)
        os.unlink(f"sent-@TOKEN@-{i}")
        assert os.write(fd, b"x" * (8 << 20)) == 8 << 20
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        os.close(fd)
    import time
    time.sleep(0.5)
    return True
""",
    timeout_s=SLOW,
)
deed(
    "space reserved",
    "import os\ndef deed():\n    for i in range(3):\n        fd = os.open(f'r-@TOKEN@-{i}', os.O_CREAT | os.O_RDWR)\n        os.posix_fallocate(fd, 0, 64 << 20)\n    return True",
    bare=False,
)
deed(
    "in a folder that none may read",
    "import os\ndef deed():\n    os.mkdir('d-@TOKEN@')\n    for i in range(12):\n        with open(f'd-@TOKEN@/{i}', 'wb') as file:\n            os.chmod('d-@TOKEN@', 0)\n            file.write(b'x' * (16 << 20))\n        os.chmod('d-@TOKEN@', 0o700)\n    os.chmod('d-@TOKEN@', 0)\n    return True",
    timeout_s=SLOW,
)
forgery(
    "sparse file",
    "def f(n):\n    with open('sparse-@TOKEN@', 'wb') as file:\n        file.truncate(1 << 40)\n    return n",
)
forgery(
    "grows until it is stopped",
    "def f(n):\n    with open('big-@TOKEN@', 'wb') as file:\n        for _ in range(64):\n            file.write(b'x' * (16 << 20))\n            file.flush()\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "many small files",
    "def f(n):\n    for i in range(3000):\n        open(f's-@TOKEN@-{i}', 'w').close()\n    return n",
)
forgery(
    "file size signal ignored",
    "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ndef f(n):\n    with open('big-@TOKEN@', 'wb') as file:\n        for _ in range(64):\n            try:\n                file.write(b'x' * (16 << 20))\n            except OSError:\n                pass\n    return n",
)
forgery(
    "deep folders",
    "import os\ndef f(n):\n    for _ in range(3000):\n        os.mkdir('d')\n        os.chdir('d')\n    return n",
    timeout_s=2.0,
)
forgery(
    "deep folders of long names",
    "import os\ndef f(n):\n    for _ in range(400):\n        os.mkdir('d' * 250)\n        os.chdir('d' * 250)\n    return n",
)
forgery(
    "names with odd characters",
    "import os\ndef f(n):\n    for name in (b'\\n', b'\\xff\\xfe', b'-rf', b'*', b'$(id)', b'a' * 255, b' ', b'\\x1b[2J', '\\u202e'.encode()):\n        open(name, 'w').close()\n        os.mkdir(name + b'd' if len(name) < 250 else b'b' * 255)\n    return n",
)
forgery(
    "folders that none may read",
    "import os\ndef f(n):\n    os.makedirs('a/b/c')\n    open('a/b/c/file', 'w').close()\n    for name in ('a/b/c', 'a/b', 'a', '.'):\n        os.chmod(name, 0)\n    return n",
)
forgery(
    "links out of the folder",
    "import os\ndef f(n):\n    for i, place in enumerate(('@HOME@', '@TMP@', '@PROJECT@', '/', '/tmp', '..')):\n        os.symlink(place, f'link{i}')\n    os.mkdir('sub')\n    os.symlink('@TMP@', 'sub/link')\n    os.chmod('sub', 0o500)\n    return n",
)
forgery(
    "link in place of a folder",
    "import os, shutil\ndef f(n):\n    here = os.getcwd()\n    os.chdir('/')\n    try:\n        os.rmdir(here)\n        os.symlink('@TMP@', here)\n    except OSError:\n        pass\n    return n",
)
forgery(
    "links in a ring",
    "import os\ndef f(n):\n    os.symlink('b', 'a')\n    os.symlink('a', 'b')\n    os.symlink('.', 'self')\n    return n",
)
forgery("fifos", "import os\ndef f(n):\n    for i in range(20):\n        os.mkfifo(f'fifo{i}')\n    return n")
forgery(
    "files that cannot be changed",
    "import fcntl, os, struct\ndef f(n):\n    os.mkdir('fixed')\n    for name in ('fixed/file', 'fixed'):\n        if name != 'fixed':\n            open(name, 'w').close()\n        fd = os.open(name, os.O_RDONLY)\n        try:\n            fcntl.ioctl(fd, 0x40086602, struct.pack('l', 0x10))\n        except OSError:\n            pass\n    return n",
)
forgery(
    "hard link to a canary",
    "import os\ndef f(n):\n    for place in ('@HOME@', '@TMP@', '@PROJECT@'):\n        try:\n            os.link(place + '/canary', 'taken')\n            open('taken', 'a').write('x')\n        except OSError:\n            pass\n    return n",
)
forgery(
    "folder removed beneath it",
    "import os, shutil\ndef f(n):\n    shutil.rmtree(os.getcwd(), ignore_errors=True)\n    return n",
    kinds=("functional", "stdio"),
)
forgery(
    "held open and growing at the end",
    "import atexit, os, time\ndef grow():\n    with open('late-@TOKEN@', 'wb') as file:\n        for _ in range(200):\n            file.write(b'x' * (1 << 20))\n            file.flush()\n            time.sleep(0.01)\natexit.register(grow)\ndef f(n):\n    return n",
)
