"""Every place that reads a file without `rlcli.support.reading`, with the reason why it may: nobody else writes that
file, or it was checked before. A new place is refused here until it has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlcli", "packages", "recipes", "verifiers", "environments", "data_prep")

PACKAGE = "a file of the package"
KERNEL = "/proc or /sys"
SANDBOXED = "in the sandbox: its own files, and a pipe of its owner"
PROCESS = "standard input or a pipe of a process that rlcli started"
WRITTEN = "written by this command, or by a process that it started, in a folder of its own"
CACHE = "the user's own cache"
TEXT = "a text that is bounded by its caller, not a file"
RUNNING = "the folder of a run that this command trains, which was checked when it began"
CHECKED = "checked by `check_regular`, `is_file` or `check_model_folder` just before, and read in pieces by its library"
KNOWN = {
    "rlcli/api/command.py": WRITTEN,
    "rlcli/api/function_verifier.py": WRITTEN,
    "packages/rlcli_audit/audit_page.py": PACKAGE,
    "packages/rlcli_planner/model_check.py": CHECKED,
    "rlcli/cli/prep/show_data.py": CHECKED,
    "rlcli/cluster/worker_errors.py": KERNEL,
    "rlcli/cluster/process/peak_memory.py": KERNEL,
    "rlcli/cluster/process/process_time.py": KERNEL,
    "rlcli/cluster/process/worker_profile.py": WRITTEN,
    "rlcli/cluster/same_code.py": PACKAGE,
    "rlcli/cluster/watchdog.py": RUNNING,
    "rlcli/cluster/worker_group.py": RUNNING,
    "rlcli/config/changes.py": TEXT,
    "packages/rlcli_port/configs/sandboxed_script.py": PACKAGE,
    "packages/rlcli_port/configs/config_files.py": CHECKED,
    "packages/rlcli_port/configs/inside_python.py": SANDBOXED,
    "packages/rlcli_port/configs/inside_shell.py": SANDBOXED,
    "rlcli/config/load.py": TEXT,
    "rlcli/config/recipes.py": PACKAGE,
    "rlcli/data/prompts/token_cache.py": CACHE,
    "rlcli/data/prompts/prompt_table.py": CHECKED,
    "rlcli/data/step_images.py": CHECKED,
    "rlcli/data/prompts/parallel_map.py": PROCESS,
    "rlcli/evaluation/sample_browser.py": CHECKED,
    "rlcli/evaluation/evaluation_settings.py": CHECKED,
    "rlcli/evaluation/evaluation_folder.py": CHECKED,
    "rlcli/export/verified_export.py": WRITTEN,
    "rlcli/support/files.py": WRITTEN,
    "rlcli/images/row_images.py": CHECKED,
    "rlcli/launch/input_files.py": CHECKED,
    "packages/rlcli_planner/launch/measured_lengths.py": CHECKED,
    "rlcli/support/machine/processor.py": KERNEL,
    "rlcli/model/io/checkpoint_files.py": "files of a checkpoint, whose manifest has been checked",
    "rlcli/model/io/bin_file.py": CHECKED,
    "rlcli/model/io/model_checks.py": CHECKED,
    "rlcli/model/io/tied_head.py": CHECKED,
    "rlcli/model/io/weight_files.py": CHECKED,
    "rlcli/support/machine/free_memory.py": KERNEL,
    "rlcli/prep/difficulty.py": CHECKED,
    "packages/rlcli_quickstart/smollm2.py": WRITTEN,
    "packages/rlcli_quickstart/warm_start.py": CACHE,
    "rlcli/support/reading.py": "this is the module",
    "packages/rlcli_inspect/report/page_assembly.py": PACKAGE,
    "rlcli/runs/run_data.py": CHECKED,
    "packages/rlcli_inspect/report/static_report.py": WRITTEN,
    "rlcli/runs/lost_engines.py": RUNNING,
    "rlcli/runs/run_images.py": CHECKED,
    "packages/rlcli_sandbox/sandbox_base.py": PACKAGE,
    "packages/rlcli_sandbox/child.py": KERNEL,
    "packages/rlcli_sandbox/sandbox_fusion.py": PACKAGE,
    "packages/rlcli_sandbox/judge/boot.py": PACKAGE,
    "packages/rlcli_sandbox/judge/remote.py": PROCESS,
    "packages/rlcli_sandbox/judge/tester.py": PROCESS,
    "packages/rlcli_sandbox/namespace_processes.py": KERNEL,
    "packages/rlcli_sandbox/orphans.py": KERNEL,
    "rlcli/support/owned_main.py": KERNEL,
    "rlcli/rewards/expression.py": TEXT,
    "rlcli/rewards/processes/cpu_time.py": KERNEL,
    "rlcli/rewards/processes/fork_server_main.py": KERNEL,
    "rlcli/rewards/response_files.py": "the file or pipe that the command line names, line by line with a bound",
    "rlcli/rollout/servers/vllm_extension.py": RUNNING,
    "rlcli/rollout/model_servers/server_processes.py": RUNNING,
    "rlcli/runs/tracking/tracked_samples.py": RUNNING,
    "rlcli/runs/tracking/tensorboard.py": RUNNING,
    "rlcli/training/loop/checkpointer.py": RUNNING,
    "rlcli/training/loop/step_profile.py": WRITTEN,
    "rlcli/training/worker/state_writer.py": RUNNING,
    "verifiers/rlcli_verifiers/judge_limits.py": WRITTEN,
    "environments/rlcli_environments/cells.py": PROCESS,
    "environments/rlcli_environments/python.py": PACKAGE,
    "environments/rlcli_environments/search.py": CHECKED,
    "data_prep/rlcli_data_prep/sources.py": CHECKED,
}

LIBRARIES = {"ParquetFile", "read_table", "safe_open", "ZipFile"}
LOADERS = {"json", "np", "numpy", "pickle", "tomllib", "torch", "yaml"}
OTHER_OPENS = {
    *("os", "wheel", "webbrowser", "Image", "EvalStore", "round", "self.source"),
    *("self.conversations", "self._conversations", "self._gateway", "self._agents"),
}
"""Objects whose method `open` opens no file for reading, or not by its path."""


def reads(path: Path) -> Iterator[int]:
    """The lines of a module that read a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if name in ("read_text", "read_bytes"):
            is_read = bool(owner)  # `rlcli.support.reading` has functions of these names
        elif name == "open":
            is_read = owner not in OTHER_OPENS and _is_for_reading(node)
        else:
            is_read = (
                name in LIBRARIES or (name == "load" and owner in LOADERS) or (owner, name) == ("tomllib", "loads")
            )
        if is_read:
            yield node.lineno


