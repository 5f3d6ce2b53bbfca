"""Exports of real checkpoints, through the command line, read back by transformers and peft alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

from rlcli.errors import CheckpointError
from rlcli.export.export_folder import model_folder
from rlcli.export.exported_weights import Stored
from rlcli.model.io.model_config import engine_keys
from tests import chat_templates as templates
from tests.export_fixtures import LORA, PROBE, export, log_probs, nothing_beside, save_run, stored_log_probs
from tests.model_fixtures import save_tiny


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "untied"])
def test_transformers_reads_the_trained_model(
    saved_runs: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    export_folder = tmp_path / "out"
    export(saved_runs / name, "--out", export_folder, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert summary["change"]["moved"] == summary["change"]["tensors"] > 20
    assert summary["log_probs"]["mean"] < 1e-5
    assert summary["log_probs"]["tokens"] == len(PROBE) - 1
    assert log_probs(export_folder) == pytest.approx(stored_log_probs(saved_runs / name), abs=1e-5)
    stored = Stored(saved_runs / name / "checkpoints" / "latest" / "policy", "policy.model.lm.")
    written = load_file(export_folder / "model.safetensors")
    assert ("lm_head.weight" in written) == (name == "untied")
    assert all(torch.equal(tensor, written[key]) for key, tensor in stored.read(stored.shapes).items())
    assert AutoTokenizer.from_pretrained(export_folder).chat_template
    assert {"config.json", "generation_config.json", "README.md", "chat_template.jinja"} <= set(
        os.listdir(export_folder)
    )
    nothing_beside(export_folder)


def test_each_expert_is_exported_by_itself(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_folder = tmp_path / "out"
    export(saved_runs / "mixture", "--out", export_folder, "--json")
    summary = json.loads(capsys.readouterr().out)
    written, base = (load_file(each / "model.safetensors") for each in (export_folder, saved_runs / "mixture-base"))
    assert written.keys() == base.keys()
    assert any(".experts.5.down_proj." in name for name in written)
    assert summary["change"]["moved"] == summary["change"]["tensors"] == len(written)
    assert log_probs(export_folder) == pytest.approx(stored_log_probs(saved_runs / "mixture"), abs=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_other_families_are_exported_under_the_names_of_their_files(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """In bfloat16, but for the bias of GLM-4's routers, which is not trained and stays in float32."""
    export_folder = tmp_path / "out"
    export(saved_runs / kind, "--out", export_folder, "--json")
    summary = json.loads(capsys.readouterr().out)
    written, base = (load_file(each / "model.safetensors") for each in (export_folder, saved_runs / f"{kind}-base"))
    assert written.keys() == base.keys()
    fixed = {name for name in written if name.endswith("e_score_correction_bias")}
    assert len(fixed) == (0 if kind in ("mixtral", "gpt_oss") else 2)
    assert engine_keys(str(export_folder)) == {}
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == fixed
    assert all(torch.equal(written[name], base[name]) for name in fixed)
    assert summary["change"]["moved"] == len(written) - len(fixed)


@pytest.mark.parametrize(("run", "words"), [("hybrid", ()), ("hybrid-lora", ("--merge",))])
def test_layers_that_predict_several_tokens_are_exported_as_they_were(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, words: tuple[str, ...]
) -> None:
    """transformers does not read them, so they are not trained."""
    export_folder = tmp_path / "out"
    export(saved_runs / run, "--out", export_folder, "--json", *words)
    summary = json.loads(capsys.readouterr().out)
    written, base = (load_file(each / "model.safetensors") for each in (export_folder, saved_runs / "hybrid-base"))
    assert written.keys() == base.keys()
    untrained = {name for name in base if name.startswith("mtp.")}
    assert len(untrained) == 2
    assert all(torch.equal(written[name], base[name]) for name in untrained)
    assert summary["change"]["tensors"] == len(written) - len(untrained)
    assert log_probs(export_folder) == pytest.approx(stored_log_probs(saved_runs / run), abs=1e-5)


