"""Expert choices that do not come from the router: drawn from a distribution, or recorded.

Random weights route as they please: a step touches as many experts as chance has it. A table [positions, layers, k]
fixes the choice by a token's position, so that every rung, width and repetition sees the same experts, and the number
of distinct experts a step is a property of the scenario. Routing weights follow from the router's scores of them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.decode.experts import Experts
from workbench.decode.model import Target
from workbench.decode.rungs.packed import expert_layers
from workbench.decode.rungs.twin import twin
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError

PERIOD = 1024
"""Positions of a drawn table; a longer sequence starts it again."""

MAX_FILE_BYTES = 256 << 20


def drawn_choices(spec: ModelSpec, *, exponent: float | None, seed: int) -> Tensor:
    """Return int64 [PERIOD, layers with experts, k]: each token draws k different experts, on its own.

    ``exponent`` None: all experts alike. Else the n-th most popular expert of a layer has weight n^-exponent (Zipf);
    which expert that is differs from layer to layer. Drawing k without replacement is by Gumbel's trick.
    """
    moe = spec.moe
    if moe is None:
        raise InputError(f"model.routing: {spec.name} has no routed experts", hint="leave it out")
    generator = torch.Generator().manual_seed(seed)
    shape = (PERIOD, spec.moe_layers, moe.experts)
    keys = -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7)))
    if exponent is not None:
        ranks = torch.stack([torch.randperm(moe.experts, generator=generator) for _ in range(spec.moe_layers)])
        keys -= exponent * (ranks + 1.0).log()
    return keys.topk(moe.top_k, dim=-1).indices


def recorded_choices(path: Path, spec: ModelSpec) -> Tensor:
    """Return int64 [tokens, layers with experts, k] from a JSON Lines file: one object a step, ``experts`` in it.

    ``experts``[layer][token][k] are the ids that the step's tokens chose, layers with experts only, in order. Tokens of
    all steps follow one another. Raises InputError, naming file, line and fix.
    """
    moe = spec.moe
    if moe is None:
        raise InputError(f"model.routing: {spec.name} has no routed experts", hint="leave it out")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB", hint="keep fewer steps")
    steps: list[Tensor] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                steps.append(_step(line, f"{path}: line {number}", spec.moe_layers, moe.experts, moe.top_k))
    if not steps:
        raise InputError(f"{path}: holds no step", hint='one JSON object a line: {"experts": [layer][token][k]}')
    return torch.cat(steps)


def _step(line: str, where: str, layers: int, experts: int, top_k: int) -> Tensor:
    """Return one step as int64 [tokens, layers, k]."""
    try:
        record: Any = json.loads(line)
        ids = torch.tensor(record["experts"], dtype=torch.int64)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{where}: {error or 'not JSON'}", hint='{"experts": [layer][token][k]} of whole numbers'
        ) from None
    if ids.ndim != 3 or ids.shape[0] != layers or ids.shape[2] != top_k or not ids.shape[1]:
        raise InputError(f"{where}: experts has shape {tuple(ids.shape)}, needs ({layers}, tokens, {top_k})")
    if int(ids.min()) < 0 or int(ids.max()) >= experts:
        raise InputError(f"{where}: experts must be 0 to {experts - 1}")
    if bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
        raise InputError(f"{where}: a token names one expert twice")
    return ids.transpose(0, 1).contiguous()


def with_choices(target: Target, choices: Tensor) -> Target:
    """Return a twin of ``target`` whose layers with experts follow ``choices`` [positions, layers, k]."""
    other = twin(target)
    for layer, (_, ffn) in enumerate(expert_layers(other)):
        assert isinstance(ffn, Experts)  # noqa: S101 - for the type checker
        ffn.forced = choices[:, layer].to(target.device).contiguous()
    return other
