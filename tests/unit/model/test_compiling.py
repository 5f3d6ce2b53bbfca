"""Compiled layers give what layers give. Of torch.compile this runs all but the code that Inductor would write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rlcli.errors import SetupError
from rlcli.model.attention import ATTENTION, packed_attention
from rlcli.model.compiling import compile_layers
from rlcli.model.io.loading import load_policy
from rlcli.model.packed import pack
from tests.model_fixtures import ragged_rows, save_tiny, tiny_lm

CPU = torch.device("cpu")


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Runs each captured graph unchanged, and collects the graphs."""
    from transformers import AttentionInterface

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(disable=False):
        yield graphs
    torch._dynamo.reset()
    AttentionInterface.register(ATTENTION, packed_attention)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "checkpointing"), [(torch.float32, True), (torch.bfloat16, False)])
def test_compiled_layers_give_the_same_results_for_any_number_of_tokens(
    mesh: Any, tmp_path: Any, without_inductor: list[Any], dtype: torch.dtype, checkpointing: bool
) -> None:
    base, results = str(save_tiny(tmp_path / "base")), []
    for compiled in (False, True):
        policy = load_policy(
            base, dtype=dtype, device=CPU, mesh=mesh, gradient_checkpointing=checkpointing, compiled=compiled
        )
        batches = [pack(ragged_rows(count, seed=count), CPU) for count in (4, 7, 9)]
        outputs = []
        for number, batch in enumerate(batches):
            compilations = len(without_inductor)
            outputs.append(policy(batch).log_probs)
            outputs[-1].sum().backward()
            assert (len(without_inductor) > compilations) == (compiled and number == 0), "one compilation serves all"
        gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
        results.append((torch.cat(outputs).detach(), gradients))
    (plain, expected), (log_probs, gradients) = results
    exact = dtype == torch.float32
    torch.testing.assert_close(log_probs, plain, rtol=0, atol=1e-5 if exact else 0.05)
    assert gradients.keys() == expected.keys(), "compiling renames nothing"
    for name, gradient in gradients.items():
        ours, theirs = (getattr(g, "to_local", lambda g=g: g)() for g in (gradient, expected[name]))
        assert (ours - theirs).norm() <= (1e-5 if exact else 0.05) * theirs.norm(), name


def test_without_a_c_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SetupError, match="no C compiler"):
        compile_layers(tiny_lm())
