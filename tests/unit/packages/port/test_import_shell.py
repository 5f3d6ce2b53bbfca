"""Launch scripts are imported by running them: values as bash passes them, and nothing that a script does gets out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rlcli_port.configs import sandboxed_script, shell_run
from rlcli_port.configs.convert import Imported, import_file
from rlcli_port.configs.hydra_values import HydraError, hydra_value
from rlcli_port.configs.launches import is_other_work, overrides_of
from rlcli_sandbox import open_sandbox

from rlcli.cli.main import main
from rlcli.errors import ConfigError, SetupError

TRAIN = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    try:
        open_sandbox("bwrap")
    except SetupError as error:
        if os.environ.get("RLCLI_REQUIRE_BWRAP") == "1":
            raise
        pytest.skip(str(error))


def script(folder: Path, text: str, name: str = "run.sh") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def sources(imported: Imported, kind: str) -> dict[str, Any]:
    return {line.source: line.foreign_value for line in imported.lines if line.kind == kind}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            f"case ${{DEVICE:-gpu}} in\n gpu) n=4;; npu) n=16;;\nesac\n{TRAIN} {ROLLOUT}.n=$n data.train_batch_size=64",
            {"rollout.samples_per_prompt": 4},
            id="the branch that is taken",
        ),
        pytest.param(
            f'run() {{ {TRAIN} {ROLLOUT}.n=$1 "${{@:2}}"; }}\nrun 6 data.train_batch_size=32',
            {"rollout.samples_per_prompt": 6, "rollout.prompts_per_step": 32},
            id="a function with arguments",
        ),
        pytest.param(
            f'A=({ROLLOUT}.n=3)\nA+=(\'data.train_files=[a.parquet, "b c.parquet"]\')\n{TRAIN} "${{A[@]}}"',
            {"rollout.samples_per_prompt": 3, "data.path": ["a.parquet", "b c.parquet"]},
            id="an array",
        ),
        pytest.param(
            f"n=1; for i in 1 2 3; do n=$((n * 2)); done\n{TRAIN} {ROLLOUT}.n=$n",
            {"rollout.samples_per_prompt": 8},
            id="a loop",
        ),
        pytest.param(
            f"gpus=$(nvidia-smi -L | wc -l)\n{TRAIN} {ROLLOUT}.n=2 trainer.n_gpus_per_node=$gpus",
            {"cluster.workers": 8},
            id="programs that are asked for the machine",
        ),
        pytest.param(
            f"ray job submit --no-wait --runtime-env x.yaml -- {TRAIN} {ROLLOUT}.n=5",
            {"rollout.samples_per_prompt": 5},
            id="ray job submit",
        ),
        pytest.param(
            f'srun --nodes 2 bash -c "{TRAIN} {ROLLOUT}.n=$((2 + 3))"',
            {"rollout.samples_per_prompt": 5},
            id="srun",
        ),
        pytest.param(
            f"set -euo pipefail\nulimit -n 65536\ncd /nowhere\nsource ~/.bashrc\nmodule load cuda\nconda activate x\n"
            f"mkdir -p logs\nexec > >(tee logs/a) 2>&1\nnohup /opt/conda/bin/{TRAIN} {ROLLOUT}.n=7 &",
            {"rollout.samples_per_prompt": 7},
            id="what a script does on its own machine",
        ),
        pytest.param(
            f"read -r n < <(echo 9)\n{TRAIN} {ROLLOUT}.n=$n",
            {"rollout.samples_per_prompt": 9},
            id="process substitution",
        ),
        pytest.param(
            f"{TRAIN} {ROLLOUT}.n=2 {ROLLOUT}.n=4 ++trainer.total_training_steps=1_0", {"train.steps": 10}, id="hydra"
        ),
        pytest.param(
            "torchrun --nnodes=2 --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=a optim.lr=3e-5",
            {"train.lr": 3e-5, "cluster.workers": 8, "algorithm.loss": "gpg"},
            id="sft of verl",
        ),
    ],
)
def test_values_are_those_that_bash_passes(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    from rlcli.config.load import resolve

    imported = import_file(script(tmp_path, f"#!/bin/bash\n{text}\n"))
    resolved = resolve(str(script(tmp_path, imported.toml, "imported.toml"))).values()
    assert {key: resolved[key] for key in expected} == expected
    assert imported.warnings == []


def test_arguments_variables_and_files_beside_it_are_used(tmp_path: Path) -> None:
    script(tmp_path, "N=11", "common.sh")
    file = script(tmp_path, f'source "$(dirname "$0")/common.sh"\n{TRAIN} {ROLLOUT}.n=$N data.seed=$SEED "$@"\n')
    imported = import_file(file, variables={"SEED": "5"}, arguments=["trainer.total_training_steps=3"])
    assert imported.settings["rollout.samples_per_prompt"] == 11
    assert imported.settings["train.seed"] == 5
    assert imported.settings["train.steps"] == 3


def test_what_only_the_users_machine_knows_is_not_made_up(tmp_path: Path) -> None:
    text = f"""set -u
