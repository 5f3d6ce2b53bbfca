"""Runs a launch script under bash in bubblewrap, with programs that record how they are called in place of python,
torchrun, ray, accelerate, srun and others: what bash would pass to them is what is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlcli.config.importing.confined import PROCESSES, files_beside, run_confined, text_of
from rlcli.sandbox import Sandbox

RECORDED = ("python", "python3", "torchrun", "accelerate", "deepspeed", "trl")
"""Programs that train: their words are recorded."""
WRAPPERS = (
    *("srun", "sbatch", "mpirun", "mpiexec", "nohup", "timeout", "sudo", "stdbuf", "numactl", "taskset", "nice"),
    *(
        "ionice",
        "nsys",
        "ray",
        "uv",
        "poetry",
        "pixi",
        "conda",
        "mamba",
        "docker",
        "podman",
        "singularity",
        "apptainer",
    ),
    *("enroot", "ssh", "unbuffer", "ipython"),
)
"""Programs that run the rest of their words, from the first that is a program or a script."""
SILENT = (
    *(
        "pip",
        "pip3",
        "npu-smi",
        "rocm-smi",
        "hf",
        "huggingface-cli",
        "modelscope",
        "git",
        "wget",
        "curl",
        "sleep",
    ),
    *("apt", "apt-get", "yum", "wandb", "swanlab", "mkdir", "touch", "cp", "mv", "rm", "ln", "chmod", "chown", "ip"),
    *("ifconfig", "lsof", "pkill", "kill", "killall", "fuser", "free", "df", "du", "kubectl", "rsync", "unzip", "tar"),
    *("scontrol", "squeue", "sinfo", "module", "pgrep", "ps", "nvcc", "gcc", "vllm", "sglang", "tmux", "screen"),
)
"""Programs that do nothing here."""
ANSWERING = ("nproc", "hostname", "nvidia-smi", "tee", "whoami", "uname")
"""Programs that are replaced and print something."""
TOOLS = (
    *("bash", "sh", "date", "dirname", "basename", "cat", "cut", "tr", "sed", "awk", "grep", "egrep", "head", "tail"),
    *("seq", "wc", "sort", "uniq", "realpath", "readlink", "expr", "printf", "env", "tac", "xargs", "ls", "find"),
    *("paste", "rev", "true", "false", "echo", "test", "bc", "shuf", "mktemp", "getopt", "column", "comm", "jq"),
)
"""Programs of /usr/bin that run as they are."""
GPUS = 8
"""The machine that scripts see: eight NVIDIA GPUs, no NPU."""

UNKNOWN = "rlcli_unknown_"
"""Begins a value that only the user's machine knows, in the alphabet of Hydra's values."""
SENTINEL = 4_000_000_000_000_001
"""The same in arithmetic, where bash would take a text for 0."""

# A stub records itself as CALL, NAME, words, CWD, END, separated by zero bytes; NOTE is what was called and did
# nothing, ANSWER what printed something that is not known here. -p: without BASH_ENV, which is for the script.
STUB = r"""#!/bin/bash -p
name=${0##*/}
record() { printf '%s\0' "$@" END >> "$RLCLI_RECORD"; }
answer() { record ANSWER "$name" "$@"; echo "@UNKNOWN@$name"; }
is_program() { [[ "$1" != -* && "$1" != *=* ]] && type -P -- "$1" > /dev/null; }
case "$name" in
  nproc) echo 64 ;;
  hostname) echo localhost ;;
  whoami) echo user ;;
  uname) echo Linux ;;
  tee) exec /usr/bin/cat ;;
  nvidia-smi)
    for ((i = 0; i < @GPUS@; i++)); do
      case "$*" in
        *-L* | *--list-gpus*) echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-$i)" ;;
        *topo*) echo "GPU$i NV18 NV18" ;;
        *index*) echo "$i" ;;
        *memory*) echo 81559 ;;
        *query*) echo "NVIDIA H100 80GB HBM3" ;;
      esac
    done ;;
  python | python3)
    if [[ "$1" = -c ]]; then
      if [[ "$2" = *print* || "$2" = *stdout* ]]; then answer "$@"; else record NOTE "$name" "$@"; exit 1; fi
    elif [[ "$1" = - || $# = 0 ]]; then answer "$@"
    elif [[ "$1" = --version || "$1" = -V ]]; then echo "Python 3.11.9"
    else record CALL "$name" "$@" "CWD=$PWD"; fi ;;
  @RECORDED@) record CALL "$name" "$@" "CWD=$PWD" ;;
  @WRAPPERS@)
    words=("$@")
    for ((i = 0; i < $#; i++)); do
      if [[ "${words[i]}" = -- && $((i + 2)) = $# && "${words[i + 1]}" = *" "* ]]; then
        exec /bin/bash -c "${words[i + 1]}"
      elif is_program "${words[i]}"; then exec "${words[@]:i}"
      elif [[ "${words[i]}" = *.py ]]; then exec python3 "${words[@]:i}"
      elif [[ "${words[i]}" = *.@(sh|bash|slurm|sbatch) && -r "${words[i]}" ]]; then exec /bin/bash "${words[@]:i}"
      fi
    done
    record NOTE "$name" "$@" ;;
  *) record NOTE "$name" "$@" ;;
esac
exit 0
"""
PRELUDE = r"""trap 'wait' EXIT
shopt -s extglob
ulimit() { :; }
command_not_found_handle() { printf '%s\0' NOTE "$@" END >> "$RLCLI_RECORD"; return 0; }
cd() { builtin cd "$@" 2> /dev/null || :; }
source() { if [[ -r "$1" ]]; then builtin source "$@"; fi; }
. () { if [[ -r "$1" ]]; then builtin source "$@"; fi; }
"""

_PATHS = re.compile(
    r"(?:\$\{?\w+\}?|~|(?<![\w./}]))(?:/[\w.+-]+)*/(?:bin|sbin)/"
    r"(?P<name>python3?|torchrun|accelerate|deepspeed|trl|ray|srun|pip3?|nvidia-smi|bash|sh|env)(?:\.\d+)?(?![\w./-])"
)
"""Programs named by their paths, which a folder of stubs does not catch."""
_TEE = re.compile(r">\s*>\((?:[^()]|\([^()]*\))*\)")
_FROM_COMMAND = re.compile(r"<\s*<\((?P<command>(?:[^()]|\([^()]*\))*)\)")
"""Process substitution needs /proc, which the sandbox does not have."""
_UNSET = re.compile(r"(?m)line \d+: \$?(?P<name>[A-Za-z_]\w*|\d+): (?:unbound variable|parameter null or not set|.*)$")
_NOT_UNSET = ("command not found", "No such file or directory", "Permission denied", "syntax error")
MOST_RUNS = 12


@dataclass(frozen=True)
class Call:
    """A program that the script started, with its words after expansion."""

    words: tuple[str, ...]
    """The program's name and its arguments, as bash passes them."""
    folder: str
    """Its working directory."""


@dataclass(frozen=True)
class Captured:
    """What a script started."""

    calls: list[Call]
    """In order; only of programs that may train."""
    answers: list[str]
    """Commands whose output the script may use, and which did not run."""
    asked: list[str]
    """Variables and arguments that the script demands and that were not given: $NAME, $1."""
    status: int
    """bash's exit status."""
    errors: str
    """The end of its standard error."""
    timed_out: bool
    """Whether it still ran when its time was up."""


def capture(
    sandbox: Sandbox,
    path: Path,
    text: str,
    is_reached: Callable[[Sequence[Call]], bool],
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Captured:
    """The calls that the script makes. sandbox: bubblewrap. is_reached: whether calls contain what is looked for; as
    long as they do not, variables and arguments that the script asks for get a mark (`UNKNOWN`), and it runs again.

    Raises `ConfigError` for a script that breaks a limit, `SetupError` if the sandbox does not start.
    """
    variables, arguments = dict(variables or {}), list(arguments)
    marked: list[str] = []
    for _ in range(MOST_RUNS):
        captured = _run(sandbox, path, text, variables, arguments)
        if captured.status == 0 or captured.timed_out or is_reached(captured.calls):
            break
        missing = [
            match["name"]
            for match in _UNSET.finditer(captured.errors)
            if not any(reason in match[0] for reason in _NOT_UNSET) and match["name"] not in variables
        ]
        if missing and not missing[-1].isdigit():
            variables[missing[-1]] = f"{UNKNOWN}{missing[-1]}"
            marked.append(f"${missing[-1]}")
        elif (missing or "sage" in captured.errors or not captured.errors) and len(arguments) < 4:
            marked.append(f"${len(arguments) + 1}")
            # The first argument is most often the number of processes.
            arguments.append(str(GPUS) if not arguments else f"{UNKNOWN}argument_{len(arguments) + 1}")
        else:
            break
    return replace(captured, asked=marked)


def _run(sandbox: Sandbox, path: Path, text: str, variables: Mapping[str, str], arguments: Sequence[str]) -> Captured:
    folder = path.resolve().parent
    stub = STUB.replace("@UNKNOWN@", UNKNOWN).replace("@GPUS@", str(GPUS))
    stub = stub.replace("@RECORDED@", " | ".join(RECORDED)).replace("@WRAPPERS@", " | ".join(WRAPPERS))
    files = {f"{folder}/{name}": prepared(content) for name, content in files_beside(path).items()}
    script = f"{folder}/{path.name}"
    # Scripts are started from their project's folder, or from their own.
    started_in = Path.cwd() if folder.is_relative_to(Path.cwd()) else folder
    # A mark evaluates to the sentinel in arithmetic; a variable that holds a mark does, too.
    marks = {value: str(SENTINEL) for value in variables.values() if value.startswith(UNKNOWN)}
    marks |= {f"{UNKNOWN}{name}": str(SENTINEL) for name in (*RECORDED, *WRAPPERS) if name.isidentifier()}
    order = {
        "files": files | {script: prepared(text)},
        "folders": [str(folder.parent)],
        "script": script,
        "started_in": str(started_in),
        "arguments": list(arguments),
        "variables": {"HOME": os.path.expanduser("~"), **marks, **variables},
        "stub": stub,
        "prelude": PRELUDE,
        "stubs": sorted({*RECORDED, *WRAPPERS, *SILENT, *ANSWERING}),
        "tools": list(TOOLS),
    }
    printed = run_confined(sandbox, text_of("inside_shell.py"), order, path, processes=PROCESSES)
    calls, answers = _calls(str(printed["record"]), str(printed["root"]))
    return Captured(calls, answers, [], int(printed["status"]), str(printed["errors"]), bool(printed["timed_out"]))


def prepared(text: str) -> str:
    """The script with programs by their names, and without process substitution.

    >>> prepared("exec > >(tee log)"), prepared("read x < <(date)"), prepared("$V/bin/python3.11 -m x")
    ('exec > /dev/null', 'read x <<<"$(date)"', 'python3 -m x')
    """
    text = text.replace("\r\n", "\n")
    text = _TEE.sub("> /dev/null", text)
    text = _FROM_COMMAND.sub(lambda match: f'<<<"$({match["command"]})"', text)
    return _PATHS.sub(lambda match: match["name"], text)


def _calls(record: str, root: str) -> tuple[list[Call], list[str]]:
    calls: list[Call] = []
    answers: list[str] = []
    words: list[str] = []
    for word in record.split("\0"):
        if word != "END":
            words.append(word.replace(root, ""))
            continue
        if words[:1] == ["CALL"] and words[-1].startswith("CWD="):
            calls.append(Call(tuple(words[1:-1]), words[-1].removeprefix("CWD=") or "/"))
        elif words[:1] == ["ANSWER"]:
            answers.append(" ".join(words[1:]))
        words = []
    return calls, list(dict.fromkeys(answers))


def is_unknown(value: str) -> bool:
    """Whether a word depends on what only the user's machine knows.

    >>> is_unknown("rlcli_unknown_NNODES"), is_unknown("8000000000000002"), is_unknown("100000000000")
    (True, True, False)
    """
    return UNKNOWN in value or any(int(number) > SENTINEL // 1_000 for number in re.findall(r"\d{13,4000}", value))
