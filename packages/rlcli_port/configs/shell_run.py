"""Runs a launch script under bash in bubblewrap, with programs that record how they are called in place of python,
torchrun, ray, accelerate, srun and others: what bash would pass to them is what is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli_sandbox import Sandbox

from rlcli.errors import ConfigError
from rlcli_port.configs.sandboxed_script import PROCESSES, files_beside, run_confined, text_of

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
OTHER_SENTINEL = SENTINEL + 1_000_003
"""Stands for the same values in a second run. The difference is a prime number, so that remainders differ, too."""
UNSET_SENTINEL = 4_000_000_000_000_037
"""Stands for a variable that is not set in the second run: a prime number, since it is 0 in the first one."""
MAX_WORDS = 20_000
"""Maximum number of words of one call."""
LONGEST_WORD = 64 << 10
"""Characters."""

# A stub records itself as CALL, NAME, words, CWD, variables, END, separated by zero bytes; NOTE is what was called and
# did nothing, ANSWER what printed something that is not known here. -p: without BASH_ENV, which is for the script.
STUB = r"""#!/bin/bash -p
name=${0##*/}
record() { printf '%s\0' "$@" END >> "$RLCLI_RECORD"; }
call() {
  local key exported=()
  for key in $(compgen -e); do exported+=("ENV=$key=${!key}"); done
  record CALL "$name" "$@" "CWD=$PWD" "${exported[@]}"
}
answer() { record ANSWER "$name" "$@"; echo "@ANSWER@"; }
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
    else call "$@"; fi ;;
  @RECORDED@) call "$@" ;;
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
    r"(?:\$\{?\w+\}?|~|(?<![\w./}+-]))(?:/[\w.+-]+)*/(?:bin|sbin)/"
    r"(?P<name>python3?|torchrun|accelerate|deepspeed|trl|ray|srun|pip3?|nvidia-smi|bash|sh|env)(?:\.\d+)?(?![\w./-])"
)
"""Programs named by their paths, which a folder of stubs does not catch."""
_TEE = re.compile(r">\s*>\((?:[^()]|\([^()]*\))*\)")
_FROM_COMMAND = re.compile(r"<\s*<\((?P<command>(?:[^()]|\([^()]*\))*)\)")
"""Process substitution needs /proc, which the sandbox does not have."""
_UNSET = re.compile(r"(?m)line \d+: \$?(?P<name>[A-Za-z_]\w*|\d+): (?:unbound variable|parameter null or not set|.*)$")
_NOT_UNSET = ("command not found", "No such file or directory", "Permission denied", "syntax error")
MAX_RUNS = 12
MAX_UNSET = 200
"""Variables that are looked at: each is one more of the second run's environment."""
_NAME = re.compile(r"(?<![\w$#])[A-Za-z_]\w*+")
_USED = re.compile(r"\$\{[#!]?([A-Za-z_]\w*+)(?!:?[-=?+])|\$([A-Za-z_]\w*+)")
_ARGUMENT = re.compile(r"\$\{?([1-9])(?![\w:=?+-])")
_COUNTED = re.compile(r"\$\{?[#@*]|\bshift\b|\bgetopts?\b")
"""Constructs of scripts that depend on the number of their arguments, so that further ones would change the result."""
_SUM = re.compile(r"(?<!\()\(\([^\n]{1,300}?\)\)")
_ASSIGNED = re.compile(r"(?<!\w)([A-Za-z_]\w*+)(?:\+?=|:=)")
_SURELY_SET = re.compile(r"(?m)^(?:export |readonly |declare (?:-\w+ )?)?([A-Za-z_]\w*+)=")
_WITH_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*+):?[-=?+]")
_TESTED = re.compile(r"(?:\[|test|&&|\|\|) (?:! )?-[znv] [\"']?\$?\{?([A-Za-z_]\w*+)")
_LOOPED = re.compile(r"\bfor\s+(?:\(\(\s*)?([A-Za-z_]\w*+)")
_ARRAY = re.compile(r"(?<!\w)([A-Za-z_]\w*+)(?:\+?=\(|\[)")
_BY_BASH = frozenset(
    (
        *("PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "IFS", "BASH_ENV", "RLCLI_RECORD", "TZ", "LANG"),
        *("RANDOM", "SECONDS", "LINENO", "FUNCNAME", "OPTARG", "OPTIND", "REPLY", "BASH", "BASHPID"),
        *("BASH_SOURCE", "BASH_VERSION", "UID", "EUID", "PPID", "PIPESTATUS", "EPOCHSECONDS"),
        *("HOSTNAME", "HOSTTYPE", "OSTYPE", "PS1"),
    )
)
"""Variables that bash or the sandbox sets."""


@dataclass(frozen=True)
class Call:
    """A program that the script started, with its words after expansion."""

    words: tuple[str, ...]
    """The program's name and its arguments, as bash passes them."""
    folder: str
    """Its working directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its environment, without what each program here has."""


@dataclass(frozen=True)
class Captured:
    """The record of one run of a script."""

    calls: list[Call]
    """In order; only of programs that may train."""
    answers: list[str]
    """Commands whose output the script may use, and which did not run."""
    demanded: list[str]
    """Variables and arguments that the script demands and that are missing: $NAME, $1."""
    unset: list[str]
    """Variables and arguments that the script uses, that are not set, and on which words of its calls depend: $NAME,
    $1."""
    status: int
    """bash's exit status."""
    errors: str
    """The end of its standard error."""
    timed_out: bool
    """True if it still ran when its time was up."""


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
    for _ in range(MAX_RUNS):
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
    captured = replace(captured, demanded=marked)
    unset = [name for name in _unset_names(path, text) if name not in variables]
    absent = [] if arguments or _COUNTED.search(text) else sorted({*_ARGUMENT.findall(text)})
    if captured.timed_out or not (marked or unset or absent or captured.answers) or not is_reached(captured.calls):
        return captured
    others = {name: str(OTHER_SENTINEL) if UNKNOWN in value else value for name, value in variables.items()}
    others |= dict.fromkeys(unset, str(UNSET_SENTINEL))
    other_arguments = [str(OTHER_SENTINEL) if UNKNOWN in word else word for word in arguments]
    other_arguments += [str(UNSET_SENTINEL)] * int(max(absent, default="0"))
    try:
        other = _run(sandbox, path, text, others, other_arguments, is_second=True)
    except ConfigError:  # it broke a limit: what depends on these variables is unknown
        return replace(captured, unset=[f"${name}" for name in unset])
    pairs = _pairs(captured.calls, other.calls)
    calls = [_agreed(call, same) for call, same in pairs]
    differs = any(call is same for call, same in pairs) or [c.words for c in calls] != [c.words for c in captured.calls]
    assigned = _names(_ASSIGNED, text) | _names(_LOOPED, text)
    never = [f"${name}" for name in (*unset, *absent) if name not in assigned]
    return replace(captured, calls=calls, unset=never if differs else [])


def _unset_names(path: Path, text: str) -> list[str]:
    """Variables that a script uses, without a default, before a line that surely sets them. It may set them later."""
    texts = [
        text,
        *(content for name, content in files_beside(path).items() if name in text and not name.endswith(".py")),
    ]
    joined = "\n".join(texts)
    uses = [(match.start(), match[1] or match[2]) for match in _USED.finditer(joined)]
    for total in _SUM.finditer(joined):
        uses += [(total.start() + match.start(), match[0]) for match in _NAME.finditer(total[0])]
    used = {name: at for at, name in sorted(uses, reverse=True)}  # where each is used first
    surely = {match[1]: match.start() for match in reversed([*_SURELY_SET.finditer(joined)])}
    assigned, defaults = _names(_ASSIGNED, joined), _names(_WITH_DEFAULT, joined)
    excluded = _BY_BASH | _names(_TESTED, joined) | _names(_ARRAY, joined) | (defaults & assigned)
    return [name for name, at in reversed(used.items()) if name not in excluded and surely.get(name, at + 1) > at][
        :MAX_UNSET
    ]


def _names(pattern: re.Pattern[str], text: str) -> frozenset[str]:
    return frozenset(match[1] for match in pattern.finditer(text))


def _pairs(calls: Sequence[Call], others: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Each call with the one of another run that shares the most words; with itself if there is none."""
    if [call.words[:1] for call in calls] == [call.words[:1] for call in others]:
        return [*zip(calls, others, strict=True)]
    pairs = []
    for call in calls:
        words = {*call.words[1:]}
        programs = {word for word in words if "=" not in word and not word.startswith("-")}
        same = [other for other in others if other.words[:1] == call.words[:1] and programs & {*other.words[1:]}]
        pairs.append((call, max(same, key=lambda other: len(words & {*other.words}), default=call)))
    return pairs


def _agreed(call: Call, other: Call) -> Call:
    """The call, with a mark in each word that the other run does not have."""
    others = other.words if len(other.words) == len(call.words) else None
    present = {*other.words}
    words = [
        word if (word == others[at] if others else word in present) else _marked(word)
        for at, word in enumerate(call.words)
    ]
    variables = {
        name: value if other.variables.get(name) == value else f"{UNKNOWN}{name}"
        for name, value in call.variables.items()
    }
    return Call(tuple(words), call.folder, variables)


def _marked(word: str) -> str:
    """A word of which the value is not known. The name of a script remains.

    >>> _marked("a.b=8"), _marked("8"), _marked("/train.py")
    ('a.b=rlcli_unknown_value', 'rlcli_unknown_value', '/train.py')
    """
    if word.endswith(".py") or UNKNOWN in word:
        return word
    key, equals, _ = word.partition("=")
    return f"{key}={UNKNOWN}value" if equals else f"{UNKNOWN}value"


def _run(
    sandbox: Sandbox,
    path: Path,
    text: str,
    variables: Mapping[str, str],
    arguments: Sequence[str],
    *,
    is_second: bool = False,
) -> Captured:
    folder = path.resolve().parent
    stub = STUB.replace("@ANSWER@", str(OTHER_SENTINEL) if is_second else f"{UNKNOWN}$name").replace(
        "@GPUS@", str(GPUS)
    )
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
    record, root, status, errors = (printed.get(name) for name in ("record", "root", "status", "errors"))
    if not (isinstance(record, str) and isinstance(root, str) and isinstance(status, int) and isinstance(errors, str)):
        raise ConfigError(
            f"{path} was run in the sandbox to be imported, and what it printed is no record of a run",
            "import the command that starts the training, in a separate script",
        )
    try:
        calls, answers = _calls(record.encode(errors="replace").decode(), root)  # without lone surrogates
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "import the command that starts the training") from error
    return Captured(calls, answers, [], [], status, errors, bool(printed.get("timed_out")))


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
        variables: dict[str, str] = {}
        while len(words) > 1 and words[-1].startswith("ENV="):
            key, _, value = words.pop().removeprefix("ENV=").partition("=")
            if key not in _BY_BASH and not key.startswith(UNKNOWN):
                variables[key] = value
        if words[:1] == ["CALL"] and words[-1].startswith("CWD=") and len(words) > 2:
            if len(words) > MAX_WORDS or max(map(len, words)) > LONGEST_WORD:
                raise ValueError(
                    f"a call has more than {MAX_WORDS} words, or one of more than {LONGEST_WORD} characters"
                )
            calls.append(Call(tuple(words[1:-1]), words[-1].removeprefix("CWD=") or "/", variables))
        elif words[:1] == ["ANSWER"]:
            answers.append(" ".join(words[1:]))
        words = []
    return calls, list(dict.fromkeys(answers))


def is_unknown(value: str) -> bool:
    """True if a word depends on what only the user's machine knows.

    >>> is_unknown("rlcli_unknown_NNODES"), is_unknown("8000000000000002"), is_unknown("100000000000")
    (True, True, False)
    """
    return UNKNOWN in value or any(int(number) > SENTINEL // 1_000 for number in re.findall(r"\d{13,4000}", value))
