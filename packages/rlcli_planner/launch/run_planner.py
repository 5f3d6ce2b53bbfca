"""The planner that a run asks before it starts (`rlcli.launch.planner`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.launch.planner import Planner, Rows

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.config.schema import RunConfig
    from rlcli.launch.prepared_run import Prepared
    from rlcli_planner.plan_input import RunPlanInput


class RunPlanner:
    """See `Planner`. Each method imports what it needs: a run asks for few of them."""

    def parameters(self, model: str) -> int:
        from rlcli_planner.model_shape import read_shape

        return read_shape(model).parameters

    def kv_cache_bytes(self, config: RunConfig, bytes_each: int, longest: int) -> int:
        from rlcli_planner.engine_memory import workload_cache
        from rlcli_planner.model_shape import read_shape

        return workload_cache(config, read_shape(config.model.path), bytes_each, longest)

    def resolve(self, recipe: str, flags: Mapping[str, object], sets: Sequence[str]) -> Resolved:
        from rlcli_planner.launch.memory_auto import resolve_auto

        return resolve_auto(recipe, flags, sets)

    def rates_are_known(self, config: RunConfig, device: str) -> bool:
        from rlcli_planner.launch.local_machine import rates_are_known

        return rates_are_known(config, device)

    def measure_rates(self, config: RunConfig, device: str) -> None:
        from rlcli_planner.launch.local_machine import rates_of

        rates_of(config, device, "unless known")

    def with_sizes(self, resolved: Resolved, prepared: Prepared, *, largest: bool) -> tuple[Resolved, Prepared, Rows]:
        from rlcli_planner.launch.memory_auto import with_auto_memory, with_sizes_for_cpus

        return (with_auto_memory if largest else with_sizes_for_cpus)(resolved, prepared)

    def with_least_sleep(self, prepared: Prepared) -> tuple[Prepared, Rows]:
        from rlcli_planner.launch.engine_sleep import with_least_sleep

        return with_least_sleep(prepared)

    def estimates(self, prepared: Prepared, steps: int) -> Rows:
        from rlcli_planner.launch.plan_summary import estimates

        return estimates(prepared, steps)

    def summary(self, prepared: Prepared, plan: Rows, target: Path, steps_done: int) -> Rows:
        from rlcli_planner.launch.plan_summary import summary

        return summary(prepared, plan, target, steps_done)

    def setting(self, prepared: Prepared) -> RunPlanInput | None:
        from rlcli_planner.launch.plan_summary import setting_of_run

        return setting_of_run(prepared)

    def advice(self, prepared: Prepared) -> str:
        from rlcli_planner.asynchrony.advice import advice

        plan = self.setting(prepared)
        result = advice(plan) if plan else None
        return f"{result.summary} (simulated; responses {result.lengths})" if result else ""


PLANNER: Planner = RunPlanner()
