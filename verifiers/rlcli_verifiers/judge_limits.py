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

LOOK_S = 0.05
"""Time between two looks for a free slot."""


def shared_folder() -> Path:
    """The folder with the state of all endpoints, for this user's processes. Raises `SetupError` if another user has
    taken its name."""
    return private_folder(Path(tempfile.gettempdir(), f"rlcli-judge-{os.getuid()}"))


@dataclass(frozen=True)
class Limits:
    """Of one endpoint. concurrency: calls at once. requests_per_minute, tokens_per_minute: 0: not limited.

    They hold for a machine and its user: the state is in files that the kernel unlocks if a process is killed.
    """

    endpoint: str
    concurrency: int
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def folder(self) -> Path:
        path = shared_folder() / sha256(self.endpoint.encode()).hexdigest()[:16]
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the `concurrency` places, once there is one."""
        file = await self._free()
        try:
            yield
        finally:
            file.close()

    async def pace(self, tokens: int) -> None:
        """Wait until the limits of a minute allow a call of about so many tokens."""
        while (wait_s := self._take(tokens)) > 0:
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.1))

    def correct(self, tokens: int) -> None:
        """Count so many tokens more (or fewer) than `pace` was told."""
        if self.tokens_per_minute:
            self._change(0.0, float(tokens), always=True)

    async def _free(self) -> BinaryIO:
        places = list(range(self.concurrency))
        while True:
            random.shuffle(places)
            for place in places:
                file = (self.folder / f"slot-{place}").open("ab")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                except BlockingIOError:
                    file.close()
            await asyncio.sleep(LOOK_S * random.uniform(0.5, 1.5))

    def _take(self, tokens: int) -> float:
        """Take one request and its tokens; else the seconds until they are there."""
        if not self.requests_per_minute and not self.tokens_per_minute:
            return 0.0
        return self._change(1.0, float(tokens))

    def _change(self, requests: float, tokens: float, always: bool = False) -> float:
        """Take from two buckets that fill by a minute's limit in a minute. A call larger than its bucket takes all."""
        most = {"requests": float(self.requests_per_minute), "tokens": float(self.tokens_per_minute)}
        with (self.folder / "minute").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            now, left = time.time(), dict(most)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                before = json.loads(file.read())
                passed = max(now - before["at"], 0.0) / 60.0
                left = {name: min(before[name] + passed * limit, limit) for name, limit in most.items()}
            wanted = {"requests": requests, "tokens": tokens if always else min(tokens, most["tokens"])}
            short = [(wanted[name] - left[name]) / limit for name, limit in most.items() if limit]
            wait_s = 0.0 if always else 60.0 * max(0.0, *short)
            if wait_s <= 0:
                left = {name: left[name] - wanted[name] for name in most}
            file.truncate(0)
            file.write(json.dumps({**left, "at": now}))
        return wait_s
