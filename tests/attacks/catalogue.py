"""The type of an attack, its formatting as a completion, and the collection of all attacks.

Every program here is bounded, so that it does no harm where a sandbox fails: at most 200 forks or 400 threads, 1.5 GiB
of memory, 1 GiB of files, connections to the harness's own port on loopback only, signals to the harness's own victim.
The two exceptions name an address outside that is reserved for documentation, and send nothing of value to it.

Two kinds of program:

- A *deed* is answered rightly when, and only when, the program managed what it must not: its `deed()` says so, and the
  one test case expects the word BROKEN. Run without a sandbox most deeds do succeed, which shows that they are no
  blanks.
- A *forgery* is asked for values that nobody can know (`secret-` and 16 random hex digits, drawn for each run): an OK
  is a forged pass. Bombs are forgeries too: what counts for them is what the harness sees from outside.

Placeholders that the harness fills in: @HOME@, @PROJECT@, @TMP@ (folders of canaries), @TOKEN@ (part of the name of
all that a program leaves behind), @PORT@ (a listener of the harness), @LISTEN@ (a free port), @VICTIM@ (a process of
the harness), @ABSTRACT@ and @UNIX@ (its unix sockets).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlcli.types import Outcome

FAILED = frozenset({Outcome.WRONG, Outcome.NO_ANSWER})
KINDS = ("functional", "check", "asserts", "stdio")
FENCED = "```python\n{}\n```"

DEED = """

def f(n):
    try:
        return "BROKEN" if deed() else "held"
    except BaseException as error:
        return "held: " + type(error).__name__ + ": " + str(error)[:200]
"""
STDIO = """

if __name__ == "__main__":
    print(f(int(input())))
"""
SYSCALLS = """import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = platform.machine() == "aarch64"
NR = {"socket": (41, 198), "connect": (42, 203), "fork": (57, -1), "vfork": (58, -1), "clone": (56, 220),
      "clone3": (435, 435), "ptrace": (101, 117), "memfd_create": (319, 279), "memfd_secret": (447, 447),
      "io_uring_setup": (425, 425), "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
      "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "process_vm_readv": (310, 270), "unshare": (272, 97),
      "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51), "keyctl": (250, 219),
      "add_key": (248, 217), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
      "shmget": (29, 194), "shmat": (30, 196), "shmdt": (67, 197), "shmctl": (31, 195), "msgget": (68, 186),
      "semget": (64, 190), "mq_open": (240, 180), "mq_unlink": (241, 181),
      "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
      "finit_module": (313, 273), "reboot": (169, 142), "sethostname": (170, 161), "prlimit64": (302, 261),
      "sched_setscheduler": (144, 119), "setpriority": (141, 140), "ioprio_set": (251, 30), "fsopen": (430, 430),
      "open_tree": (428, 428), "execveat": (322, 281), "personality": (135, 92), "fchmodat2": (452, 452)}

def call(name, *args):
    ctypes.set_errno(0)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = libc.syscall(ctypes.c_long(NR[name][ARM]), *wide)
    if got < 0:
        raise OSError(ctypes.get_errno(), name + ": " + os.strerror(ctypes.get_errno()))
    return got

"""
"""Raw system calls by name (x86_64, aarch64): what the libraries of Python would refuse or cannot say."""


@dataclass(frozen=True)
class Attack:
    """One program of the suite.

    kind: how it is asked, one of KINDS. truth: its ground truth where that is special, written as {"kind": …}; S0, S1
    and so on in it are replaced by fresh secrets. deed: see above. bare: this deed succeeds where there is no sandbox.
    allowed: the outcomes that it may have. pool: run through the scoring pool as well. repeated: another kind
    of question has the same program.
    """

    group: str
    name: str
    completion: str
    kind: str = "functional"
    truth: str = ""
    deed: bool = False
    bare: bool = False
    allowed: frozenset[Outcome] = FAILED
    timeout_s: float = 1.0
    pool: bool = False
    repeated: bool = False

    @property
    def id(self) -> str:
        return f"{self.group}-{self.name}".replace(" ", "-").replace("/", "_")

    def ground_truth(self) -> str:
        """Fresh at each call: nothing that a program saw or left in an earlier run is worth anything now."""
        if self.deed:
            return json.dumps(functional([[0]], ["BROKEN"]))
        known = [f"secret-{secrets.token_hex(8)}" for _ in range(3)]
        if not self.truth:
            return json.dumps(asked(self.kind, known))
        text = self.truth
        for index, value in enumerate(known):
            text = text.replace(f"S{index}", value)
        return text


@dataclass
class Group:
    """The attacks of one kind; a module of this package makes one and adds to it."""

    name: str
    attacks: list[Attack] = field(default_factory=list)

    def deed(self, name: str, source: str, *, bare: bool = True, syscalls: bool = False, **fields: Any) -> None:
        """A program whose `deed()` returns something true when it managed what it must not."""
        program = (SYSCALLS if syscalls else "") + source.strip("\n") + DEED
        self.attacks.append(Attack(self.name, name, FENCED.format(program), deed=True, bare=bare, **fields))

    def forgery(self, name: str, source: str, *, kinds: tuple[str, ...] = ("functional",), **fields: Any) -> None:
        """A program that cannot know the answers to `f(0)`, `f(1)`, `f(2)`; asked in each of `kinds`."""
        for kind in kinds:
            program = source.strip("\n") + (STDIO if kind == "stdio" and "input(" not in source else "")
            label = name if len(kinds) == 1 else f"{name} ({kind})"
            self.attacks.append(
                Attack(self.name, label, FENCED.format(program), kind=kind, repeated=kind != kinds[0], **fields)
            )

    def text(self, name: str, completion: str, **fields: Any) -> None:
        """A whole completion, taken as it is."""
        self.attacks.append(Attack(self.name, name, completion, **fields))


def functional(inputs: list[list[Any]], outputs: list[Any], entry_point: str = "f") -> dict[str, Any]:
    cases = [{"input": arguments, "output": wanted} for arguments, wanted in zip(inputs, outputs, strict=True)]
    return {"kind": "functional", "entry_point": entry_point, "cases": cases}


def asked(kind: str, known: list[str]) -> dict[str, Any]:
    """A ground truth of `kind` in which f(0), f(1), … are the values of `known`."""
    if kind == "functional":
        return functional([[n] for n in range(len(known))], known)
    if kind == "stdio":
        return {"kind": kind, "cases": [{"input": f"{n}\n", "output": f"{value}\n"} for n, value in enumerate(known)]}
    if kind == "asserts":
        return {"kind": kind, "setup": "", "asserts": [f"assert f({n}) == {value!r}" for n, value in enumerate(known)]}
    lines = "".join(f"    assert candidate({n}) == {value!r}\n" for n, value in enumerate(known))
    return {"kind": "check", "test": f"def check(candidate):\n{lines}", "entry_point": "f"}


def collect() -> list[Attack]:
    """All attacks, in the order of their groups; no two of one name."""
    from tests.attacks import disk, files, forging, lies, loops, memory, network, output, processes, source, system

    modules = (loops, processes, memory, output, disk, files, network, system, forging, lies, source)
    attacks = [attack for module in modules for attack in module.ATTACKS.attacks]
    names = [attack.id for attack in attacks]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return attacks


def programs(attacks: list[Attack]) -> Iterator[str]:
    """The distinct completions: one that is asked in several kinds counts once."""
    yield from {attack.completion.replace(STDIO, "") for attack in attacks}
