from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord
from workbench.decode.model import Target
from workbench.decode.presets import load_preset
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError

MakeSpec = Callable[..., ModelSpec]
MakeTarget = Callable[..., Target]
DENSE = {"moe": None, "dense_inter": 48, "tied_head": True, "dflash": None}


def some_tokens(batch: int, length: int, vocab: int = 64) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(length))


@given(chunks=st.lists(st.integers(1, 8), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("changes", [{}, DENSE, {"dense_first": 1, "dense_inter": 48}], ids=["moe", "dense", "mixed"])
def test_scoring_in_chunks_equals_the_forward_over_the_whole(
    tiny_target: MakeTarget, changes: dict[str, object], chunks: list[int]
) -> None:
    target = tiny_target(1, **changes)
    tokens = some_tokens(2, sum(chunks))
    with torch.no_grad():
        hidden, taps, _ = target(tokens)
        logits = target.logits(hidden)
    cache = target.new_cache(sum(chunks), batch=2)
    for count in chunks:
        rows = slice(cache.length, cache.length + count)
        scores = target.score(tokens[:, rows], cache)
        torch.testing.assert_close(scores.logits, logits[:, rows], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scores.hidden, hidden[:, rows], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scores.taps, taps[:, rows], rtol=1e-3, atol=1e-4)
        assert cache.length == rows.start  # scoring commits nothing
        cache.length += count


def test_shapes_of_what_a_forward_yields(tiny_target: MakeTarget) -> None:
    target = tiny_target(0)
    scores = target.score(some_tokens(3, 4), target.new_cache(8, batch=3))
    assert scores.logits.shape == (3, 4, 64)
    assert scores.logits.dtype == torch.float32
    assert scores.hidden.shape == (3, 4, 32)
    assert scores.taps.shape == (3, 4, 2, 32)
    assert scores.experts.shape == (2, 12, 2)  # layers, batch x tokens, top_k
    assert scores.experts.min() >= 0
    assert scores.experts.max() < 4
    torch.testing.assert_close(scores.taps[:, :, 1], scores.hidden)  # the last layer's output is the hidden state


def test_a_dense_model_taps_nothing_and_routes_nothing(tiny_target: MakeTarget) -> None:
    target = tiny_target(0, **DENSE)
    scores = target.score(some_tokens(1, 3), target.new_cache(8))
    assert scores.taps.shape == (1, 3, 0, 32)
    assert scores.experts.shape[0] == 0
    _, taps, balance = target(some_tokens(1, 3))
    assert taps.shape == (1, 3, 0, 32)
    assert float(balance) == 0


def test_the_head_is_the_embedding_or_its_own(tiny_target: MakeTarget) -> None:
    tied, free = tiny_target(0, tied_head=True), tiny_target(0)
    assert tied.head_weight is tied.embed.weight
    assert free.head_weight is not free.embed.weight
    state = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    normed = state / state.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(free.logits(state), normed @ free.head_weight.T)


def test_the_balance_losses_of_the_layers_add_up(tiny_target: MakeTarget) -> None:
    target = tiny_target(0)
    with torch.no_grad():
        for block in target.blocks:
            block.ffn.router.weight.zero_()
    assert float(target(some_tokens(1, 8))[2].detach()) == pytest.approx(2)


def test_rotations_stay_float32_and_can_be_trained_with_after_decoding(tiny_target: MakeTarget) -> None:
    target = tiny_target(0).to(torch.bfloat16)
    engine = EagerEngine(target, NoDrafter(), SamplingRule(), capacity=16)
    list(engine.decode([1, 2, 3], 4, SequenceRecord(3)))
    assert target.rope.dtype == torch.float32
    hidden, _, _ = target(some_tokens(1, 6))
    hidden.float().sum().backward()
    assert target.embed.weight.grad is not None


def test_what_plain_torch_cannot_run_is_refused(tiny_spec: MakeSpec) -> None:
    gqa = {"kind": "gqa", "heads": 4, "kv_heads": 2, "v_dim": 8}
    for spec, message in (
        (load_preset("qwen3-next-80b-a3b"), "layer 0 uses gated_delta"),
        (tiny_spec(attention=gqa | {"qk_dim": 7}, sliding=None), r"tiny: rotary embedding turns pairs, 7 numbers"),
    ):
        with torch.device("meta"), pytest.raises(InputError, match=message):
            Target(spec)


def test_more_positions_than_the_model_or_the_cache_has_are_refused(tiny_target: MakeTarget) -> None:
    target = tiny_target(0)
    with pytest.raises(InputError, match="tiny: 97 positions exceed max_positions=96"):
        target.new_cache(97)
    with pytest.raises(InputError, match=r"0 \+ 5 positions exceed its capacity 4"):
        target.score(some_tokens(1, 5), target.new_cache(4))
