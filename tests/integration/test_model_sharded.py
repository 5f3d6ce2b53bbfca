"""Sharded policies and value models on real gloo groups of one and two processes, each launched once for all tests."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlcli.model.lora import LoraSpec
from tests.export_fixtures import stored
from tests.model_fixtures import Row, padded_log_probs, ragged_rows, save_tiny, tiny_config, tiny_lm

pytestmark = pytest.mark.timeout(900)
CPU = torch.device("cpu")
ROWS = ragged_rows(10, longest=40, seed=3)
# The same ten samples split three ways over two ranks' micro-batches, one of which leaves a rank with nothing to do.
SPLITS: dict[int, list[list[list[list[int]]]]] = {
    1: [[[list(range(10))]], [[[3, 1, 4], [0, 2, 5, 6], [7, 8, 9]]]],
    2: [
        [[[0, 1, 2, 3, 4, 5, 6]], [[7, 8, 9]]],
        [[[9, 2], [5]], [[1, 0, 3], [4, 6, 7, 8]]],
        [[list(range(10))], [[]]],
    ],
}
LORA = LoraSpec(rank=4, alpha=8.0, targets="all-linear")


Loss = Callable[[Any, Any, torch.Tensor], torch.Tensor]
"""Of a model, a pack and a number of each response token's sequence: a sum over the pack's response tokens."""


def policy_loss(policy: Any, batch: Any, weight: torch.Tensor) -> torch.Tensor:
    output = policy(batch, 0.8)
    return (weight * output.log_probs + 0.1 * output.entropy).sum()


def value_loss(model: Any, batch: Any, weight: torch.Tensor) -> torch.Tensor:
    return (model(batch).values - weight).square().sum() / 2


def training(
    model: Any, micro_batches: list[list[int]], world: int, loss_of: Loss = policy_loss, lr: float = 1e-2
) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm, step after step: a sum over all response tokens over one global denominator."""
    from rlcli.model.optim import build_optimizer, clip_grad_norm
    from rlcli.model.packed import dummy, pack

    optimizer = build_optimizer(model, lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    denominator = sum(len(tokens) - prompt for tokens, prompt in ROWS)
    weights = torch.linspace(-1, 1, len(ROWS))
    while True:
        total = torch.zeros(())
        for indices in micro_batches:
            batch = pack([ROWS[i] for i in indices], CPU) if indices else dummy(CPU)
            weight = weights[torch.tensor(indices, dtype=torch.int64)][batch.sequence]
            loss = loss_of(model, batch, weight) / denominator if indices else loss_of(model, batch, weight) * 0
            (loss * world).backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item(), norm


def train(*args: Any) -> list[tuple[float, float]]:
    return list(islice(training(*args), 3))


def values(model: Any) -> torch.Tensor:
    from rlcli.model.packed import pack

    with torch.no_grad():
        return model(pack(ROWS, CPU)).values


def log_probs(policy: Any, rows: list[Row] = ROWS) -> torch.Tensor:
    from rlcli.model.packed import pack

    with torch.no_grad():
        return policy(pack(rows, CPU)).log_probs


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.stream_weights()}