@pytest.mark.long
def test_the_pipeline_that_the_card_shows_answers(tmp_path: Path) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "run", make_tiny_model(tmp_path / "base"))
    dist.destroy_process_group()
    export(tmp_path / "run", "--out", tmp_path / "out", "--no-check")
    code = (tmp_path / "out" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    shown = subprocess.run(
        [sys.executable, "-c", code.replace("256", "4")], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "'role': 'assistant'" in shown.stdout, shown.stderr


@pytest.mark.parametrize(("settings", "words"), [((), ()), (LORA, ("--merge",))], ids=["full", "merged"])
def test_the_export_ends_a_response_where_the_run_did(
    settings: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    """A base model's own generation config names the end of a text alone."""
    from transformers import AutoTokenizer, GenerationConfig

    from rlcli.model.io.tiny_model import make_tiny_model

    base = make_tiny_model(tmp_path / "base")
    eos = AutoTokenizer.from_pretrained(base).eos_token_id
    (base / "chat_template.jinja").write_text(templates.BY_OPENER)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "do_sample": True, "top_k": 7}))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "run", base, *settings, "rollout.stop_token_ids=[9]")
    dist.destroy_process_group()
    export(tmp_path / "run", *words, "--out", tmp_path / "out", "--no-check")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    user = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|user|>")
    assert generation.eos_token_id == sorted({eos, user, 9})
    assert (generation.do_sample, generation.top_k) == (True, 7)


