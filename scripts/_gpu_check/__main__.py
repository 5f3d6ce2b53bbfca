"""`scripts/gpu-check`: runs the parts one after another (two at once in a rehearsal), each with a deadline.

Standard library only, so that a broken installation fails a part and not this command.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_check import checkout, results, running
from _gpu_check.parts import ALL, BY_NAME, TIERS, Part

MINUTES, FULL_MINUTES = 12.0, 30.0
"""Time limits by default, and with --full."""
AT_ONCE = 2
"""Parts that a rehearsal runs at a time: they mostly import, which uses one core."""
REHEARSAL_DEADLINE_FACTOR = 4.0
"""Factor on the deadlines in a rehearsal: two parts run at once, and the machine may be busy."""
SAVE_EVERY_S = 5.0
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"},
    **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"},
}
ON_CPU = {
    **{"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"},
    "CUDA_VISIBLE_DEVICES": "",
}


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if options.list:
        print(listing())
        return 0
    if options.prepare:
        print(f"export PYTHONPATH={checkout.python_path(checkout.make_site())}")
        return 0
    output_folder = options.out or checkout.ROOT / "runs" / ("gpu-check-rehearsal" if options.rehearse else "gpu-check")
    try:
        recorded = results.load(output_folder, options.rehearse)
        parts = choose(options, recorded)
    except results.IncompatibleResults as error:
        return refuse(str(error))
    except KeyError as error:
        name = str(error.args[0])
        near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else "the parts are:"
        return refuse(f"--only {name}: no such part; {hint} {'' if near else ', '.join(BY_NAME)}".strip())
    if not (options.rehearse or has_gpu()):
        return refuse("no NVIDIA GPU here (nvidia-smi lists none); --rehearse tries every part on the CPU")
    signal.signal(signal.SIGTERM, _interrupt)
    return Session(output_folder, options, recorded).run(parts)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PART", action="append", default=[], help="run this part; may be repeated")
    parser.add_argument("--tier", type=int, action="append", default=[], choices=TIERS, help="run its parts alone")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="transformers: tiers 0, 1")
    parser.add_argument("--shape", choices=["0.5b", "1.5b"], default="0.5b", help="of the models (0.5b)")
    parser.add_argument("--full", action="store_true", help="the long parts too: step, mfu, grpo-1.5b, tests")
    parser.add_argument("--missing", action="store_true", help="run the parts that --out does not hold as ok")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--out", type=Path, help="folder for the results (runs/gpu-check, or runs/gpu-check-rehearsal)")
    parser.add_argument("--minutes", type=float, help="start no part that could end later (12; with --full 30)")
    parser.add_argument("--models", type=Path, help="folder for the generated models")
    parser.add_argument("--list", action="store_true", help="print the parts and exit")
    parser.add_argument("--prepare", action="store_true", help="print the PYTHONPATH that makes rlcli work uninstalled")
    options = parser.parse_args(words)
    if options.minutes is None:
        options.minutes = FULL_MINUTES if options.full else MINUTES
    return options


def listing() -> str:
    when = {"always": "", "full": " (--full)", "named": " (--only)"}
    rows = [
        f"{part.name:<12} {part.tier}  {part.takes_s:>4.0f} s  {part.deadline_s:>4.0f} s  "
        f"{part.summary}{when[part.when]}"
        for part in ALL
    ]
    tiers = [f"tier {tier}: {needs}" for tier, needs in TIERS.items()]
    head = "part      tier  takes¹  at most what"
    return "\n".join([head, *rows, *tiers, "¹ on one H100; estimated, not measured yet"])


def choose(options: argparse.Namespace, recorded: results.Results) -> list[Part]:
    """The parts to run. Raises `KeyError` for an unknown name."""
    wanted = [BY_NAME[name] for name in options.only] or [part for part in ALL if is_wanted(part, options)]
    if not options.missing:
        return wanted
    return [part for part in wanted if recorded["parts"].get(part.name, {}).get("status") != "ok"]


def is_wanted(part: Part, options: argparse.Namespace) -> bool:
    """True if a part runs without being named."""
    tiers = options.tier or ([0, 1] if options.engine == "transformers" else list(TIERS))
    when = ("always", "full") if options.full else ("always",)
    return part.tier in tiers and (part.when in when or bool(part.shape)) and part.shape in ("", *shapes(options))


def shapes(options: argparse.Namespace) -> list[str]:
    return ["0.5b", "1.5b"] if options.full else [options.shape]


def refuse(message: str) -> int:
    print(f"scripts/gpu-check: {message}", file=sys.stderr)
    return 2


def has_gpu() -> bool:
    import subprocess

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    return False


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def environment(rehearse: bool) -> dict[str, str]:
    """Environment variables of the parts. The user's override the defaults; a rehearsal hides the GPU."""
    variables = {**ENVIRONMENT, **os.environ, **(ON_CPU if rehearse else {})}
    if importlib.util.find_spec("flashinfer") is None:
        variables.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    folders = [str(Path(__file__).resolve().parents[1])]
    if not checkout.is_installed():
        folders += checkout.make_site()
    known = variables.get("PYTHONPATH", "").split(os.pathsep)
    missing = [folder for folder in folders if folder not in known]
    return variables | {"PYTHONPATH": checkout.python_path(missing, variables)}


