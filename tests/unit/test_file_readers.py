"""Every place that reads a file without `rlcli.reading`, with the reason why it may: nobody else writes that file, or
it was checked before. A new place is refused here until it has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlcli", "recipes", "verifiers", "environments", "data_prep")

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
    "rlcli/api/verifier.py": WRITTEN,
    "rlcli/audit/page.py": PACKAGE,
    "rlcli/cli/prep/show.py": CHECKED,
    "rlcli/cluster/errors.py": KERNEL,
    "rlcli/cluster/process/memory.py": KERNEL,
    "rlcli/cluster/process/process_time.py": KERNEL,
    "rlcli/cluster/process/profiling.py": WRITTEN,
    "rlcli/cluster/same_code.py": PACKAGE,
    "rlcli/cluster/watchdog.py": RUNNING,
    "rlcli/cluster/worker_group.py": RUNNING,
    "rlcli/config/changes.py": TEXT,
    "rlcli/config/importing/confined.py": PACKAGE,
    "rlcli/config/importing/files.py": CHECKED,
    "rlcli/config/importing/inside_python.py": SANDBOXED,
    "rlcli/config/importing/inside_shell.py": SANDBOXED,
    "rlcli/config/load.py": TEXT,
    "rlcli/config/recipes.py": PACKAGE,
    "rlcli/data/prompts/cache.py": CACHE,
    "rlcli/data/prompts/table.py": CHECKED,
    "rlcli/data/step_pictures.py": CHECKED,
    "rlcli/data/prompts/parallel_map.py": PROCESS,
    "rlcli/evaluation/browse.py": CHECKED,
    "rlcli/evaluation/settings.py": CHECKED,
    "rlcli/evaluation/store.py": CHECKED,
    "rlcli/export/verify.py": WRITTEN,
    "rlcli/files.py": WRITTEN,
    "rlcli/images/rows.py": CHECKED,
    "rlcli/launch/inputs.py": CHECKED,
    "rlcli/launch/planning/measured.py": CHECKED,
    "rlcli/machine/processor.py": KERNEL,
    "rlcli/model/io/checkpoint_files.py": "files of a checkpoint, whose manifest has been checked",
    "rlcli/model/io/bin_file.py": CHECKED,
    "rlcli/model/io/facts.py": CHECKED,
    "rlcli/model/io/tied_head.py": CHECKED,
    "rlcli/model/io/files.py": CHECKED,
    "rlcli/planner/device.py": KERNEL,
    "rlcli/prep/difficulty.py": CHECKED,
    "rlcli/quickstart/smollm2.py": WRITTEN,
    "rlcli/quickstart/warm_start.py": CACHE,
    "rlcli/reading.py": "this is the module",
    "rlcli/report/page.py": PACKAGE,
    "rlcli/report/source.py": CHECKED,
    "rlcli/report/static.py": WRITTEN,
    "rlcli/runs/lost_engines.py": RUNNING,
    "rlcli/runs/pictures.py": CHECKED,
    "rlcli/sandbox/base.py": PACKAGE,
    "rlcli/sandbox/child.py": KERNEL,
    "rlcli/sandbox/fusion.py": PACKAGE,
    "rlcli/sandbox/judge/boot.py": PACKAGE,
    "rlcli/sandbox/judge/remote.py": PROCESS,
    "rlcli/sandbox/judge/tester.py": PROCESS,
    "rlcli/sandbox/members.py": KERNEL,
    "rlcli/sandbox/orphans.py": KERNEL,
    "rlcli/sandbox/owned_main.py": KERNEL,
    "rlcli/scoring/expression.py": TEXT,
    "rlcli/scoring/processes/cpu_time.py": KERNEL,
    "rlcli/scoring/processes/fork_server_main.py": KERNEL,
    "rlcli/scoring/rows.py": "the file or pipe that the command line names, line by line with a bound",
    "rlcli/serving/engines/extension.py": RUNNING,
    "rlcli/serving/server_group.py": RUNNING,
    "rlcli/tracking/samples.py": RUNNING,
    "rlcli/tracking/tensorboard.py": RUNNING,
    "rlcli/trainer/checkpointer.py": RUNNING,
    "rlcli/trainer/profiling.py": WRITTEN,
    "rlcli/workers/state_writer.py": RUNNING,
    "verifiers/rlcli_verifiers/judge_limits.py": WRITTEN,
    "environments/rlcli_environments/cells.py": PROCESS,
    "environments/rlcli_environments/python.py": PACKAGE,
    "environments/rlcli_environments/search.py": CHECKED,
    "data_prep/rlcli_data_prep/sources.py": CHECKED,
}

LIBRARIES = {"ParquetFile", "read_table", "safe_open", "ZipFile"}
LOADERS = {"json", "np", "numpy", "pickle", "tomllib", "torch", "yaml"}
OTHER_OPENS = {"os", "wheel", "webbrowser", "Image", "EvalStore", "round", "self.conversations", "self._gateway"}
"""What has a method `open` that opens no file for reading, or not by its path."""


def reads(path: Path) -> Iterator[int]:
    """The lines of a module that read a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if name in ("read_text", "read_bytes"):
            found = bool(owner)  # `rlcli.reading` has functions of these names
        elif name == "open":
            found = owner not in OTHER_OPENS and _is_for_reading(node)
        else:
            found = name in LIBRARIES or (name == "load" and owner in LOADERS) or (owner, name) == ("tomllib", "loads")
        if found:
            yield node.lineno


def _is_for_reading(node: ast.Call) -> bool:
    values = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    modes = [text for text in texts if set(text) <= set("rwabtx+")]
    return not modes or any("r" in mode or "+" in mode for mode in modes)


def test_every_place_that_reads_a_file_by_itself_is_known() -> None:
    modules = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): list(reads(path)) for path in modules}
    new = [f"{name}:{lines[0]}" for name, lines in found.items() if lines and name not in KNOWN]
    assert not new, f"read with rlcli.reading, or say in KNOWN why not: {', '.join(new)}"
    assert not [name for name in KNOWN if not found.get(name)], "no longer read a file: remove them from KNOWN"


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
