"""TRL scripts and notebooks are imported by running them with stubs: their arguments, reward functions and data."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlcli_port.configs import config_files, sandboxed_script
from rlcli_port.configs.convert import Imported, import_file
from rlcli_port.configs.lifting import lift

from rlcli.cli.main import main
from rlcli.config.load import resolve
from rlcli.errors import ConfigError, SetupError

SCRIPT = '''
import re
from functools import partial
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward

print("training begins")
PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)  # the last one counts
SCALE = 2.0
dataset = load_dataset("openai/gsm8k", "main", split="train")


def extract(text):
    """What stands between
the tags."""
    found = PATTERN.findall(text)
    return found[-1].strip() if found else ""


def to_prompt(row):
    return {"prompt": row["question"]}


dataset = dataset.map(to_prompt)


def correct(completions, answer, **kwargs) -> "list[float]":
    return [SCALE * (extract(text) == right) for text, right in zip(completions, answer)]


def tagged(completions, **kwargs):
    return [float(PATTERN.search(text) is not None) for text in completions]


def main():
    low = 0.25

    def at_least(completions, **kwargs):
        return [low for _ in completions]

    args = GRPOConfig(
        learning_rate=4e-6, num_generations=8 // 2, max_completion_length=64 * 4, report_to=[],
        reward_weights=[1.0, 0.5, 1.0, 1.0, 2.0],
    )
    trainer = GRPOTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct", [correct, tagged, accuracy_reward, think_format_reward, at_least],
        args, train_dataset=dataset,
    )
    trainer.train()
    trainer.save_model("out")


if __name__ == "__main__":
    main()
'''


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notes(imported: Imported) -> dict[str, str]:
    return {line.source: line.note for line in imported.lines}


def test_arguments_functions_and_data_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    assert main(["config", "import", str(script(tmp_path, SCRIPT)), "--out", str(recipe)]) == 0
    report = capsys.readouterr().out
    resolved = resolve(str(recipe)).values()
    rewards = tmp_path / "mine_rewards.py"
    assert resolved["verifier.name"] == (
        f"{rewards}:correct + 0.5 * {rewards}:tagged + math + format + 2 * {rewards}:at_least"
    )
    assert resolved["model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert resolved["rollout.samples_per_prompt"] == 4
    assert resolved["rollout.max_response_tokens"] == 256
    assert (
        "rlcli prep hf --source openai/gsm8k --subset main --columns prompt=…,answer=answer --out data/gsm8k" in report
    )
    assert "the script passes the rows through map(to_prompt, line " in report
    assert f"wrote {rewards}: the script's reward functions" in report
    assert "training begins" not in report


def test_lifted_functions_score_without_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported = import_file(script(tmp_path, SCRIPT), out=tmp_path / "mine.toml")
    module = loaded(script(tmp_path, imported.rewards, "lifted.py"))
    assert module.correct(["<answer>4</answer>", "4"], answer=["4", "4"]) == [2.0, 0.0]
    assert module.tagged(["<answer>4</answer>", "4"]) == [1.0, 0.0]
    assert module.at_least(["x"]) == [0.25]
    assert "training" not in capsys.readouterr().out
    assert not {"dataset", "main", "to_prompt", "GRPOTrainer", "load_dataset"} & {*vars(module)}
    assert "# the last one counts" in imported.rewards
    assert "between\nthe tags" in imported.rewards


def test_without_out_the_line_says_how_to_name_the_functions(tmp_path: Path) -> None:
    imported = import_file(script(tmp_path, SCRIPT))
    assert "verifier.name" not in imported.settings
    assert notes(imported)["reward_funcs"].startswith(
        "--out FILE.toml also writes the script's functions into a file, for: --verifier 'train_rewards.py:correct + "
    )


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    existing = script(tmp_path, "mine", "mine_rewards.py")
    assert main(["config", "import", str(script(tmp_path, SCRIPT)), "--out", str(tmp_path / "mine.toml")]) == 2
    assert "mine_rewards.py exists; name another file with --out" in capsys.readouterr().err
    assert existing.read_text() == "mine"
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("def f(completions): return trainer.x", "it uses `trainer`, which the training makes"),
        ("def f(completions): return nowhere(completions)", "it uses `nowhere`, which is an argument of the function"),
    ],
)
def test_a_function_that_needs_the_training_is_named(function: str, problem: str, tmp_path: Path) -> None:
    text = f"""
