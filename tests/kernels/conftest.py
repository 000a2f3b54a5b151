"""Kernels run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when Triton is imported, so a test that imported it before these were collected must have set it too.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("Triton was imported without TRITON_INTERPRET=1; set it in the environment")
    os.environ["TRITON_INTERPRET"] = "1"


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