def child(rank: int, world: int, port: int, base: str, folder_path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.export.exported_weights import write_lora, write_model, write_value
    from rlcli.model import dithering
    from rlcli.model.io.loading import load_policy, load_value
    from rlcli.model.parallel import fsdp_sharding

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dithering.CHUNK = {"cpu": 1001}  # of which most parameters have several
    mesh = init_device_mesh("cpu", (world,))
    result: dict[str, Any] = {"runs": []}
    folder = Path(folder_path)

    def load(path: str = base, **options: Any) -> Any:
        torch.manual_seed(rank)  # ranks differ on purpose: only the first one's draws may count
        options = {"dtype": torch.float32, **options}
        return load_policy(path, device=CPU, mesh=mesh, **options)

    def export(write: Callable[..., None], model: Any, to: Path, *args: Any) -> None:
        """Through the files of all ranks, as the first one reads them."""
        weights = stored(model, Path(f"{to}-checkpoint"))
        if rank == 0:
            to.mkdir()
            write(weights, *args, to)
        dist.barrier()

    for number, split in enumerate(SPLITS[world]):
        if number:  # the first is gathered whole, all others layer by layer, as large models are
            fsdp_sharding.WHOLE_BYTES = 0
        policy = load(gradient_checkpointing=number == 1)
        if number == 0:
            result["loaded"] = weights_of(policy)
            result["before"] = log_probs(policy)
        # Three micro-batches on one rank must meet as many on the other.
        micro_batch_count = max(len(micro) for micro in split)
        mine = split[rank] + [[]] * (micro_batch_count - len(split[rank]))
        result["runs"].append({"steps": train(policy, mine, world), "weights": weights_of(policy)})
    result["after"] = log_probs(policy)
    result["after_no_grad"] = weights_of(policy)
    export(write_model, policy, folder / "full", base, base, torch.float32)

    reference = load(trainable=False)
    result["reference"] = log_probs(reference)
    result["reference_trains"] = any(p.requires_grad for p in reference.parameters())
    result["untied"] = sorted(name for name, _ in load(str(folder.parent / "untied")).stream_weights())

    lora = load(lora=LORA)
    with lora.adapter_disabled():  # before anything else: gathered parameters must still learn afterwards
        result["lora_base"] = log_probs(lora)
    result["lora_steps"] = train(lora, SPLITS[world][1][rank], world)
    result["lora_after"] = log_probs(lora)
    with lora.adapter_disabled():
        result["lora_base_after"] = log_probs(lora)
    result["adapter"] = lora.adapter_state()
    result["merged"] = weights_of(lora)
    export(write_lora, lora, folder / "adapter", LORA, base, torch.float32)
    lora.save_adapter(folder / f"adapter-of-rank-{rank}")

    published = str(folder.parent / "published")
    noisy = [load(published, dtype=torch.bfloat16), load_value(published, dtype=torch.bfloat16, device=CPU, mesh=mesh)]
    result["masters"] = [{name: tensor.clone() for name, tensor in m.stream_weights(torch.float32)} for m in noisy]
    half = load(dtype=torch.bfloat16, gradient_checkpointing=True)
    result["half_masters"] = {p.dtype for p in half.parameters()}
    result["half"] = log_probs(half)
    result["half_steps"] = train(half, SPLITS[world][0][rank], world)
    result["half_stream"] = {tensor.dtype for _, tensor in half.stream_weights()}
    half_lora = load(dtype=torch.bfloat16, lora=LORA)
    result["half_lora_dtypes"] = {("lora_" in name, p.dtype) for name, p in half_lora.named_parameters()}
    result["half_lora_steps"] = train(half_lora, SPLITS[world][0][rank], world)

    # A second trained policy, as PRIME's reward model is, beside the first: each steps in turn with its own optimizer.
    pair = [training(load(), SPLITS[world][number][rank], world) for number in (0, 1)]
    result["pair"] = list(islice(zip(*pair, strict=True), 3))

    result["values"] = []
    for number, split in enumerate(SPLITS[world]):
        torch.manual_seed(rank)
        options = {"dtype": torch.float32, "device": CPU, "mesh": mesh, "gradient_checkpointing": number == 1}
        value = load_value(str(folder.parent / "reward"), **options)
        initial_values = values(value)
        mine = split[rank] + [[]] * (max(len(micro) for micro in split) - len(split[rank]))
        steps = train(value, mine, world, value_loss, 1e-4)
        result["values"].append({"before": initial_values, "steps": steps, "after": values(value)})
    export(write_value, value, folder / "value", str(folder.parent / "reward"), base, torch.float32)
    result["saved_values"] = values(load_value(str(folder / "value"), dtype=torch.float32, device=CPU, mesh=mesh))
    half_value = load_value(base, dtype=torch.bfloat16, device=CPU, mesh=mesh, gradient_checkpointing=True)
    result["half_values"] = values(half_value)
    result["half_value_steps"] = train(half_value, SPLITS[world][0][rank], world, value_loss, 1e-4)
    result["half_value_masters"] = {p.dtype for p in half_value.parameters()}
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def save_reward_model(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    config = tiny_config(num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("sharded")
    base = save_tiny(root / "base")
    results = {}
    for world in (1, 2):
        folder = root / f"world{world}"
        folder.mkdir()
        if world == 1:
            save_tiny(root / "untied", tie_word_embeddings=False)
            save_reward_model(root / "reward")
            tiny_lm().bfloat16().save_pretrained(root / "published")
        mp.spawn(child, (world, free_port(), str(base), str(folder)), nprocs=world)
        results[world] = [
            {**torch.load(folder / f"{rank}.pt", weights_only=False), "folder": folder, "base": base}
            for rank in range(world)
        ]
    return results


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def everyone(runs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [*runs[1], *runs[2]]


def test_what_an_engine_is_sent_of_an_adapter_is_the_base_with_it_added(runs: Any) -> None:
    for result in everyone(runs):
        base = dict(tiny_lm().named_parameters())
        assert list(result["merged"]) == list(base)
        for name, weight in base.items():
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            expected = weight.detach()
            if (down := result["adapter"].get(f"{layer}.lora_A.weight")) is not None:
                up = result["adapter"][f"{layer}.lora_B.weight"]
                assert up.any(), "it has been trained"
                expected = expected + LORA.alpha / LORA.rank * up @ down
            torch.testing.assert_close(result["merged"][name], expected, rtol=0, atol=1e-6)
        lm = tiny_lm().eval()
        lm.load_state_dict(result["merged"], strict=False)
        torch.testing.assert_close(result["lora_after"], padded_log_probs(lm, ROWS)[0], rtol=0, atol=1e-5)


def test_every_rank_loads_the_files_weights(runs: Any) -> None:
    expected = dict(tiny_lm().named_parameters())
    for result in everyone(runs):
        assert list(result["loaded"]) == list(expected)  # a tied head is not there
        assert all(torch.equal(result["loaded"][name], expected[name]) for name in expected)


def test_sharded_log_probs_equal_the_models_own(runs: Any) -> None:
    expected, _ = padded_log_probs(tiny_lm().eval(), ROWS)
    for result in everyone(runs):
        for name in ("before", "reference", "lora_base"):
            torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-5)
        assert not result["reference_trains"]


def test_any_split_over_ranks_and_micro_batches_trains_alike(runs: Any) -> None:
    first = runs[1][0]["runs"][0]
    assert first["steps"][0][0] != first["steps"][1][0]
    for run in [run for result in everyone(runs) for run in result["runs"]]:
        np.testing.assert_allclose(run["steps"], first["steps"], rtol=1e-5)
        for name, weight in run["weights"].items():
            # AdamW divides by the gradient's own size, so where that is near 0 rounding shows more than elsewhere.
            assert (weight - first["weights"][name]).norm() <= 1e-4 * first["weights"][name].norm(), name


def test_first_update_is_alike_to_float32_rounding(runs: Any) -> None:
    losses = [run["steps"][0] for result in everyone(runs) for run in result["runs"]]
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=2e-6)


def test_weights_stream_in_full_after_a_forward_without_gradient(runs: Any) -> None:
    for result in everyone(runs):
        last = result["runs"][-1]["weights"]
        assert list(result["after_no_grad"]) == list(last)
        assert all(torch.equal(result["after_no_grad"][name], last[name]) for name in last)


def test_an_untied_head_is_streamed(runs: Any) -> None:
    for result in everyone(runs):
        assert "lm_head.weight" in result["untied"]
        assert "model.embed_tokens.weight" in result["untied"]


@pytest.mark.parametrize("world", [1, 2])
def test_the_export_gives_the_same_log_probs_in_transformers(runs: Any, world: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = runs[world][0]
    folder = result["folder"] / "full"
    expected, _ = padded_log_probs(AutoModelForCausalLM.from_pretrained(folder).eval(), ROWS)
    torch.testing.assert_close(result["after"], expected, rtol=0, atol=1e-5)
    assert (result["after"] - result["before"]).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (folder / "generation_config.json").is_file()


@pytest.mark.parametrize("world", [1, 2])
def test_peft_reads_the_adapter_and_gives_the_same_log_probs(runs: Any, world: int) -> None:
    from peft import PeftModel

    result = runs[world][0]
    for name in ("adapter", f"adapter-of-rank-{world - 1}"):
        model = PeftModel.from_pretrained(tiny_lm(), result["folder"] / name).eval()
        assert model.peft_config["default"].base_model_name_or_path == str(result["base"])
        expected, _ = padded_log_probs(model, ROWS)
        torch.testing.assert_close(result["lora_after"], expected, rtol=0, atol=1e-5)


def test_lora_trains_the_adapter_and_leaves_the_base(runs: Any) -> None:
    for result in everyone(runs):
        assert torch.equal(result["lora_base"], result["lora_base_after"])
        assert (result["lora_after"] - result["lora_base"]).abs().max() > 1e-3
        assert all(tensor.dtype == torch.float32 for tensor in result["adapter"].values())
        np.testing.assert_allclose(result["lora_steps"], runs[1][0]["lora_steps"], rtol=1e-4)


def test_bfloat16_computes_in_half_and_keeps_float32_masters(runs: Any) -> None:
    for result in everyone(runs):
        assert result["half_masters"] == {torch.float32}
        assert result["half_stream"] == {torch.bfloat16}
        gap = (result["half"] - result["before"]).abs().max()
        assert 0 < gap < 0.2
        np.testing.assert_allclose(result["half_steps"][0], result["runs"][0]["steps"][0], rtol=0.1)
        assert result["half_lora_dtypes"] == {(True, torch.float32), (False, torch.bfloat16)}
        assert all(math.isfinite(x) for step in result["half_lora_steps"] for x in step)


def test_master_weights_round_to_the_files_and_are_the_same_on_any_ranks(runs: Any) -> None:
    files = dict(tiny_lm().bfloat16().named_parameters())
    for result in everyone(runs):
        for masters, expected in zip(result["masters"], runs[1][0]["masters"], strict=True):
            assert all(torch.equal(weight, expected[name]) for name, weight in masters.items())
            shared = files.keys() & masters.keys()
            assert len(shared) > 20
            for name in shared:
                assert torch.equal(masters[name].bfloat16(), files[name])
                assert not torch.equal(masters[name], files[name].float())


def test_two_trained_policies_step_in_turn_as_each_would_alone(runs: Any) -> None:
    alone = runs[1][0]["runs"][0]["steps"]
    for result in everyone(runs):
        for steps in zip(*result["pair"], strict=True):
            np.testing.assert_allclose(steps, alone, rtol=1e-5)


def test_sharded_values_equal_the_reward_models_own(runs: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    lm = AutoModelForSequenceClassification.from_pretrained(runs[1][0]["folder"].parent / "reward").eval()
    with torch.no_grad():
        hidden = [lm.model(input_ids=torch.tensor(tokens)[None]).last_hidden_state[0] for tokens, _ in ROWS]
        alone = [lm.score(h)[prompt - 1 : -1, 0] for h, (_, prompt) in zip(hidden, ROWS, strict=True)]
    for run in [run for result in everyone(runs) for run in result["values"]]:
        torch.testing.assert_close(run["before"], torch.cat(alone), rtol=0, atol=1e-5)


def test_any_split_trains_the_value_model_alike(runs: Any) -> None:
    first = runs[1][0]["values"][0]
    assert first["steps"][2][0] < first["steps"][0][0]
    for run in [run for result in everyone(runs) for run in result["values"]]:
        np.testing.assert_allclose(run["steps"][0], first["steps"][0], rtol=2e-6)
        np.testing.assert_allclose(run["steps"], first["steps"], rtol=1e-5)
        torch.testing.assert_close(run["after"], first["after"], rtol=0, atol=1e-4)


def test_a_saved_value_model_gives_the_same_values(runs: Any) -> None:
    for result in everyone(runs):
        last = result["values"][-1]
        assert torch.equal(result["saved_values"], last["after"])
        assert (last["after"] - last["before"]).abs().max() > 1e-2


def test_a_value_model_of_the_policy_starts_at_zero_and_learns_in_bf16(runs: Any) -> None:
    for result in everyone(runs):
        assert not result["half_values"].any()
        assert result["half_value_masters"] == {torch.float32}
        losses, norms = zip(*result["half_value_steps"], strict=True)
        assert losses[2] < losses[0]
        assert all(math.isfinite(norm) and norm > 0 for norm in norms)
