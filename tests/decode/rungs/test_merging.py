"""Merged projections, and that building a rung moves no weight: graphs captured before it still read them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.decode.rungs.fused import FusedStep
from workbench.decode.rungs.merging import merged
from workbench.decode.rungs.plan import PLANS


def linear(rows: int, columns: int, seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    part = nn.Linear(columns, rows)
    part.weight = nn.Parameter(torch.randn(rows, columns, generator=generator), requires_grad=False)
    part.bias = nn.Parameter(torch.randn(rows, generator=generator), requires_grad=False)
    return part


def test_merging_shares_storage_and_is_done_once() -> None:
    parts = [linear(rows, 64, rows) for rows in (32, 16, 16)]
    wanted = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
    weight, bias = merged(*parts)
    assert torch.equal(weight, wanted[0])
    assert bias is not None
    assert torch.equal(bias, wanted[1])
    assert {part.weight.untyped_storage().data_ptr() for part in parts} == {weight.untyped_storage().data_ptr()}
    again, _ = merged(*parts)
    assert again.data_ptr() == weight.data_ptr()
    assert torch.equal(again, wanted[0])
    alone, none = merged(nn.Linear(8, 8, bias=False))
    assert none is None
    assert alone.shape == (8, 8)
    out_of_order, _ = merged(parts[1], parts[0])
    assert torch.equal(out_of_order, torch.cat([parts[1].weight, parts[0].weight]))


def test_building_rungs_moves_no_weight(models: Callable[..., Any]) -> None:
    for family in ("gpt-oss", "qwen"):
        model = models(family, "mxfp4-experts-fp8")
        for held in (model.expanded, model.packed):
            before = {name: part.data_ptr() for name, part in held.target.named_parameters()}
            for rung in ("fused", "splitk", "livequant-fused"):
                if PLANS[rung].packed == bool(held.packed):
                    FusedStep(held.target, held.packed, PLANS[rung], 8)
            assert {name: part.data_ptr() for name, part in held.target.named_parameters()} == before
