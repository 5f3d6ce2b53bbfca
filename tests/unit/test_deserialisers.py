"""Uses of deserialisers that can run code, and flags of Python subprocesses: a new use needs a reason here."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlcli", "packages", "verifiers", "environments", "data_prep", "recipes", "scripts")
PAGE = ROOT / "docs" / "security.md"

READERS = re.compile(
    r"(pickle|_pickle|marshal|dill|joblib|shelve|cloudpickle|ray\.cloudpickle|jsonpickle|msgpack|pandas)\."
    r"(load\w*|read_\w+|unpack\w*|open|decode|Unpickler)"
    r"|(torch|numpy)\.(load|lib\.npyio\.\w+|lib\.format\.read_\w+|package\.\w+|hub\.\w+|jit\.load|serialization\.\w+)"
    r"|torch\.distributed\.checkpoint(\.\w+)*\.(load\w*|_load\w*|\w*Reader)"
    r"|yaml\.(\w*load\w*|\w*Loader)"
    r"|(torch\.)?multiprocessing\.(spawn|start_processes|get_context|Process|Pool|Queue|SimpleQueue|Manager|Pipe)"
    r"|multiprocessing\.(connection|managers|pool|queues|shared_memory)\.\w+"
    r"|concurrent\.futures\.ProcessPoolExecutor"
)
"""Readers that build objects from bytes that may name code, or exchange them with processes that do."""
METHODS = re.compile(r"(all_)?gather_object(_list)?|(broadcast|scatter|send|recv)_object(_list)?|read_pickle")
"""Methods of the same kind, by their name alone."""

ALLOWED = {
    "packages/rlcli_port/configs/config_files.py": {
        "yaml.load": "with BaseLoader: texts, lists and tables alone",
        "yaml.BaseLoader": "builds no objects",
    },
    "rlcli/data/prompts/token_cache.py": {"numpy.load": "of the user's own cache, without pickles"},
    "rlcli/data/prompts/parallel_map.py": {"pickle.load": "between this process and children that it has started"},
    "rlcli/model/io/checkpoint_files.py": {
        "pickle.Unpickler": "finds only DCP's records; the opcodes are checked first",
        "torch.distributed.checkpoint.FileSystemReader": "its read_metadata is replaced",
        "torch.distributed.checkpoint.load": "with that reader, and a planner that unpickles no bytes",
        "torch.load": "with weights_only",
    },
    "rlcli/model/io/bin_file.py": {"torch.load": "with weights_only"},
    "rlcli/prep/row_store.py": {"pickle.loads": "from a file without a name that this process has written"},
    "rlcli/rollout/vllm/vllm_engine.py": {
        ".all_gather_object": "between the ranks of a run",
        ".broadcast_object": "between the ranks of a run",
    },
    "packages/rlcli_sandbox/inside.py": {"marshal.loads": "in the sandbox, from its owner"},
    "rlcli/rewards/processes/fork_server.py": {
        "multiprocessing.connection.Connection": "bytes alone; replies are JSON",
        "multiprocessing.connection.Pipe": "bytes alone; replies are JSON",
    },
    "rlcli/rewards/processes/fork_server_main.py": {
        "multiprocessing.connection.Connection": "bytes alone; replies are JSON",
        "multiprocessing.connection.wait": "reads nothing",
        "pickle.loads": "in a scoring process, from its owner",
    },
    "rlcli/rewards/service/scoring_client.py": {
        "multiprocessing.connection.Connection": "bytes alone",
        "marshal.loads": "from the run's scoring service, by a socket in a private folder",
    },
    "rlcli/rewards/service/scoring_service.py": {
        "multiprocessing.connection.Connection": "bytes alone",
        "multiprocessing.connection.wait": "reads nothing",
        "marshal.loads": "from the run's workers, by a socket in a private folder",
    },
    "rlcli/rewards/service/shared_rows.py": {
        "pickle.loads": "in a scoring process, what the run's workers have pickled"
    },
    "rlcli/training/worker/fsdp_backend.py": {".all_gather_object": "between the ranks of a run"},
    "rlcli/training/worker/state_writer.py": {"numpy.load": "without pickles"},
    "scripts/bench/_common.py": {"torch.multiprocessing.spawn": "its own processes"},
    "scripts/bench/_controller.py": {"pickle.loads": "measures what the script itself has pickled"},
    "scripts/bench/_step_raw.py": {
        "multiprocessing.connection.Connection": "its own processes",
        "multiprocessing.get_context": "its own processes",
        ".recv()": "its own processes",
    },
    "scripts/bench/loading.py": {
        ".all_gather_object": "its own processes",
        ".broadcast_object_list": "its own processes",
    },
}
"""File → what it uses → why no file or message of somebody else comes there, or why it can do nothing."""

WITH_ARGUMENT = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}

PLAIN = {"GenerationConfig", "LoraConfig", "PeftModel", "Qwen2VLImageProcessorPil", "GotOcr2ImageProcessorPil"}
"""Their `from_pretrained` loads no code of a model's folder, and takes no `trust_remote_code`."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> dict[str, str]:
    """Name in the module → what it was imported as, with all dots."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                names[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.load` for `load` after `from torch import load`; empty for what was not imported."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    known = names.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([known, *reversed(parts)]) if known else ""


def uses(tree: ast.AST) -> set[str]:
    names = imports(tree)
    readers = {name for name in names.values() if READERS.fullmatch(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and READERS.fullmatch(name := full_name(node, names)):
            readers.add(name)
        elif isinstance(node, ast.Attribute) and METHODS.fullmatch(node.attr):
            readers.add(f".{node.attr}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "recv":
            readers |= set() if node.args else {".recv()"}  # a socket's takes a size; a connection's unpickles
    return readers


@pytest.mark.long
def test_every_reader_of_objects_has_a_reason() -> None:
    readers_by_file = {file: used for file, tree in modules() if (used := uses(tree))}
    assert readers_by_file == {file: set(reasons) for file, reasons in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.loads(b'')",
        "from pickle import load",
        "import pickle as p; p.Unpickler",
        "import numpy as np; np.load('x')",
        "from torch import load",
        "import torch; torch.hub.load('x', 'y')",
        "from torch.distributed import checkpoint as dcp; dcp.FileSystemReader('x')",
        "import torch.distributed.checkpoint as dcp; dcp.load({})",
        "from torch.distributed.checkpoint.state_dict_loader import _load_state_dict",
        "import yaml; yaml.safe_load('')",
        "from ray import cloudpickle; cloudpickle.loads(b'')",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "connection.recv()",
        "from concurrent.futures import ProcessPoolExecutor",
        "import pandas as pd; pd.read_csv('x')",
    ],
)
def test_a_new_one_is_found(source: str) -> None:
    assert uses(ast.parse(source))


@pytest.mark.parametrize("source", ["import json; json.loads('')", "pickle.dumps(1)", "sock.recv(10)", "self.load(x)"])
def test_others_are_not(source: str) -> None:
    assert not uses(ast.parse(source))


def test_the_page_names_every_file_of_the_program_that_has_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [file for file in ALLOWED if not file.startswith("scripts/") and f"`{file}`" not in page] == []


@pytest.mark.long
def test_tensors_and_arrays_are_read_without_pickles() -> None:
    wrong = []
    for file, tree in modules():
        names = imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (wanted := WITH_ARGUMENT.get(full_name(node.func, names))):
                keywords = {
                    each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)
                }
                if keywords.get(wanted[0]) is not wanted[1]:
                    wrong.append(f"{file}:{node.lineno}")
    assert wrong == []


@pytest.mark.long
def test_no_model_may_bring_code() -> None:
    """Without the argument, transformers asks on the terminal whether to run the code of a model's folder."""
    wrong, seen = [], 0
    for file, tree in modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "from_pretrained" or file.startswith("scripts/"):
                continue
            seen += 1
            trusts = [each.value for each in node.keywords if each.arg == "trust_remote_code"]
            plain = isinstance(node.func.value, ast.Name) and node.func.value.id in PLAIN
            if not plain and not (trusts and isinstance(trusts[0], ast.Constant) and trusts[0].value is False):
                wrong.append(f"{file}:{node.lineno}")
    assert wrong == []
    assert seen > 10


