from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.errors import ModelError
from rlcli.model.attention import Segments, packed_attention
from rlcli.model.io.model_config import SUPPORTED, WINDOWED
from rlcli.model.packed import dummy, pack
from rlcli.model.policy import PolicyModel
from tests.flash_stand_in import use_varlen
from tests.model_fixtures import VOCABULARY, Row, padded_log_probs, ragged_rows, tiny_lm

CPU = torch.device("cpu")


def policy_of(lm: torch.nn.Module) -> PolicyModel:
    return PolicyModel(lm, dtype=torch.float32, source="tiny")


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_pack_lays_every_response_token_beside_its_predictor(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    prompts = [data.draw(st.integers(1, n)) for n in lengths]
    first = np.cumsum([0, *lengths])
    rows = [(np.arange(first[i], first[i + 1]), p) for i, p in enumerate(prompts)]  # each token is its own flat index
    batch = pack(rows, CPU)
    expected = [(i, int(token)) for i, (tokens, prompt) in enumerate(rows) for token in tokens[prompt:]]
    assert list(zip(batch.sequence.tolist(), batch.targets.tolist(), strict=True)) == expected
    assert batch.input_ids[batch.response_index].tolist() == [token - 1 for _, token in expected]
    assert batch.position_ids.tolist() == [i for n in lengths for i in range(n)]
    assert batch.boundaries.tolist() == first.tolist()
    assert batch.boundaries.dtype == torch.int32


def test_pack_takes_read_only_arrays() -> None:
    tokens = np.array([3, 4, 5], dtype=np.int32)
    tokens.setflags(write=False)
    assert pack([(tokens, 1)], CPU).targets.tolist() == [4, 5]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_packed_log_probs_equal_the_models_own_padded_ones(kind: str) -> None:
    lm = tiny_lm(kind).eval()
    rows = ragged_rows(9)
    expected, entropy = padded_log_probs(lm, rows)
    output = policy_of(lm)(pack(rows, CPU))
    assert output.log_probs.dtype == torch.float32
    torch.testing.assert_close(output.log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-5)


def test_packed_gradients_equal_padded_ones() -> None:
    lm, rows = tiny_lm(), ragged_rows(9)
    reference = copy.deepcopy(lm)
    (padded_log_probs(reference, rows, temperature=0.7)[0].sum()).backward()
    policy_of(lm)(pack(rows, CPU), 0.7).log_probs.sum().backward()
    for (name, ours), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * max(scale, 1.0), msg=name)


def test_a_sequence_is_the_same_whatever_lies_beside_it() -> None:
    lm, rows = tiny_lm(), ragged_rows(12, longest=60)
    policy = policy_of(lm)
    alone = torch.cat([policy(pack([row], CPU)).log_probs for row in rows])
    torch.testing.assert_close(policy(pack(rows, CPU)).log_probs, alone, rtol=0, atol=1e-5)
    order = np.random.default_rng(1).permutation(len(rows))
    mixed = pack([rows[i] for i in order], CPU)
    log_probs = policy(mixed).log_probs
    parts = torch.cat([log_probs[mixed.sequence == np.flatnonzero(order == i)[0]] for i in range(len(rows))])
    torch.testing.assert_close(parts, alone, rtol=0, atol=1e-5)


