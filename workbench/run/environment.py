"""Facts about the software and the machine, one a row of table ``env``."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from workbench import __version__
from workbench.run.bench import CudaBench

if TYPE_CHECKING:
    from workbench.decode.pipeline import Pipeline

PACKAGES = (
    *("torch", "triton", "numpy", "pyarrow", "safetensors", "tokenizers", "nvidia-ml-py", "nsight-python"),
    *("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc"),
)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that change how a run behaves; their values name no machine."""


def env_rows(fingerprint: dict[str, Any], bench: CudaBench | None) -> list[dict[str, str]]:
    """Return the rows: packages, processor, and on CUDA the driver, the device and its modes."""
    rows = [("decode-workbench", __version__), ("python", str(fingerprint["python"]))]
    rows += [(name, found) for name in PACKAGES if (found := _version(name))]
    rows += [
        ("torch.cuda", str(torch.version.cuda)),
        ("torch.threads", str(torch.get_num_threads())),
        ("cpu", str(fingerprint["cpu"]["model"])),
        ("cpu.usable_threads", str(fingerprint["cpu"]["usable_threads"])),
        ("memory_bytes", str(fingerprint["memory_bytes"])),
        ("os.kernel", str(fingerprint["os"]["kernel"])),
        ("os.libc", str(fingerprint["os"]["libc"])),
    ]
    rows += [(f"env.{name}", os.environ[name]) for name in VARIABLES if name in os.environ]
    facts = [{"key": key, "value": value} for key, value in rows]
    return facts + bench.env() if bench is not None else facts


def expert_rows(pipelines: Sequence["Pipeline"]) -> list[dict[str, str]]:
    """Return how each variant on a plain-torch rung runs its routed experts, and why not as a grouped product."""
    return [
        {"key": f"experts.{one.variant.name}", "value": str(one.experts)}
        for one in pipelines
        if one.experts is not None
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
