"""Limits of the calls to one endpoint, shared by all scoring processes of a machine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from rlcli.support.files import private_folder

SLOT_POLL_S = 0.05
"""Mean time between two attempts to get a slot."""


def shared_folder() -> Path:
    """The folder with the state of all endpoints, for this user's processes. Raises `SetupError` if another user owns
    its name."""
    return private_folder(Path(tempfile.gettempdir(), f"rlcli-judge-{os.getuid()}"))


@dataclass(frozen=True)
class Limits:
    """Limits of one endpoint.

    They hold for a machine and its user: the state is in files that the kernel unlocks if a process is killed.
    """

    endpoint: str
    """Identity of the endpoint; equal ones share the limits."""
    concurrency: int
    """Maximum number of concurrent calls."""
    requests_per_minute: int = 0
    """0: not limited."""
    tokens_per_minute: int = 0
    """0: not limited."""

    @property
    def folder(self) -> Path:
        path = shared_folder() / sha256(self.endpoint.encode()).hexdigest()[:16]
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the `concurrency` slots; waits for a free one."""
        file = await self._free()
        try:
            yield
        finally:
            file.close()

    async def pace(self, tokens: int) -> None:
        """Wait until the limits of a minute allow a call of about `tokens` tokens."""
        while (wait_s := self._take(tokens)) > 0:
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.1))

    def correct(self, tokens: int) -> None:
        """Add the difference between the tokens used and the estimate given to `pace`."""
        if self.tokens_per_minute:
            self._change(0.0, float(tokens), always=True)

    async def _free(self) -> BinaryIO:
        slots = list(range(self.concurrency))
        while True:
            random.shuffle(slots)
            for slot in slots:
                file = (self.folder / f"slot-{slot}").open("ab")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                except BlockingIOError:
                    file.close()
            await asyncio.sleep(SLOT_POLL_S * random.uniform(0.5, 1.5))

    def _take(self, tokens: int) -> float:
        """Take one request and its tokens; returns the seconds until they are available, 0 if they were taken."""
        if not self.requests_per_minute and not self.tokens_per_minute:
            return 0.0
        return self._change(1.0, float(tokens))

    def _change(self, requests: float, tokens: float, always: bool = False) -> float:
        """Take from two buckets that fill by a minute's limit in a minute. A call larger than its bucket takes all."""
        limits = {"requests": float(self.requests_per_minute), "tokens": float(self.tokens_per_minute)}
        with (self.folder / "minute").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            now, available = time.time(), dict(limits)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                state = json.loads(file.read())
                passed = max(now - state["at"], 0.0) / 60.0
                available = {name: min(state[name] + passed * limit, limit) for name, limit in limits.items()}
            wanted = {"requests": requests, "tokens": tokens if always else min(tokens, limits["tokens"])}
            short = [(wanted[name] - available[name]) / limit for name, limit in limits.items() if limit]
            wait_s = 0.0 if always else 60.0 * max(0.0, *short)
            if wait_s <= 0:
                available = {name: available[name] - wanted[name] for name in limits}
            file.truncate(0)
            file.write(json.dumps({**available, "at": now}))
        return wait_s