def test_files_get_the_permissions_that_the_umask_leaves(saved_runs: Path, tmp_path: Path) -> None:
    previous_umask = os.umask(0o027)
    try:
        export(saved_runs / "full", "--out", tmp_path / "out", "--no-check")
    finally:
        os.umask(previous_umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_large_model_is_written_as_several_files(
    saved_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(split_torch_state_dict_into_shards, max_shard_size="300KB")
    monkeypatch.setattr("rlcli.export.exported_weights.split_torch_state_dict_into_shards", small)
    export_folder = tmp_path / "out"
    export(saved_runs / "full", "--out", export_folder)
    assert len(list(export_folder.glob("model-*-of-*.safetensors"))) > 2
    assert not (export_folder / "model.safetensors").exists()
    assert log_probs(export_folder) == pytest.approx(stored_log_probs(saved_runs / "full"), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "base", "factors", "matrices"), [("lora", "base", 14, 14), ("mixture-lora", "mixture-base", 12, 8 + 36)]
)
def test_an_adapter_is_read_by_peft_and_merged_by_transformers_alone(
    saved_runs: Path,
    name: str,
    base: str,
    factors: int,
    matrices: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a mixture each expert has its own: both are trained so, exported, read and merged."""
    from peft import AutoPeftModelForCausalLM

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export(saved_runs / name, "--out", adapter, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kind"], summary["change"]["tensors"], summary["change"]["moved"]) == ("adapter", factors, factors)
    assert summary["log_probs"]["mean"] < 1e-5
    export(saved_runs / name, "--merge", "--out", merged, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kind"], summary["change"]["moved"]) == ("model", matrices)
    assert summary["log_probs"]["mean"] < 1e-5
    assert not (merged / "adapter_config.json").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        saved_runs / base
    )
    expected = pytest.approx(stored_log_probs(saved_runs / name), abs=1e-5)
    assert log_probs(merged) == expected
    with torch.no_grad():
        lm = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
        distributions = lm(input_ids=torch.tensor([PROBE])).logits[0].log_softmax(-1)
    assert [distributions[i, token].item() for i, token in enumerate(PROBE[1:])] == expected


@pytest.mark.parametrize(("name", "words"), [("half", []), ("full", ["--dtype", "bfloat16"])])
def test_bfloat16_is_kept_or_made(
    saved_runs: Path, name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_folder = tmp_path / "out"
    export(saved_runs / name, *words, "--out", export_folder, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert summary["dtype"] == "bfloat16"
    assert 0 < summary["log_probs"]["mean"] < summary["log_probs"]["bound"] == 0.15
    assert {tensor.dtype for tensor in load_file(export_folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((export_folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_rounding_is_no_change(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base in float32 that was not trained differs from its own rounding, and yet nothing was learnt."""
    export(saved_runs / "unmoved", "--dtype", "bfloat16", "--out", tmp_path / "out", expect=1)
    assert "the exported weights equal the base model's: none of 26 tensors" in capsys.readouterr().err


def test_noise_of_master_weights_is_no_change(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is it in the export, whatever its dtype: training computed without it."""
    run = saved_runs / "unmoved-half"
    base = load_file(saved_runs / "published-base" / "model.safetensors")
    for dtype in ("bfloat16", "float16", "float32"):
        export(run, "--dtype", dtype, "--out", tmp_path / dtype, expect=1)
        stderr = capsys.readouterr().err
        assert "the exported weights equal the base model's: none of 26 tensors" in stderr
        assert "--dtype" not in stderr
        export(run, "--dtype", dtype, "--out", tmp_path / dtype, "--no-check")
        written = load_file(tmp_path / dtype / "model.safetensors")
        assert all(torch.equal(tensor, base[name].to(getattr(torch, dtype))) for name, tensor in written.items())


def test_a_merged_adapter_is_not_rounded_as_it_was_in_training(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its change is less than half the distance between numbers of bfloat16, in which the run computed."""
    export(saved_runs / "lora-half", "--merge", "--dtype", "float32", "--out", tmp_path / "out", "--json")
    change = json.loads(capsys.readouterr().out)["change"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(saved_runs / "published-base" / "model.safetensors")
    moved = [tensor for name, tensor in written.items() if not torch.equal(tensor, base[name].float())]
    size = sum((tensor - base[name].float()).abs().sum(dtype=torch.float64) for name, tensor in written.items())
    assert change["moved"] == len(moved) > 10
    assert change["mean"] == pytest.approx(float(size) / sum(tensor.numel() for tensor in written.values()), rel=1e-4)


def test_weights_that_equal_the_base_fail_and_leave_nothing(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_folder = tmp_path / "out"
    export(saved_runs / "unmoved", "--out", export_folder, expect=1)
    stderr = capsys.readouterr().err
    assert "the exported weights equal the base model's" in stderr
    assert "--no-check exports anyway" in stderr
    assert not list(tmp_path.iterdir())
    export(saved_runs / "unmoved", "--out", export_folder, "--no-check")
    assert "It was not checked." in (export_folder / "README.md").read_text()


def test_a_swapped_tensor_is_seen_in_the_log_probs(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(saved_runs / "swapped", "--out", tmp_path / "out", expect=1)
    assert "does not give the trainer's log-probs: they differ by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_adapter_on_another_base_is_seen_in_the_log_probs(
    run_of: Any, saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = run_of("lora"), saved_runs / "base"
    shutil.copytree(base, tmp_path / "other")
    save_tiny(tmp_path / "other", seed=1)
    for file in ("config.toml", "manifest.json"):  # the base by another name, in a checkpoint that is sound
        path = run / "checkpoints" / "step-000003" / file
        if file == "config.toml":
            original = path.read_text()
            path.write_text(original.replace(str(base), str(tmp_path / "other")))
        else:
            from rlcli.support.files import described

            manifest = json.loads(path.read_text())
            manifest["files"]["config.toml"] = described(path.with_name("config.toml"))
            path.write_text(json.dumps(manifest))
    export(run, "--out", tmp_path / "out", expect=1)
    assert "does not give the trainer's log-probs" in capsys.readouterr().err


def test_a_folder_that_is_there_is_replaced_by_force_alone(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_folder = tmp_path / "out"
    export(saved_runs / "full", "--step", "2", "--out", export_folder, "--no-check")
    (export_folder / "mine.txt").write_text("kept")
    mtimes = {file: file.stat().st_mtime_ns for file in export_folder.iterdir()}
    export(saved_runs / "full", "--out", export_folder, expect=2)
    assert f"{export_folder} exists; give another folder with --out" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in export_folder.iterdir()} == mtimes
    export(saved_runs / "unmoved", "--out", export_folder, "--force", expect=1)  # a proof that fails costs nothing
    assert {file: file.stat().st_mtime_ns for file in export_folder.iterdir()} == mtimes
    export(saved_runs / "full", "--out", export_folder, "--force")
    assert json.loads((export_folder / "rlcli_export.json").read_text())["step"] == 5
    assert not (export_folder / "mine.txt").exists()
    nothing_beside(export_folder)


@pytest.mark.parametrize("kind", ["folder", "file", "run", "model"])
def test_force_replaces_nothing_but_exports(
    saved_runs: Path, run_of: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "notes"
    if kind == "file":
        target.write_text("mine")
    elif kind == "model":  # such as the base that the run began with
        shutil.copytree(saved_runs / "base", target)
    elif kind == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target = run_of("full")
    export(saved_runs / "full", "--out", target, "--force", expect=2)
    assert "is not an export (it holds no rlcli_export.json) and was not changed" in capsys.readouterr().err
    assert target.exists()


def test_force_does_not_replace_the_base_that_an_export_is_made_from(
    run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    export(run_of("full"), "--out", base)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "next", base)
    dist.destroy_process_group()
    weights = (base / "model.safetensors").read_bytes()
    export(tmp_path / "next", "--out", base, "--force", expect=2)
    assert "holds the base model that the export reads" in capsys.readouterr().err
    assert (base / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("words", [[], ["--critic"]])
def test_weights_that_are_not_finite_fail(
    words: list[str], saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(tmp_path / "broken", saved_runs / "base", recipe="ppo", critic=saved_runs / "base", moved_by=float("nan"))
    dist.destroy_process_group()
    export(tmp_path / "broken", *words, "--out", tmp_path / "out", expect=1)
    assert "the weights at step 3 are not finite; nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("probe", [None, {"tokens": [7], "log_probs": []}, {"tokens": [7, 3], "log_probs": [-1, -2]}])
def test_without_anything_to_compare_with_there_is_no_proof(
    probe: Any, run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.support.files import described

    run = run_of("full")
    checkpoint = run / "checkpoints" / "step-000005"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["probe"]
    (checkpoint / "state.json").write_text(json.dumps(state | ({"probe": probe} if probe else {})))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = described(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    export(run, "--out", tmp_path / "out", expect=2)
    assert "holds no log-probs of a probe to compare with; export without the check" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    export(run, "--out", tmp_path / "out", "--no-check")


def test_a_folder_that_cannot_be_made_is_said_before_any_work(
    saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    export(saved_runs / "full", "--out", tmp_path / "file" / "out", expect=2)
    assert f"{tmp_path / 'file'} is a file; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["full", "--merge"], "--merge: no adapter to merge"),
        (["full", "--critic"], "--critic: step 5 of full has no critic"),
        (["full", "--step", "4"], "--step 4: no such checkpoint; "),
        (["full", "--step", "4"], "has 2, 5; or give best"),
        (["lora", "--step", "best"], "--step best: no checkpoint of "),
        (["full/checkpoints/latest", "--step", "2"], "is one checkpoint"),
        (["base"], "is neither a run's folder nor a checkpoint; give runs/NAME or"),
        (["nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    saved_runs: Path, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(saved_runs / words[0], *words[1:], "--out", tmp_path / "out", expect=2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "step"), [([], 5), (["--step", "2"], 2), (["--step", "best"], 2), (["checkpoints/step-000002"], 2)]
)
def test_the_step_that_is_asked_for(saved_runs: Path, words: list[str], step: int, tmp_path: Path) -> None:
    inside = [word for word in words if word.startswith("checkpoints")]
    others = [word for word in words if word not in inside]
    export(saved_runs / "full" / "/".join(inside), *others, "--out", tmp_path / "out", "--no-check")
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
    saved_runs: Path, name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    export_folder = tmp_path / "out"
    export(saved_runs / name, "--critic", "--out", export_folder, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kind"], summary["log_probs"]) == (kind, None)
    assert summary["change"]["moved"] == summary["change"]["tensors"]
    auto = AutoModelForSequenceClassification if name == "ppo" else AutoModelForCausalLM
    lm = auto.from_pretrained(export_folder)
    stored = Stored(saved_runs / name / "checkpoints" / "latest" / "policy", "critic.model.lm.")
    expected = stored.read(stored.shapes)
    parameters = dict(lm.named_parameters())
    assert expected.keys() == parameters.keys()
    assert all(torch.equal(expected[key], parameters[key]) for key in parameters)


def test_the_card_tells_recipe_data_evaluation_and_checks(run_of: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from huggingface_hub import ModelCard

    from rlcli.data.prompts.provenance import stamped

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
        "of the trainer's in the mean of 7 tokens (at most 0.0001)",
    ):
        assert words in card.text, card.text
    for private in (str(tmp_path), "secret", "10.0.0.5"):  # where it was trained is nobody's business
        assert private not in card.content


@pytest.mark.long
def test_a_full_disk_leaves_nothing_behind(saved_runs: Path, tmp_path: Path) -> None:
    """As a limit on the size of a file, which is less than the model's."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
        "from rlcli.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(saved_runs / "full"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "free disk space" in done.stderr
    assert not list(tmp_path.iterdir())


def test_paths_are_from_where_the_run_was_started(run_of: Any, saved_runs: Path, tmp_path: Path) -> None:
    run = run_of("full")
    checkpoint = run / "checkpoints" / "step-000005"
    from rlcli.support.files import described

    config = checkpoint / "config.toml"
    config.write_text(config.read_text().replace(f'"{saved_runs}/base"', '"base"'))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["config.toml"] = described(config)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (run / "environment.json").write_text(json.dumps({"directory": str(saved_runs)}))
    export(run, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_that_trains_an_adapter_is_merged_to_talk_to_it(run_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from rlcli.cli.chat import model_source

    run = run_of("lora")
    merged = Path(model_source(str(run)))
    assert "merging the adapter of step 3 of lora into its base for this command" in capsys.readouterr().err
    assert log_probs(merged) == pytest.approx(stored_log_probs(run), abs=1e-5)
    assert run not in merged.parents
