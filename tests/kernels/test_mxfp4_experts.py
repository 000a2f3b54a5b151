"""The expert kernels against a float64 reference on checkpoint-form weights."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.contract import power_of_2
from workbench.kernels.mxfp4_experts import H_EXPONENT, ExpertConfig, default_config, down, floor, gate_up, shares
from workbench.kernels.mxfp4_layout import dequantise, relayout
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace


def random_weights(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(115, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def choose(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(torch.int32)


def crowd(tokens: int, counts: dict[int, int], seed: int) -> torch.Tensor:
    """Choices in which expert e is chosen by ``counts[e]`` tokens, anywhere among them; all tokens choose as many."""
    top_k, rest = divmod(sum(counts.values()), tokens)
    assert rest == 0
    # One expert after another over the tokens in turn: none comes twice to a token.
    line = torch.tensor([expert for expert, count in counts.items() for _ in range(count)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(tokens, generator=generator)
    slots = torch.randperm(top_k, generator=generator)
    return line.view(top_k, tokens).T[order][:, slots].contiguous()


@pytest.mark.parametrize(
    ("tokens", "gptoss", "order", "config"),
    [
        (1, False, "stacked", ExpertConfig(2, 1, 1, 1, 2)),
        (3, True, "interleaved", ExpertConfig(2, 2, 1, 1, 1)),
        (4, True, "stacked", ExpertConfig(1, 1, 2, 2, 2)),
        (11, False, "interleaved", ExpertConfig(2, 1, 1, 2, 4)),
    ],
)
def test_gate_up(
    device: torch.device, bf16_tol: float, tokens: int, gptoss: bool, order: str, config: ExpertConfig
) -> None:
    experts, inter, columns, top_k = 5, 24, 192, 2
    blocks, scales = random_weights(experts, 2 * inter, columns, 1)
    words, scale_words = (part.to(device) for part in relayout(blocks, scales, order))  # type: ignore[arg-type]
    w = dequantise(blocks, scales, torch.float64)
    w = w.view(experts, 2, inter, -1) if order == "stacked" else w.view(experts, inter, 2, -1).transpose(1, 2)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    bias = torch.randn(experts, 2, inter, generator=generator).bfloat16() if gptoss else None
    ids = choose(tokens, experts, top_k, 3)
    h = torch.full((tokens * top_k, inter), float("nan"), dtype=torch.bfloat16, device=device)
    gate_up(
        x.to(device), ids.to(device), words, scale_words, bias=None if bias is None else bias.to(device),
        activation="gptoss" if gptoss else "silu", out=h, config=config,
    )  # fmt: skip
    want = reference.gate_up(x, ids, dict(enumerate(w)), bias, "gptoss" if gptoss else "silu")
    assert relative_error(h.double() / 2.0**H_EXPONENT, want) < bf16_tol


@pytest.mark.parametrize(
    ("tokens", "bias", "config"),
    [
        (1, True, ExpertConfig(1, 2, 1, 1, 2)),
        (2, False, ExpertConfig(2, 1, 2, 1, 1)),
        (9, True, ExpertConfig(1, 1, 1, 2, 1)),
    ],
)
def test_down(device: torch.device, bf16_tol: float, tokens: int, bias: bool, config: ExpertConfig) -> None:
    experts, hidden, inter, top_k = 4, 48, 128, 2
    blocks, scales = random_weights(experts, hidden, inter, 4)
    words, scale_words = (part.to(device) for part in relayout(blocks, scales, "plain"))
    w = dequantise(blocks, scales, torch.float64)
    generator = torch.Generator().manual_seed(5)
    h = torch.randn(tokens * top_k, inter, generator=generator).bfloat16()
    weights = torch.rand(tokens, top_k, generator=generator)
    base = torch.randn(tokens, hidden, generator=generator).bfloat16() if bias else None
    b = torch.randn(experts, hidden, generator=generator).bfloat16() if bias else None
    ids = choose(tokens, experts, top_k, 6)
    workspace = Workspace(device)
    out = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    want = reference.down(h, ids, weights, dict(enumerate(w)), b, base)
    for _ in range(2):  # the counters must come back to zero by themselves
        out.fill_(float("nan"))
        down(
            (h.double() * 2.0**H_EXPONENT).bfloat16().to(device), ids.to(device), weights.to(device), words,
            scale_words, bias=None if b is None else b.to(device), base=None if base is None else base.to(device),
            out=out, workspace=workspace, config=config,
        )  # fmt: skip
        assert relative_error(out, want) < bf16_tol
    assert int(workspace.counters.abs().sum()) == 0


CROWDS = (
    (9, 24, {0: 9, 3: 8, 23: 1}, 1),  # programs by pairs: fewer than experts
    (9, 4, {0: 9, 3: 8, 1: 1}, 2),  # by experts
    (16, 6, {2: 16, 0: 9, 5: 7, 3: 8, 1: 1, 4: 7}, 1),
    (16, 40, {2: 10, 35: 11, 0: 1, 31: 9, 39: 9, 32: 8}, 1),
)


@pytest.mark.parametrize(("tokens", "experts", "counts", "split"), CROWDS)
def test_experts_of_more_and_of_fewer_than_eight_tokens(
    device: torch.device, bf16_tol: float, tokens: int, experts: int, counts: dict[int, int], split: int
) -> None:
    """Above 8 tokens in all: a program takes the tokens of its expert by eights, and every pair is computed once."""
    inter, hidden = 16, 32
    up, lower = random_weights(experts, 2 * inter, 64, 8), random_weights(experts, hidden, 64, 9)
    ids = crowd(tokens, counts, 10)
    assert torch.bincount(ids.flatten().long(), minlength=experts).tolist() == [
        counts.get(e, 0) for e in range(experts)
    ]
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    pairs, config = ids.numel(), ExpertConfig(1, 1, 2, split, 1)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    weights = torch.rand(ids.shape, generator=generator)
    workspace = Workspace(device)
    workspace.take("test", split * pairs * 2 * inter, pairs * 2)[0].fill_(float("nan"))

    h = torch.full((pairs, inter), float("nan"), dtype=torch.bfloat16, device=device)
    words, scale_words = (part.to(device) for part in relayout(*up, "stacked"))
    gate_up(x.to(device), ids.to(device), words, scale_words, out=h, workspace=workspace, config=config)
    dense = dequantise(*up, torch.float64).view(experts, 2, inter, -1)
    want_h = reference.gate_up(x, ids, dict(enumerate(dense)), None, "silu")
    for row, want in zip(h, want_h, strict=True):
        assert relative_error(row.double() / 2.0**H_EXPONENT, want) < 2 * bf16_tol

    plain = torch.randn(pairs, 64, generator=generator).bfloat16()
    out = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    words, scale_words = (part.to(device) for part in relayout(*lower, "plain"))
    down(
        (plain.double() * 2.0**H_EXPONENT).bfloat16().to(device), ids.to(device), weights.to(device), words,
        scale_words, out=out, workspace=workspace, config=config,
    )  # fmt: skip
    want_y = reference.down(plain, ids, weights, dict(enumerate(dequantise(*lower, torch.float64))))
    for row, want in zip(out, want_y, strict=True):
        assert relative_error(row, want) < 2 * bf16_tol
    assert int(workspace.counters.abs().sum()) == 0


def test_small_activations_survive_the_decode(device: torch.device) -> None:
    """2^-126 of the decode times 1e-4 would vanish in fp32; the scaling by 2^64 keeps it exact."""
    blocks = torch.full((1, 16, 2, 16), 0x11, dtype=torch.uint8)  # every weight 0.5, the subnormal code
    scales = torch.full((1, 16, 2), 100, dtype=torch.uint8)
    words, scale_words = (part.to(device) for part in relayout(blocks, scales, "plain"))
    h = torch.full((1, 64), 2.0**-14, dtype=torch.bfloat16, device=device) * 2.0**H_EXPONENT
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    weights = torch.ones(1, 1, device=device)
    out = down(h, ids, weights, words, scale_words, config=ExpertConfig(1, 1, 1, 1, 1))
    assert out.float().cpu().tolist() == [[64 * 0.5 * 2.0**-27 * 2.0**-14] * 16]


def test_programs_stand_for_experts_where_these_are_fewer_than_pairs() -> None:
    assert shares(8, 4, 16) == (32, False)  # as measured up to 8 tokens
    assert shares(16, 4, 32) == (39, True)  # 64 pairs, of which at most 7 are an expert's ninth
    assert shares(16, 4, 128) == (64, False)


def test_default_config_fills_the_card() -> None:
    for tiles, chunks, pairs in [(360, 45, 4), (180, 45, 4), (32, 96, 8), (384, 4, 8), (1, 1, 1)]:
        config = default_config(tiles, chunks, pairs)
        assert config.num_warps in (1, 2, 4, 8)
        assert config.split == power_of_2(config.split)
        assert config.kw * config.split <= 2 * chunks


def test_default_config_is_what_was_measured_best() -> None:
    assert default_config(360, 45, 4) == ExpertConfig(4, 1, 1, 1, 4)
    assert default_config(360, 45, 16) == ExpertConfig(4, 1, 1, 1, 2)
    assert default_config(180, 45, 4, half="down") == ExpertConfig(8, 1, 2, 1, 1)
    assert default_config(32, 96, 8) == ExpertConfig(8, 1, 1, 1, 4)  # no Split-K: it took twice as long
    assert default_config(32, 96, 48) == ExpertConfig(8, 1, 1, 1, 2)
    assert default_config(384, 4, 8, half="down") == ExpertConfig(1, 4, 1, 1, 2)


def test_floor_counts_the_public_reference_bytes() -> None:
    """gpt-oss-120b, one token: 4 experts of 3 x 2880 x 2880 weights are 52.9 MB."""
    total = floor(1, 4, 5760, 2880).bytes_read + floor(1, 4, 2880, 2880).bytes_read
    assert total / 1e6 == pytest.approx(52.9, abs=0.1)


def test_refusals(device: torch.device) -> None:
    blocks, scales = random_weights(2, 16, 64, 7)
    words, scale_words = (part.to(device) for part in relayout(blocks, scales, "stacked"))
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"x is torch\.float32"):
        gate_up(x.float(), ids, words, scale_words)
    with pytest.raises(InputError, match=r"x has shape \(1, 32\), needs \(1, 64\)"):
        gate_up(x[:, :32].contiguous(), ids, words, scale_words)
    with pytest.raises(InputError, match="17 tokens"):
        gate_up(x.expand(17, 64).contiguous(), ids.expand(17, 1).contiguous(), words, scale_words)
    with pytest.raises(InputError, match="activation='relu'"):
        gate_up(x, ids, words, scale_words, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not a power of two"):
        gate_up(x, ids, words, scale_words, config=ExpertConfig(kw=3))