ports=$(python3 -c "import socket; print(1)")
{TRAIN} {ROLLOUT}.n=$MANY trainer.nnodes=$((NODES * 2)) data.seed=$ports trainer.total_training_steps=$1
"""
    imported = import_file(script(tmp_path, text))
    unresolved = sources(imported, "unresolved")
    assert {f"{ROLLOUT}.n", "trainer.nnodes", "data.seed"} <= {*unresolved}
    assert imported.settings["train.steps"] == 8  # the first argument
    assert any("python3 -c import socket; print(1)" in warning for warning in imported.warnings)
    assert any("$MANY, $NODES, $1: give --variable NAME=VALUE" in warning for warning in imported.warnings)


def test_a_launch_of_trl_is_followed_to_its_yaml_and_processes(tmp_path: Path) -> None:
    script(tmp_path, "num_generations: 8\nlearning_rate: 1.0e-6\nbeta: 0.1\n", "grpo.yaml")
    script(tmp_path, "num_processes: 4\n", "zero3.yaml")
    launch = "accelerate launch --config_file zero3.yaml src/open_r1/grpo.py --config grpo.yaml"
    imported = import_file(
        script(tmp_path, f'srun bash -c "{launch} --learning_rate 2e-6 --use_vllm"\n', "train.slurm")
    )
    assert (imported.framework, imported.method) == ("trl", "grpo")
    assert imported.settings["train.lr"] == 2e-6  # the command line's
    assert imported.settings["algorithm.kl_coef"] == 0.1
    assert imported.settings["cluster.workers"] == 4
    assert import_file(tmp_path / "train.slurm", 2).settings["cluster.workers"] == 2


@pytest.mark.parametrize("command", ["trl rloo", "accelerate launch --num_processes 2 rloo.py", "uv run rloo.py"])
def test_a_command_line_of_trl_is_a_configuration(command: str, tmp_path: Path) -> None:
    words = "--model_name_or_path m --num_generations=4 --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'"
    imported = import_file(
        script(tmp_path, f"{command} {words} --lr_scheduler_type cosine_with_min_lr --max_steps 9\n")
    )
    assert (imported.method, imported.settings["algorithm.advantage"]) == ("rloo", "rloo")
    assert imported.settings["train.min_lr_fraction"] == 0.1
    assert imported.settings["algorithm.kl_in"] == "reward"


def test_a_script_of_the_project_is_run_with_the_arguments_it_gets(tmp_path: Path) -> None:
    text = """
