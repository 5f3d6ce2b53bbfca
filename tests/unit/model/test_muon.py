"""Muon: its rule against plain loops in float64, which parameters follow it, and steps on two ranks as on one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlcli.model.muon import COEFFICIENTS, EPSILON, STEPS, Muon, StepSize, hidden_matrices, orthogonal, step_factor
from rlcli.model.optim import MuonSettings, build_optimizer
from rlcli.model.policy import PolicyModel
from tests.model_fixtures import tiny_lm

Rows = list[list[float]]
LR, DECAY, MOMENTUM, BETAS = 0.02, 0.1, 0.9, (0.9, 0.99)
KINDS = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text")


def times(a: Rows, b: Rows) -> Rows:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def plus(*terms: tuple[float, Rows]) -> Rows:
    rows, columns = len(terms[0][1]), len(terms[0][1][0])
    return [[sum(factor * m[i][j] for factor, m in terms) for j in range(columns)] for i in range(rows)]


def turned(a: Rows) -> Rows:
    return [list(column) for column in zip(*a, strict=True)]


def newton_schulz(u: Rows) -> Rows:
    """Keller Jordan's iteration, number by number."""
    if len(u) > len(u[0]):
        return turned(newton_schulz(turned(u)))
    norm = max(math.sqrt(sum(x * x for row in u for x in row)), EPSILON)
    x = plus((1 / norm, u))
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = times(x, turned(x))
        x = plus((a, x), (1.0, times(plus((b, gram), (c, times(gram, gram))), x)))
    return x


def reference(weight: Rows, gradients: list[Rows], size: StepSize) -> Rows:
    """The weight after a step for each gradient."""
    momentum = plus((0.0, weight))
    a, b = len(weight), len(weight[0])
    scale = 0.2 * math.sqrt(max(a, b)) if size == "match_rms_adamw" else math.sqrt(max(1, a / b))
    for gradient in gradients:
        momentum = plus((MOMENTUM, momentum), (1 - MOMENTUM, gradient))
        direction = newton_schulz(plus((1 - MOMENTUM, gradient), (MOMENTUM, momentum)))
        weight = plus((1 - LR * DECAY, weight), (-LR * scale, direction))
    return weight


def built(model: Any, size: StepSize = "match_rms_adamw") -> Muon:
    optimizer = build_optimizer(model, LR, BETAS, DECAY, MuonSettings(MOMENTUM, size))
    assert isinstance(optimizer, Muon)
    return optimizer


def policy(kind: str) -> PolicyModel:
    return PolicyModel(tiny_lm(kind).double(), dtype=torch.float64, source="tiny")


def gradients_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("size", get_args(StepSize))
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_a_matrix_moves_as_plain_loops_say(shape: tuple[int, int], size: StepSize) -> None:
    from rlcli.model.muon import Hidden

    generator = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Muon([Hidden(parameter)], [], lr=LR, weight_decay=DECAY, betas=BETAS, momentum=MOMENTUM, size=size)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = reference(weight.tolist(), [gradient.tolist() for gradient in gradients], size)
    torch.testing.assert_close(parameter.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10)


def test_coefficients_and_step_sizes_are_those_of_torch() -> None:
    from torch.optim import _muon

    assert (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C) == COEFFICIENTS
    assert (_muon.DEFAULT_NS_STEPS, _muon.EPS) == (STEPS, EPSILON)
    for size in get_args(StepSize):
        for shape in ((8, 2), (2, 8), (3, 3)):
            assert step_factor(*shape, size) == pytest.approx(_muon._adjust_lr(1.0, size, torch.Size(shape)))


def test_torchs_own_muon_moves_alike_but_for_bfloat16() -> None:
    torch.manual_seed(0)
    model = PolicyModel(tiny_lm(), dtype=torch.float32, source="tiny")
    [hidden, *_] = hidden_matrices(model.lm)
    theirs = torch.nn.Parameter(hidden.parameter.detach().clone())
    their = torch.optim.Muon([theirs], LR, DECAY, MOMENTUM, adjust_lr_fn="match_rms_adamw")
    optimizer, initial = built(model), theirs.detach().clone()
    for seed in range(3):
        for name, gradient in gradients_of(model, seed).items():
            model.get_parameter(name).grad = gradient.float()
        assert hidden.parameter.grad is not None
        theirs.grad = hidden.parameter.grad.clone()
        optimizer.step()
        their.step()
    moved = (theirs.detach() - initial).norm()
    assert float((hidden.parameter.detach() - theirs.detach()).norm() / moved) < 0.02


