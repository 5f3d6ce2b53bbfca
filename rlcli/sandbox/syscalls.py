"""Numbers of the system calls that the filter knows, by machine. A call is absent where its machine never had it.

Taken from Linux's `asm/unistd_64.h` and `asm-generic/unistd.h`; numbers of system calls never change.
"""

from __future__ import annotations

NEWEST = 451
"""The last number of these tables' time (`cachestat`, 6.5; both machines). Later calls do not exist in a sandbox."""

NETWORK: dict[str, tuple[int | None, int | None]] = {
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "socket": (41, 198),
}
"""Sockets, and what could carry a file descriptor or a datagram to a socket of another process."""

PROCESSES: dict[str, tuple[int | None, int | None]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "tkill": (200, 130),
    "vfork": (58, None),
}
"""New processes, programs, sessions; the memory and signals of other processes."""

KERNEL: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_restrict_self": (446, 446),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "nfsservctl": (180, 42),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "seccomp": (317, 277),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
"""Interfaces with a large attack surface and no use to a solution of a puzzle."""

MOUNTS: dict[str, tuple[int | None, int | None]] = {
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
}
"""Mounts and namespaces, and files by handle."""

SHARED: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
}
"""Memory and queues that outlive the process or that its limits do not count."""

METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "chown": (92, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "setxattr": (188, 5),
    "truncate": (76, 45),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
"""Changes to a file that Landlock does not govern: refused where it alone protects the machine's files."""

JUDGED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "mmap": (9, 222),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sendto": (44, 206),
    "socketpair": (53, 199),
    "tgkill": (234, 131),
}
"""Allowed or refused by their arguments."""