def rows_of_groups(groups: int = 3, samples: int = 4, seed: int = 0) -> list[Row]:
    """Samples of some prompts in a random order, ragged; one response is empty."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, random.integers(5, 30)) for _ in range(groups)]
    rows = [
        (np.concatenate([prompt, random.integers(0, VOCABULARY, 0 if sample == 1 else random.integers(1, 40))]), prompt)
        for prompt in prompts
        for sample in range(samples)
    ]
    return [(rows[i][0], len(rows[i][1])) for i in random.permutation(len(rows))]


def test_a_prompt_of_several_rows_is_in_the_pack_once() -> None:
    rows = rows_of_groups()
    batch = pack(rows, CPU)
    prompts = {tokens[:prompt].tobytes(): prompt for tokens, prompt in rows}
    assert batch.tokens == sum(prompts.values()) + sum(len(tokens) - prompt for tokens, prompt in rows)
    ends = batch.boundaries.tolist()
    for (tokens, prompt), start, end, row in zip(rows, ends[:-1], ends[1:], range(len(rows)), strict=True):
        indices = batch.source[start:end]
        assert batch.input_ids[indices].tolist() == tokens.tolist()
        assert batch.position_ids[indices].tolist() == list(range(len(tokens)))
        assert batch.response_index[batch.sequence == row].tolist() == indices[prompt - 1 : -1].tolist()
        assert batch.targets[batch.sequence == row].tolist() == tokens[prompt:].tolist()


def test_prompts_are_not_shared_for_the_sake_of_a_few_tokens() -> None:
    rows = [(np.arange(size) % 7 + 1, 2) for size in (50, 60)]
    assert pack(rows, CPU).segments.source is None
    assert pack([(tokens, 40) for tokens, _ in rows], CPU).segments.source is not None


def test_a_head_in_float32_rounds_no_logit() -> None:
    """In bfloat16: hidden states and weights as they are, their products and sums in float32; against float64."""
    lm, batch = tiny_lm(tie_word_embeddings=False).to(torch.bfloat16), pack(ragged_rows(), CPU)
    policy = PolicyModel(lm, dtype=torch.bfloat16, source="tiny")
    hidden = policy.hidden(batch, batch.segments).detach().double()
    weight = lm.lm_head.weight.detach().double().requires_grad_()
    exact = (hidden @ weight.T).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    rounded = policy(batch).log_probs
    policy.float_head = True
    log_probs = policy(batch).log_probs
    torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=1e-5)
    assert (rounded - exact).abs().max() > 1e-3
    log_probs.sum().backward()
    exact.sum().backward()
    assert lm.lm_head.weight.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(lm.lm_head.weight.grad.double(), weight.grad, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "window"), [*((kind, None) for kind in SUPPORTED), *((kind, 7) for kind in WINDOWED)])
@pytest.mark.parametrize("layout", ["padded", "end_to_end"])
def test_shared_prompts_change_neither_log_probs_nor_gradients(
    kind: str, window: int | None, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of_groups()
    lm = tiny_lm(kind, sliding_window=window)
    reference = copy.deepcopy(lm)
    batch = pack(rows, CPU)
    padded = batch.segments.padded
    assert len(padded.keys.copies)
    assert not len(padded.queries.copies)
    if layout == "end_to_end":
        use_varlen(monkeypatch)
    weight = torch.linspace(-1, 1, len(batch.targets))
    ours = policy_of(lm)(batch, 0.7)
    expected, entropy = padded_log_probs(reference, rows, temperature=0.7)
    torch.testing.assert_close(ours.log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.entropy, entropy, rtol=0, atol=1e-5)
    (weight * ours.log_probs).sum().backward()
    (weight * expected).sum().backward()
    for (name, parameter), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=0, atol=1e-5 * max(scale, 1.0), msg=name)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
@settings(deadline=None)
def test_groups_cover_each_token_once_and_waste_little(lengths: list[int]) -> None:
    padded = Segments.of(lengths, CPU).padded
    layout = padded.keys
    assert layout is padded.queries
    assert layout.source[layout.home].tolist() == list(range(sum(lengths)))
    assert len(layout.source) == sum(size * length for size, _, length in padded.shapes) <= 1.25 * sum(lengths)
    assert not len(layout.copies)


def test_layers_share_what_one_of_them_has_laid_out() -> None:
    """FSDP2 gives each layer a copy, by dataclass field, of what it gets in 16 bits."""
    segments = Segments.of([3, 2], CPU)
    first, second = replace(segments), replace(segments)
    assert first.padded is second.padded
    assert first.end_to_end is second.end_to_end
    moved = segments.moved(lambda tensor: tensor.clone())
    assert moved.padded is not segments.padded
    assert moved.padded.keys.source.tolist() == segments.padded.keys.source.tolist()


@given(st.data())
@settings(deadline=None)
def test_a_shared_prompt_attends_once_and_is_seen_by_every_row(data: st.DataObject) -> None:
    prompt = np.arange(data.draw(st.integers(1, 40)))
    responses = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=12))
    rows = [
        (np.concatenate([prompt, 100 * (row + 1) + np.arange(size)]), len(prompt)) for row, size in enumerate(responses)
    ]
    batch = pack(rows, CPU)
    segments, padded = batch.segments, batch.segments.padded
    assert padded.queries.source[padded.queries.home].tolist() == list(range(batch.tokens))
    assert padded.keys.source[padded.keys.home].tolist() == list(range(batch.tokens))
    if segments.source is None:
        return
    assert not len(padded.queries.copies)
    # Every token sees what is before it in its sequence, and itself.
    flat = [(row, position) for row, (tokens, _) in enumerate(rows) for position in range(len(tokens))]
    place_of = dict(zip(segments.source.tolist(), (position for _, position in flat), strict=True))
    offset = keys = 0
    for call in padded.calls:
        count, last, key_count = call.shape
        seen = call.visible(None, CPU)
        seen = seen.expand(count, 1, last, key_count)[:, 0]
        for row in range(count):
            for query in range(last):
                token = int(padded.queries.source[offset + row * last + query])
                sees = padded.keys.source[keys + row * key_count : keys + (row + 1) * key_count][seen[row, query]]
                if int(padded.queries.home[token]) == offset + row * last + query:
                    assert len(sees) == place_of[token] + 1
                    assert int(sees[-1]) == token
        offset, keys = offset + count * last, keys + count * key_count


def test_a_dummy_gives_every_parameter_a_zero_gradient() -> None:
    policy = policy_of(tiny_lm())
    output = policy(dummy(CPU))
    assert output.log_probs.shape == (0,)
    (output.log_probs.sum() * 0).backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("window", [1, 3, 50])
def test_each_token_sees_the_last_ones_of_its_window_alone(window: int) -> None:
    torch.manual_seed(0)
    lengths = [9, 4, 1, 8]
    query, key, value = (torch.randn(1, 2, sum(lengths), 8, dtype=torch.float64) for _ in range(3))
    attended, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, segments=Segments.of(lengths, CPU), sliding_window=window
    )
    start = 0
    for length in lengths:
        for position in range(length):
            sees = slice(start + max(0, position - window + 1), start + position + 1)
            scores = torch.einsum("hd,hkd->hk", query[0, :, start + position], key[0, :, sees]) / 8**0.5
            expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), value[0, :, sees])
            torch.testing.assert_close(attended[0, start + position], expected)
        start += length


@pytest.mark.parametrize("kernel", ["_grouped", "_varlen"])
def test_values_may_be_narrower_than_keys(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in latent attention: against plain loops in float64, with gradients."""
    torch.manual_seed(0)
    lengths = [9, 4, 1, 8]
    query, key = (torch.randn(1, 2, sum(lengths), 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 2, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    if kernel == "_varlen":
        use_varlen(monkeypatch)
    attended, _ = packed_attention(torch.nn.Identity(), query, key, value, None, segments=Segments.of(lengths, CPU))
    assert attended.shape == (1, sum(lengths), 2, 6)
    start, rows = 0, []
    for length in lengths:
        for position in range(start, start + length):
            scores = torch.einsum("hd,hkd->hk", query[0, :, position], key[0, :, start : position + 1]) / 16**0.5
            rows.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), value[0, :, start : position + 1]))
        start += length
    expected = torch.stack(rows)
    torch.testing.assert_close(attended[0], expected)
    weight = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad((output * weight).sum(), (query, key, value)) for output in (attended[0], expected)
    )
    for own_gradient, gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own_gradient, gradient)


@pytest.mark.parametrize("feature", ["softcap"])
def test_attention_that_packing_does_not_do_is_refused(feature: str) -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match=feature):
        packed_attention(torch.nn.Identity(), x, x, x, None, segments=Segments.of([3], CPU), **{feature: torch.ones(1)})


def test_an_output_layer_with_a_bias_is_refused() -> None:
    lm = tiny_lm()
    lm.lm_head = torch.nn.Linear(128, 100, bias=True)
    with pytest.raises(ModelError, match="without bias"):
        policy_of(lm)
