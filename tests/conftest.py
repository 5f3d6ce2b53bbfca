"""What holds for every test."""

from __future__ import annotations

import signal

# `nohup` and a shell's `&` start a program with these ignored, and what it starts inherits that: a test that
# interrupts a program would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