import argparse
from trl import GRPOConfig, GRPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
GRPOTrainer(model="m", args=GRPOConfig(learning_rate=parser.parse_args().lr), reward_funcs=[])
"""
    script(tmp_path, text, "train_it.py")
    imported = import_file(script(tmp_path, "LR=4e-6\npython train_it.py --lr $LR\n"))
    assert imported.settings["train.lr"] == 4e-6
    with pytest.raises(ConfigError, match="asks for arguments; give them after --"):
        import_file(tmp_path / "train_it.py")


def test_several_trainings_are_named(tmp_path: Path) -> None:
    text = f"python -m verl.trainer.sft_trainer data.a=1 data.b=2 optim.lr=1\n{TRAIN} {ROLLOUT}.n=3\n"
    imported = import_file(script(tmp_path, text))
    assert imported.settings["rollout.samples_per_prompt"] == 3
    assert "the script starts 2 trainings" in imported.warnings[0]
    assert "verl.trainer.sft_trainer (sft)" in imported.warnings[0]


def test_the_yaml_of_a_project_lies_below_the_command_line(tmp_path: Path) -> None:
    script(tmp_path, "data: {train_batch_size: 48}\nhydra: {searchpath: [x]}\ntrainer: {seed: 1}\n", "mine.yaml")
    text = f'{TRAIN} --config-path="$(dirname $(realpath $0))" --config-name=mine {ROLLOUT}.n=3\n'
    assert import_file(script(tmp_path, text)).settings["rollout.prompts_per_step"] == 48


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("python -m verl.trainer.main_generation data.path=a model.path=b rollout.n=1", "which trains nothing"),
        ("trl kto --learning_rate 1e-6", "a configuration of KTO, which has no counterpart"),
        ("trl dpo --beta 0.1", "a configuration of dpo; rlcli has DPO on pairs of verified samples"),
        (f"{TRAIN} distillation.enabled=True", "start from the recipe opd"),
    ],
)
def test_what_is_no_such_training_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "import", str(script(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_without_bubblewrap_a_script_is_read_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    imported = import_file(script(tmp_path, f"N=4\n{TRAIN} {ROLLOUT}.n=$N\n"))
    assert imported.settings["rollout.samples_per_prompt"] == 4
    assert "was not run, since that needs bubblewrap" in imported.warnings[0]


def test_no_script_gets_out_of_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, network, environment and processes: what a script finds of them becomes a value of its recipe."""
    secret, mark = tmp_path / "secret", tmp_path / "mark"
    secret.mkdir()
    script(secret, "hunter2", "key")
    monkeypatch.setenv("HOME", str(secret))
    monkeypatch.setenv("TOKEN", "hunter3")
    text = f"""
read1=$(/usr/bin/cat {secret}/key /etc/shadow ~/key 2> /dev/null || echo no)
env=$(env | /usr/bin/grep -c hunter)
net=$(: 2> /dev/null 3<> /dev/tcp/127.0.0.1/80 && echo yes || echo no)
echo written > {mark} || :
/usr/bin/python3 -c "open('{mark}', 'w')"
proc=$(/usr/bin/ls /proc 2> /dev/null | /usr/bin/wc -l)
kill -9 -1 2> /dev/null || :
{TRAIN} {ROLLOUT}.n=2 trainer.a=$read1 trainer.b=$env trainer.c=$net trainer.d=$proc
"""
    settings = sources(import_file(script(tmp_path, text)), "missing")
    assert [settings[f"trainer.{name}"] for name in "abcd"] == ["no", 0, "no", 0]
    assert not mark.exists()


def test_links_beside_a_script_are_not_followed(tmp_path: Path) -> None:
    script(tmp_path, "hunter2", "outside.txt")
    inside = tmp_path / "project"
    inside.mkdir()
    (inside / "linked.txt").symlink_to(tmp_path / "outside.txt")
    file = script(inside, f"{TRAIN} {ROLLOUT}.n=2 trainer.a=$(cat linked.txt || echo no)\n")
    assert sources(import_file(file), "missing")["trainer.a"] == "no"


