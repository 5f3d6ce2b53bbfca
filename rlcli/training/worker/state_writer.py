"""Saves a worker's state in the background of training, and the tokens of samples that wait for a later step."""

from __future__ import annotations

import contextlib
import io
import shutil
import threading
import traceback
from collections.abc import Mapping
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from rlcli.cluster.watchdog import progress
from rlcli.data.sample_shard import SampleShard
from rlcli.errors import CheckpointError, RunFailed
from rlcli.support.files import FileFacts, described, write_synced
from rlcli.support.machine.free_memory import COPY_RESERVE, available_memory, process_limit

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.distributed import ProcessGroup

WRITE_TIMEOUT = timedelta(hours=4)
"""Longest wait until other ranks have written their parts."""
LOOK_EVERY_S = 1.0
Files = dict[str, FileFacts]
"""Relative name → size and hash."""


class StateWriter:
    """Writes copies in the background, one checkpoint at a time, on all ranks together."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._done: futures.Future[Files] | None = None
        self._folder = Path()

    def start(self, state: Mapping[str, Tensor], rank_values: Mapping[str, object], folder: Path) -> None:
        """Write `state`, which must not change from now on, and the values of this rank alone to `folder`. Collective.
        Waits for an earlier write first, whose outcome is lost unless `files` was called for it."""
        import torch.distributed as dist

        self.wait()
        if self._group is None:
            # A separate group: messages of two threads over one group would get mixed up. Gloo: data on the CPU.
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._done, self._folder = futures.Future(), folder
        # A daemon: a process that is asked to end does not wait for a slow disk.
        threading.Thread(
            target=_write, args=(self._done, [state], rank_values, folder, self._group), daemon=True
        ).start()

    def wait(self) -> None:
        """Wait until nothing is being written; this counts as progress as long as the folder grows."""
        size = -1
        while self._done is not None and not futures.wait([self._done], timeout=LOOK_EVERY_S).done:
            last_size, size = size, _size(self._folder)
            if size != last_size:
                progress()

    def files(self, wait: bool) -> Files | None:
        """The files that this rank wrote, under names that begin with the folder's; None while it still writes. Raises
        RunFailed if a rank could not write."""
        assert self._done is not None, "no write was started"
        if wait:
            self.wait()
        return self._done.result() if self._done.done() else None


def _write(
    done: futures.Future[Files],
    states: list[Mapping[str, Tensor]],
    rank_values: Mapping[str, object],
    folder: Path,
    group: ProcessGroup,
) -> None:
    """states: holds the state to write, and is empty once `done` is set: two copies must not exist at once."""
    from rlcli.model.io.model_state import save_state

    try:
        files = save_state(states.pop(), rank_values, folder, group)
        done.set_result({f"{folder.name}/{name}": facts for name, facts in files.items()})
    except BaseException as error:
        traceback.print_exc()  # to the rank's log
        shutil.rmtree(folder, ignore_errors=True)  # at once: the next step needs the disk space
        done.set_exception(_failure(error, folder))


def _size(folder: Path) -> int:
    """Bytes in its files, including other ranks' files: this rank waits for them."""
    with contextlib.suppress(OSError):  # it does not exist yet
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _failure(error: BaseException, folder: Path) -> BaseException:
    """The error for the user: one line if the disk is full; anything else, such as a rank that died, is returned as it
    is for the caller to handle."""
    from torch.distributed.checkpoint.api import CheckpointException

    label = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = sorted(error.failures.items())[0]
        label = f"rank {rank}: "
    if not isinstance(error, OSError):
        return error
    return RunFailed(
        f"{label}cannot write the checkpoint {folder}: {error.strerror or error}",
        "make room there, or give a folder that can be written",
    )


def room_for_copy(state: Mapping[str, Tensor], workers: int) -> bool:
    """True if this machine has memory for copies of this rank's parts of `state` in each of its `workers`."""
    import psutil

    size = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in state.values())
    free = min(available_memory() / workers, process_limit() - psutil.Process().memory_info().rss)
    return bool(size + COPY_RESERVE <= free)


MOST_SHARDS = 1 << 20
"""A file with more shards was not written by this program."""


def write_waiting(path: Path, shards: list[SampleShard | None]) -> Files:
    """Write shards as one file; returns its size and hash, under its name. RunFailed if it cannot be written."""
    import numpy as np

    arrays = {
        f"{number}.{name}": value
        for number, shard in enumerate(shards)
        for name, value in (vars(shard).items() if shard is not None else ())
        if value is not None
    }
    buffer = io.BytesIO()
    np.savez(buffer, count=np.array(len(shards)), **arrays)
    try:
        write_synced(path, buffer.getvalue())
        return {path.name: described(path)}
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}", "make room or give a folder to write to") from error


def read_waiting(path: Path) -> list[SampleShard | None]:
    """The inverse of `write_waiting`. CheckpointError if the file is invalid."""
    import numpy as np

    try:
        with ZipFile(path) as packed:
            if any(each.compress_type != ZIP_STORED or each.file_size > each.compress_size for each in packed.filelist):
                raise ValueError("it is compressed")  # to a size that memory may not hold
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file.items())
        count = int(arrays.pop("count"))
        if count > MOST_SHARDS:
            raise ValueError(f"it has {count} shards")
        shards: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
        for key, value in arrays.items():
            number, name = key.split(".")
            shards[int(number)][name] = value
        return [SampleShard.of_arrays(fields) if fields else None for fields in shards]
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, BadZipFile, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", "resume from another checkpoint") from error
