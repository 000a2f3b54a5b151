from collections.abc import Callable

import pytest
import torch
from torch import nn

from workbench.decode.dflash import DFlashModel
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import random_target

CPU = torch.device("cpu")

_TINY: dict[str, object] = {
    "name": "tiny",
    "hidden": 32,
    "vocab": 64,
    "mixers": ("sliding", "full"),
    "window": 5,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "qk_norm": True},
    "moe": {"experts": 4, "top_k": 2, "inter": 32},
    # Not tied: a random model with a tied head repeats the token it has just read.
    "tied_head": False,
    "max_positions": 96,
    "mtp": {"modules": 1, "dense_inter": 32},
    "dflash": {"layers": 2, "block": 4, "window": 6, "inter": 32, "taps": (0, 1)},
}

MakeSpec = Callable[..., ModelSpec]
MakeTarget = Callable[..., Target]


def _spec(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(_TINY | changes)


def _target(seed: int = 0, **changes: object) -> Target:
    return random_target(_spec(**changes), seed=seed, device=CPU, dtype=torch.float32)


def _randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)


def _mtp(target: Target, seed: int = 1) -> MtpHead:
    head = MtpHead(target.spec)
    _randomize(head, seed)
    return head.eval()


def _dflash(target: Target, seed: int = 2) -> DFlashModel:
    model = DFlashModel(target.spec)
    _randomize(model, seed)
    return model.eval()


@pytest.fixture(scope="session")
def tiny_spec() -> MakeSpec:
    """``tiny_spec(**changes)``: two layers, one sliding and one full, four experts, with MTP and DFlash sections."""
    return _spec


@pytest.fixture(scope="session")
def tiny_target() -> MakeTarget:
    """``tiny_target(seed, **changes)``: a target of that shape with random weights, float32 on the CPU."""
    return _target


@pytest.fixture(scope="session")
def tiny_mtp() -> Callable[..., MtpHead]:
    """``tiny_mtp(target, seed)``: a random MTP head for ``target``."""
    return _mtp


@pytest.fixture(scope="session")
def tiny_dflash() -> Callable[..., DFlashModel]:
    """``tiny_dflash(target, seed)``: a random DFlash drafter for ``target``."""
    return _dflash


@pytest.fixture(scope="session")
def randomize() -> Callable[[nn.Module, int], None]:
    """``randomize(module, seed)``: random weights everywhere, norms and biases included."""
    return _randomize
