"""The parts of the check: what each measures, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """module: of this package, with a function `run(check)`. takes_s: what it is expected to take on one H100 (an
    estimate until it was run there); deadline_s: after which it is killed. options: handed to `run`."""

    name: str
    module: str
    takes_s: float
    deadline_s: float
    what: str
    options: tuple[str, ...] = ()


ALL = (
    Part("environment", "environment", 40, 120, "versions, driver, GPU, entry points, `rlcli doctor`"),
    Part(
        *("grpo-0.5b", "grpo", 110, 300),
        "GRPO steps on a model of Qwen2.5-0.5B's shape: weight checks hold, metrics are finite",
        ("0.5b",),
    ),
    Part(*("sleep", "sleeping", 70, 240), "the engine's sleep and wake: memory freed, seconds, log-probs unchanged"),
    Part(*("sync", "sync", 90, 240), "weight sync: GB/s of gathering the weights, and of loading them into the engine"),
    Part(
        *("planner", "planner", 240, 420),
        "`rlcli plan`'s prediction against measured peaks, phase by phase, for four kinds of runs",
    ),
    Part(
        *("step", "step", 330, 470),
        "a whole step against its floor (raw vLLM and raw torch) and TRL, on the 0.5B shape",
    ),
    Part(*("mfu", "mfu", 230, 470), "MFU of the update and of the whole step, rollout tokens/s; 0.5B and 1.5B shapes"),
    Part(
        *("grpo-1.5b", "grpo", 140, 360),
        "GRPO steps on a model of Qwen2.5-1.5B's shape",
        ("1.5b",),
    ),
    Part(*("tests", "suite", 200, 470), "tests/gpu; what does not fit is run when the part is run again"),
)
"""In the order in which they run: what is quick and what others rest on first, the long test suite last."""

BY_NAME = {part.name: part for part in ALL}
