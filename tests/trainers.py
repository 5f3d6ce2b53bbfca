"""A real Trainer whose workers, view and trackers record calls: they would need a cluster and a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking.run_console import View
from rlcli.training.loop.trainer import Trainer
from rlcli.training.worker.worker_pools import WorkerPools
from rlcli.training.worker.worker_spec import WorkerSpec
from rlcli.types import Prompt
from tests.contexts import context_of

PROMPT = Prompt("a:0", ({"role": "user", "content": "2+2?"},), "a", "math", "exact", "4")
PROMPTS = TokenizedPrompts([PROMPT], 0, np.arange(4, dtype=np.int32), np.array([0, 4]))


class Stop:
    requested = armed = False


def trainer_of(folder: Path, workers: Any, held_out: TokenizedPrompts | None = None, **sections: object) -> Trainer:
    """The trainer of a run of `sections` in the new folder `folder`."""
    config = RunConfig.model_validate(sections)
    groups = WorkerPools(workers, None, None, MagicMock(spec=WorkerSpec))
    view, trackers = MagicMock(spec=View, show_samples=1), MagicMock()
    return Trainer(context_of(config), PROMPTS, held_out, groups, RunFolder.create(folder), trackers, view, Stop())