def test_singular_values_come_near_one_and_zero_stays_zero() -> None:
    matrices = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    assert torch.equal(orthogonal(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_matrices_follow_it_and_the_rest_adamw(kind: str) -> None:
    model = policy(kind)
    hidden = {id(matrix.parameter) for matrix in hidden_matrices(model.lm)}
    parameters = dict(model.named_parameters())
    excluded = [name for name, parameter in parameters.items() if parameter.ndim > 1 and id(parameter) not in hidden]
    assert excluded
    assert all(
        name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight", ".router.weight", "conv1d.weight"))
        or name.endswith(("shared_expert_gate.weight", "proj_bias"))
        for name in excluded
    )
    optimizer, plain = built(model), policy(kind)
    adamw = build_optimizer(plain, LR, BETAS, DECAY)
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, gradient in gradients_of(model, 0).items():
        parameters[name].grad, plain.get_parameter(name).grad = gradient, gradient.clone()
    optimizer.step()
    adamw.step()
    for name, parameter in parameters.items():
        other = plain.get_parameter(name).detach()
        assert torch.equal(parameter.detach(), other) is (id(parameter) not in hidden), name
        assert not torch.equal(parameter.detach(), initial[name]), name
        state_keys = {"momentum_buffer"} if id(parameter) in hidden else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == state_keys


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_each_matrix_of_an_expert_steps_as_if_alone(kind: str) -> None:
    """As the model's files have them: a gate and an up projection, or both in one of transposed form."""
    model = policy(kind)
    name = next(name for name, _ in model.named_parameters() if name.endswith("experts.gate_up_proj"))
    weight, gradient = model.get_parameter(name), gradients_of(model, 0)[name]
    initial = weight.detach().clone()
    weight.grad = gradient
    built(model, "original").step()
    for expert in range(len(initial)):
        matrices = (initial[expert], gradient[expert], weight.detach()[expert])
        # Files have gpt_oss's as it is in memory, [inputs, outputs].
        parts = [(matrix.mT,) for matrix in matrices] if kind == "gpt_oss" else [matrix.chunk(2) for matrix in matrices]
        pairs = zip(*parts, strict=True)
        for old, slope, new in pairs:
            step = step_factor(old.shape[0], old.shape[1], "original") * orthogonal(slope[None])[0]
            torch.testing.assert_close(new, old * (1 - LR * DECAY) - LR * step, rtol=1e-9, atol=1e-12)


RANKS = {2: (("qwen3_moe", 1), ("gpt_oss", 1), ("qwen3", 2)), 3: (("qwen3_5_moe_text", 1),)}
"""Number of ranks → kinds of models, each with the number of its copies."""


def stepped(model: Any, distribute: Any, steps: range) -> None:
    """Steps with the same gradients wherever the parameters are."""
    optimizer = built(model)
    for seed in steps:
        for name, gradient in gradients_of(model, seed).items():
            model.get_parameter(name).grad = distribute(model.get_parameter(name), gradient)
        optimizer.step()


def child(rank: int, world: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from rlcli.model.decoder import blocks
    from rlcli.model.parallel.parallel_dims import ParallelDims

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = {}
    for kind, replicate in RANKS[world]:
        mesh = ParallelDims.of(world, replicate).mesh("cpu")
        model = policy(kind)
        for layer in blocks(model.lm):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def place(parameter: Any, gradient: torch.Tensor) -> Any:
            return distribute_tensor(gradient, parameter.device_mesh, parameter.placements)

        stepped(model, place, range(3))
        full_weights = {name: cast(DTensor, weight).full_tensor().detach() for name, weight in model.named_parameters()}
        results[f"{kind} {replicate}"] = full_weights
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_step_as_one_process_does(world: int, tmp_path: Path) -> None:
    """Three of them divide no matrix evenly, and have fewer matrices of a shape than ranks at last."""
    mp.spawn(child, (world, str(tmp_path)), nprocs=world)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for name, weights in ranks[0].items():
        model = policy(name.split()[0])
        stepped(model, lambda _, gradient: gradient, range(3))
        for key, weight in weights.items():
            expected = model.get_parameter(key).detach()
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-11, msg=f"{name} {key}")
            assert all(torch.equal(other[name][key], weight) for other in ranks[1:])
