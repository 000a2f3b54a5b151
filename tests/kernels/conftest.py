"""Kernels run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the first kernel import


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device the correctness tests run on."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def bf16_tol() -> float:
    """Relative error that one rounding to bf16 explains; the interpreter truncates instead."""
    return 3e-3 if HAS_GPU else 6e-3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, with the reason."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda finds none"))