class Session:
    """One call of the command."""

    def __init__(self, output_folder: Path, options: argparse.Namespace, recorded: results.Results) -> None:
        self.out, self.options, self.results = output_folder, options, recorded
        self.start_time, self.saved = time.monotonic(), 0.0
        self.models = options.models or Path(tempfile.gettempdir()) / f"rlcli-gpu-check-{os.getuid()}"

    def run(self, parts: list[Part]) -> int:
        """Run the parts. Returns the exit code: 1 if one of them is not ok, 130 if the command was interrupted."""
        self.out.mkdir(parents=True, exist_ok=True)
        variables, waiting, active = environment(self.options.rehearse), list(parts), list[running.Running]()
        for part in parts:
            if part.name not in self.results["parts"]:
                self.results = results.merge(self.results, part.name, _not_run(part, "not reached"))
        try:
            while waiting or active:
                while waiting and len(active) < (AT_ONCE if self.options.rehearse else 1):
                    if (started := self.begin(waiting.pop(0), variables)) is not None:
                        active.append(started)
                for ended in [process for process in active if process.poll()]:
                    active.remove(ended)
                    self.end(ended)
                self.save_periodically(active)
                time.sleep(running.POLL_S)
        except KeyboardInterrupt:
            for process in active:
                process.kill()
                self.end(process, interrupted=True)
            return 130
        statuses = {part.name: self.results["parts"][part.name]["status"] for part in parts}
        self.save()
        print((self.out / results.TABLE).read_text())
        bad = [f"{name} ({status})" for name, status in statuses.items() if status != "ok"]
        print(f"{self.out / results.JSON}: " + (f"not ok: {', '.join(bad)}" if bad else "all ok"))
        return 1 if bad else 0

    def begin(self, part: Part, variables: dict[str, str]) -> running.Running | None:
        """Start a part; if it might end too late, record it as not run and return None."""
        remaining_s = 60 * self.options.minutes - (time.monotonic() - self.start_time)
        if part.takes_s > remaining_s and not self.options.rehearse:
            if self.results["parts"][part.name]["status"] == "not run":
                why = f"{self.options.minutes:g} minutes would not have sufficed; scripts/gpu-check --missing runs it"
                self.results = results.merge(self.results, part.name, _not_run(part, why))
            print(f"{part.name}: not started: {remaining_s:.0f} s are left", flush=True)
            return None
        deadline = (
            REHEARSAL_DEADLINE_FACTOR * part.deadline_s if self.options.rehearse else min(part.deadline_s, remaining_s)
        )
        print(f"{part.name}: {part.summary} (at most {deadline:.0f} s)", flush=True)
        earlier_data = self.results["parts"].get(part.name, {}).get("data", {})
        settings: dict[str, Any] = {"rehearse": self.options.rehearse, "models": str(self.models)}
        settings |= {"shape": self.options.shape}
        settings |= {"deadline_s": deadline, "data": earlier_data}
        return running.start(part.name, settings, self.out, variables, show=lambda line: print(line, flush=True))

    def end(self, process: running.Running, interrupted: bool = False) -> None:
        """Record the result of a part that has ended, and remove its temporary files."""
        result = process.result()
        if interrupted:
            result |= {"status": "running", "error": "interrupted"}
        self.results = results.merge(self.results, process.name, result)
        self.save()
        running.clean(process)
        print(f"{process.name}: {result['status']}, {result['seconds']:.0f} s {result['error']}", flush=True)

    def save_periodically(self, active: list[running.Running]) -> None:
        if time.monotonic() - self.saved > SAVE_EVERY_S:
            for process in active:
                self.results = results.merge(self.results, process.name, process.result())
            self.save()

    def save(self) -> None:
        """Write the results, and copies to the folder $OUT, if it is set, which a job that is cut off returns."""
        results.write(self.results, self.out)
        self.saved = time.monotonic()
        copies = os.environ.get("OUT", "")
        if copies and Path(copies).is_dir():
            for file in self.out.iterdir():
                if file.suffix in (".json", ".md", ".log") and not file.name.startswith("."):
                    shutil.copy(file, copies)


def _not_run(part: Part, why: str) -> running.Result:
    nothing: running.Result = {"figures": [], "checks": [], "data": {}, "tail": [], "log": "", "began": ""}
    return {"status": "not run", "error": why, "seconds": 0, "deadline_s": part.deadline_s, **nothing}


if __name__ == "__main__":
    sys.exit(main())