def test_a_yaml_outside_the_project_is_not_read(tmp_path: Path) -> None:
    script(tmp_path, "learning_rate: 5.0\n", "secret.yaml")
    inside = tmp_path / "project"
    (inside / ".git").mkdir(parents=True)
    (inside / "linked.yaml").symlink_to(tmp_path / "secret.yaml")
    for name in (f"{tmp_path}/secret.yaml", "../secret.yaml", "linked.yaml"):
        imported = import_file(script(inside, f"trl grpo --config {name} --num_generations 4\n"))
        assert "its values are not read" in imported.warnings[0]
        assert "train.lr" not in imported.settings or imported.settings["train.lr"] != 5.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("while :; do :; done", "it ran for more than 2 s"),
        ("for ((i = 0; i < 300; i++)); do /usr/bin/tail -f /dev/null & done; wait", "more than 32 processes"),
        ("x=$(/usr/bin/head -c 900000000 /dev/zero | /usr/bin/tr '\\0' x); echo ${#x}", None),
        ("/usr/bin/head -c 900000000 /dev/zero > big", None),
        ("for ((i = 0; i < 3000; i++)); do echo > file$i; done", None),
    ],
)
def test_what_breaks_a_limit_is_one_line_and_leaves_nothing(
    text: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandboxed_script, "WALL_S", 2.0)
    monkeypatch.setitem(sandboxed_script.ENDED, "time", "it ran for more than 2 s")
    assert main(["config", "import", str(script(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (says or "") in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


def test_a_script_that_waits_is_imported_as_far_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = sandboxed_script.text_of("inside_shell.py").replace("LONGEST_S = 6.0", "LONGEST_S = 1.0")
    monkeypatch.setattr(shell_run, "text_of", lambda name: short)
    imported = import_file(script(tmp_path, f"{TRAIN} {ROLLOUT}.n=2 &\nuntil false; do :; done\n"))
    assert imported.settings["rollout.samples_per_prompt"] == 2
    assert imported.warnings == ["the script did not end: it may wait for something that does not happen here"]


@pytest.mark.parametrize(
    "record", ["CALL\0CWD=/\0END\0", "CALL\0python3\0-m", "END\0END\0", "CALL\0END\0", "CALL\0python\0END\0", "\0\0"]
)
def test_a_forged_record_is_no_call(record: str) -> None:
    assert shell_run._calls(record, "/root")[0] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1,[2,3]]", [1, [2, 3]]),
        ("{b:1,c:{d: x}}", {"b": 1, "c": {"d": "x"}}),
        ("'it\\'s'", "it's"),
        ("x y", "x y"),
        ("a\\,b", "a,b"),
        ("1_000", 1000),
        ("05", "05"),
        (".5", 0.5),
        ("none", "none"),
        ("NULL", None),
        ("${trainer.x}", "${trainer.x}"),
        ("[]", []),
        ("", ""),
    ],
)
def test_values_are_those_of_hydra(text: str, value: Any) -> None:
    assert hydra_value(text) == value


@pytest.mark.parametrize("text", ["a,b", "f(x)", "['a'", "'a", "a=b", "{a}", "[" * 2_000, "1]"])
def test_what_hydra_refuses_is_refused(text: str) -> None:
    with pytest.raises(HydraError):
        hydra_value(text)


def test_a_variable_that_is_not_set_is_not_zero(tmp_path: Path) -> None:
    text = f"""M=4
N=$((SLURM_NNODES*8))
[ -n "$DEBUG" ] && M=1
{TRAIN} {ROLLOUT}.n=$M trainer.nnodes=$((SLURM_NNODES % 8)) data.seed=$SEED data.train_batch_size=$N \\
  trainer.total_training_steps=${{STEPS:-7}} $EXTRA
"""
    imported = import_file(script(tmp_path, text))
    assert {"trainer.nnodes", "data.seed", "data.train_batch_size"} <= {*sources(imported, "unresolved")}
    assert (imported.settings["rollout.samples_per_prompt"], imported.settings["train.steps"]) == (4, 7)
    assert any("not known: $SLURM_NNODES, $SEED, $EXTRA: give --variable" in warning for warning in imported.warnings)
    result = import_file(tmp_path / "run.sh", variables={"SLURM_NNODES": "2", "SEED": "5", "EXTRA": ""})
    assert result.settings["rollout.prompts_per_step"] == 16
    assert result.warnings == []


def test_calls_of_two_runs_are_paired_by_their_words(tmp_path: Path) -> None:
    """The second run, whose unset variables have values, starts workers that the first one does not."""
    prepare = 'python prepare.py --out "$PWD/a"\npython prepare_test.py --out "$PWD/b"\n'
    workers = "for ((i = 1; i <= $((NODES - 1)); i++)); do [[ $i -gt 2 ]] && break; ray start --address $HEAD & done\n"
    text = f"{prepare}{workers}srun -w $HEAD {TRAIN} {ROLLOUT}.n=6 trainer.nnodes=$NODES data.train_batch_size=32"
    imported = import_file(script(tmp_path, text))
    assert imported.settings["rollout.samples_per_prompt"] == 6
    assert imported.settings["rollout.prompts_per_step"] == 32
    (unset,) = [line for line in imported.warnings if line.startswith("not set")]
    assert all(name in unset for name in ("$NODES", "$HEAD"))
    assert "$i" not in unset


def test_marks_survive_arithmetic_and_a_change_of_case(tmp_path: Path) -> None:
    text = f"""set -u
port=$(python3 -c "print(1)")
{TRAIN} {ROLLOUT}.n=$((X % 8)) data.seed=${{X^^}} trainer.nnodes=$((port % 2)) trainer.save_freq=$(printf %d $X)
"""
    imported = import_file(script(tmp_path, text))
    assert {f"{ROLLOUT}.n", "data.seed", "trainer.nnodes", "trainer.save_freq"} <= {*sources(imported, "unresolved")}


def test_the_word_none_is_a_text(tmp_path: Path) -> None:
    file = script(tmp_path, "trl grpo --scale_rewards none --num_generations 4\n")
    assert import_file(file).settings["algorithm.scale"] == "none"
    table = script(tmp_path, "scale_rewards: none\nnum_generations: 4\n", "a.yaml")
    assert import_file(table).settings["algorithm.scale"] == "none"


def test_exported_variables_reach_the_python_script(tmp_path: Path) -> None:
    text = 'import os\nfrom trl import GRPOConfig\nGRPOConfig(num_generations=int(os.environ["N"]))\n'
    script(tmp_path, text, "train_it.py")
    imported = import_file(script(tmp_path, "export N=6\npython train_it.py\n"))
    assert imported.settings["rollout.samples_per_prompt"] == 6


def test_another_program_with_overrides_is_not_verl(tmp_path: Path) -> None:
    words = "policy.model=x grpo.n=4 data.path=y cluster.gpus=8"
    with pytest.raises(ConfigError):
        import_file(script(tmp_path, f"python examples/run_it.py {words}\n"))


def test_hidden_files_and_the_home_folder_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".git").mkdir()
    script(tmp_path, "learning_rate: 5.0\n", "secret.yaml")
    script(tmp_path / "project", "learning_rate: 5.0\n", ".secret.yaml")
    for folder, name in ((tmp_path, "secret.yaml"), (tmp_path / "project", ".secret.yaml")):
        imported = import_file(script(folder, f"trl grpo --config {name} --num_generations 4\n"))
        assert "its values are not read" in imported.warnings[0]