from trl import GRPOConfig, GRPOTrainer
{function}
trainer = GRPOTrainer(model="m", reward_funcs=[f, lambda completions: [1.0]], args=GRPOConfig(num_generations=4))
"""
    imported = import_file(script(tmp_path, text), out=tmp_path / "mine.toml")
    assert imported.rewards == ""
    assert notes(imported)["reward_funcs"].startswith(f"f cannot be copied: {problem}")
    assert "<lambda> cannot be copied: a lambda: give it a name" in notes(imported)["reward_funcs"]


def test_functions_of_other_files_and_packages_are_named(tmp_path: Path) -> None:
    script(tmp_path, "def near(completions): return [1.0 for _ in completions]", "my_rewards.py")
    text = """
from functools import partial
from trl import GRPOConfig, GRPOTrainer
from my_rewards import near
from others.rewards import far
GRPOTrainer(model="m", reward_funcs=[partial(near), far, "a/model"], args=GRPOConfig(num_generations=4))
"""
    imported = import_file(script(tmp_path, text), out=tmp_path / "mine.toml")
    assert imported.settings["verifier.name"].endswith("my_rewards.py:near")
    note = notes(imported)["reward_funcs"]
    assert "others.rewards.far: --verifier others.rewards:far" in note
    assert "a/model: a model as reward: --verifier 'served_reward_model" in note


def test_lifting_brings_imports_classes_and_try() -> None:
    text = """
try:
    import regex as re
except ImportError:
    import re
import json, os
from typing import Any
class Box:
    limit: int = 3
    def has(self, text: str) -> Any: return bool(re.search("x", text))
if True:
    WEIGHTS = {"a": 1.0}
@staticmethod
def unused(): os.system("x")
def f(completions, *, box=Box()) -> Any:
    data = json.loads("{}")
    return [WEIGHTS["a"] * box.has(one) for one in completions]
"""
    lifted = lift(text, [("f", 15)], 'it\'s "odd"\n.py')
    assert lifted.functions == ["f"]
    namespace: dict[str, Any] = {}
    exec(compile(lifted.text, "lifted", "exec"), namespace)
    assert namespace["f"](["x", "y"]) == [1.0, 0.0]
    assert "unused" not in lifted.text
    assert "Any" not in namespace or "from typing import Any" in lifted.text


@pytest.mark.parametrize("text", ["def f(", "x = " + "(" * 5_000, "\0", ""])
def test_what_is_not_python_has_no_functions(text: str) -> None:
    lifted = lift(text, [("f", 1)], "x.py")
    assert (lifted.text, [*lifted.problems]) == ("", ["f"])


def test_values_that_only_running_gives(tmp_path: Path) -> None:
    text = """
import os, torch
from dataclasses import dataclass
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, ModelConfig
@dataclass
class Sizes:
    batch: int = 4
    def total(self): return self.batch * int(os.environ.get("GPUS", "2"))
name = "-".join(["Qwen/Qwen3", "4B"])
model, tokenizer = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16), object()
model = get_peft_model(model, r=2 ** 5, lora_alpha=64)
common = dict(learning_rate=1e-6 * 5, bf16=torch.cuda.is_bf16_supported())
args = GRPOConfig(per_device_train_batch_size=Sizes().total(), seed=int(os.environ["MY_SEED"][-1:] == "D"), **common,
                  model_init_kwargs={"dtype": torch.bfloat16}, run_name=os.environ["RUN"])
trainer = GRPOTrainer(model=model, args=args, reward_funcs=[], train_dataset=None)
args.beta = 0.5
for _ in trainer.history: pass
with torch.no_grad():
    loss, (a, b) = trainer.step(), trainer.pair
"""
    imported = import_file(script(tmp_path, text))
    assert imported.settings["model.path"] == "Qwen/Qwen3-4B"
    assert imported.settings["train.lr"] == pytest.approx(5e-6)
    assert imported.settings["rollout.prompts_per_step"] == 1
    assert imported.settings["lora.rank"] == 32
    assert imported.settings["algorithm.kl_coef"] == 0.5  # set afterwards
    assert imported.settings["train.seed"] == 1
    assert imported.warnings == []


def test_a_parser_takes_the_command_line(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
@dataclass
class Mine:
    level: int = 1
parser = TrlParser((Mine, ScriptArguments, GRPOConfig, ModelConfig))
mine, script_args, args, model_args = parser.parse_args_and_config()
def reward(completions, **kwargs): return [float(mine.level)] * len(completions)
GRPOTrainer(model=model_args.model_name_or_path, args=args, reward_funcs=reward)
"""
    file = script(tmp_path, text)
    with pytest.raises(ConfigError, match="takes its configuration from the command line; give it after --"):
        import_file(file)
    script(tmp_path, "learning_rate: 1e-6\nnum_generations: 4\n", "a.yaml")
    imported = import_file(file, arguments=["--config", "a.yaml", "--learning-rate", "3e-6", "--level", "2", "--bf16"])
    assert (imported.settings["train.lr"], imported.settings["rollout.samples_per_prompt"]) == (3e-6, 4)
    assert "uses `mine`" not in notes(imported)["reward_funcs"]


