"""Choose what an engine releases while the trainer on the same GPUs computes (`rollout.sleep = auto`)."""

from __future__ import annotations

from rlcli.launch.prepared_run import Prepared
from rlcli_planner.launch.plan_summary import setting_of_run

DESCRIPTIONS = {
    "none": "the engine keeps its memory while the trainer computes",
    "cache": "the engine releases its KV cache while the trainer computes, and keeps its weights",
    "all": "the engine releases its weights and KV cache while the trainer computes",
}


def with_least_sleep(prepared: Prepared) -> tuple[Prepared, list[tuple[str, str]]]:
    """With the least `rollout.sleep` with which the run fits, if it is `auto`, and a row for the plan. On CPUs, where
    no engine sleeps, and where the memory of the GPUs is not known, nothing changes."""
    from rlcli_planner.fitting.solve import budget, with_least_sleep
    from rlcli_planner.known_devices import GIB
    from rlcli_planner.phase_memory import phases

    if prepared.facts.device == "cpu" or prepared.config.rollout.sleep != "auto":
        return prepared, []
    setting = setting_of_run(prepared)
    if setting is None or not setting.hosts_engine:
        return prepared, []
    resolved = with_least_sleep(setting)
    sleep = resolved.config.rollout.sleep
    peak = max(phase.total for phase in phases(resolved))
    usage = f"{peak / GIB:.1f} of {budget(resolved) / GIB:.1f} GiB"
    row = ("engine's sleep", f"rollout.sleep = {sleep}: {DESCRIPTIONS[sleep]} ({usage})")
    return prepared.changed(prepared.config.changed(rollout={"sleep": sleep})), [row]