def test_text_of_scripts_is_read_in_linear_time() -> None:
    """Each of these takes minutes if its time grows with the square of the length."""
    assert shell_run.prepared("/-" * 200_000) == "/-" * 200_000
    with pytest.raises(HydraError):
        hydra_value("{" + "\t" * 200_000)
    assert not is_other_work("preprocess" * 20_000 + "-")
    with pytest.raises(ValueError, match="more than 20000 words"):
        shell_run._calls("CALL\0python\0" + "a\0" * 20_001 + "CWD=/\0END\0", "/root")


def test_an_argument_that_is_not_given_is_not_empty(tmp_path: Path) -> None:
    file = script(tmp_path, f"{TRAIN} {ROLLOUT}.n=$1 data.seed=${{2:-5}} data.train_batch_size=$(($3 + 8))\n")
    imported = import_file(file)
    assert {f"{ROLLOUT}.n", "data.train_batch_size"} <= {*sources(imported, "unresolved")}
    assert any("not known: $1, $3: give" in warning for warning in imported.warnings)
    assert import_file(file, arguments=["4", "5", "6"]).warnings == []


def test_a_deleted_key_is_absent_until_it_is_set_again() -> None:
    words = ("a.b=1", "a.c={d: 2}", "e.f=3", "~a.c", "~a.b", "a.b=4", "e.f=5")
    assert overrides_of(words) == {"a.b": 4, "e.f": 5}
    many = tuple(f"a{at}.b=1" for at in range(10_000)) + tuple(f"~b{at}" for at in range(10_000))
    assert len(overrides_of(many)) == 10_000
