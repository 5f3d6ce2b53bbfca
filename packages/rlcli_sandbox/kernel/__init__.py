"""The Linux kernel's means to isolate a process: Landlock, seccomp filters and resource limits."""
