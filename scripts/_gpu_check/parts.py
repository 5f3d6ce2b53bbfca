"""The parts of the check: what each measures, what it needs, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

TIERS = {0: "torch alone: neither Ray nor vLLM", 1: "Ray, with the engine `transformers`", 2: "vLLM"}
"""Requirements of a part besides torch and transformers."""


@dataclass(frozen=True)
class Part:
    """One part, run in a separate process."""

    name: str
    """Name, for --only."""
    tier: int
    """Key of TIERS."""
    module: str
    """Module of this package, `part_MODULE`, with a function `run(check, *options)`."""
    takes_s: float
    """Expected seconds on one H100; an estimate until it was run there."""
    deadline_s: float
    """Seconds after which it is killed."""
    summary: str
    """Its measurements, in one line."""
    options: tuple[str, ...] = ()
    """Further arguments of `run`."""
    when: str = "always"
    """always; full: with --full; named: with --only single_worker."""
    shape: str = ""
    """Run only if this shape is asked for; empty: with any."""


ALL = (
    Part("environment", 0, "environment", 30, 120, "versions, driver, GPU, entry points, `rlcli doctor`"),
    Part("trainer", 0, "trainer", 80, 150, "an update by torch alone: head, MFU, memory, gathered weights"),
    Part(
        "transformers",
        1,
        "grpo",
        80,
        180,
        "GRPO steps on Ray with the engine `transformers`: a run without vLLM",
        ("0.5b", "transformers"),
    ),
    Part("engine", 2, "engine", 100, 200, "sleep, wake and weight sync of one vLLM engine beside the trainer"),
    Part(
        "grpo-0.5b",
        2,
        "grpo",
        110,
        300,
        "GRPO steps on a model of Qwen2.5-0.5B's shape: weight checks hold, metrics are finite",
        ("0.5b", "vllm"),
        shape="0.5b",
    ),
    Part(
        "planner",
        2,
        "planner",
        120,
        420,
        "`rlcli plan`'s prediction against measured peaks, phase by phase; four kinds of runs if time allows",
    ),
    Part(
        "grpo-1.5b",
        2,
        "grpo",
        140,
        360,
        "GRPO steps on a model of Qwen2.5-1.5B's shape",
        ("1.5b", "vllm"),
        when="full",
        shape="1.5b",
    ),
    Part("sleep", 2, "sleeping", 70, 240, "the part of `engine` that sleeps and wakes", when="named"),
    Part("sync", 2, "sync", 90, 240, "the part of `engine` that syncs, and gathered weights", when="named"),
    Part(
        "step",
        2,
        "step",
        330,
        470,
        "a whole step against its floor (raw vLLM and raw torch) and TRL, on the 0.5B shape",
        when="full",
    ),
    Part(
        "mfu",
        2,
        "mfu",
        230,
        470,
        "MFU of the update and of the whole step, rollout tokens/s; 0.5B and 1.5B shapes",
        when="full",
    ),
    Part("tests", 2, "suite", 200, 470, "tests/gpu; what does not fit is run when the part is run again", when="full"),
)
"""In the order in which they run: quick parts and those that others depend on first, the long test suite last."""

BY_NAME = {part.name: part for part in ALL}
