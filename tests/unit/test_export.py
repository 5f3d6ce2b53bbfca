"""Exports of real checkpoints, through the command line, read back by transformers and peft alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

from rlcli.cli.main import main
from rlcli.errors import CheckpointError
from rlcli.model.stored import Stored
from rlcli.trainer.exporting import model_folder
from tests.export_fixtures import PROBE, save_evaluation, save_run
from tests.loopback_hub import TOKEN, LoopbackHub, loopback_hub
from tests.model_fixtures import padded_log_probs, save_tiny

LORA = ("lora.rank=4", "lora.alpha=8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one checkpoint or more each, named for what they are."""
    root = tmp_path_factory.mktemp("runs")
    base = save_tiny(root / "base")
    untied = save_tiny(root / "untied-base", tie_word_embeddings=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(root / "full", base, step=2)
    save_run(root / "full", base, step=5)
    save_run(root / "untied", untied)
    save_run(root / "lora", base, *LORA)
    save_run(root / "half", base, dtype=torch.bfloat16)
    save_run(root / "unmoved", base, moved_by=0.0)
    save_run(root / "swapped", base, swap=True)
    save_run(root / "ppo", base, recipe="ppo", critic=base)
    save_run(root / "prime", base, recipe="prime", critic=base)
    dist.destroy_process_group()
    for step, mean in ((0, 0.2), (2, 0.7), (5, 0.6)):
        save_evaluation(root / "full", step, mean)
    return root


@pytest.fixture
def run_of(runs: Path, tmp_path: Path) -> Any:
    """A copy of a run, to do something to."""
    return lambda name: Path(shutil.copytree(runs / name, tmp_path / "runs" / name, symlinks=True))


def export(*words: object, expect: int = 0) -> None:
    assert main(["export", *map(str, words)]) == expect


def stored_log_probs(run: Path) -> list[float]:
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    found: list[float] = state["probe"]["log_probs"]
    return found


def log_probs(folder: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: list[float] = padded_log_probs(lm, [(np.array(PROBE), 1)])[0].tolist()
    return found


def nothing_beside(out: Path) -> None:
    assert not [entry for entry in out.parent.iterdir() if entry.name.startswith(f".{out.name}")]


@pytest.mark.parametrize("name", ["full", "untied"])
def test_transformers_reads_the_trained_model(
    runs: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    export(runs / name, "--out", out, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["change"]["moved"] == said["change"]["tensors"] > 20
    assert said["log_probs"]["largest"] < 1e-5
    assert said["log_probs"]["tokens"] == len(PROBE) - 1
    assert log_probs(out) == pytest.approx(stored_log_probs(runs / name), abs=1e-5)
    stored = Stored(runs / name / "checkpoints" / "latest" / "policy", "policy.model.lm.")
    written = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in written) == (name == "untied")
    assert all(torch.equal(tensor, written[key]) for key, tensor in stored.read(stored.shapes).items())
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert {"config.json", "generation_config.json", "README.md", "chat_template.jinja"} <= set(os.listdir(out))
    nothing_beside(out)


def test_the_pipeline_that_the_card_shows_answers(tmp_path: Path) -> None:
    from rlcli.model.tiny import make_tiny_model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "run", make_tiny_model(tmp_path / "base"))
    dist.destroy_process_group()
    export(tmp_path / "run", "--out", tmp_path / "out", "--no-check")
    code = (tmp_path / "out" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    shown = subprocess.run(
        [sys.executable, "-c", code.replace("256", "4")], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "'role': 'assistant'" in shown.stdout, shown.stderr


def test_files_get_the_permissions_that_the_umask_leaves(runs: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(runs / "full", "--out", tmp_path / "out", "--no-check")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_large_model_is_written_as_several_files(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(split_torch_state_dict_into_shards, max_shard_size="300KB")
    monkeypatch.setattr("rlcli.model.export.split_torch_state_dict_into_shards", small)
    out = tmp_path / "out"
    export(runs / "full", "--out", out)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert not (out / "model.safetensors").exists()
    assert log_probs(out) == pytest.approx(stored_log_probs(runs / "full"), abs=1e-5)


def test_an_adapter_is_read_by_peft_and_merged_by_transformers_alone(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export(runs / "lora", "--out", adapter, "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["change"]["tensors"], said["change"]["moved"]) == ("adapter", 14, 14)
    assert said["log_probs"]["largest"] < 1e-5
    export(runs / "lora", "--merge", "--out", merged, "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["change"]["moved"]) == ("model", 14)
    assert said["log_probs"]["largest"] < 1e-5
    assert not (merged / "adapter_config.json").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(runs / "base")
    expected = pytest.approx(stored_log_probs(runs / "lora"), abs=1e-5)
    assert log_probs(merged) == expected
    with torch.no_grad():
        lm = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
        found = lm(input_ids=torch.tensor([PROBE])).logits[0].log_softmax(-1)
    assert [found[i, token].item() for i, token in enumerate(PROBE[1:])] == expected


@pytest.mark.parametrize(("name", "words"), [("half", []), ("full", ["--dtype", "bfloat16"])])
def test_bfloat16_is_kept_or_made(
    runs: Path, name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export(runs / name, *words, "--out", out, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["dtype"] == "bfloat16"
    assert 0 < said["log_probs"]["largest"] < said["log_probs"]["bound"] == 0.3
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_rounding_is_no_change(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base in float32 that was not trained differs from its own rounding, and yet nothing was learnt."""
    export(runs / "unmoved", "--dtype", "bfloat16", "--out", tmp_path / "out", expect=1)
    assert "the exported weights equal the base model's: none of 26 tensors" in capsys.readouterr().err


def test_weights_that_equal_the_base_fail_and_leave_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export(runs / "unmoved", "--out", out, expect=1)
    said = capsys.readouterr().err
    assert "the exported weights equal the base model's" in said
    assert "--no-check exports all the same" in said
    assert not list(tmp_path.iterdir())
    export(runs / "unmoved", "--out", out, "--no-check")
    assert "It was not checked." in (out / "README.md").read_text()


def test_a_swapped_tensor_is_seen_in_the_log_probs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(runs / "swapped", "--out", tmp_path / "out", expect=1)
    assert "does not give the trainer's log-probs: they differ by up to" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_adapter_on_another_base_is_seen_in_the_log_probs(
    run_of: Any, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = run_of("lora"), runs / "base"
    shutil.copytree(base, tmp_path / "other")
    save_tiny(tmp_path / "other", seed=1)
    for file in ("config.toml", "manifest.json"):  # the base by another name, in a checkpoint that is sound
        path = run / "checkpoints" / "step-000003" / file
        if file == "config.toml":
            before = path.read_text()
            path.write_text(before.replace(str(base), str(tmp_path / "other")))
        else:
            from rlcli.files import described

            manifest = json.loads(path.read_text())
            manifest["files"]["config.toml"] = described(path.with_name("config.toml"))
            path.write_text(json.dumps(manifest))
    export(run, "--out", tmp_path / "out", expect=1)
    assert "does not give the trainer's log-probs" in capsys.readouterr().err


def test_a_folder_that_is_there_is_replaced_by_force_alone(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export(runs / "full", "--step", "2", "--out", out, "--no-check")
    (out / "mine.txt").write_text("kept")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    export(runs / "full", "--out", out, expect=2)
    assert f"{out} exists already; give another folder with --out" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    export(runs / "unmoved", "--out", out, "--force", expect=1)  # a proof that fails costs nothing
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    export(runs / "full", "--out", out, "--force")
    assert json.loads((out / "rlcli_export.json").read_text())["step"] == 5
    assert not (out / "mine.txt").exists()
    nothing_beside(out)


@pytest.mark.parametrize("kind", ["folder", "file", "run", "model"])
def test_force_replaces_nothing_but_exports(
    runs: Path, run_of: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "notes"
    if kind == "file":
        out.write_text("mine")
    elif kind == "model":  # such as the base that the run began with
        shutil.copytree(runs / "base", out)
    elif kind == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        out = run_of("full")
    export(runs / "full", "--out", out, "--force", expect=2)
    assert "is no export (it holds no rlcli_export.json), and is left as it is" in capsys.readouterr().err
    assert out.exists()


def test_force_does_not_replace_the_base_that_an_export_is_made_from(
    run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    export(run_of("full"), "--out", base)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "next", base)
    dist.destroy_process_group()
    before = (base / "model.safetensors").read_bytes()
    export(tmp_path / "next", "--out", base, "--force", expect=2)
    assert "holds the base model that the export is made from" in capsys.readouterr().err
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("words", [[], ["--critic"]])
def test_weights_that_are_not_finite_fail(
    words: list[str], runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "broken", runs / "base", recipe="ppo", critic=runs / "base", moved_by=float("nan"))
    dist.destroy_process_group()
    export(tmp_path / "broken", *words, "--out", tmp_path / "out", expect=1)
    assert "the weights at step 3 are not finite; nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("probe", [None, {"tokens": [7], "log_probs": []}, {"tokens": [7, 3], "log_probs": [-1, -2]}])
def test_without_anything_to_compare_with_there_is_no_proof(
    probe: Any, run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.files import described

    run = run_of("full")
    checkpoint = run / "checkpoints" / "step-000005"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["probe"]
    (checkpoint / "state.json").write_text(json.dumps(state | ({"probe": probe} if probe else {})))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = described(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    export(run, "--out", tmp_path / "out", expect=2)
    assert "holds no log-probs of a probe to compare with; export without the proof" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    export(run, "--out", tmp_path / "out", "--no-check")


def test_a_folder_that_cannot_be_made_is_said_before_any_work(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    export(runs / "full", "--out", tmp_path / "file" / "out", expect=2)
    assert f"{tmp_path / 'file'} is a file; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["full", "--merge"], "--merge: there is no adapter to merge"),
        (["full", "--critic"], "--critic: step 5 of full holds no critic"),
        (["full", "--step", "4"], "--step 4: there is no such checkpoint; "),
        (["full", "--step", "4"], "has 2, 5; or give best"),
        (["lora", "--step", "best"], "--step best: no checkpoint of "),
        (["full/checkpoints/latest", "--step", "2"], "is one checkpoint"),
        (["base"], "is neither a run's folder nor a checkpoint; give runs/NAME or"),
        (["nowhere"], "nowhere is not there"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    runs: Path, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(runs / words[0], *words[1:], "--out", tmp_path / "out", expect=2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "step"), [([], 5), (["--step", "2"], 2), (["--step", "best"], 2), (["checkpoints/step-000002"], 2)]
)
def test_the_step_that_is_asked_for(runs: Path, words: list[str], step: int, tmp_path: Path) -> None:
    inside = [word for word in words if word.startswith("checkpoints")]
    others = [word for word in words if word not in inside]
    export(runs / "full" / "/".join(inside), *others, "--out", tmp_path / "out", "--no-check")
    assert json.loads((tmp_path / "out" / "rlcli_export.json").read_text())["step"] == step


def test_a_damaged_checkpoint_is_named_or_left_out(
    run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("full")
    shard = next((run / "checkpoints" / "step-000005" / "policy").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    export(run / "checkpoints" / "latest", "--out", tmp_path / "out", expect=2)
    assert f"step-000005 is damaged: policy/{shard.name} has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=f"policy/{shard.name}"):
        model_folder(str(run / "checkpoints" / "latest"), print)
    export(run, "--out", tmp_path / "out")
    assert "going back to step-000002" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "rlcli_export.json").read_text())["step"] == 2


@pytest.mark.parametrize(("name", "kind"), [("ppo", "value model"), ("prime", "process reward model")])
def test_a_critic_is_exported_where_it_is_asked_for(
    runs: Path, name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    out = tmp_path / "out"
    export(runs / name, "--critic", "--out", out, "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["log_probs"]) == (kind, None)
    assert said["change"]["moved"] == said["change"]["tensors"]
    auto = AutoModelForSequenceClassification if name == "ppo" else AutoModelForCausalLM
    lm = auto.from_pretrained(out)
    stored = Stored(runs / name / "checkpoints" / "latest" / "policy", "critic.model.lm.")
    expected = stored.read(stored.shapes)
    named = dict(lm.named_parameters())
    assert expected.keys() == named.keys()
    assert all(torch.equal(expected[key], named[key]) for key in named)


def test_the_card_tells_recipe_data_evaluation_and_checks(run_of: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from huggingface_hub import ModelCard

    from rlcli.data.provenance import stamped

    run = run_of("full")
    record = {
        "dataset": "gsm8k",
        "converter": "rlcli",
        "rlcli": "0.1",
        "sources": [{"hub": "openai/gsm8k"}],
        "arguments": {"seed": 3, "against": [f"{tmp_path}/secret/math500"]},
        "steps": [{"step": "deduplicate", "rows": 7000}],
        "date": "2026-01-02",
    }
    data = tmp_path / "secret" / "data"
    data.mkdir(parents=True)
    pyarrow.parquet.write_table(stamped(pyarrow.table({"a": [1]}), record), data / "train.parquet")
    (tmp_path / "base").mkdir()
    save_tiny(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = (
        *(f"data.path={data}", "algorithm.kl_coef=0.01", "train.lr=3e-6", "evaluation.data=some/gsm8k"),
        *(f"verifier.name={tmp_path}/secret/mine.py:score + 0.1 * format", "verifier.sandbox=http://10.0.0.5:8080"),
    )
    save_run(run, tmp_path / "base", *settings, step=7)
    dist.destroy_process_group()
    export(run, "--out", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.datasets == ["openai/gsm8k"]
    assert {"rlcli", "grpo"} <= set(card.data.tags)
    for words in (
        "7 steps of the recipe `grpo`",
        "| KL to the base | 0.01 × k3 in the loss |",
        "lr = 3e-06",
        "| source | openai/gsm8k |",
        "| arguments | seed = 3, against = ['math500'] |",
        "| verifier | mine.py:score + 0.1 * format |",
        "deduplicate",
        "|  | before training | after step 5 |",
        "| pass@1 | 20.0% [10.0, 30.0] | 60.0% [50.0, 70.0] |",
        "26 of 26 tensors differ from the base",
        "of the trainer's on 7 tokens (at most 0.0001)",
    ):
        assert words in card.text, card.text
    for private in (str(tmp_path), "secret", "10.0.0.5"):  # where it was trained is nobody's business
        assert private not in card.content


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_push_is_a_private_repository_with_the_whole_folder(
    hub: LoopbackHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(runs / "full", "--out", tmp_path / "out", "--push", "me/model", "--json")
    assert json.loads(capsys.readouterr().out)["pushed"] == f"{hub.url}/me/model"
    assert hub.repos["me/model"]["visibility"] == "private"
    assert hub.files["me/model"] == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_what_fails_its_checks_is_not_pushed(hub: LoopbackHub, runs: Path, tmp_path: Path) -> None:
    export(runs / "unmoved", "--out", tmp_path / "out", "--push", "me/model", expect=1)
    assert not hub.repos


def test_a_push_that_fails_leaves_the_export_and_says_how_to_go_on(
    hub: LoopbackHub, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.full, out = True, tmp_path / "out"
    export(runs / "full", "--out", out, "--push", "me/model", "--no-check", expect=1)
    said = capsys.readouterr().err
    assert f"{out} is exported, but not pushed to me/model: 403 Forbidden: Storage quota exceeded" in said
    assert f"hf upload --private me/model {out}" in said
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("token", "repo", "said"),
    [
        ("", "me/model", "there is no Hugging Face token; log in with `hf auth login`, or set HF_TOKEN"),
        ("wrong", "me/model", "the hub refuses: Invalid user token"),
        (TOKEN, "me/my/model", "Repo id must be in the form"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_any_work(
    hub: LoopbackHub,
    runs: Path,
    token: str,
    repo: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    export(runs / "full", "--out", tmp_path / "out", "--push", repo, expect=2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(runs: Path, tmp_path: Path) -> None:
    """As a limit on the size of a file, which is less than the model's."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
        "from rlcli.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(runs / "full"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "make room" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_a_model_already(runs: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    for path in ("Qwen/Qwen2.5-0.5B-Instruct", str(runs / "base"), str(tmp_path / "nowhere"), str(tmp_path)):
        assert model_folder(path, notes.append) == path
    assert not notes


def test_a_run_is_exported_once_and_again_when_its_step_is_another(run_of: Any, runs: Path) -> None:
    run, notes = run_of("full"), list[str]()
    made = Path(model_folder(str(run), notes.append))
    assert made == run / "exports" / "step-000005"
    assert notes == [f"exporting step 5 of full to {made}"]
    assert log_probs(made) == pytest.approx(stored_log_probs(run), abs=1e-5)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert model_folder(str(run / "checkpoints" / "latest"), notes.append) == str(made)
    assert model_folder(str(made), notes.append) == str(made)
    assert len(notes) == 1
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    shutil.rmtree(run / "checkpoints" / "step-000005")
    shutil.copytree(runs / "half" / "checkpoints" / "step-000003", run / "checkpoints" / "step-000005")
    manifest = json.loads((run / "checkpoints" / "step-000005" / "manifest.json").read_text())
    state = run / "checkpoints" / "step-000005" / "state.json"
    state.write_text(state.read_text().replace('"step": 3', '"step": 5'))
    from rlcli.files import described

    manifest["step"], manifest["files"]["state.json"] = 5, described(state)
    (run / "checkpoints" / "step-000005" / "manifest.json").write_text(json.dumps(manifest))
    assert model_folder(str(run), notes.append) == str(made)
    assert len(notes) == 2
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_critic_path_takes_the_critic_and_else_the_policy(run_of: Any) -> None:
    ppo, full = run_of("ppo"), run_of("full")
    assert model_folder(str(ppo), print, critic=True) == str(ppo / "exports" / "step-000003-critic")
    assert "score.weight" in load_file(ppo / "exports" / "step-000003-critic" / "model.safetensors")
    assert model_folder(str(ppo), print) == str(ppo / "exports" / "step-000003")
    assert model_folder(str(full), print, critic=True) == str(full / "exports" / "step-000005")


def test_a_new_run_can_begin_from_a_run_and_the_critic_of_another(run_of: Any) -> None:
    from rlcli.config.load import resolve
    from rlcli.model.facts import check_model, check_value_model
    from rlcli.trainer.exporting import with_model_folders

    full, ppo = run_of("full"), run_of("ppo")
    asked = resolve("ppo", {"model.path": str(full), "critic.path": str(ppo / "checkpoints" / "latest")}).config
    config = with_model_folders(asked, print)
    assert config.model.path == str(full / "exports" / "step-000005")
    assert config.critic.path == str(ppo / "exports" / "step-000003-critic")
    check_value_model(config.critic.path, check_model(config.model.path).tokenizer_size)
    assert with_model_folders(config, print) == config


def test_a_run_that_cannot_be_written_is_exported_elsewhere(
    run_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, notes = run_of("full"), list[str]()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(run)))  # root may write anywhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = Path(model_folder(str(run), notes.append))
    assert made.name == "step-000005"
    assert not (run / "exports").exists()
    assert (made / "model.safetensors").exists()
    assert any("nothing can be written" in note for note in notes)


def test_paths_are_from_where_the_run_was_started(run_of: Any, runs: Path, tmp_path: Path) -> None:
    run = run_of("full")
    checkpoint = run / "checkpoints" / "step-000005"
    from rlcli.files import described

    config = checkpoint / "config.toml"
    config.write_text(config.read_text().replace(f'"{runs}/base"', '"base"'))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["config.toml"] = described(config)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (run / "environment.json").write_text(json.dumps({"directory": str(runs)}))
    export(run, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