def starts(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and constant words of each list, tuple or call that begins with an interpreter, as in `[sys.executable, …]`.
    Only those that ask for `-c` or `-m`: a script's own folder comes first on its sys.path, not the current one."""
    for node in ast.walk(tree):
        items = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "args", [])
        if not isinstance(items, list) or len(items) < 2 or not isinstance(node, ast.List | ast.Tuple | ast.Call):
            continue
        words = [each.value for each in items if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        first = ast.unparse(items[0])
        if re.search(r"executable|interpreter|python", first) and {"-c", "-m"} & set(words):
            yield node.lineno, words


@pytest.mark.long
def test_no_python_is_started_that_looks_into_the_current_folder_first() -> None:
    lines = defaultdict(list)
    for file, tree in modules():
        for line, words in starts(tree):
            flags = words[: min(words.index(each) for each in ("-c", "-m") if each in words)]
            lines[bool({"-P", "-I"} & set(flags))].append(f"{file}:{line}")
    assert lines[False] == []
    assert len(lines[True]) > 20


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("[sys.executable, '-m', 'x']", 1),
        ("run((sys.executable, '-c', code))", 1),
        ("lines(sys.executable, '-c', code)", 1),
        ("[python, '-c', code]", 1),
        ("[sys.executable, __file__]", 0),
    ],
)
def test_starts_are_found(source: str, count: int) -> None:
    assert len(list(starts(ast.parse(source)))) == count