def _is_for_reading(node: ast.Call) -> bool:
    values = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    modes = [text for text in texts if set(text) <= set("rwabtx+")]
    return not modes or any("r" in mode or "+" in mode for mode in modes)


def test_every_place_that_reads_a_file_by_itself_is_known() -> None:
    modules = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    reads_by_file = {path.relative_to(ROOT).as_posix(): list(reads(path)) for path in modules}
    new = [f"{name}:{lines[0]}" for name, lines in reads_by_file.items() if lines and name not in KNOWN]
    assert not new, f"read with rlcli.support.reading, or say in KNOWN why not: {', '.join(new)}"
    assert not [name for name in KNOWN if not reads_by_file.get(name)], "no longer read a file: remove them from KNOWN"


def test_the_search_sees_every_way_to_read(tmp_path: Path) -> None:
    lines = (
        'path.read_text(encoding="utf-8")',
        "path.read_bytes()",
        "open(path)",
        'path.open("rb")',
        'gzip.open(path, "rt")',
        'path.open("a+")',
        "json.load(file)",
        "tomllib.loads(text)",
        "pq.ParquetFile(path)",
        "np.load(path, allow_pickle=False)",
    )
    others = ("read_text(path)", 'path.open("wb")', "os.open(path, 0)", "json.loads(text)", "opened(path)")
    (tmp_path / "module.py").write_text("\n".join((*lines, *others)))
    assert list(reads(tmp_path / "module.py")) == [*range(1, len(lines) + 1)]