def test_a_notebook_is_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = ["!pip install trl \\\n  --quiet\n%cd x\nimport os", "not python (", ["from trl import GRPOConfig\n"]]
    sources += ["for i in [1]:\n    !ls\nargs = GRPOConfig(learning_rate=2e-6)"]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    cells.append({"cell_type": "markdown", "source": "GRPOConfig(learning_rate=1)"})
    imported = import_file(script(tmp_path, json.dumps({"cells": cells}), "a.ipynb"))
    assert imported.settings["train.lr"] == 2e-6
    for text in ("{", "{}", '{"cells": 3}', '{"cells": []}'):
        assert main(["config", "import", str(script(tmp_path, text, "b.ipynb"))]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_script_that_fails_is_imported_as_far_as_it_came(tmp_path: Path) -> None:
    text = "from trl import GRPOConfig\nargs = GRPOConfig(num_generations=4)\nraise ValueError('no GPU')\n"
    imported = import_file(script(tmp_path, text))
    assert imported.settings["rollout.samples_per_prompt"] == 4
    assert "ended with ValueError: no GPU (line 3); what comes later is not imported" in imported.warnings[0]


def test_a_configuration_that_is_not_reached_is_read(tmp_path: Path) -> None:
    text = "from trl import GRPOConfig\ndef main():\n    GRPOConfig(num_generations=4)\n"
    imported = import_file(script(tmp_path, text))
    assert imported.settings["rollout.samples_per_prompt"] == 4
    assert "makes no trainer when it is run: it was read as text" in imported.warnings[0]


def test_without_a_sandbox_a_script_is_read_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(backend: str) -> None:
        raise SetupError("programs cannot be isolated here", "install bubblewrap")

    monkeypatch.setattr(config_files, "open_sandbox", none)
    imported = import_file(script(tmp_path, "from trl import GRPOConfig\nGRPOConfig(num_generations=2 * 2)\n"))
    assert imported.settings["rollout.samples_per_prompt"] == 4
    assert imported.warnings[0].startswith("programs cannot be isolated here: it was read as text, not run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("while True: pass", "it ran for more than"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", ""),
        ("open('big', 'wb').write(bytes(900 << 20))", ""),
        ("import os\nfor _ in range(300): os.fork()", "holds no GRPOConfig"),
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
        ("import os; os._exit(0)", "ended"),
        ("import os; os.write(1, b'[' * 2000); os._exit(0)", "ended"),
        ("print(open('/etc/shadow').read())", "holds no GRPOConfig"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "holds no GRPOConfig"),
    ],
)
def test_what_a_hostile_script_does_is_one_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandboxed_script, "WALL_S", 2.0)
    assert main(["config", "import", str(script(tmp_path, f"{text}\n"))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_control_characters_of_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
data = load_dataset("a\\x1b[31m/b; rm -rf x")
GRPOTrainer(model="m\\x1b", args=GRPOConfig(run_name="\\x1b"), reward_funcs=["\\x1b[2J"], train_dataset=data)
raise ValueError("\\x1b[2J")
"""
    assert main(["config", "import", str(script(tmp_path, text))]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "--source 'a" in printed.out  # quoted for the shell


def test_values_that_depend_on_a_stub_are_not_known(tmp_path: Path) -> None:
    text = """
import os
import yaml
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
cfg, data = yaml.load("x"), load_dataset("a/b")
args = GRPOConfig(learning_rate=float(cfg.lr), num_generations=int(cfg.n), max_steps=len(data) // 10, beta=0.5,
                  lr_scheduler_type=f"{cfg.x}", temperature=int(os.environ["T"] == "1") + float(cfg.t) % 2)
GRPOTrainer(model="m", args=args, reward_funcs=[], train_dataset=data)
"""
    imported = import_file(script(tmp_path, text))
    unresolved = {line.source for line in imported.lines if line.kind == "unresolved"}
    assert {"learning_rate", "num_generations", "max_steps", "lr_scheduler_type", "temperature"} <= unresolved
    assert imported.settings["algorithm.kl_coef"] == 0.5
    assert "train.steps" not in imported.settings


def test_of_sft_and_grpo_in_one_script_grpo_is_taken(tmp_path: Path) -> None:
    text = """
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
SFTTrainer(model="m", args=SFTConfig(learning_rate=1e-5))
GRPOTrainer(model="m", args=GRPOConfig(learning_rate=3e-6), reward_funcs=[])
"""
    imported = import_file(script(tmp_path, text))
    assert (imported.method, imported.settings["train.lr"]) == ("grpo", 3e-6)
    assert "makes 2 trainers; this is GRPOTrainer. The others: SFTTrainer, line 3" in imported.warnings[0]


def test_a_partial_with_arguments_is_not_taken_without_them(tmp_path: Path) -> None:
    text = """
from functools import partial
from trl import GRPOConfig, GRPOTrainer
def long(completions, target=1, **kwargs): return [float(len(text) > target) for text in completions]
GRPOTrainer(model="m", reward_funcs=[partial(long, target=200)], args=GRPOConfig(num_generations=4))
"""
    imported = import_file(script(tmp_path, text), out=tmp_path / "mine.toml")
    assert "verifier.name" not in imported.settings
    assert "partial(long, target=200): define a function that passes these arguments" in notes(imported)["reward_funcs"]


def test_variables_reach_a_python_script(tmp_path: Path) -> None:
    text = 'import os\nfrom trl import GRPOConfig\nGRPOConfig(num_generations=int(os.environ.get("N", "2")))\n'
    imported = import_file(script(tmp_path, text), variables={"N": "6"})
    assert imported.settings["rollout.samples_per_prompt"] == 6
    table = script(tmp_path, "num_generations: 4\n", "a.yaml")
    with pytest.raises(ConfigError, match="--variable and arguments after -- have no effect"):
        import_file(table, variables={"N": "6"})


@pytest.mark.parametrize(
    "record",
    [
        "{}",
        '{"calls": 5}',
        '{"calls": [{"name": "GRPOConfig"}], "loads": [], "parsed": null, "invented": false, "error": ""}',
        '{"calls": [], "loads": [], "parsed": 5, "invented": false, "error": ""}',
    ],
)
def test_a_forged_record_of_python_is_refused(record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"import os\nos.write(1, {record.encode()!r})\nos._exit(0)\n"
    assert main(["config", "import", str(script(tmp_path, text))]) == 2
    assert "is no record of a run" in capsys.readouterr().err


def test_a_forged_function_name_names_no_other_file(tmp_path: Path) -> None:
    text = """
from trl import GRPOConfig, GRPOTrainer
def f(completions): return [1.0]
f.__name__ = "f + other.py:evil"
GRPOTrainer(model="m\\ud800", reward_funcs=[f], args=GRPOConfig(num_generations=4, run_name="\\udfff"))
"""
    imported = import_file(script(tmp_path, text), out=tmp_path / "mine.toml")
    assert "verifier.name" not in imported.settings
    assert imported.settings["model.path"] == "m?"


def test_weights_that_are_not_known_are_a_line(tmp_path: Path) -> None:
    text = """
import yaml
from trl import GRPOConfig, GRPOTrainer
def f(completions): return [1.0]
args = GRPOConfig(num_generations=4, reward_weights=yaml.load("x").weights)
GRPOTrainer(model="m", reward_funcs=[f], args=args)
"""
    imported = import_file(script(tmp_path, text), out=tmp_path / "mine.toml")
    kinds = [line.kind for line in imported.lines if line.source == "reward_weights"]
    assert kinds == ["unresolved"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (
            "scale = 1\ndef helper(x): return x * scale\ndef main():\n    scale = 5\n"
            "    def f(completions): return [helper(scale)]\n",
            5,
            "`scale` of the function around it is another one",
        ),
        ("WORDS = []\nWORDS.append('x')\ndef f(completions): return WORDS\n", 3, "`WORDS`, which line 2 changes"),
        (
            "import p\nargs = p.P().parse_args()\ndef f(completions): return [args.x]\n",
            3,
            "the command line, parse_args()",
        ),
        ("x = " + "-" * 900 + "1\ndef f(completions): return [x]\n", 2, "RecursionError"),
        (
            "def main():\n    n = 0\n    def f(completions):\n        nonlocal n\n        n += 1\n        return [n]\n",
            3,
            "it does not stand alone",
        ),
    ],
)
def test_what_a_copy_would_change_is_not_copied(text: str, line: int, problem: str) -> None:
    lifted = lift(f"{text}\ndef g(completions): return [1.0]\n", [("f", line), ("g", text.count("\n") + 2)], "x.py")
    assert problem in lifted.problems["f"]
    assert lifted.functions == ["g"]


def test_a_logger_is_copied() -> None:
    text = "import logging\nlog = logging.getLogger()\nlog.info('x')\ndef f(completions):\n    log.info('y')\n"
    assert lift(text, [("f", 4)], "x.py").functions == ["f"]
