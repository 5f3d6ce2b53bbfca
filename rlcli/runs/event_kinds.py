"""The events of a run: every kind in events.jsonl, and when it is written. The reference page of events is made of
this.

Each line of events.jsonl has `time` (seconds since 1970), `event` (the kind) and the entries named below.
"""

from __future__ import annotations

EVENTS: dict[str, str] = {
    "started": "The workers are ready and the first step begins. `step`, `of`: the last step.",
    "resumed": "The same, from a checkpoint: `step` is the checkpoint's.",
    "startup": "The engines have started. `engine`: name, version and settings; `done_after_s`: seconds by stage.",
    "checkpoint": "A checkpoint is complete. `step`, `path`.",
    "checkpoint_failed": "A checkpoint could not be written; the run continues. `step`, `why`.",
    "evaluated": "An evaluation is complete. `step`, `headline`: its figures in one line.",
    "warning": "A check found something suspicious. `step`, `name`, `text`.",
    "pace": "The measured pace of the first steps against the plan. `step`, and the figures.",
    "bad_update": "A gradient was not finite or too large; the update was left out. `step`, `model`, `minibatch`, "
    "`grad_norm`, `saved`: the folder of the batch.",
    "step_skipped": "No sample of the step counts: it has no update. `step`, `samples`, `left_out`: counts by reason.",
    "rolled_back": "The run returned to a checkpoint after a bad update. `step`, `to`: the checkpoint's step.",
    "engine lost": "An inference server no longer answers. `server`, `why`, `worker`.",
    "inputs_changed": "The run continues with files that have changed (`--accept-changes`). `step`, `text`, `files`.",
    "inputs_unrecorded": "The run has no record of the files that it reads by path. `step`, `text`.",
    "failed": "A process failed. `who`, `step`, `phase`, `message`, `hint`, `retry`: whether the run restarts.",
    "restarted": "The supervisor starts the run again. `restart`, `of`: restarts allowed, `step`: the checkpoint's.",
    "stopped": "The run was asked to stop and has saved its state. `step`.",
    "finished": "The last step is done and saved. `step`.",
}
"""Kind → when it is written, and its entries."""
